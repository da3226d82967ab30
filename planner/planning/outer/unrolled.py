"""Compares recipes of a large unrolled step on a version with its equal blocks in loops.

Each recipe is another program, and a program of tens of thousands of operations takes seconds to
trace and to analyze. With loops it takes a tenth of that, and recipes compare in the same way. The
best recipe is then planned for the step as written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable

from planner.chunks.rewrite import chunks_worth
from planner.errors import MeshwrightError, RequestError
from planner.planning.open_recipes import Door
from planner.planning.row import Planned
from planner.recipes import CLOSE, Recipe, Rewriter, Wish
from planner.request.parsed import Request
from planner.request.state import StateRequest
from planner.rolled import Rolled, rolled
from planner.space.decisions import parsed
from planner.spec import PER_MICROBATCH, WHOLE

TRIES = ((1.0, True), (1.0, False), (0.9, False), (0.8, False))
"""Share of the memory that the step with loops is planned for, and whether chunks are allowed; each
is tried until the step as written fits. XLA:GPU fills the stacks of all chunked layers at once, but
those of layers in a loop one by one."""

MOST_HOPEFUL = 2
"""Most recipes that are planned besides the best."""
MOST_OTHERS = 5
"""Most recipes that are planned until one fits."""

Search = Callable[[Wish, Door], Planned]


def over_loops(wish: Wish, door: Door, search: Search) -> Planned | None:
    """The plan under the recipe that is best for the step with loops.

    None if every recipe must be tried on the step as written: the step has no equal blocks or few
    operations, the request names its arguments, or no plan fits.
    """
    request = door.request
    plain = Recipe(statistics=wish.recipe.statistics)
    closed = dataclasses.replace(
        wish.recipe, microbatches=1, remat=plain.remat, chunks=1, replicas=1
    )
    if not wish.open - {"replicas"} or closed != plain or plain.statistics != WHOLE:
        return None
    if request.spreads or request.shardings or request.state != StateRequest():
        return None
    if dict(request.decided) != parsed({}):
        return None
    first = door.row_of(wish.recipe)
    if first.step.pins or (not wish.always and first.suffices):
        return None
    if first.floor.start_bytes > request.limit_bytes:
        return None
    step = _with_loops(door)
    if step is None:
        return None
    rewriter = Rewriter(step.function, step.args)
    looked = wish
    if "microbatches" in wish.open and not _cuts(rewriter) and _cuts(door.rewriter):
        if not _cuts(rewriter, PER_MICROBATCH):
            return None
        own_recipe = dataclasses.replace(wish.recipe, statistics=PER_MICROBATCH)
        looked = dataclasses.replace(wish, recipe=own_recipe, open=wish.open - {"replicas"})
    for share, chunks in TRIES:
        inner_request = _with_room(request, share)
        inner = Door(rewriter, step.args, inner_request, door.donate_argnums, door.begun)
        inner_wish = (
            looked if chunks else dataclasses.replace(looked, open=looked.open - {"chunks"})
        )
        try:
            inner_planned = search(inner_wish, inner)
        except MeshwrightError:
            continue
        recipe = _best(inner_planned, door, wish)
        if recipe is None:
            continue
        # the number of replicas is valid only for the recipe that it was chosen for
        known = recipe == inner_planned.plan.recipe and "replicas" in looked.open
        left = frozenset() if known else wish.open & {"replicas"}
        planned = search(dataclasses.replace(wish, recipe=recipe, open=left), door)
        note = f"recipes compared on the step with its {step.repeats} in loops"
        compared = (*inner_planned.compared, *planned.compared, note)
        notes = (*planned.plan.notes, *inner_planned.compared, note)
        plan = dataclasses.replace(planned.plan, notes=notes)
        return dataclasses.replace(planned, plan=plan, compared=compared)
    return None


def _with_loops(door: Door) -> Rolled | None:
    """The step with loops; None on any error. It only saves time, so errors must not prevent a
    plan."""
    try:
        return rolled(door.rewriter.function, door.rewriter.cut(1)[1], door.args)
    except Exception as error:
        warnings.warn(
            f"equal blocks could not be put into loops ({type(error).__name__}: {error}); recipes "
            "are tried one by one, which takes longer",
            stacklevel=2,
        )
        return None


def _cuts(rewriter: Rewriter, statistics: str = WHOLE) -> bool:
    """Whether a step can be cut into two microbatches. Random numbers inside loops may then differ
    from those of the whole batch, which does not matter if only prices are compared."""
    try:
        rewriter.cut(2, statistics=statistics)
    except MeshwrightError:
        return False
    return True


def _best(inner_planned: Planned, door: Door, wish: Wish) -> Recipe | None:
    """The best recipe for the step as written, among the best one for the step with loops and those
    that may be faster; None if none fits.

    If the step as written takes clearly longer than with loops, the loops misjudged it: XLA stores
    what loops leave behind in stacks. Chunks, which free the most memory, are then tried as well.
    """
    seconds: dict[Recipe, float] = {}
    for k, candidate in enumerate(
        (inner_planned.plan.recipe, *inner_planned.hopeful[:MOST_OTHERS])
    ):
        if k > MOST_HOPEFUL and seconds:
            break
        recipe = dataclasses.replace(candidate, statistics=WHOLE)
        with contextlib.suppress(RequestError):
            row = door.row_of(recipe)
            if row.fits:
                seconds[recipe] = row.near_s
    least_s = min(seconds.values(), default=math.inf)
    if CLOSE * inner_planned.plan.search.cost_s < least_s < math.inf and "chunks" in wish.open:
        best = min(seconds, key=lambda r: seconds[r])
        parts = chunks_worth(door.rewriter.cut(1)[1])
        for remat in dict.fromkeys((wish.recipe.remat, best.remat)):
            recipe = dataclasses.replace(wish.recipe, remat=remat, chunks=parts)
            with contextlib.suppress(RequestError):
                row = door.row_of(recipe)
                if parts > 1 and row.fits:
                    seconds[recipe] = row.near_s
    return min(seconds, key=lambda r: seconds[r], default=None)


def _with_room(request: Request, share: float) -> Request:
    """The same request with a share of the memory, for an internal plan."""
    return dataclasses.replace(
        request,
        limit_bytes=share * request.limit_bytes,
        advice=False,
        confirm="",
        candidates=1,
        dump_problem=None,
    )
