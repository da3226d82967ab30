"""The work and the collectives of one device in a ``shard_map`` region.

Products count by flop and bytes. Any other operation counts one flop per element that it makes, and
the bytes that it moves; of an elementwise operation, only the result. Collectives count as they are
written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planner import compat
from planner.rules.kernels.pallas.work import Work, kernel_work

Sends = tuple[tuple[str, tuple[int, ...], float, float], ...]
"""Collectives: kind, positions of axes, payload bytes of a device, and how often one run of the
region sends it. ``costmodels.collectives.collective_coefficients`` defines the payload."""

_FREE = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim iota pvary convert_element_type transpose copy "
    "sharding_constraint stop_gradient axis_index".split()
)
RAGGED = frozenset({"ragged_dot", "ragged_dot_general"})
_PRODUCTS = frozenset({"dot_general", *RAGGED})
_SENDS = {
    **dict.fromkeys("psum psum_invariant psum2 pmax pmin".split(), "all_reduce"),
    **dict.fromkeys("all_gather all_gather_invariant".split(), "all_gather"),
    **dict.fromkeys("reduce_scatter psum_scatter".split(), "reduce_scatter"),
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
}
"""The kind of a collective primitive."""
MASKED, MASKED_GRADIENT = "masked", "masked gradient"
"""Kinds of extra work of ragged products if a compiler multiplies all rows by the matrices of all
groups. XLA:GPU and XLA:CPU do; XLA:TPU does only for the gradients of matrices."""


def inside(jaxpr: Any, axes: Mapping[str, int]) -> tuple[Work, Sends]:
    """The work and the collectives of one run of a region's body.

    Args:
        jaxpr: the body, of local arrays.
        axes: the axes of its mesh and their sizes; those of size one are left out of positions.
    """
    names = [name for name, size in axes.items() if size > 1]
    totals = _Inside(names)
    totals.add(jaxpr, 1.0)
    rows = (
        ("matmul", *totals.products),
        ("vector", *totals.rest),
        *((kind, *more) for kind, more in totals.masked.items()),
    )
    work = tuple((kind, flops, moved) for kind, flops, moved in rows if flops or moved)
    return work, tuple((*key, times) for key, times in totals.sends.items())


def held_inside(jaxpr: Any, masked: bool = False) -> float:
    """Peak bytes that a body allocates, without its operands and results.

    Results of products, collectives, kernels, and operations on several shapes are written, and
    live until the last operation that reads them; elementwise results are not written. ``masked``:
    whether ragged products hold masked copies of their operands (XLA:GPU, XLA:CPU).
    """
    inner = compat.body(jaxpr)
    last: dict[Any, int] = {}
    for k, eqn in enumerate(inner.eqns):
        last.update((v, k) for v in eqn.invars if not compat.is_literal(v))
    results = {v for v in inner.outvars if not compat.is_literal(v)}
    live = peak = 0.0
    ends: dict[int, float] = {}
    for k, eqn in enumerate(inner.eqns):
        deeper = max((held_inside(b, masked) for b in _bodies(eqn)), default=0.0)
        if masked and eqn.primitive.name in RAGGED:
            deeper += _ragged(eqn).copied
        new_bytes = 0.0
        for v in eqn.outvars if _is_written(eqn) else ():
            if v not in results and v in last:
                new_bytes += _bytes(v)
                ends[last[v]] = ends.get(last[v], 0.0) + _bytes(v)
        live += new_bytes
        peak = max(peak, live + deeper)
        live -= ends.pop(k, 0.0)
    return peak


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs in an equation, except those of kernels."""
    if eqn.primitive.name == "pallas_call":
        return []
    bodies = []
    for value in eqn.params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        bodies += [b for b in items if hasattr(getattr(b, "jaxpr", b), "eqns")]
    return bodies


def _is_written(eqn: Any) -> bool:
    """Whether an equation writes its results to memory."""
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
    masked: dict[str, tuple[float, float]] = field(default_factory=dict)
    sends: dict[tuple[str, tuple[int, ...], float], float] = field(default_factory=dict)

    def add(self, jaxpr: Any, times: float) -> None:
        """Count a body that runs ``times`` times."""
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
                if name in RAGGED:
                    more = _ragged(eqn)
                    before = self.masked.get(more.kind, (0.0, 0.0))
                    flops = (more.groups - 1) * _flops(eqn)
                    self.masked[more.kind] = _sum(before, times, flops, 2.0 * more.copied)
            elif name not in _FREE:
                self.other(eqn, times)

    def other(self, eqn: Any, times: float) -> None:
        """Count a call by its body. Any other operation moves its results if it is elementwise,
        else its operands as well."""
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


class _Ragged(NamedTuple):
    """A ragged product, if it is masked.

    Attributes:
        kind: ``MASKED``, or ``MASKED_GRADIENT`` if the rows are summed over.
        groups: number of groups.
        copied: bytes of the masked copies: of the rows, or of both operands for a gradient.
    """

    kind: str
    groups: int
    copied: float


def _ragged(eqn: Any) -> _Ragged:
    rows, out_rank = (len(compat.aval_shape(v.aval)) for v in (eqn.invars[0], eqn.outvars[0]))
    gradient = out_rank > rows
    groups = compat.aval_shape(eqn.invars[2].aval)[-1]
    copied = groups * _bytes(*eqn.invars[: 2 if gradient else 1])
    return _Ragged(MASKED_GRADIENT if gradient else MASKED, groups, copied)


def _flops(eqn: Any) -> float:
    """Flop of a product; in a ragged one, each row is multiplied by the matrix of one group."""
    left = compat.aval_shape(eqn.invars[0].aval)
    out_shape = compat.aval_shape(eqn.outvars[0].aval)
    if eqn.primitive.name in RAGGED:
        if len(out_shape) > len(left):  # [groups, ...]: a gradient, the rows are summed over
            return 2.0 * float(math.prod(out_shape[1:]) * left[0])
        return 2.0 * float(math.prod(out_shape) * left[-1])
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * float(math.prod(left[d] for d in contracted) * math.prod(out_shape))


def _bytes(*atoms: Any) -> float:
    return float(sum(math.prod(compat.aval_shape(a.aval)) * compat.itemsize(a.aval) for a in atoms))


def _elements(jaxpr: Any) -> int:
    """Number of elements that a body makes."""
    eqns = compat.body(jaxpr).eqns
    return sum(math.prod(compat.aval_shape(v.aval)) for e in eqns for v in e.outvars)
