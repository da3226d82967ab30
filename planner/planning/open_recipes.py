"""Chooses which of the recipes that a ``Wish`` leaves open are tried, and plans the best one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.choose.quick import free_bounds, scout_meshes
from planner.chunks.rewrite import chunks_worth, in_chunks
from planner.errors import MemoryLimitError, RequestError
from planner.graph.trace import Traced
from planner.microbatch.rewrite import batch_size
from planner.plan.plan import Plan
from planner.planning.row import SQUEEZED, Planned, Row
from planner.recipes import (
    CLOSE,
    FULL,
    WORTH,
    Look,
    Outcome,
    Recipe,
    Rewriter,
    Wish,
    search_recipes,
)
from planner.remat.policy import NONE
from planner.remat.rewrite import policies
from planner.report.units import bytes_text
from planner.request.parsed import Request
from planner.spec import MeshSpec

MOST_PARTS = 64
"""Most microbatches that are tried."""
MOST_PLANNED = 2
"""Most recipes whose quick search is followed by a better one."""
MOST_LONGER = 1
"""Most recipes that are planned in full besides the best."""
MOST_OPEN = 2
"""Most further recipes that are planned because their lower bounds allow a faster plan."""
FAR = 1.2
"""A lower bound that is this factor below a plan leaves hope for a longer search."""
NEAR = 1.01
"""A quick search within this factor of a plan, or of the time that would replace it, may have
missed a better plan."""


@dataclass(frozen=True, eq=False)
class Door:
    """The inputs that all recipes of a step share."""

    rewriter: Rewriter
    args: Sequence[Any]
    request: Request
    donate_argnums: int | Sequence[int] | None
    begun: float
    rows: dict[Recipe, Row] = field(default_factory=dict, init=False)

    def row_of(self, recipe: Recipe) -> Row:
        """The step under a recipe, cached."""
        if recipe not in self.rows:
            function, traced = self.rewriter(recipe)
            row = Row(traced, self.args, self.request, self.donate_argnums, function)
            self.rows[recipe] = row
        return self.rows[recipe]

    def look(
        self, recipe: Recipe, known_s: float, bounds_s: Mapping[MeshSpec, float]
    ) -> Outcome[Row | None]:
        """Plan a recipe with a quick search; see ``scout_meshes``."""
        try:
            row = self.row_of(recipe)
            seen = scout_meshes(row.step.quotient, row.step.pins, row.request, known_s, bounds_s)
        except RequestError as error:  # such as a microbatch that traces to another program
            return Outcome(math.inf, False, None, refused=str(error))
        return Outcome(seen.cost_s, seen.fits, row, seen.bound_s, seen.floor, seen.fill)


def searched(wish: Wish, door: Door) -> Planned:
    """The plan under the best recipe of those that a wish leaves open, except for stages and
    replicas."""
    rewriter, request, begun = door.rewriter, door.request, door.begun
    first = door.row_of(wish.recipe)
    if not wish.open - {"replicas"} or (not wish.always and first.suffices):
        return first.planned(begun)
    if first.floor.start_bytes > request.limit_bytes:
        return first.planned(begun)  # no recipe can help

    cuts = _Cuts(rewriter, wish.recipe.statistics)

    @functools.cache
    def bounds_s(recipe: Recipe) -> dict[MeshSpec, float]:
        try:
            cuts.check(recipe.microbatches)
            row = first if recipe == wish.recipe else door.row_of(recipe)
        except RequestError:
            return {}
        return free_bounds(row.step.quotient, row.step.pins, row.request)

    def look(recipe: Recipe, known_s: float) -> Outcome[Row | None]:
        plain = dataclasses.replace(wish.recipe, chunks=recipe.chunks)
        try:
            cuts.check(recipe.microbatches)
        except RequestError:
            return Outcome(math.inf, False, None)
        return door.look(recipe, known_s, bounds_s(plain))

    def least_of(recipe: Recipe) -> float:
        return min(bounds_s(recipe).values(), default=0.0)

    counts, why = _counts(wish, rewriter)
    cuts.counts = counts
    recipe = wish.recipe
    plain = rewriter.cut(recipe.microbatches, recipe.stages > 1, statistics=recipe.statistics)[1]
    device_policies: dict[int, tuple[str, ...]] = {}

    def enumerated() -> Iterator[tuple[int, tuple[str, ...]]]:
        for some in (False, True):
            n = wish.recipe.chunks
            if "chunks" in wish.open:
                n = chunks_worth(plain) if some else 1
            if n not in device_policies:
                device_policies[n] = _policies(wish, plain, n)
                yield n, device_policies[n]

    stores = first.step.quotient.part.stacks
    best, seen = search_recipes(counts, enumerated(), look, wish.recipe, least_of, stores=stores)
    if cuts.refused:
        counts, why = (1,), cuts.refused
        seen = {recipe: o for recipe, o in seen.items() if recipe.microbatches == 1}
    total = len(counts) * sum(map(len, device_policies.values()))
    tight = not wish.always and first.fits
    if total == 1:  # only the step as written
        return first.planned(begun)
    least_s = least_of(wish.recipe)
    on_host = "remat" in wish.open and request.cluster.host_memory_bytes > 0
    on_host = on_host and not wish.recipe.schedule
    away: dict[int, tuple[str, ...]] = {}
    if on_host and (not tight if best is None else seen[best].cost_s > SQUEEZED * least_s):
        host_policies = ((n, _policies(wish, plain, n, on_host=True)) for n in device_policies)
        away = {n: remats for n, remats in host_policies if remats}
        best, seen = search_recipes(
            counts, away.items(), look, wish.recipe, known=(best, seen), stores=stores
        )
        total += len(counts) * sum(map(len, away.values()))
    tried = _tried_text(len(seen), total, counts, device_policies, away)
    if best is not None and 0.0 < seen[best].cost_s <= CLOSE * least_s:
        percent = 100 * (seen[best].cost_s / least_s - 1)
        faster = f"more than {percent:.2g} % faster" if percent > 0 else "faster"
        tried += f"; not more, as none is expected to be {faster}, even with unlimited memory"
    if why:
        tried += f"; no microbatches: {why}"
    if wish.always and _plain_is_as_good(recipe, best, seen, look):
        planned, rest = first.planned(begun), "; none is faster than the step as written"
    else:
        planned, rest = _best_of(seen, first, tight, begun, tried)
    tried += rest
    note = tried if wish.always else f"{_cause(first, tight)}; {tried}"
    plan = dataclasses.replace(planned.plan, notes=(*planned.plan.notes, note))
    hopeful = _hopeful(seen, plan) if best is not None else ()
    return dataclasses.replace(planned, plan=plan, compared=(note,), hopeful=hopeful)


def _plain_is_as_good(
    plain: Recipe,
    best: Recipe | None,
    seen: Mapping[Recipe, Outcome[Row | None]],
    look: Look[Row | None],
) -> bool:
    """Whether the step as written, if it has not been tried yet, is within ``WORTH`` of the best
    recipe."""
    if best is None or plain in seen:
        return False
    worth_s = seen[best].cost_s * WORTH
    outcome = look(plain, worth_s)
    return outcome.cost_s <= worth_s and not outcome.fill > FULL >= seen[best].fill


def _best_of(
    seen: Mapping[Recipe, Outcome[Row | None]], first: Row, tight: bool, begun: float, tried: str
) -> tuple[Planned, str]:
    """The best plan of the recipes that were tried, or of the step as written, and a text on it.

    Raises:
        MemoryLimitError: no plan fits.
    """
    some = any(o.found is not None and o.cost_s < math.inf for o in seen.values())
    if tight:
        with contextlib.suppress(MemoryLimitError):
            planned = best_planned(seen, begun, tried) if some else None
            if planned is not None and planned.plan.search.cost_s * WORTH < first.near_s:
                return planned, ""
        return first.planned(begun), "; none is faster"
    if some:
        return best_planned(seen, begun, tried), ""
    nearest = _nearest(seen) or first
    more = f"; the least of them needs {bytes_text(nearest.floor.peak_bytes)} or more"
    return nearest.planned(begun, tried + more), more


def _cause(first: Row, tight: bool) -> str:
    """Why recipes were compared without a request."""
    if not tight:
        return "the step does not fit as written"
    stacks = first.step.quotient.part.stacks
    why = "of memory, or for what its loops store," if stacks else "of memory"
    return f"for lack {why} the step as written takes up to {first.squeeze:.2g} times as long"


def _tried_text(
    seen: int,
    total: int,
    counts: Sequence[int],
    device_policies: Mapping[int, tuple[str, ...]],
    away: Mapping[int, tuple[str, ...]],
) -> str:
    """Text on what was tried; ``device_policies``, ``away``: policies by number of chunks."""
    names = dict.fromkeys(
        p for some in (device_policies, away) for remats in some.values() for p in remats
    )
    return (
        f"{seen} of {total} recipes planned: {' or '.join(map(str, counts))} microbatches, "
        f"remat {', '.join(names)}"
        + (f", {' or '.join(map(str, device_policies))} chunks" if len(device_policies) > 1 else "")
    )


def _hopeful(seen: Mapping[Recipe, Outcome[Row | None]], plan: Plan) -> tuple[Recipe, ...]:
    """Recipes that may be faster than a plan after a longer search, the most promising first; then
    the others that fit, the fastest first."""
    known_s = plan.search.cost_s / WORTH
    others = {r: o for r, o in seen.items() if r != plan.recipe}
    some = sorted(
        (r for r, o in others.items() if o.bound_s < known_s), key=lambda r: seen[r].bound_s
    )
    rest = sorted(
        (r for r, o in others.items() if o.cost_s < math.inf), key=lambda r: seen[r].cost_s
    )
    return tuple(dict.fromkeys((*some, *rest)))


@dataclass(eq=False)
class _Cuts:
    """Whether a step can be cut into microbatches; determined on first use.

    Attributes:
        counts: numbers of microbatches that are tried.
        refused: why it can't be cut; empty if it can, or if that was not checked.
        statistics: see ``Recipe``.
    """

    rewriter: Rewriter
    statistics: str
    counts: Sequence[int] = ()
    refused: str = ""

    def check(self, count: int) -> None:
        """Raise RequestError if a step can't be cut into ``count`` microbatches, or was refused for
        the fewest of ``counts`` before."""
        if count == 1:
            return
        if self.refused:
            raise RequestError(self.refused)
        try:
            self.rewriter.cut(count, statistics=self.statistics)
        except RequestError as error:
            fewest = min((n for n in self.counts if n > 1), default=count)
            try:
                if fewest != count:
                    self.rewriter.cut(fewest, statistics=self.statistics)
                else:
                    self.refused = str(error)
            except RequestError as other:
                self.refused = str(other)
            raise


def _nearest(seen: Mapping[Recipe, Outcome[Row | None]]) -> Row | None:
    """The step under the recipe whose plans need the least memory; None without any."""
    rows = [outcome.found for outcome in seen.values() if outcome.found is not None]
    return min(rows, key=lambda r: r.floor.peak_bytes, default=None)


def best_planned(seen: Mapping[Recipe, Outcome[Row | None]], begun: float, tried: str) -> Planned:
    """The fastest plan of the recipes that fit according to a quick search. The most promising
    recipe is searched first; then others if the quick search found something faster for them (up to
    ``NEAR``), or if their lower bounds allow a much faster plan: if memory is tight, quick searches
    may be far off. The longest search runs for the best recipe, and for one more if memory is
    tight. Among recipes that differ by at most ``CLOSE``, those that fill the memory come last:
    predictions are not that exact."""
    rows = [(o.found, o) for o in seen.values() if o.found is not None and o.cost_s < math.inf]
    least_s = min((look.cost_s for _, look in rows), default=math.inf)
    rows.sort(
        key=lambda row: (
            row[1].cost_s > CLOSE * least_s,
            row[1].cost_s <= CLOSE * least_s and row[1].fill > FULL,
            row[1].cost_s,
        )
    )
    near: list[Row] = []
    for row, look in rows[:MOST_PLANNED]:
        known_s = near[0].near_s if near else math.inf
        worth = CLOSE if look.fill > FULL else WORTH
        if look.cost_s * worth > NEAR * WORTH * known_s or look.bound_s * worth > known_s:
            continue
        near.insert(0 if row.near_s * worth < known_s else len(near), row)
    open_rows = [one for one in rows[MOST_PLANNED:] if one[0] not in near]
    for row, look in sorted(open_rows, key=lambda one: one[1].bound_s)[:MOST_OPEN]:
        known_s = near[0].near_s if near else math.inf
        if look.bound_s * SQUEEZED < known_s and row.near_s * CLOSE < known_s:
            near.insert(0, row)
    for row in near:
        with contextlib.suppress(MemoryLimitError):
            failed = [one for one in near if one.near_s == math.inf]
            others = [one for one in rows if one[0] is not row and one[0] not in failed]
            return _or_longer(row.planned(begun, tried), others, begun)
    return rows[0][0].planned(begun, tried)


def _or_longer(
    planned: Planned, others: Sequence[tuple[Row, Outcome[Row | None]]], begun: float
) -> Planned:
    """The plan, or a faster one under another recipe that a quick search found slower by less than
    ``SQUEEZED``, and whose lower bound is far below: if memory is tight, only the longest search
    may find how to use it."""
    known_s = planned.plan.search.cost_s
    some = (
        (look.bound_s, other)
        for other, look in others
        if look.cost_s < SQUEEZED * known_s and look.bound_s * FAR < known_s
    )
    for _, other in sorted(some, key=lambda one: one[0])[:MOST_LONGER]:
        with contextlib.suppress(MemoryLimitError):
            longer = other.planned(begun)
            if longer.plan.search.cost_s * WORTH < known_s:
                planned, known_s = longer, longer.plan.search.cost_s
    return planned


def _policies(wish: Wish, traced: Traced, chunks: int, *, on_host: bool = False) -> tuple[str, ...]:
    """Rematerialization policies to try with a number of chunks; ``on_host``: those that store
    values in host memory."""
    if "remat" not in wish.open:
        return (wish.recipe.remat,)
    inside = in_chunks if chunks > 1 else None
    remats = policies(traced, inside, on_host=on_host)
    return remats if on_host else (NONE, *remats)


def _counts(wish: Wish, rewriter: Rewriter) -> tuple[tuple[int, ...], str]:
    """Numbers of microbatches to try, and why the batch can't be cut; empty if it can."""
    given = wish.recipe.microbatches
    if "microbatches" not in wish.open:
        return (given,), ""
    try:
        size = batch_size(rewriter.cut(1)[1])
    except RequestError as error:
        return (1,), str(error)
    counts = [m for m in range(1, min(size, MOST_PARTS) + 1) if size % m == 0]
    twos = [m for m in counts if m & (m - 1) == 0]
    return tuple(twos if len(twos) > 1 else counts), ""
