"""A smaller batch: planned at a half, a quarter, ... until a plan fits.

The batch is the first dimension of the arguments that are fed at every step. The factor rules
determine which values grow with it. A size is skipped if its scaled bytes would not fit even with
every array split over all devices. At any other size the step is traced and planned again. If that
fails (its code may know the batch's size), the memory is estimated.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from planner.advice.trials import relief, tried_out
from planner.annotate import Pin
from planner.choose.candidates import candidate_meshes
from planner.choose.floors import mesh_floor, perfect_floor
from planner.cost.pricing import Priced
from planner.errors import MeshwrightError
from planner.graph.ir import Graph
from planner.report.shortage import Relief
from planner.request.parsed import Request
from planner.rules.factor import FactorRule
from planner.search.local.memory_limit import least_memory
from planner.step.analysis import Analysis
from planner.step.classes import Quotient

Shapes = Mapping[int, tuple[int, ...]]
"""New shapes by position of the argument's leaf."""
Retrace = Callable[[Shapes], tuple[Quotient, Sequence[Pin]]]
"""The step again with other shapes; raises MeshwrightError where that is impossible."""

ESTIMATE_S = 2.0
"""Seconds for the least peak at one size."""
ESTIMATES_S = 10.0
"""Seconds after which no further size is estimated."""


def batch_leaves(graph: Graph) -> tuple[int, ...]:
    """Positions of the arguments whose first dimension is the batch, and of state with such rows;
    none when nothing is fed."""
    values = [(k, graph.values[v]) for k, v in enumerate(graph.inputs) if graph.values[v].shape]
    fed = [v for _, v in values if v.fed] or [v for _, v in values if v.has_examples]
    if not fed:
        return ()
    size = max(fed, key=lambda v: v.nbytes).shape[0]
    rows = tuple(k for k, v in values if v.has_examples and v.shape[0] == size)
    return rows if size > 1 else ()


def growing(graph: Graph, rules: Sequence[FactorRule], leaves: Sequence[int]) -> frozenset[int]:
    """The values that grow with the first dimension of some arguments."""
    return frozenset(growth(graph, rules, leaves))


def growth(graph: Graph, rules: Sequence[FactorRule], leaves: Sequence[int]) -> Mapping[int, int]:
    """How many dimensions of each value grow with the first one of some arguments; only growing
    values.

    A dimension that shares a factor with one that grows also grows. Other arguments of the state
    never grow.
    """
    scaling = {graph.inputs[k] for k in leaves}
    fixed = {v for pair in graph.next_values.items() if pair[0] not in scaling for v in pair}
    grows: dict[int, set[int]] = {graph.inputs[k]: {0} for k in leaves}
    while True:
        before = sum(map(len, grows.values()))
        for op in graph.ops:
            rule = rules[op.index]
            ends = [
                (value, dims)
                for value, dims in zip(
                    (*op.inputs, *op.outputs), (*rule.operands, *rule.results), strict=False
                )
                if value >= 0
            ]
            factors = {
                max(dims[d], key=lambda f: rule.sizes[f])
                for value, dims in ends
                for d in grows.get(value, ())
                if d < len(dims) and dims[d]
            }
            for value, dims in ends if factors else ():
                if value not in fixed:
                    scaling = {d for d, mapped in enumerate(dims) if factors & set(mapped)}
                    if scaling:
                        grows.setdefault(value, set()).update(scaling)
        if sum(map(len, grows.values())) == before:
            return {value: len(dims) for value, dims in grows.items()}


def scaled_memory(priced: Priced, grows: Mapping[int, int], share: float) -> Priced:
    """The pricing with the memory of some values scaled, once for each dimension that grows; costs
    stay the same."""
    analysis = priced.analysis
    buffers = tuple(
        dataclasses.replace(b, nbytes=b.nbytes * share ** grows[b.value]) if b.value in grows else b
        for b in analysis.buffers
    )
    return dataclasses.replace(priced, analysis=dataclasses.replace(analysis, buffers=buffers))


def smaller_batch(
    analysis: Analysis,
    priced: Priced,
    pins: Sequence[Pin],
    request: Request,
    retrace: Retrace,
    deadline: float,
) -> Relief | None:
    """The largest power-of-two fraction of the batch at which a plan fits, each planned in turn.

    Args:
        analysis: the analysis of the whole step.
        priced: its pricing on the mesh of the least peak.
        pins, request: the user's pins and request.
        retrace: traces the step with other shapes.
        deadline: monotonic time after which no other size is planned.
    """
    graph = analysis.graph
    leaves = batch_leaves(graph)
    if not leaves:
        return None
    shapes = {k: graph.values[graph.inputs[k]].shape for k in leaves}
    size = shapes[leaves[0]][0]
    grows = growth(graph, analysis.rules, leaves)
    last = None
    only = len(candidate_meshes(request, pins)) == 1
    for cut in [k for k in range(1, size.bit_length()) if size % (1 << k) == 0]:
        part = scaled_memory(priced, grows, 1.0 / (1 << cut))
        what = f"1/{1 << cut} of the batch, {size >> cut} instead of {size}"
        floor = mesh_floor(part) if only else perfect_floor(part.analysis, part.mesh.num_devices)
        least = floor.peak_bytes
        if least > request.limit_bytes:
            note = "at least" + ("" if only else ", were every array split over all devices")
            last = Relief(what, least, math.inf, False, note)
            continue
        if time.monotonic() >= deadline:
            return Relief(what, least, math.inf, False, "out of time", tried=False)
        try:
            quotient, again = retrace({k: (s[0] >> cut, *s[1:]) for k, s in shapes.items()})
            tried = tried_out(quotient, again, request)
        except MeshwrightError:
            return _estimated(priced, grows, size, cut, request)
        if tried is not None:
            last = relief(what, quotient.whole, tried)
            if last.fits:
                return last
    return last


def _estimated(
    priced: Priced, grows: Mapping[int, int], size: int, first: int, request: Request
) -> Relief:
    """The first fraction of the batch, from a cut on, at which a plan would fit; else the
    smallest."""
    deadline = time.monotonic() + ESTIMATES_S
    note = "an estimate of the memory: the step can't be traced with a smaller batch"
    for cut in [k for k in range(first, size.bit_length()) if size % (1 << k) == 0]:
        part = scaled_memory(priced, grows, 1.0 / (1 << cut))
        peak = least_memory(part.problem, time_limit_s=ESTIMATE_S).peak_bytes
        peak += priced.analysis.scalar_bytes
        what = f"1/{1 << cut} of the batch, {size >> cut} instead of {size}"
        estimate = Relief(what, peak, math.inf, peak <= request.limit_bytes, note)
        if estimate.fits or time.monotonic() >= deadline:
            break
    return estimate
