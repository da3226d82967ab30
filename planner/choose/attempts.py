"""One search on one mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from planner.annotate import Pin
from planner.choose.candidates import SPLITS, allowed_masks, examples_alone
from planner.choose.simplest import BUSY, LESS, Tried, devices_worth
from planner.cost.pricing import Priced, price, unfolded
from planner.errors import RequestError
from planner.graph.ir import Role
from planner.modes import PROPAGATION
from planner.request.parsed import Request
from planner.request.pins import Mask
from planner.search.problem import Problem, Solution, evaluate
from planner.search.registry import FAST, solve
from planner.search.relax.bound import lower_bound
from planner.spec import MeshSpec
from planner.step.analysis import ideal_s
from planner.step.classes import Quotient
from planner.step.feeding import batch_of

SPREAD = 10.0
"""Surcharge for a change of layout outside AUTO_PARALLEL, in ideal steps on one device."""
AGAIN = (1.0, 0.1, 0.0)
"""Surcharges to try where ``SPREAD`` leaves devices idle, in ideal steps on all devices."""
CLOSED = 1e-6
"""Relative gap up to which a choice on the quotient counts as optimal."""
SWEEPS = 48
"""Diffusion sweeps on the quotient to close that gap."""


def attempt(
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
    mesh: MeshSpec,
    search: str,
    *,
    whole: bool = False,
) -> Tried:
    """Price one mesh under the pins and the mode, and run one search on it.

    Outside AUTO_PARALLEL, and in sharding_propagation, the search only completes the given
    shardings: every other change of layout costs more than the whole step (``SPREAD``). The gathers
    of parameters that ZeRO-3 stores in shards, and the scatters of their gradients, count as given.

    A mode that splits the batch tries smaller surcharges (``AGAIN``) where devices would repeat
    each other's work because a change of layout cannot be avoided. If no argument holds a batch, as
    where an environment is stepped inside, nothing can be spread, and all else is searched.
    DATA_PARALLEL splits no weights in the operations that read them, unless that is clearly faster,
    as it is where the devices do not divide the examples.
    """
    open_masks = allowed_masks(quotient, pins, request, mesh)
    held = examples_alone(quotient, pins, request, mesh, open_masks)
    if held is None:
        return _attempt(quotient, request, mesh, search, open_masks, whole)
    trial = _attempt(quotient, request, mesh, search, held, whole)
    if trial[1].feasible and devices_worth(trial[0], trial[1].choice) >= BUSY * mesh.num_devices:
        return trial
    other = _attempt(quotient, request, mesh, search, open_masks, whole)
    better = other[1].feasible and not trial[1].feasible
    return other if better or other[1].cost_s < LESS * trial[1].cost_s else trial


def _attempt(
    quotient: Quotient,
    request: Request,
    mesh: MeshSpec,
    search: str,
    masks: Mapping[int, Mask],
    whole: bool,
) -> Tried:
    """As ``attempt``, under the given masks."""
    analysis, model = quotient.part, request.model
    priced = price(analysis, mesh, model, request.limit_bytes, masks)
    if request.spreads and request.state.zero == 3:
        priced = dataclasses.replace(priced, free=_of_parameters(quotient))
    if whole:
        priced = unfolded(quotient, priced)
    if not request.spreads:
        solution = _solve(search, priced.problem, request)
        return priced, _bounded(priced.problem, solution, search)
    mode_text = f"mode {request.mode}" if request.search != PROPAGATION else PROPAGATION
    splits = request.mode in SPLITS and request.search != PROPAGATION
    nothing = splits and not batch_of(quotient.whole.graph)
    surcharge_s = 0.0 if nothing else SPREAD * ideal_s(analysis, model, 1) + 1e-9
    best = _spread(priced, surcharge_s, search, request)
    how = "no batch to split, all else searched" if nothing else "nothing else resharded"
    ideal = ideal_s(analysis, model, mesh.num_devices)
    for share in AGAIN if splits and not nothing else ():
        if devices_worth(priced, best.choice) >= BUSY * mesh.num_devices:
            break
        again = _spread(priced, share * ideal, search, request)
        if again.feasible and again.cost_s < LESS * best.cost_s:
            best, how = again, "resharded where devices would repeat each other's work"
    return priced, dataclasses.replace(
        best,
        lower_bound_s=min(best.cost_s, lower_bound(priced.problem)),
        search=PROPAGATION if request.search == PROPAGATION else best.search,
        reason=f"{mode_text}: given shardings spread, {how}; "
        "the bound is that of any sharding with the same inputs",
    )


def _spread(priced: Priced, surcharge_s: float, search: str, request: Request) -> Solution:
    """The solution of a search with a surcharge for changes of layout; its cost is without it."""
    spread = dataclasses.replace(priced, change_s=surcharge_s)
    solution = _solve(search, spread.problem, request)
    cost, peak, moment = evaluate(priced.problem, solution.choice)
    return dataclasses.replace(solution, cost_s=cost, peak_bytes=peak, peak_moment=moment)


def _solve(name: str, problem: Problem, request: Request) -> Solution:
    """Run a search; a problem that it refuses (too many combinations for brute) is a
    RequestError."""
    if not problem.cost_s:
        return Solution((), 0.0, 0.0, 0.0, 0, True, name, "nothing to decide", 0.0)
    name = FAST if name == PROPAGATION else name
    counted = {} if math.isinf(request.effort_s) else {"effort_s": request.effort_s}
    try:
        return solve(name, problem, request.time_limit_s, counted)
    except ValueError as error:
        raise RequestError(f"search {name}: {error}; choose another search") from error


def _of_parameters(quotient: Quotient) -> frozenset[int]:
    """The classes of parameters and of their copies."""
    groups, values = quotient.whole.groups, quotient.whole.graph.values
    state = [v.index for v in values if v.role in (Role.PARAMETER, Role.FROZEN)]
    held = {home[0] for v in state if (home := groups.home[v]) is not None}
    copies = {x.b for x in groups.links if x.a in held and groups.groups[x.b].kind == "copy"}
    return frozenset(quotient.color[g] for g in held | copies)


def _bounded(problem: Problem, solution: Solution, search: str) -> Solution:
    """The solution with a lower bound for the whole step: on a quotient, only diffusion has one."""
    if problem.counts is None or search == FAST or not solution.feasible:
        return solution
    enough = solution.cost_s * (1.0 - 0.1 * CLOSED)
    lower = lower_bound(problem, sweeps=SWEEPS, enough=enough)
    return dataclasses.replace(solution, lower_bound_s=min(lower, solution.cost_s))
