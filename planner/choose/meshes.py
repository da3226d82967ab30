"""Choice of the logical mesh: tries meshes and takes the simplest that no other clearly beats."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence, Set

from planner.annotate import Pin
from planner.choose.attempts import CLOSED, attempt
from planner.choose.bounds import Field, Scout, deepened, scouted
from planner.choose.candidates import allowed_masks, candidate_meshes
from planner.choose.simplest import SAME, Tried, choose, preferred, rank
from planner.cost.pricing import unfolded
from planner.errors import PinError
from planner.modes import PROPAGATION
from planner.request.parsed import Request
from planner.request.pins import Mask
from planner.search.problem import Solution, evaluate, fits, make_solution
from planner.search.registry import FAST, QUICK, WHOLE
from planner.spec import MeshSpec
from planner.step.analysis import ideal_s
from planner.step.classes import Quotient

LEADERS = 4
"""Maximum number of meshes to run the requested search on, after scouting."""
AUTO_S = 1.0
"""Counted effort of a quick search on one mesh, in seconds, where the optimality gap is above the
search's margin."""
SCOUTED = "message passing on all meshes, then single-variable moves"
"""Reason given for a choice from scouting if no search ran on its mesh."""
SAMPLE = 2
"""Number of searched meshes from which the ratio of cost to bound is assumed for the others: what
keeps one mesh from its bound, such as the memory limit, mostly affects all of them."""
WIDE = 0.1
"""Optimality gap after the longest search above which it runs on other meshes, too: where memory is
tight, the results of the quick searches do not show which mesh is best."""
LONGEST = 3
"""Maximum number of meshes to run the longest search on."""
FEW = 40
"""Maximum number of groups for which the quick searches run on every leading mesh: an elimination
is fast then."""
FAILURES = 6
"""Maximum number of meshes that exceed the memory limit without counting as leaders."""


@dataclasses.dataclass(frozen=True)
class Led:
    """State of every mesh before the longest search, which runs on one of them.

    ``settled``: the meshes on which a search ran; ``done``: whether the longest search is not
    needed; ``deep``: results of more message passing, by mesh; ``bounds_s``: lower bounds on the
    cost of each mesh without a memory limit, if all meshes were bounded at once.
    """

    tried: tuple[Tried, ...]
    settled: frozenset[MeshSpec]
    done: bool = False
    deep: Mapping[MeshSpec, Tried] = dataclasses.field(default_factory=dict)
    bounds_s: Mapping[MeshSpec, float] = dataclasses.field(default_factory=dict)


def lead_meshes(
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
    *,
    whole: bool = True,
    quick: bool = False,
) -> Led:
    """Try meshes: all of them at once for a bound and a first choice each (``scouted``), then one
    by one with a quick search, while a bound leaves room for improvement. ``whole``: a single mesh
    is also searched with equal layers as separate decisions, where that may help. ``quick``: bounds
    are not needed, and meshes that exceed the memory limit count as leaders."""
    meshes = candidate_meshes(request, pins)
    few = len(quotient.whole.groups.groups) <= FEW
    if len(meshes) == 1 and request.search in QUICK and not few:
        return _lead_one(quotient, pins, request, meshes[0])
    if len(meshes) == 1 or not quotient.part.groups.groups:
        only = _settle(quotient, pins, request, meshes[0], whole=whole)
        return Led((only,), frozenset((only[0].mesh,)), done=True)
    tried = first_tries(quotient, pins, request)
    bounds_s = {} if request.spreads else {t[0].mesh: t[1].lower_bound_s for t in tried}
    less = request
    if request.search in QUICK:
        less = dataclasses.replace(request, search=request.search if few else FAST, effort_s=AUTO_S)
    settled: set[MeshSpec] = set()
    deep: dict[MeshSpec, Tried] = {}
    failed, failures = 0, 0 if quick else FAILURES
    while len(settled) - failed < LEADERS and (pick := _next(tried, settled)) is not None:
        mesh = pick[0].mesh
        settled.add(mesh)
        if quick:
            trial = attempt(quotient, pins, request, mesh, FAST)
        else:
            trial = _settle(quotient, pins, less, mesh, whole=few, deep=deep)
        trial = _better(trial, pick)
        failed += not trial[1].feasible and failed < failures
        tried[tried.index(pick)] = trial
    return Led(tuple(tried), frozenset(settled), deep=deep, bounds_s=bounds_s)


def first_tries(quotient: Quotient, pins: Sequence[Pin], request: Request) -> list[Tried]:
    """All meshes, each with a lower bound and a first choice."""
    meshes = candidate_meshes(request, pins)
    allowed = allowed_meshes(quotient, pins, request, meshes)
    if request.spreads or len(meshes) == 1 or not quotient.part.groups.groups:
        return [attempt(quotient, pins, request, mesh, FAST) for mesh, _ in allowed]
    ideal = ideal_s(quotient.whole, request.model, request.cluster.num_devices)
    field = Field(quotient.part, request.model, allowed, request.limit_bytes, SAME, ideal)
    return [of_scout(s, request) for s in scouted(field)]


def tried_in_vain(quotient: Quotient, pins: Sequence[Pin], request: Request) -> tuple[Tried, ...]:
    """All meshes as ``search_meshes`` returns them, for a step that no plan fits in memory."""
    tried = first_tries(quotient, pins, request)
    best = choose(tried)
    if best[1].choice and not request.spreads:
        tried[tried.index(best)] = _with_moment(best)
    return tuple(tried)


def _lead_one(quotient: Quotient, pins: Sequence[Pin], request: Request, mesh: MeshSpec) -> Led:
    """Search a single mesh quickly. If that leaves a wide gap or does not fit, also search it with
    the effort for the best of several meshes. If that does not fit, a longer search follows."""
    quick = dataclasses.replace(request, effort_s=AUTO_S)
    trial = _settle(quotient, pins, dataclasses.replace(quick, search=FAST), mesh, whole=False)
    longer = not trial[1].feasible or trial[1].gap > SAME - 1
    if longer:
        trial = min(_settle(quotient, pins, quick, mesh, whole=False), trial, key=rank)
    return Led((trial,), frozenset((mesh,)), done=longer and trial[1].feasible)


def search_meshes(
    quotient: Quotient, pins: Sequence[Pin], request: Request, led: Led | None = None
) -> tuple[Tried, ...]:
    """Run the requested search on the mesh that is best after ``lead_meshes`` (``led``, if its
    result is known).

    Returns:
        The result for every mesh. A mesh that its bound pruned has no choice.
    """
    led = lead_meshes(quotient, pins, request) if led is None else led
    if led.done:
        return led.tried
    tried = list(led.tried)
    best = choose(tried)
    enough = {FAST: math.inf, PROPAGATION: math.inf}.get(
        request.search, SAME - 1 if request.search in QUICK else CLOSED
    )
    if best[1].feasible and best[1].gap <= enough:
        better = best
        if not request.spreads and request.search in QUICK and best[1].gap > CLOSED:
            mesh = best[0].mesh
            deep = led.deep[mesh] if mesh in led.deep else _deeper(quotient, pins, request, mesh)
            better = _better(best, deep)
        if best[0].mesh not in led.settled:
            better = _with_moment(better)
        tried[tried.index(best)] = _named(better, request)
    elif best[1].choice:
        effort_s = AUTO_S if request.search in QUICK else math.inf
        less = dataclasses.replace(request, effort_s=effort_s)
        _search_on(tried, best, led, quotient, pins, less)
    return tuple(tried)


def search_others(
    quotient: Quotient, pins: Sequence[Pin], request: Request, led: Led, tried: Sequence[Tried]
) -> tuple[Tried, ...]:
    """The result of ``search_meshes``, then of the longest search on more meshes (``LONGEST`` in
    all) while the optimality gap of the cheapest plan that fits is above ``WIDE``."""
    trials = list(tried)
    if led.done or request.search not in QUICK or request.spreads:
        return tuple(trials)
    less = dataclasses.replace(request, effort_s=AUTO_S)
    searched = {choose(led.tried)[0].mesh}
    while len(searched) < LONGEST and (other := _hopeful(trials, searched)) is not None:
        searched.add(other[0].mesh)
        _search_on(trials, other, led, quotient, pins, less)
    return tuple(trials)


def _search_on(
    tried: list[Tried],
    one: Tried,
    led: Led,
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
) -> None:
    """Search the mesh of ``one``, an entry of ``tried``, and replace the entry if the result is
    better. Equal layers may be sharded differently if ``one`` does not fit."""
    mesh = one[0].mesh
    known = one if mesh in led.settled else None
    trial = _settle(quotient, pins, request, mesh, whole=not one[1].feasible, known=known)
    tried[tried.index(one)] = min(trial, _better(trial, one), key=rank)


def _hopeful(tried: Sequence[Tried], searched: Set[MeshSpec]) -> Tried | None:
    """The mesh to run the longest search on next: of those that could be clearly cheaper than the
    best plan, the one with the lowest bound. None if the best plan does not fit, or its optimality
    gap is at most ``WIDE``."""
    best = min(tried, key=rank)
    if not best[1].feasible or best[1].gap <= WIDE:
        return None
    below = best[1].cost_s / (1.0 + WIDE)
    open_ = [
        one
        for one in tried
        if one[1].choice and one[0].mesh not in searched and one[1].lower_bound_s <= below
    ]
    return min(open_, key=lambda one: one[1].lower_bound_s, default=None)


def _with_moment(tried: Tried) -> Tried:
    """The same with the moment of the peak, which scouting does not compute."""
    priced, solution = tried
    moment = evaluate(priced.problem, solution.choice)[2]
    return priced, dataclasses.replace(solution, peak_moment=moment)


def _named(tried: Tried, request: Request) -> Tried:
    """A proved answer of the fast search under the name of the requested search."""
    priced, solution = tried
    if request.search not in QUICK or solution.search != FAST:
        return tried
    why = f"{solution.search} is within {100 * max(solution.gap, 0.0):.2g} % of its bound"
    return priced, dataclasses.replace(
        solution,
        search=f"{request.search}:{solution.search}",
        reason=f"{why}; {solution.reason}",
    )


def _better(trial: Tried, scout: Tried) -> Tried:
    """The search's solution, or the scouted one if that is cheaper, with the higher lower bound."""
    lower = max(trial[1].lower_bound_s, scout[1].lower_bound_s)
    if scout[1].feasible:
        problem, search, reason = scout[0].problem, scout[1].search, scout[1].reason
        scout_solution = make_solution(
            problem, scout[1].choice, lower, search, reason, time.monotonic()
        )
        close = trial[1].feasible and trial[1].cost_s <= scout_solution.cost_s * (1.0 + CLOSED)
        if scout_solution.feasible and not close:
            return scout[0], scout_solution
    lower = min(lower, trial[1].cost_s)
    return trial[0], dataclasses.replace(trial[1], lower_bound_s=lower)


def allowed_meshes(
    quotient: Quotient, pins: Sequence[Pin], request: Request, meshes: Sequence[MeshSpec]
) -> list[tuple[MeshSpec, Mapping[int, Mask]]]:
    """The meshes on which all pins hold, with masks of the strategies that remain.

    Raises:
        PinError: the pins hold on no mesh; gives the first mesh's reason.
    """
    out: list[tuple[MeshSpec, Mapping[int, Mask]]] = []
    refused: list[PinError] = []
    for mesh in meshes:
        try:
            out.append((mesh, allowed_masks(quotient, pins, request, mesh)))
        except PinError as error:
            refused.append(error)
    if not out:
        raise refused[0]
    return out


def of_scout(scout: Scout, request: Request) -> Tried:
    """A scouted mesh in the form of a tried one; without a choice it counts as infeasible."""
    scalars = scout.priced.analysis.scalar_bytes
    peak = scout.peak_bytes - scalars if scout.choice else math.inf
    feasible = scout.choice is not None and fits(peak, request.limit_bytes - scalars)
    return scout.priced, Solution(
        scout.choice or (),
        scout.cost_s,
        min(scout.bound_s, scout.cost_s),
        peak,
        0,  # the moment is not known here, see _with_moment
        feasible,
        FAST,
        SCOUTED,
        0.0,
    )


def _next(tried: Sequence[Tried], settled: Set[MeshSpec]) -> Tried | None:
    """The mesh to run the search on next; None when that can hardly change the pick.

    A mesh that was not searched is expected to cost its bound. Once the search has plans on
    ``SAMPLE`` meshes, such a mesh is expected to cost its bound times the smallest ratio of cost to
    bound of any plan, and at most as much as its first choice, if that fits.
    """
    known = [one[1] for one in tried if one[1].feasible and one[1].lower_bound_s > 0]
    over = min((s.cost_s / s.lower_bound_s for s in known), default=1.0)
    if sum(one[0].mesh in settled and one[1].feasible for one in tried) < SAMPLE:
        over = 1.0

    def hoped(one: Tried) -> float:
        if one[0].mesh in settled:
            return one[1].cost_s if one[1].feasible else math.inf
        hope = one[1].lower_bound_s * over
        return min(hope, one[1].cost_s) if one[1].feasible else hope

    open_ = [t for t in tried if t[1].choice]
    best = min((hoped(t) for t in open_), default=math.inf)
    level = [t for t in open_ if hoped(t) <= SAME * best and math.isfinite(hoped(t))]
    pick = preferred([(t, hoped(t)) for t in level]) if level else None
    return None if pick is None or pick[0].mesh in settled else pick


def runners_up(
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
    best: Tried,
    tried: Sequence[Tried],
) -> list[Tried]:
    """The best of the other meshes, at most ``request.candidates - 1``, fastest first. Meshes that
    their bounds pruned are solved here."""
    others = sorted((t for t in tried if t is not best), key=lambda t: t[1].lower_bound_s)
    runners: list[Tried] = []
    for priced, solution in others:
        if len(runners) >= request.candidates - 1:
            break
        trial = (priced, solution)
        if not solution.choice:
            trial = _settle(quotient, pins, request, priced.mesh, whole=False)
        if trial[1].feasible and trial[1].choice:
            runners.append(trial)
    return sorted(runners, key=lambda t: t[1].cost_s)


def unfold(quotient: Quotient, tried: Tried) -> Tried:
    """The pricing and the choice for the whole step."""
    priced, solution = tried
    if priced.analysis is quotient.whole:
        return tried
    choice = quotient.unfold_choice(solution.choice)
    moment = quotient.moment(solution.peak_moment)
    return unfolded(quotient, priced), dataclasses.replace(
        solution, choice=choice, peak_moment=moment
    )


def _settle(
    quotient: Quotient,
    pins: Sequence[Pin],
    request: Request,
    mesh: MeshSpec,
    *,
    whole: bool = True,
    deep: dict[MeshSpec, Tried] | None = None,
    known: Tried | None = None,
) -> Tried:
    """Run the requested search on one mesh: on the quotient and, if ``whole``, on the whole step if
    a search other than the fast one leaves a gap, or nothing fits: equal layers may need different
    shardings. ``deep`` collects results of more message passing; ``known``: an earlier result for
    this mesh, used in place of the fast search."""
    name = FAST if request.search == PROPAGATION else request.search
    if name in WHOLE:
        return attempt(quotient, pins, request, mesh, name, whole=True)
    trial = attempt(quotient, pins, request, mesh, FAST) if known is None else known
    enough = SAME - 1 if name == FAST else CLOSED
    if known is None and not request.spreads and trial[1].gap > enough and trial[1].choice:
        deeper = _deeper(quotient, pins, request, mesh)
        trial = _better(trial, deeper)
        if deep is not None:
            deep[mesh] = deeper
    if name in QUICK and trial[1].feasible and trial[1].gap <= CLOSED:
        return _named(trial, request)
    if name != FAST:
        other = attempt(quotient, pins, request, mesh, name)
        trial = min(_with_bound(other, trial), _with_bound(trial, other), key=rank)
    solution = trial[1]
    exact = name != FAST and solution.gap > CLOSED
    if not whole or trial[0].problem.counts is None or (solution.feasible and not exact):
        return trial
    other = attempt(quotient, pins, request, mesh, name, whole=True)
    return min(_with_bound(other, trial), _with_bound(trial, other), key=rank)


def _deeper(quotient: Quotient, pins: Sequence[Pin], request: Request, mesh: MeshSpec) -> Tried:
    """The result of more message passing on one mesh."""
    masks = allowed_masks(quotient, pins, request, mesh)
    one = Field(quotient.part, request.model, [(mesh, masks)], request.limit_bytes, SAME, 0.0)
    return of_scout(deepened(one), request)


def _with_bound(tried: Tried, other: Tried) -> Tried:
    """A solution with the higher of two bounds."""
    lower = max(tried[1].lower_bound_s, other[1].lower_bound_s)
    return tried[0], dataclasses.replace(tried[1], lower_bound_s=min(lower, tried[1].cost_s))
