"""Decides which parameters are on parameter servers and which under SPMD, by request or by cost.

The cost of a table under SPMD is the time that it adds to the step's plan: gradients summed over
all its rows, the optimizer's pass over them, collectives. Its cost on servers is the transfer of
the rows that a batch reads, in both directions, and their update. Both use the same catalog.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from costmodels import Cluster
from planner.arguments.metadata import with_logical_axis_rules
from planner.errors import MemoryLimitError, RequestError
from planner.frontend.capture import CapturedCall
from planner.frontend.loss import check_scalar
from planner.graph.lookups.tables import LookUps, LookupTable, find_lookups
from planner.graph.trace import Traced, trace
from planner.placement.case import AUTO, PS, SPMD, WHOLE, Case, case_of, served_seconds
from planner.placement.hybrid_step import (
    Split,
    check_across,
    hybrid_step,
    looks_across,
    split_of,
    step_args,
)
from planner.plan.plan import Plan
from planner.planning import Planned, plan_traced
from planner.report.units import time_text
from planner.request.options import Options, given_options, takes_options
from planner.request.parsed import Request, parse_request
from planner.space.decisions.host_memory import WORTH
from planner.spec import REWRITINGS


@dataclass(frozen=True)
class Placed:
    """Where one parameter is stored, and why.

    Attributes:
        path: path of the parameter.
        place: ``"spmd"``, ``"ps"`` or ``"ps_whole"``.
        nbytes: bytes of the whole parameter.
        rows: number of rows that a batch reads; 0 if it is not served by rows.
        row_bytes: bytes of those rows; for ``"ps_whole"``, of the whole parameter.
        served_s: predicted seconds per step of keeping it on servers.
        spmd_s: predicted seconds per step that it adds to the plan under SPMD. Infinite if no plan
            fits, negative if the plan gets faster, None if this was not compared.
        reason: why, in words.
    """

    path: str
    place: str
    nbytes: int
    rows: int
    row_bytes: int
    served_s: float
    spmd_s: float | None
    reason: str

    def __str__(self) -> str:
        where = {
            PS: f"on parameter servers, {self.rows} rows a step",
            WHOLE: "on parameter servers, whole",
        }
        return f"{self.path}: {where.get(self.place, 'under SPMD')}: {self.reason}"


@dataclass(frozen=True)
class Placement:
    """Where the parameters are stored.

    Attributes:
        leaves: the parameters that are on servers, or could have been.
        plan: plan of the step of the parameters under SPMD; its notes list ``leaves``.
    """

    leaves: tuple[Placed, ...]
    plan: Plan

    def at(self, place: str) -> frozenset[str]:
        """Paths of the parameters in ``leaves`` with this place."""
        return frozenset(x.path for x in self.leaves if x.place == place)

    def __str__(self) -> str:
        return "\n".join(map(str, self.leaves)) or "all parameters under SPMD"


OF_ONE_STEP = ("dump_problem", "confirm", *REWRITINGS)
"""Options that have no meaning where several steps are planned."""


def placement_request(cluster: str | Cluster, door: str, options: Mapping[str, Any]) -> Request:
    """The request of an entry point, ``door``, that places parameters.

    Raises:
        RequestError: as ``parse_request``; or one of ``OF_ONE_STEP``: several steps are planned, so
            there is no single problem to write, program to compile or step to rewrite.
    """
    given = given_options(door, options)
    for name in OF_ONE_STEP:
        if name in given:
            raise RequestError(
                f"{door}: {name} is not supported, because several steps are planned; use "
                "make_plan on the step"
            )
    return parse_request(cluster, **given)


@takes_options
def make_placement(
    loss: Callable[..., Any],
    params: Any,
    optimizer: Any,
    *batch: Any,
    cluster: str | Cluster,
    placement: str | Mapping[str, str] = AUTO,
    **options: Unpack[Options],
) -> Placement:
    """Decide where the parameters of ``loss(params, *batch)`` are stored; starts no backend.

    Args:
        loss: a function that returns a scalar.
        params, batch: arrays or ShapeDtypeStructs. The indices in the batch are not read: every
            lookup counts as another row.
        optimizer: an optax transformation.
        cluster: as for ``make_plan``.
        placement: as for ``executor.parameter_server.hybrid``.
        **options: as for ``make_plan``.

    Raises:
        ModelError: the loss failed while traced.
        RequestError: the loss is not a scalar; a table is requested on servers by rows and can't
            be served, says why; or the optimizer's update of another parameter depends on those
            requested on servers (``check_across``).
        MemoryLimitError: no plan fits.
    """
    request = placement_request(cluster, "make_placement", options)
    lookups = find_lookups(loss, params, batch)
    return place_and_plan(lookups, params, batch, optimizer, placement, request)[0]


def place_and_plan(
    lookups: LookUps,
    params: Any,
    batch: Sequence[Any],
    optimizer: Any,
    placement: str | Mapping[str, str],
    request: Request,
    *,
    asked_for: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Placement, Planned, CapturedCall]:
    """Decide where every parameter is stored, and plan the step of those under SPMD.

    Tables that are left to the planner are tried one by one, the largest first. A table goes to the
    servers if that costs less than the table adds to the plan.

    Args:
        lookups: lookups of the loss.
        params, batch: its arguments, arrays or ShapeDtypeStructs.
        optimizer: an optax transformation, for the parameters under SPMD.
        placement: as for ``parse_placement``.
        request: the cluster, and the other options of the plan.
        asked_for: number of rows that a batch reads, by path; None takes the maximum.
        sizes: number of rows that the step has room for, by path; None takes ``asked_for``.

    Returns:
        The placement; the planned step of the parameters under SPMD; and that step.

    Raises:
        RequestError: the loss is not a scalar; a table is requested on servers by rows and can't
            be served, says why; or the optimizer's update of another parameter depends on those
            requested on servers (``check_across``).
        MemoryLimitError: no plan fits.
    """
    check_scalar(lookups)
    case = case_of(lookups, params, placement, optimizer, request, asked_for)
    room = case.counts | dict(sizes or {})
    shapes, whole = case.shapes, case.whole

    def step(rows: frozenset[str]) -> CapturedCall:
        return _step(lookups, split_of(shapes, rows, whole), optimizer, shapes, room, batch)

    def planned(rows: frozenset[str], advice: bool = False) -> Planned:
        begun = time.perf_counter()
        return _planned(step(rows), dataclasses.replace(request, advice=advice), begun)

    rows = frozenset(p for p, where in case.asked.items() if where == PS)
    check_across(split_of(shapes, rows, whole), optimizer, shapes)
    best, best_s = _tried(planned, rows)
    spmd: dict[str, float] = {}
    tied: dict[str, str] = {}
    for path in _by_size(t for t in lookups.tables if case.asked[t.path] == AUTO):
        if across := looks_across(split_of(shapes, rows | {path}, whole), optimizer, shapes):
            tied[path] = f"the optimizer's update of {across} depends on other arrays"
            continue
        other, other_s = _tried(planned, rows | {path})
        spmd[path] = best_s - other_s if best is not None else math.inf
        if case.price[path] < spmd[path]:
            rows, best, best_s = rows | {path}, other, other_s
    if best is None:
        best = planned(rows, advice=True)  # raises, and says what would help
    leaves = tuple(_placed(case, lookups, rows, spmd, tied))
    plan = dataclasses.replace(best.plan, notes=(*best.plan.notes, *map(str, leaves)))
    return Placement(leaves, plan), dataclasses.replace(best, plan=plan), step(rows)


def _placed(
    case: Case,
    lookups: LookUps,
    rows: frozenset[str],
    spmd: Mapping[str, float],
    tied: Mapping[str, str],
) -> Iterator[Placed]:
    """The rows of the report: parameters on servers, and tables that could have been there.

    ``rows``: paths on servers by rows; ``spmd``: cost of a table under SPMD, if it was planned;
    ``tied``: why a table can't be served.
    """
    for path, leaf in case.leaves.items():
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if path in rows or path in spmd:
            seconds, moved, count = case.price[path], case.sought[path], case.counts[path]
            where, reason = PS if path in rows else SPMD, _reason(seconds, spmd.get(path))
        elif path in case.whole:
            seconds = served_seconds(case.cluster, nbytes, case.moments[path])
            where, moved, count, reason = WHOLE, nbytes, 0, _reason(seconds, None)
        elif path in tied or (
            case.asked[path] == AUTO and path in lookups.mixed and nbytes >= WORTH
        ):
            where, seconds, moved, count = SPMD, math.inf, 0, 0
            why = tied.get(path) or lookups.refused[path]
            reason = f"it can't be served by rows: {why}"
        else:
            continue
        yield Placed(path, where, nbytes, count, moved, seconds, spmd.get(path), reason)


def plan_hybrid(
    lookups: LookUps,
    split: Split,
    optimizer: Any,
    shapes: Any,
    sizes: Mapping[str, int],
    batch: Sequence[Any],
    request: Request,
    plan: Plan | None = None,
) -> tuple[Traced, Plan]:
    """Trace the step of a placement with room for ``sizes`` rows of each table, and plan it unless
    ``plan`` is given."""
    begun = time.perf_counter()
    step = _step(lookups, split, optimizer, shapes, sizes, batch)
    traced = trace(step.function, step.args)
    return traced, plan or _planned(step, request, begun, traced).plan


def _step(
    lookups: LookUps,
    split: Split,
    optimizer: Any,
    shapes: Any,
    sizes: Mapping[str, int],
    batch: Sequence[Any],
) -> CapturedCall:
    step = with_logical_axis_rules(hybrid_step(lookups, split, optimizer))
    args = step_args(split, optimizer, shapes, sizes, batch)
    return CapturedCall(step, args, {"donate_argnums": 0})


def _planned(
    step: CapturedCall, request: Request, begun: float, traced: Traced | None = None
) -> Planned:
    traced = traced or trace(step.function, step.args)
    donated = step.options["donate_argnums"]
    return plan_traced(traced, step.args, request, donated, begun, function=step.function)


def _tried(planned: Callable[[frozenset[str]], Planned], rows: frozenset[str]) -> tuple[Any, float]:
    """The planned step and its seconds; None and infinity if nothing fits."""
    try:
        candidate = planned(rows)
    except MemoryLimitError:
        return None, math.inf
    return candidate, candidate.plan.prediction.step_s


def _by_size(tables: Iterable[LookupTable]) -> list[str]:
    """Paths of the tables of at least ``WORTH`` bytes, the largest first."""
    large = [t for t in tables if t.rows * t.row_bytes >= WORTH]
    return [t.path for t in sorted(large, key=lambda t: (-t.rows * t.row_bytes, t.path))]


def _reason(served_s: float, spmd_s: float | None) -> str:
    if spmd_s is None:
        return f"requested; {time_text(served_s)} a step there"
    if math.isinf(spmd_s):
        return f"no plan fits with it under SPMD; {time_text(served_s)} a step on servers"
    more = time_text(spmd_s) if spmd_s > 0 else "no more"
    return f"{time_text(served_s)} a step on servers, {more} under SPMD"
