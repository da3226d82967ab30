"""What one device does, and sends, in a ``shard_map`` region.

Products count by flop and bytes, everything else by the bytes that it moves, where elementwise
operations write their result once. Collectives count as they are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner import compat
from planner.rules.kernels.pallas.work import Work, kernel_work

Sends = tuple[tuple[str, tuple[int, ...], float, float], ...]
"""Collectives: kind, axes by position, payload bytes of a device, how often a run of the region
sends it. The payload is as ``costmodels.collectives.collective_coefficients`` wants it."""

_FREE = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim iota pvary convert_element_type transpose copy "
    "sharding_constraint stop_gradient axis_index".split()
)
_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general"})
_SENDS = {
    **dict.fromkeys("psum psum_invariant psum2 pmax pmin".split(), "all_reduce"),
    **dict.fromkeys("all_gather all_gather_invariant".split(), "all_gather"),
    **dict.fromkeys("reduce_scatter psum_scatter".split(), "reduce_scatter"),
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
}
"""The kind of a collective primitive."""


def inside(jaxpr: Any, axes: Mapping[str, int]) -> tuple[Work, Sends]:
    """What a run of a region's body does and sends.

    Args:
        jaxpr: the body, of local arrays.
        axes: the axes of its mesh and their sizes; those of size one are left out of positions.
    """
    names = [name for name, size in axes.items() if size > 1]
    found = _Inside(names)
    found.add(jaxpr, 1.0)
    rows = (("matmul", *found.products), ("vector", *found.rest))
    work = tuple((kind, flops, moved) for kind, flops, moved in rows if flops or moved)
    return work, tuple((*key, times) for key, times in found.sends.items())


def held_inside(jaxpr: Any) -> float:
    """Bytes that a body allocates at its worst moment, without its operands and results.

    What products, collectives, kernels, and operations of several shapes make is written, and lives
    until the last operation that reads it; elementwise results are not.
    """
    inner = compat.body(jaxpr)
    last: dict[Any, int] = {}
    for k, eqn in enumerate(inner.eqns):
        last.update((v, k) for v in eqn.invars if not compat.is_literal(v))
    results = {v for v in inner.outvars if not compat.is_literal(v)}
    live = peak = 0.0
    ends: dict[int, float] = {}
    for k, eqn in enumerate(inner.eqns):
        deeper = max((held_inside(b) for b in _bodies(eqn)), default=0.0)
        made = 0.0
        for v in eqn.outvars if _is_written(eqn) else ():
            if v not in results and v in last:
                made += _bytes(v)
                ends[last[v]] = ends.get(last[v], 0.0) + _bytes(v)
        live += made
        peak = max(peak, live + deeper)
        live -= ends.pop(k, 0.0)
    return peak


def _bodies(eqn: Any) -> list[Any]:
    """The programs in an equation, but for those of kernels."""
    if eqn.primitive.name == "pallas_call":
        return []
    found = []
    for value in eqn.params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        found += [b for b in items if hasattr(getattr(b, "jaxpr", b), "eqns")]
    return found


def _is_written(eqn: Any) -> bool:
    """Whether an equation writes what it makes."""
    name = eqn.primitive.name
    if name in _FREE:
        return False
    if name in _PRODUCTS or name in _SENDS or name == "pallas_call":
        return True
    ends = (*eqn.invars, *eqn.outvars)
    return len({compat.aval_shape(v.aval) for v in ends} - {()}) > 1 or bool(_bodies(eqn))


@dataclass
class _Inside:
    """``inside`` in progress: (flop, bytes) of products and of the rest."""

    names: list[str]
    products: tuple[float, float] = (0.0, 0.0)
    rest: tuple[float, float] = (0.0, 0.0)
    sends: dict[tuple[str, tuple[int, ...], float], float] = field(default_factory=dict)

    def add(self, jaxpr: Any, times: float) -> None:
        """Count a body that runs so many times."""
        for eqn in compat.body(jaxpr).eqns:
            name, params = eqn.primitive.name, eqn.params
            if name == "cond":
                self.add(max(params["branches"], key=_elements), times)
            elif name == "scan":
                self.add(params["jaxpr"], times * int(params["length"]))
            elif name == "while":
                self.add(params["body_jaxpr"], times)
            elif name == "pallas_call":
                flops = sum(row[1] for row in kernel_work(params))
                self.products = _sum(self.products, times, flops, _bytes(*eqn.invars, *eqn.outvars))
            elif name in _SENDS:
                self.send(eqn, times)
            elif name in _PRODUCTS:
                moved = _bytes(*eqn.invars, *eqn.outvars)
                self.products = _sum(self.products, times, _flops(eqn), moved)
            elif name not in _FREE:
                self.other(eqn, times)

    def other(self, eqn: Any, times: float) -> None:
        """Count a call by its body, anything else as elementwise or by all that it touches."""
        bodies = [b for b in eqn.params.values() if hasattr(getattr(b, "jaxpr", b), "eqns")]
        if bodies:
            self.add(bodies[0], times)
            return
        ends = (*eqn.invars, *eqn.outvars)
        alike = len({compat.aval_shape(v.aval) for v in ends} - {()}) <= 1
        flops = sum(math.prod(compat.aval_shape(v.aval)) for v in eqn.outvars)
        self.rest = _sum(self.rest, times, flops, _bytes(*(eqn.outvars if alike else ends)))

    def send(self, eqn: Any, times: float) -> None:
        """Count a collective."""
        kind, params = _SENDS[eqn.primitive.name], eqn.params
        said = params.get("axes", params.get("axis_name", ()))
        over = {str(a) for a in (said if isinstance(said, tuple | list) else (said,))}
        axes = tuple(k for k, name in enumerate(self.names) if name in over)
        if not axes:
            return
        for operand, result in zip(eqn.invars, eqn.outvars, strict=False):
            nbytes = _bytes(result if kind == "all_gather" else operand)
            key = (kind, axes, nbytes)
            self.sends[key] = self.sends.get(key, 0.0) + times


def _sum(
    before: tuple[float, float], times: float, flops: float, moved: float
) -> tuple[float, float]:
    return before[0] + times * flops, before[1] + times * moved


def _flops(eqn: Any) -> float:
    """Of a product; each row of a ragged one meets one group."""
    left = compat.aval_shape(eqn.invars[0].aval)
    depth = left[-1]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(left[d] for d in contracted)
    return 2.0 * depth * math.prod(compat.aval_shape(eqn.outvars[0].aval))


def _bytes(*atoms: Any) -> float:
    return float(sum(math.prod(compat.aval_shape(a.aval)) * compat.itemsize(a.aval) for a in atoms))


def _elements(jaxpr: Any) -> int:
    """How many elements a body makes."""
    eqns = compat.body(jaxpr).eqns
    return sum(math.prod(compat.aval_shape(v.aval)) for e in eqns for v in e.outvars)
