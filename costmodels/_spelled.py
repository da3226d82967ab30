"""Converts the cluster names of clouds and other spellings to the form of `parse_cluster`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ._catalog import ClusterError, catalog_entry, known_kinds

Shapes = Mapping[int, tuple[int, ...]]
"""Chips and dimensions of slices, smallest first."""

_CORES = frozenset({"v4", "v5p"})
"""TPUs whose accelerator types count TensorCores, two per chip."""
_CUBES: Shapes = {
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
    4096: (16, 16, 16),
    6144: (16, 16, 24),
}
"""Slices of three dimensions by their chips. Source: Google Cloud, TPU v5p, configurations."""
_SQUARES: Shapes = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
"""Slices of two dimensions. Source: Google Cloud, TPU v5e and TPU v6e, configurations."""
_INSTANCE_PARTS: Shapes = {1: (1,), 2: (2,), 4: (4,), 8: (2, 4), 16: (4, 4), 64: (4, 4, 4)}
"""Parts of a Trn2 instance, an instance, and an UltraServer. Source: AWS Neuron documentation."""
_SLICES: Mapping[str, Shapes] = {
    "v4": _CUBES,
    "v5p": _CUBES,
    "v5e": _SQUARES,
    "v6e": _SQUARES,
    "trn2": _INSTANCE_PARTS,
}


class Machine(NamedTuple):
    """A rented machine: its kind of device, Gbit/s per device between machines (or between the
    nodes that machines make up), devices, and how many machines share one node."""

    kind: str
    gbits: float
    devices: int = 8
    per_node: int = 1


_INSTANCES: Mapping[str, Machine] = {
    # Amazon EC2, accelerated computing instance types: EFA rates over the devices of an instance.
    "p4d.24xlarge": Machine("a100-40gb", 50),
    "p4de.24xlarge": Machine("a100", 50),
    "p5.48xlarge": Machine("h100", 400),
    "p5e.48xlarge": Machine("h200", 400),
    "p5en.48xlarge": Machine("h200", 400),
    "p6-b200.48xlarge": Machine("b200", 400),
    "p6-b300.48xlarge": Machine("b300", 800),
    # Amazon EC2 P6e UltraServers: 18 instances, 72 GPUs, 28.8 Tbit/s; u-p6e-gb200x36 is half of it.
    "p6e-gb200.36xlarge": Machine("gb200", 400, 4, 18),
    "u-p6e-gb200x36": Machine("gb200", 400, 36),
    "u-p6e-gb200x72": Machine("gb200", 400, 72),
    # AWS Neuron documentation, Trn2 architecture: 3,200 Gbit/s for 16 chips; an UltraServer of 4.
    "trn2.48xlarge": Machine("trn2", 200, 16),
    "trn2u.48xlarge": Machine("trn2", 200, 16),
    "u-trn2x64": Machine("trn2", 200, 64),
    # Google Compute Engine, networking and GPU machines: a2 one NIC of 100 Gbit/s, a3-highgpu TCPX
    # 4 x 200, a3-megagpu TCPXO 8 x 200, a3-ultragpu and a4 RoCE 8 x 400, a4x 4 x 400, a4x-maxgpu
    # 4 x 800.
    "a2-highgpu-8g": Machine("a100-40gb", 12.5),
    "a2-ultragpu-8g": Machine("a100", 12.5),
    "a3-highgpu-8g": Machine("h100", 100),
    "a3-megagpu-8g": Machine("h100", 200),
    "a3-ultragpu-8g": Machine("h200", 400),
    "a4-highgpu-8g": Machine("b200", 400),
    "a4x-highgpu-4g": Machine("gb200", 400, 4, 18),
    "a4x-maxgpu-4g-metal": Machine("gb300", 800, 4, 18),
    # Azure, ND family: 8 x 200 Gbit/s HDR, 8 x 400 NDR, 4 x 400 NDR (GB200), 800 per GPU (GB300).
    "nd96asr_v4": Machine("a100-40gb", 200),
    "nd96amsr_a100_v4": Machine("a100", 200),
    "nd96isr_h100_v5": Machine("h100", 400),
    "nd96isr_h200_v5": Machine("h200", 400),
    "nd96isr_mi300x_v5": Machine("mi300x", 400),
    "nd128isr_ndr_gb200_v6": Machine("gb200", 400, 4, 18),
    "nd128isr_gb300_v6": Machine("gb300", 800, 4, 18),
    # Oracle Cloud Infrastructure, compute shapes: RDMA rates over the devices of a shape.
    "bm.gpu4.8": Machine("a100-40gb", 200),
    "bm.gpu.a100-v2.8": Machine("a100", 200),
    "bm.gpu.h100.8": Machine("h100", 400),
    "bm.gpu.h200.8": Machine("h200", 400),
    "bm.gpu.b200.8": Machine("b200", 400),
    "bm.gpu.mi300x.8": Machine("mi300x", 400),
    "bm.gpu.mi355x.8": Machine("mi355x", 400),
    "bm.gpu.l40s.4": Machine("l40s", 200, 4),
    # Racks by their name: NVIDIA GB200 NVL72 and GB300 NVL72, one NIC per GPU.
    "nvl72": Machine("gb200", 400, 72),
    "gb200-nvl72": Machine("gb200", 400, 72),
    "gb300-nvl72": Machine("gb300", 800, 72),
}
"""Machines by their type, each with the source of its network. Azure's names may begin with
``Standard_``."""

_TPU = re.compile(r"(?:tpu-?)?(v4|v5p|v5e|v5litepod|v6e)-(\d{1,6})(?:\+(\d{1,6}))?")
_CHIPS = re.compile(r"(v4|v5p|v5e|v6e|trn2):(\d{1,6})(?:\+(\d{1,6}))?")
_COUNTED = re.compile(r"(?:(\d{1,6})\s*x\s*)?(\d{1,6})\s*x\s*([a-z][\w.-]*)")
_MACHINE = re.compile(r"(?:(\d{1,6})\s*x\s*)?([a-z][\w.-]*)")


def respelled(text: str) -> str:
    """The cluster text for another spelling: an accelerator type of Cloud TPU (``v5p-64``: 64
    cores, 32 chips; ``v5litepod-16``; ``v5e-16+2``: two slices), a number of chips that has a usual
    shape (``v5p:64``; any other is a ring or a line), a count of devices (``8xH100``, ``2x8xA100``:
    2 nodes of 8), or a machine type (``p5.48xlarge``, ``4xa3-ultragpu-8g``, ``2xnvl72``). Any other
    text is returned unchanged.

    Raises:
        ClusterError: no such slice is offered, the machines do not fill whole NVLink domains, or a
            name is close to a machine's.

    >>> respelled("v5p-64"), respelled("v5p:64"), respelled("2x8xH100")
    ('v5p:2x4x4', 'v5p:4x4x4', 'h100:8x2')
    """
    plain = text.strip().lower()
    if (match := _CHIPS.fullmatch(plain)) and (
        shape := _SLICES[match.group(1)].get(int(match.group(2)))
    ):
        return _torus(match.group(1), shape, match.group(3))
    if match := _TPU.fullmatch(plain):
        return _slice(match.group(1), match.group(2), match.group(3), text)
    match = _MACHINE.fullmatch(plain)
    name = match.group(2).removeprefix("standard_") if match else ""
    if match and name in _INSTANCES:
        return _machines(int(match.group(1) or 1), name, text)
    if near := difflib.get_close_matches(name, _INSTANCES, n=1, cutoff=0.8):
        near = [meant(text) or near[0]]
        raise ClusterError(
            f"cannot read cluster {text!r}: unknown machine type; did you mean {near[0]!r}? Or "
            f"write a kind of device and a size, such as {respelled(near[0])}"
        )
    if counted := _COUNTED.fullmatch(plain):
        nodes, devices, kind = counted.groups()
        return f"{kind}:{devices}" + (f"x{nodes}" if nodes else "")
    return text


_ALIASES = {
    "a100-80gb": "a100",
    "ct4p": "v4",
    "ct5lp": "v5e",
    "ct5p": "v5p",
    "ct6e": "v6e",
    "h100-80gb": "h100",
    "ironwood": "tpu7x",
    "trillium": "v6e",
    "v5litepod": "v5e",
    "v7x": "tpu7x",
}
"""Other names of kinds of devices."""


def meant(text: str) -> str:
    """The cluster that an invalid text most likely stands for; empty if there is no good guess.

    >>> meant("H100 x 8"), meant("2x8A100"), meant("h100"), meant("v5p-64x2"), meant("nonsense")
    ('h100:8', 'a100:8x2', 'h100:8', 'v5p:2x4x4+2', '')
    """
    plain = text.strip().lower()
    machine = next((name for name in sorted(_INSTANCES, key=len)[::-1] if name in plain), "")
    names = {**{kind: kind for kind in known_kinds()}, **_ALIASES}
    kind = next((name for name in sorted(names, key=len)[::-1] if name in plain), "")
    if not (machine or kind):
        return ""
    before, after = plain.split(machine or kind, 1)
    numbers = [int(n) for n in re.findall(r"\d+", before)[::-1] + re.findall(r"\d+", after)]
    if any(n < 1 or n > MOST_DEVICES for n in numbers) or len(numbers) > 3:
        return ""
    if machine:
        return f"{numbers[0]}x{machine}" if numbers else machine
    device_kind = names[kind]
    usual = (
        usual_sizes(device_kind)
        if "node" in catalog_entry(device_kind) or device_kind in _SLICES
        else ()
    )
    if not numbers or not usual:
        many = "8" if "torus" not in catalog_entry(device_kind) else "2x2x1"
        many += "x2" if device_kind == "tpu7x" else ""  # a device is half a chip
        return next((size for size in usual if size == f"{device_kind}:8"), f"{device_kind}:{many}")
    shapes = _SLICES.get(device_kind)
    if shapes is None:
        return f"{device_kind}:{'x'.join(map(str, numbers[:2]))}"
    cores = 2 if device_kind in _CORES and after.startswith("-") and not before else 1
    shape = shapes.get(numbers[0] // cores)
    if shape is None:
        return usual[0]
    return _torus(device_kind, shape, str(numbers[1]) if numbers[1:] else None)


MOST_DEVICES = 1_000_000
"""Largest number of devices of a proposed cluster."""
MOST_NODES = 128
"""Nodes of the largest cluster of GPUs that ``usual_sizes`` names."""


def usual_sizes(kind: str) -> tuple[str, ...]:
    """Clusters of a device kind in the sizes that clouds rent out, smallest first: the slices of
    TPUs and Trainium, parts of a node of GPUs and then 1, 2, 4, ... nodes.

    Raises:
        ClusterError: unknown device, or one whose usual sizes are not known.

    >>> usual_sizes("v5e")[:4], usual_sizes("h100")[2:5]
    (('v5e:1x1', 'v5e:2x2', 'v5e:2x4', 'v5e:4x4'), ('h100:4', 'h100:8', 'h100:8x2'))
    """
    entry: dict[str, Any] = dict(catalog_entry(kind))
    if kind in _SLICES:
        return tuple(f"{kind}:{'x'.join(map(str, s))}" for s in _SLICES[kind].values())
    if "node" not in entry:
        raise ClusterError(f"device {kind!r}: its usual sizes are not known; give --cluster")
    most = int(entry["node"]["devices_per_node"])
    inside = [*(1 << k for k in range(most.bit_length()) if 1 << k < most), most]
    nodes = [1 << k for k in range(1, MOST_NODES.bit_length())]
    return (*(f"{kind}:{n}" for n in inside), *(f"{kind}:{most}x{n}" for n in nodes))


def _slice(kind: str, count: str, slices: str | None, text: str) -> str:
    """The shape of a slice from its accelerator type."""
    kind = "v5e" if kind == "v5litepod" else kind
    cores = 2 if kind in _CORES else 1
    shapes = _SLICES[kind]
    shape = shapes.get(int(count) // cores) if int(count) % cores == 0 else None
    if shape is None:
        below = [size for size in shapes if size * cores < int(count)][-1:]
        near = below + [size for size in shapes if size * cores > int(count)][:1]
        offered = " and ".join(f"{kind}-{size * cores}" for size in near)
        raise ClusterError(
            f"cluster {text!r}: {kind} slices of {count} {'cores' if cores == 2 else 'chips'} have "
            f"no usual shape; the nearest are {offered}; or give the shape: {kind}:"
            + "x".join(map(str, shapes[near[-1]]))
        )
    return _torus(kind, shape, slices)


def _torus(kind: str, shape: tuple[int, ...], slices: str | None) -> str:
    return f"{kind}:{'x'.join(map(str, shape))}" + (f"+{slices}" if slices else "")


def _machines(count: int, name: str, text: str) -> str:
    """The cluster of some machines of a type."""
    machine = _INSTANCES[name]
    kind, _, devices, domain = machine
    entry: dict[str, Any] = dict(catalog_entry(kind))
    if "torus" in entry:
        return _torus(kind, _SLICES[kind][devices], str(count) if count != 1 else None)
    nodes = -(-count // domain)
    if nodes > 1 and count % domain:
        raise ClusterError(
            f"cluster {text!r}: {count} machines are no whole NVLink domains of {domain}; give "
            f"a multiple of {domain}, or at most {domain}"
        )
    inside = devices * min(count, domain)
    named = name if nodes > 1 and network_of(name) else kind
    return f"{named}:{inside}" + (f"x{nodes}" if nodes != 1 else "")


def network_of(name: str) -> tuple[str, float] | None:
    """The kind of device and bytes/s per device of a machine type whose network is not that of the
    kind's catalog entry; None for any other text.

    >>> network_of("a3-megagpu-8g"), network_of("p5.48xlarge"), network_of("h100")
    (('h100', 25000000000.0), None, None)
    """
    machine = _INSTANCES.get(name.strip().lower().removeprefix("standard_"))
    if machine is None:
        return None
    entry: dict[str, Any] = dict(catalog_entry(machine.kind))
    network = entry["inter_node" if "node" in entry else "inter_slice"]
    ours = machine.gbits * 0.125e9
    return None if abs(ours / network["bytes_per_s"] - 1) <= 0.1 else (machine.kind, ours)
