"""Devices, links and clusters: what a cluster text or a cluster file describes."""

from __future__ import annotations

import dataclasses
import math
import re
from decimal import Decimal
from typing import Literal

from ._catalog import ClusterError, Table, find_kind, known_kinds
from ._describe import Description, described, with_profile

__all__ = [
    "Cluster",
    "ClusterError",
    "Device",
    "Link",
    "find_kind",
    "known_kinds",
    "parse_bytes",
    "parse_cluster",
    "with_memory",
    "with_profile",
]

_UNITS = {
    **{"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
# A narrow dtype without a peak is widened to the first of these that the device has.
_WIDENED_TO = ("bfloat16", "float16", "float32")
_NARROW = ("float8", "int8", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or one virtual device's share of a host.

    `peak_flops_per_s` holds (dtype name, dense matmul flop/s) pairs; `vector_flops_per_s` is the
    flop/s of everything that is not a matmul; `memory_bytes` bytes; `memory_bytes_per_s` bytes/s;
    `matmul_efficiency`, `convolution_efficiency`, `attention_efficiency` and `memory_efficiency`
    are the fractions of the peaks that the best shapes achieve, in (0, 1]; `matmul_store` is how
    many times a product pays for writing its result, and `store_power`, at least 1, is the power of
    the norm that combines this with the time of its flop (see `op_time_s`); `lane_bytes` is the
    smallest number of bytes that an element counts in the vector unit; `fast_memory_bytes` is the
    size of the largest operand that a product holds in fast memory while it also updates
    parameters (0: products do not update parameters); `kernel_latency_s` is
    the cost of starting one kernel in seconds, `step_latency_s` that of starting a step; `overlap`,
    `overlap_ahead` and `overlap_behind` are the shares of communication that hide under compute:
    where compute waits for it, where it runs ahead of its use (gathers of parameters), where little
    waits for it (reductions of gradients); `combined_latency` is the share of its latency that a
    collective of parameters or gradients retains when the compiler may combine it with others; all
    are in [0, 1]; `fuses_operands` is whether the compiler computes elementwise operands inside
    matrix products, which read them as bfloat16; the two minor dimensions of an array are padded
    to `tile_rows` and `tile_lanes` elements; `memory_reserve` is the share of the memory that the
    runtime reserves, in [0, 1).
    """

    kind: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    vector_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    matmul_efficiency: float
    memory_efficiency: float
    kernel_latency_s: float
    matmul_store: float = 0.0
    store_power: float = 1.0
    lane_bytes: int = 0
    fast_memory_bytes: int = 0
    convolution_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    overlap: float = 0.0
    overlap_ahead: float = 0.0
    overlap_behind: float = 0.0
    combined_latency: float = 0.0
    step_latency_s: float = 0.0
    native_reduce_scatter: bool = True
    fuses_operands: bool = False
    tile_rows: int = 1
    tile_lanes: int = 1
    memory_reserve: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """Memory that programs may use: all but the reserve."""
        return int(self.memory_bytes * (1.0 - self.memory_reserve))

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Dense matmul peak in flop/s for a dtype name such as 'bfloat16' or 'float8_e4m3fn'.

        A narrow dtype without a figure for this device runs at the rate of the type that it is
        widened to, and float64 without a figure at the vector rate. Integers wider than 8 bits,
        booleans and complex64 run at the float32 rate, complex128 at the float64 rate.
        """
        peaks = dict(self.peak_flops_per_s)
        name = _dtype_class(dtype)
        if name in peaks:
            return peaks[name]
        chain = _WIDENED_TO if name in _NARROW else ()
        return next((peaks[other] for other in chain if other in peaks), self.vector_flops_per_s)


@dataclasses.dataclass(frozen=True)
class Link:
    """Achievable rate of one device in one direction (bytes/s), and latency of a step (s).

    On a torus, the rate is that of one link in one direction, and the latency that of one hop.
    `startup_s` is the fixed cost of a collective that uses the link. If the switch reduces the data
    that passes through it, `reduce_bytes_per_s` is its rate per device (else 0) and
    `reduce_latency_s` the fixed cost of such an all-reduce. `wires` holds the number of links
    between each two devices of a node; it is empty if a switch connects them all.
    """

    bytes_per_s: float
    latency_s: float
    startup_s: float = 0.0
    reduce_bytes_per_s: float = 0.0
    reduce_latency_s: float = 0.0
    wires: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal devices and how they are wired.

    A 'hierarchy' has shape (devices per node, nodes), `link` inside a node and `network` between
    nodes. A 'torus' has its dimensions as shape and `link` for every link; a dimension whose
    length is a multiple of `wrap_multiple` is a ring, any other a line. Several `slices`, each
    such a torus, are joined by `network`. `host` joins each device to the memory of its host,
    whose share for one device is `host_memory_bytes` (0: not known).
    `text` is the cluster text that `parse_cluster` reads.
    """

    text: str
    device: Device
    shape: tuple[int, ...]
    kind: Literal["hierarchy", "torus"]
    link: Link
    network: Link | None = None
    slices: int = 1
    wrap_multiple: int = 4
    host: Link | None = None
    host_memory_bytes: float = 0.0

    @property
    def num_devices(self) -> int:
        """Number of devices in the whole cluster."""
        return math.prod(self.shape) * self.slices

    @property
    def devices_per_node(self) -> int:
        """Devices that share the fast links: those of a node, or of a slice of a torus."""
        return self.shape[0] if self.kind == "hierarchy" else math.prod(self.shape)


def parse_cluster(text: str) -> Cluster:
    """Cluster from 'h100:8x4', 'h100:8', 'v5p:4x4x8', 'v5e:16x16+4', 'cpu:8', a .toml path, or a
    .toml path and another size of the same kind, 'profile.toml:8x4'.

    '+4' means that the data-center network joins 4 such slices (a torus only). Rates are in flop/s
    and bytes/s, latencies in seconds, sizes in bytes. The rates of a kind with `shared_cores` are
    the host's, divided by the devices of a node. Counts and names of cloud machines also work:
    '8xH100', '2x8xA100' (2 nodes of 8), 'v5p-64' (64 cores: 32 chips), 'v5litepod-16', 'v5p:64'
    (64 chips in their usual shape, 4x4x4; other numbers are a ring or a line), 'p5.48xlarge',
    '4xa3-ultragpu-8g'.

    Raises:
        ClusterError: unknown device, bad or non-positive shape, unreadable file, bad key or value.

    >>> parse_cluster("h100:8x4").num_devices
    32
    >>> parse_cluster("v5e:16x16+4").num_devices
    1024
    """
    return build_cluster(described(text))


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """The same cluster with `memory_bytes` bytes on every device.

    Raises:
        ClusterError: a size that is not positive.
    """
    if memory_bytes <= 0:
        raise ClusterError(
            f"device memory must be positive, got {memory_bytes} bytes; give a size such as 80GB"
        )
    device = dataclasses.replace(cluster.device, memory_bytes=int(memory_bytes))
    return dataclasses.replace(cluster, device=device)


def part_of(cluster: Cluster, count: int) -> Cluster:
    """One of ``count`` equal parts of a cluster, each of consecutively numbered devices.

    A torus dimension that is cut becomes a line. The text stays that of the whole cluster.

    Raises:
        ClusterError: nodes or dimensions can't be cut into that many parts.

    >>> part_of(parse_cluster("h100:8x4"), 8).shape, part_of(parse_cluster("v5p:4x4x8"), 4).shape
    ((4, 1), (1, 4, 8))
    """
    error = ClusterError(f"{cluster.text} can't be cut into {count} equal parts")
    if cluster.kind == "hierarchy":
        local, nodes = cluster.shape[0], math.prod(cluster.shape[1:])
        outer = math.gcd(nodes, count)
        if local % (count // outer):
            raise error
        shape = (local * outer // count, *((nodes // outer,) if cluster.shape[1:] else ()))
        return dataclasses.replace(cluster, shape=shape)
    slices = cluster.slices // math.gcd(cluster.slices, count)
    left = count // math.gcd(cluster.slices, count)
    sizes, is_cut = list(cluster.shape), False
    for k, size in enumerate(sizes):
        here = math.gcd(size, left)
        sizes[k], left, is_cut = size // here, left // here, is_cut or here > 1
        if sizes[k] > 1:
            break
    if left > 1:
        raise error
    wrap = max(cluster.shape) + 1 if is_cut else cluster.wrap_multiple
    return dataclasses.replace(cluster, shape=tuple(sizes), slices=slices, wrap_multiple=wrap)


def parse_bytes(text: str) -> int:
    """Bytes in '80GB', '500MB' (SI decimal), '16GiB' (binary) or '1024' (plain bytes).

    Raises:
        ClusterError: no number, an unknown unit, or a size below one byte.

    >>> parse_bytes("80GB"), parse_bytes("16GiB")
    (80000000000, 17179869184)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ClusterError(
            f"cannot read size {text!r}; expected a number and one of B, kB, MB, GB, TB, KiB, "
            "MiB, GiB, TiB; write it like 80GB or 16GiB"
        )
    size = int(Decimal(match.group(1)) * _UNITS[unit])
    if size <= 0:
        raise ClusterError(f"size must be positive, got {text!r}; write it like 80GB or 16GiB")
    return size


def _dtype_class(dtype: str) -> str:
    """The catalog's name for the rate that a dtype is computed at."""
    if dtype.startswith("float8"):
        return "float8"
    if dtype in ("int8", "uint8", "int4", "uint4"):
        return "int8"
    if dtype == "complex128":
        return "float64"
    return dtype if dtype in ("float64", "float16", "bfloat16") else "float32"


def _link(table: Table) -> Link:
    return Link(
        bytes_per_s=float(table["bytes_per_s"] * table["efficiency"]),
        latency_s=float(table["latency_s"]),
        startup_s=float(table.get("startup_s", 0.0)),
    )


def build_cluster(given: Description) -> Cluster:
    """Build the described cluster; raises ClusterError if the wiring has another size."""
    text, entry, shape, slices = given.text, given.entry, given.shape, given.slices
    values = entry["device"]
    share = shape[0] if values["shared_cores"] else 1
    device = Device(
        kind=values["kind"],
        peak_flops_per_s=tuple(
            (dtype, float(peak) / share) for dtype, peak in entry["peak_flops_per_s"].items()
        ),
        vector_flops_per_s=float(values["vector_flops_per_s"]) / share,
        memory_bytes=int(values["memory_bytes"]) // share,
        memory_bytes_per_s=float(values["memory_bytes_per_s"]) / share,
        matmul_efficiency=float(values["matmul_efficiency"]),
        memory_efficiency=float(values["memory_efficiency"]),
        kernel_latency_s=float(values["kernel_latency_s"]),
        matmul_store=float(values["matmul_store"]),
        store_power=float(values["store_power"]),
        lane_bytes=int(values["lane_bytes"]),
        fast_memory_bytes=int(values["fast_memory_bytes"]),
        convolution_efficiency=float(values["convolution_efficiency"]),
        attention_efficiency=float(values["attention_efficiency"]),
        overlap=float(values["overlap"]),
        overlap_ahead=float(values["overlap_ahead"]),
        overlap_behind=float(values["overlap_behind"]),
        combined_latency=float(values["combined_latency"]),
        step_latency_s=float(values["step_latency_s"]),
        native_reduce_scatter=bool(values["native_reduce_scatter"]),
        fuses_operands=bool(values["fuses_operands"]),
        tile_rows=int(values["tile_rows"]),
        tile_lanes=int(values["tile_lanes"]),
        memory_reserve=float(values["memory_reserve"]),
    )
    if "torus" in entry:
        network = _link(entry["inter_slice"]) if slices > 1 else None
        wrap_multiple = int(entry["torus"]["wrap_multiple"])
        link = _link(entry["torus"])
        return Cluster(
            text,
            device,
            shape,
            "torus",
            link,
            network,
            slices,
            wrap_multiple,
            _link(entry["host"]),
            float(entry["host"]["memory_bytes_per_device"]),
        )
    node = entry["intra_node"]
    wires = tuple(tuple(row) for row in node["wires"])
    if wires and len(wires) != int(entry["node"]["devices_per_node"]):
        raise ClusterError(
            f"{text}: [intra_node] wires has {len(wires)} rows for "
            f"{entry['node']['devices_per_node']} devices per node; give each device a row, or [] "
            "for a switch"
        )
    link = dataclasses.replace(
        _link(node),
        reduce_bytes_per_s=float(node["bytes_per_s"] * node["in_switch_efficiency"]),
        reduce_latency_s=float(node["in_switch_latency_s"]),
        wires=wires,
    )
    network = _link(entry["inter_node"])
    return Cluster(
        text,
        device,
        shape,
        "hierarchy",
        link,
        network,
        host=_link(entry["host"]),
        host_memory_bytes=float(entry["host"]["memory_bytes_per_device"]),
    )
