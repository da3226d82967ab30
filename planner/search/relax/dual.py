"""Lagrange multipliers on the memory limit: a level-bundle ascent.

With a price lambda_t >= 0 on every moment, the dual function

    q(lambda) = min_x  cost(x) + sum_t lambda_t (memory_t(x) - limit)

is concave and never above the optimum under the limit.  Each elimination gives its value and a
choice x, hence a cut q(lambda) <= cost(x) + lambda . g(x) with g(x) = memory(x) - limit.  The next
multipliers are the nearest ones (in the 1-norm) at which the cuts still allow a level half-way
between the best value and the maximum that the cuts allow.  Only moments that were a peak of some
choice have a multiplier.

The least possible peak is bounded in the same way: for lambda on the simplex,
max_lambda min_x sum_t lambda_t memory_t(x) is never above it.

Complexity: per round, one elimination and two linear programs of (moments + rounds) size.
Papers: Lemarechal, Nemirovskii and Nesterov, "New variants of bundle methods", Mathematical
Programming 69, 1995; Fisher, "The Lagrangian relaxation method", Management Science 27, 1981.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planner.search.local.memory import local_peaks
from planner.search.problem import Array
from planner.search.progress import time_is_up

Choice = Sequence[int] | Array
"""One strategy per node."""

Oracle = Callable[[Array], tuple[float, Choice]]
"""Minimizes the costs plus a flat price per strategy: (value or lower bound, choice)."""


class Memory(Protocol):
    """Usages over K moments: `memory.MemoryTimeline` or `flat.FlatMoments`."""

    @property
    def moments(self) -> Array:
        """[K] the moments."""
        ...

    @property
    def base(self) -> Array:
        """[K] bytes that no choice changes."""
        ...

    @property
    def offsets(self) -> Array:
        """[nodes + 1] where each node's strategies begin in a flat array."""
        ...

    def profile(self, choice: Choice, /) -> Array:
        """[K] bytes under a choice, the base included."""
        ...

    def prices(self, multipliers: Array, /) -> Array:
        """Flat price of every strategy under one multiplier per moment."""
        ...


@dataclass(frozen=True, eq=False)
class Dual:
    """The best dual value and the prices that give it.

    Attributes:
        value: the bound.
        prices: flat price of every strategy at that bound.
        shift: multipliers * (base - limit), the part of ``value`` that no choice changes.
        moments: the moments that had a multiplier at any time.
        reason: why the ascent stopped.
    """

    value: float
    prices: Array
    shift: float
    moments: tuple[int, ...]
    reason: str


@dataclass
class _Bundle:
    """Cuts: the cost and scaled excess profile of every choice seen."""

    costs: list[float]
    excess: list[Array]
    active: list[int]

    def rows(self) -> Array:
        """[cuts, active] the slopes of the cuts."""
        return np.array([[profile[t] for t in self.active] for profile in self.excess])

    def add(self, cost: float, excess: Array) -> None:
        """Add a cut, and its highest local peaks to the active moments."""
        self.costs.append(cost)
        self.excess.append(excess)
        peaks = local_peaks(excess, 1e-12, 4, max(1, excess.size // 16))
        self.active += [peak for peak in peaks if peak not in self.active]


def ascend(
    oracle: Oracle,
    cost_of: Callable[[Choice], float],
    on_choice: Callable[[Choice, Array], float],
    timeline: Memory,
    limit: float,
    start: tuple[float, Choice],
    deadline: float,
    rounds: int = 40,
    patience: int | None = None,
    on_value: Callable[[float], None] = lambda _: None,
) -> Dual:
    """Maximize the dual of the memory limit.

    Args:
        oracle: minimizes costs plus prices.
        cost_of: plain cost of a choice.
        on_choice: called with every choice and its prices; returns the best feasible cost known.
        timeline: the usages; its prices are per byte.
        limit: the memory limit.
        start: the oracle's answer at zero prices.
        deadline: monotonic time to stop at; no round starts that would pass it if it took as long
            as the last one.
        rounds: maximum number of calls of the oracle.
        patience: stop if this many rounds close less than a hundredth of the gap.
        on_value: called with every better value.

    Returns:
        The best dual value, a lower bound of the optimum under the limit.
    """
    scale = max(limit, float(timeline.profile(start[1]).max())) or 1.0
    prices = np.zeros(int(timeline.offsets[-1]))
    upper = on_choice(start[1], prices)
    best, best_prices, best_shift = start[0], prices, 0.0
    reason = "the rounds of the dual ascent are used up"
    bundle = _Bundle([], [], [])
    excess = (timeline.profile(start[1]) - limit) / scale
    bundle.add(_finite(cost_of(start[1]), start[0]), excess)
    centre: dict[int, float] = {}
    values, took = list[float](), 0.0
    for _ in range(rounds):
        values.append(best)
        past = values[-patience - 1] if patience and len(values) > patience else -math.inf
        if math.isfinite(upper) and best - past <= 0.01 * (upper - best):
            reason = "the dual hardly rises any more"
            break
        begun = time.monotonic()
        if time_is_up(deadline - took):
            reason = "out of time in the dual ascent"
            break
        point = _next_point(bundle, centre, best, upper)
        if point is None:
            reason = "the dual is at its maximum"
            break
        multipliers = np.zeros(timeline.moments.size)
        multipliers[list(point)] = list(point.values())
        prices = timeline.prices(multipliers / scale)
        priced, choice = oracle(prices)
        shift = float(multipliers @ (timeline.base - limit)) / scale
        value = priced + shift
        if value > best:
            best, best_prices, best_shift, centre = value, prices, shift, point
            on_value(best)
        upper, took = min(upper, on_choice(choice, prices)), time.monotonic() - begun
        excess = (timeline.profile(choice) - limit) / scale
        bundle.add(_finite(cost_of(choice), value - float(multipliers @ excess)), excess)
    return Dual(best, best_prices, best_shift, tuple(bundle.active), reason)


def _finite(cost: float, instead: float) -> float:
    """The cost of a choice, or ``instead`` if it is infinite: its cut then meets the bound."""
    return cost if math.isfinite(cost) else instead


def _next_point(
    bundle: _Bundle, centre: dict[int, float], best: float, upper: float
) -> dict[int, float] | None:
    """The multipliers to try next, or None if the cuts allow no more than the best value."""
    from scipy.optimize import linprog  # takes half a second to import

    slopes, costs = bundle.rows(), np.array(bundle.costs)
    if not math.isfinite(upper):
        top = max(float(costs.max()), best)
        upper = top + (abs(top) or 1.0)
    unit = max(upper - best, 1e-12 * abs(upper), 1e-300)
    heights = (costs - best) / unit
    count = len(bundle.active)
    ceiling = linprog(
        np.append(np.zeros(count), -1.0),
        A_ub=np.hstack([-slopes, np.ones((costs.size, 1))]),
        b_ub=heights,
        bounds=[(0, None)] * count + [(None, 1.0)],
        method="highs",
    )
    if ceiling.x is None or -ceiling.fun <= 1e-7 or unit <= 1e-11 * abs(upper):
        return None
    level = 0.5 * -ceiling.fun
    here = np.array([centre.get(t, 0.0) for t in bundle.active]) / unit
    eye = np.eye(count)
    nearest = linprog(
        np.append(np.zeros(count), np.ones(count)),
        A_ub=np.block(
            [[-slopes, np.zeros(slopes.shape)], [eye, -eye], [-eye, -eye]],
        ),
        b_ub=np.concatenate([heights - level, here, -here]),
        bounds=[(0, None)] * (2 * count),
        method="highs",
    )
    point = nearest.x if nearest.x is not None else ceiling.x
    values = np.maximum(point[:count], 0.0) * unit
    return {t: float(v) for t, v in zip(bundle.active, values, strict=True)}


def least_peak(
    oracle: Oracle,
    on_choice: Callable[[Choice], None],
    timeline: Memory,
    start: Choice,
    deadline: float,
    enough: float,
    rounds: int = 40,
) -> float:
    """Search for a choice with a small memory peak.

    Args:
        oracle: minimizes the prices alone (costs are zero except for forbidden entries).
        on_choice: called with every choice of the oracle.
        timeline: the usages.
        start: an initial choice.
        deadline: monotonic time to stop at.
        enough: stop once the bound exceeds this peak or a choice reaches it.
        rounds: maximum number of calls of the oracle.

    Returns:
        A lower bound of the peak of every choice.
    """
    from scipy.optimize import linprog

    bound, active, took = 0.0, list[int](), 0.0
    profiles = [timeline.profile(start)]
    scale = max(float(profiles[0].max()), 1e-300)
    for _ in range(rounds):
        peak = int(np.argmax(profiles[-1]))
        if profiles[-1][peak] <= enough or bound > enough * (1 + 1e-9):
            break
        if peak not in active:
            active.append(peak)
        begun = time.monotonic()
        if time_is_up(deadline - took):
            break
        slopes = np.array([[profile[t] / scale for t in active] for profile in profiles])
        count = len(active)
        solution = linprog(
            np.append(np.zeros(count), -1.0),
            A_ub=np.hstack([-slopes, np.ones((len(profiles), 1))]),
            b_ub=np.zeros(len(profiles)),
            A_eq=[[1.0] * count + [0.0]],
            b_eq=[1.0],
            bounds=[(0, None)] * count + [(None, None)],
            method="highs",
        )
        if solution.x is None:
            break
        multipliers = np.zeros(timeline.moments.size)
        multipliers[active] = np.maximum(solution.x[:count], 0.0)
        multipliers /= multipliers.sum()
        priced, choice = oracle(timeline.prices(multipliers))
        value = priced + float(multipliers @ timeline.base)
        on_choice(choice)
        profiles.append(timeline.profile(choice))
        took = time.monotonic() - begun
        if -solution.fun * scale - value <= 1e-9 * scale and peak in active and value <= bound:
            break
        bound = max(bound, value)
    return bound
