"""Clusters as clouds and people name them, in the form of `parse_cluster`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ._catalog import ClusterError, catalog_entry

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
_SLICES: Mapping[str, Shapes] = {"v4": _CUBES, "v5p": _CUBES, "v5e": _SQUARES, "v6e": _SQUARES}

_INSTANCES = {
    "p4d.24xlarge": ("a100-40gb", 50),
    "p4de.24xlarge": ("a100", 50),
    "p5.48xlarge": ("h100", 400),
    "p5e.48xlarge": ("h200", 400),
    "p5en.48xlarge": ("h200", 400),
    "p6-b200.48xlarge": ("b200", 400),
    "a2-highgpu-8g": ("a100-40gb", 12.5),
    "a2-ultragpu-8g": ("a100", 12.5),
    "a3-highgpu-8g": ("h100", 100),
    "a3-megagpu-8g": ("h100", 200),
    "a3-ultragpu-8g": ("h200", 400),
    "a4-highgpu-8g": ("b200", 400),
    "standard_nd96asr_v4": ("a100-40gb", 200),
    "standard_nd96amsr_a100_v4": ("a100", 200),
    "standard_nd96isr_h100_v5": ("h100", 400),
    "standard_nd96isr_h200_v5": ("h200", 400),
}
"""Machines of 8 GPUs: the kind, and Gbit/s per GPU between machines. Source: the pages of Amazon
EC2, Google Compute Engine and Azure on these machine types."""

_TPU = re.compile(r"(?:tpu-?)?(v4|v5p|v5e|v5litepod|v6e)-(\d{1,6})(?:\+(\d{1,6}))?")
_CHIPS = re.compile(r"(v4|v5p|v5e|v6e):(\d{1,6})(?:\+(\d{1,6}))?")
_COUNTED = re.compile(r"(?:(\d{1,6})\s*x\s*)?(\d{1,6})\s*x\s*([a-z][\w.-]*)")
_MACHINE = re.compile(r"(?:(\d{1,6})\s*x\s*)?([a-z][\w.-]*)")


def respelled(text: str) -> str:
    """A cluster text for another spelling: an accelerator type of Cloud TPU (``v5p-64``: 64 cores,
    32 chips; ``v5litepod-16``; ``v5e-16+2``: two slices), a number of chips that
    has a usual shape (``v5p:64``; any other is a ring or a line), a count
    of devices (``8xH100``, ``2x8xA100``: 2 nodes of 8), or a machine type (``p5.48xlarge``,
    ``4xa3-ultragpu-8g``). Any other text is returned as it is.

    Raises:
        ClusterError: no such slice is offered, or the machines are joined by another network than
            the catalog's.

    >>> respelled("v5p-64"), respelled("v5p:64"), respelled("2x8xH100")
    ('v5p:2x4x4', 'v5p:4x4x4', 'h100:8x2')
    """
    plain = text.strip().lower()
    if (found := _CHIPS.fullmatch(plain)) and (
        shape := _SLICES[found.group(1)].get(int(found.group(2)))
    ):
        return _torus(found.group(1), shape, found.group(3))
    if found := _TPU.fullmatch(plain):
        return _slice(found.group(1), found.group(2), found.group(3), text)
    found = _MACHINE.fullmatch(plain)
    if found and found.group(2) in _INSTANCES:
        return _machines(int(found.group(1) or 1), found.group(2), text)
    if found := _COUNTED.fullmatch(plain):
        nodes, devices, name = found.groups()
        return f"{name}:{devices}" + (f"x{nodes}" if nodes else "")
    return text


MOST_NODES = 128
"""Nodes of the largest cluster of GPUs that ``usual_sizes`` names."""


def usual_sizes(kind: str) -> tuple[str, ...]:
    """Clusters of a kind of device in the sizes that it is rented in, smallest first: the slices
    of TPUs, parts of a node of GPUs and then 1, 2, 4, ... nodes.

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
    inside = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
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


def _machines(nodes: int, machine: str, text: str) -> str:
    """The cluster of some machines of a type."""
    kind, gbits = _INSTANCES[machine]
    entry: dict[str, Any] = dict(catalog_entry(kind))
    ours = entry["inter_node"]["bytes_per_s"] * 8e-9
    if nodes > 1 and abs(gbits / ours - 1) > 0.1:
        raise ClusterError(
            f"cluster {text!r}: {machine} has {gbits:g} Gbit/s per GPU between machines, the "
            f"catalog's {kind} {ours:g}; write a .toml file with [cluster] device = "
            f'"{kind}", devices_per_node = 8, nodes = {nodes} and [inter_node] bytes_per_s = '
            f"{gbits * 0.125e9:.4g}"
        )
    return f"{kind}:8" + (f"x{nodes}" if nodes != 1 else "")
