"""Anytime search for problems that are too wide to eliminate or limited by memory.

1. *Dual.*  Lagrange multipliers price memory (`dual`); under each price min-sum diffusion (`trws`)
   gives a bound, and a decoded choice that conditioned elimination (`buckets`) improves.  Every
   choice is brought under the limit (`walks`).
2. *Fixing.*  Strategies that the bound excludes from every cheaper choice are dropped.
3. *Neighborhoods.*  Each round holds some nodes and solves all others exactly at the memory's
   prices, then repairs and polishes the choice under the limit; the best choice is kept.
4. *Integer program.*  In parallel, on another processor, HiGHS solves what fixing leaves once that
   is small (`integer`); its bound and its choice count like any other.

One seed and one thread give the same rounds in the same order; how many of them fit into a time
limit depends on the machine. An effort counts rounds and passes over the tables instead.

Complexity: O(table entries) per sweep; per round at most the capped work of one elimination.
Papers: Lemarechal, Nemirovskii and Nesterov 1995 (bundles); Kolmogorov 2006 (sequential message
passing); Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", CP 1998 (large neighborhoods); Savchynskyy et al. 2013 (fixing by a relaxation).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.search.anytime.incumbent import Incumbent
from planner.search.anytime.leftover import Program
from planner.search.exact.reduction import ReducedProblem
from planner.search.local import walks
from planner.search.problem import Array, Edge, Problem, Usage
from planner.search.progress import current
from planner.search.relax import buckets
from planner.search.relax.dual import Choice, Dual, ascend
from planner.search.relax.flat import FlatProblem, flatten
from planner.search.relax.trws import Messages

DUAL_SHARE = 0.6
"""Share of the time that the dual may take."""
NEAR, FEW = 0.3, 1000
"""In problems with more than ``FEW`` nodes, a choice of the dual is repaired if its excess, as a
share of the limit, is at most ``NEAR``; every fifth choice is repaired in any case."""
DUAL_ROUNDS, DUAL_PATIENCE = 100, 10
FEW_IDLE, MANY_IDLE = 100, 10_000
"""Rounds without gain after which a single thread turns to the integer program: the first time, and
after that."""
PASS_S = 1e-7
"""Effort of a round per table entry, in seconds."""
ROUND_S = 1e-4
"""Fixed effort of a round, in seconds."""
IDLE = 1000
"""The search widens after every ``IDLE`` rounds without gain."""
WIDER = 5
"""Maximum number of times it widens."""
TIGHTER = (1.0, 1.0, 1.0, 0.98, 0.95, 0.9)
"""Shares of the limit that a round's choice is brought under first. It then descends within the
full limit: a choice within a tighter limit is also within a looser one."""
CAPS = (1e3, 1e4, 1e4, 3e4, 1e5)
"""Maximum entries of one join in a round, drawn at random."""


@dataclass(frozen=True, eq=False)
class Found:
    """The best choice of the reduced problem, a lower bound of the cost, and why it stopped."""

    choice: list[int]
    lower_s: float
    feasible: bool
    reason: str


class Walker:
    """Rounds over one flat problem, with a separate random number generator."""

    def __init__(self, flat: FlatProblem, seed: int) -> None:
        self.flat, self.rng = flat, np.random.default_rng(seed)
        self._scope_at, self._scope, self._data_at, self._data = flat.factors()
        self._priced = self._data.copy()

    def solve(self, choice: Array, prices: Array, cap: float, held: Array) -> Array:
        """Solve exactly, under prices, all nodes that are not held; holds more nodes if needed."""
        count = self.flat.unary.size
        np.add(self._data[:count], prices, out=self._priced[:count])
        new_choice, noise = choice.copy(), self.rng.uniform(0.3, 1.0, self.flat.nodes)
        parts = (self._scope_at, self._scope, self._data_at, self._priced)
        buckets.eliminate(self.flat.sizes, *parts, new_choice, held, float(cap), noise)
        return new_choice

    def settle(self, choice: Array, until: Callable[[], bool], share: float = 1.0) -> Array:
        """Bring a choice under a share of the limit if possible; descend within the full limit."""
        flat, new_choice = self.flat, choice.copy()
        profile = flat.memory.profile(new_choice)
        graph, memory = flat.graph, flat.memory.arrays
        aim = share * flat.memory.limit
        tighter = (*memory[:-1], aim)
        while profile.max(initial=0.0) > aim:
            before = new_choice.copy()
            walks.repair_walk(graph, tighter, flat.memory.node, new_choice, profile, 200)
            if until():
                return new_choice
            if (before == new_choice).all():
                break
        if flat.memory.excess(profile) > 0:
            return new_choice
        walks.descend_walk(graph, memory, new_choice, profile, self.rng.permutation(flat.nodes), 20)
        return new_choice

    def held(self, share: float) -> Array:
        """Hold all nodes but a ball around a random one, or several if its component is small."""
        n = self.flat.nodes
        inside = np.zeros(n, np.bool_)
        wanted = min(n, max(2, round(share * n)))
        starts, shuffle = self.rng.permutation(n), self.rng.integers(0, 1 << 30, n)
        walks.balls(self.flat.graph, starts, wanted, shuffle, inside)
        return ~inside


@functools.cache
def load() -> float:
    """Load the compiled kernels, or compile them on first use; returns the seconds it took."""
    begun = time.monotonic()
    cost, table = np.array([0.0, 1.0]), np.array([[0.0, 1.0], [2.0, 0.0]])
    usages = (Usage(0, 0, 2, np.array([2.0, 1.0])), Usage(1, 1, 3, np.array([2.0, 1.0])))
    flat = flatten(Problem(("a", "b"), (cost, cost), (Edge(0, 1, table),), usages, 3.0))
    walker, messages = Walker(flat, 0), Messages(flat)
    messages.sweep(1)
    messages.bound()
    choice = walker.solve(messages.decode(), np.zeros(4), 1e3, walker.held(0.5))
    walker.settle(choice, lambda: False)
    return time.monotonic() - begun


def anytime(
    reduction: ReducedProblem,
    deadline: float,
    begun: float,
    *,
    seed: int = 0,
    threads: int = 2,
    effort_s: float | None = None,
) -> Found:
    """Search a reduced problem until the deadline or a proof.

    Args:
        reduction: a problem reduced with ``keep_memory=True``.
        deadline: monotonic time to stop at.
        begun: monotonic time of the start, for progress reports.
        seed: of the random numbers.
        threads: processors to use; the second one runs the integer program.
        effort_s: counted work to stop after, in seconds of one processor of 2020; the integer
            program is off then, and the answer does not depend on the machine.

    Returns:
        The best choice and the lower bound.
    """
    count = len(reduction.problem.cost_s)
    flat, monitor = flatten(reduction.problem), current()
    best = Incumbent(flat, begun, monitor)

    def over(at: float) -> bool:
        return time.monotonic() >= at or monitor.should_stop()

    if not flat.nodes:
        best.offer(best.choice, "nothing to decide")
        fits = best.cost < math.inf
        lower = flat.constant_s if fits else math.inf
        return Found(flat.whole(best.choice, count), lower, fits, "nothing to decide")
    walker, messages = Walker(flat, seed), Messages(flat)
    passes = _passes(flat, effort_s)
    dual = _ascend(best, messages, walker, deadline, over, min(DUAL_ROUNDS, passes // 3))
    if effort_s is not None:
        reason = _rounds(best, walker, dual.prices, None, lambda: over(deadline), most=passes)
        return _found(best, count, reason)
    program = Program(best, reduction, messages, dual, deadline)
    try:
        if threads == 1:
            half = (time.monotonic() + deadline) / 2
            _rounds(best, walker, dual.prices, None, lambda: over(half), FEW_IDLE)
            program.start()
            program.wait(lambda: over(deadline))
            _rounds(best, walker, dual.prices, None, lambda: over(deadline), MANY_IDLE)
            program.finish(lambda: over(deadline))
        beside = program if threads > 1 else None
        reason = _rounds(best, walker, dual.prices, beside, lambda: over(deadline))
        program.finish(lambda: over(deadline))
    finally:  # an interrupt also ends the integer program
        program.close()
    return _found(best, count, reason)


def _passes(flat: FlatProblem, effort_s: float | None) -> int:
    """The number of passes over the tables that an effort allows."""
    if effort_s is None:
        return 1 << 30
    entries = flat.table.size + flat.unary.size
    return max(6, int(effort_s / (ROUND_S + PASS_S * entries)))


def _found(best: Incumbent, count: int, reason: str) -> Found:
    """The result of a search."""
    flat = best.flat
    if best.proved:
        fits = best.cost < math.inf
        reason = "the bound meets the cost" if fits else "proved that nothing fits"
    whole_choice = flat.whole(best.choice, count)
    return Found(whole_choice, best.lower, best.cost < math.inf, reason)


def _ascend(
    best: Incumbent,
    messages: Messages,
    walker: Walker,
    deadline: float,
    over: Callable[[float], bool],
    rounds: int,
) -> Dual:
    """Price memory for a share of the time; leaves ``messages`` at the best prices."""
    flat, memory = best.flat, best.flat.memory
    until = time.monotonic() + DUAL_SHARE * max(0.0, deadline - time.monotonic())
    nobody = np.zeros(flat.nodes, np.bool_)
    last: list[Array] = []
    calls = [0]

    def priced(choice: Array, prices: Array) -> float:
        return flat.cost(choice) + float(prices[flat.at[:-1] + choice].sum())

    def oracle(prices: Array, sweeps: int = 4) -> tuple[float, Array]:
        messages.price(prices)
        messages.sweep(sweeps, lambda: over(until))
        value = messages.bound()
        choice = min([messages.decode(), *last], key=lambda start: priced(start, prices))
        for _ in range(2):
            candidate = walker.solve(choice, prices, 1e4, nobody)
            if priced(candidate, prices) <= priced(choice, prices):
                choice = candidate
        last[:] = [choice]
        return value, choice

    def on_choice(choice: Choice, _: Array) -> float:
        given = np.asarray(choice, np.int64)
        best.offer(given, "dual")
        calls[0] += 1
        near = memory.excess(memory.profile(given)) <= NEAR * memory.limit
        if near or flat.nodes <= FEW or calls[0] % 5 == 0:
            best.offer(walker.settle(given, lambda: over(until)), "dual")
        return best.cost

    start = oracle(np.zeros(flat.unary.size), 20)
    best.bound(start[0], "dual")
    if memory.base.size:
        _first_fit(best, walker, start[1], lambda: over(until))
    if memory.base.size:
        dual = ascend(
            oracle,
            lambda choice: flat.cost(np.asarray(choice, np.int64)),
            on_choice,
            memory,
            memory.limit,
            start,
            until,
            rounds,
            DUAL_PATIENCE,
            lambda value: best.bound(value, "dual"),
        )
    else:
        dual = Dual(start[0], np.zeros(flat.unary.size), 0.0, (), "memory never binds")
        on_choice(start[1], dual.prices)
    messages.price(dual.prices)
    while not over(until):
        before = messages.bound() + dual.shift
        messages.sweep(20, lambda: over(until))
        after = messages.bound() + dual.shift
        best.bound(after, "diffusion")
        if after - before <= 1e-3 * (best.cost - after):
            break
    messages.bound()
    return dual


def _first_fit(best: Incumbent, walker: Walker, choice: Array, over: Callable[[], bool]) -> None:
    """Find a feasible choice early: one price for all moments rises until a repair succeeds."""
    flat, memory = best.flat, best.flat.memory
    count, cost = memory.base.size, abs(flat.cost(choice))
    if math.isinf(cost):
        cost = max(abs(best.lower), float(np.abs(flat.unary).sum()))
    share = memory.prices(np.full(count, 1.0 / (count * (memory.limit or 1.0))))
    for factor in (1.0, 10.0, 100.0, 1000.0):
        if over() or best.cost < math.inf:
            return
        choice = walker.solve(choice, factor * cost * share, 1e4, np.zeros(flat.nodes, np.bool_))
        best.offer(walker.settle(choice, over), "first fit")


def _rounds(
    best: Incumbent,
    walker: Walker,
    prices: Array,
    program: Program | None,
    over: Callable[[], bool],
    patience: float = math.inf,
    most: float = math.inf,
) -> str:
    """Hold some nodes, solve the others, and settle, until ``patience`` rounds bring no gain or
    ``most`` rounds are done.

    The longer there is no gain, the larger the joins and the wider the range of prices.
    """
    flat, rng = best.flat, walker.rng
    nobody = np.zeros(flat.nodes, np.bool_)
    idle, done, choice = 0, 0, best.choice
    while not best.proved:
        if over():
            return "out of time"
        if done >= most:
            return f"{done} rounds done"
        done += 1
        wide = min(idle // IDLE, WIDER)
        if program is not None:
            program.start()
        if idle >= patience:
            return f"{idle} rounds without gain"
        if idle % 20 == 0:
            choice = best.choice
        share = float(rng.choice((0.01, 0.03, 0.1, 0.3, 1.0)))
        held = nobody if share == 1.0 else walker.held(share)
        now = prices * float(rng.choice((0.7, 0.9, 1.0, 1.0, 1.1, 1.4))) ** (1 + wide)
        now *= np.exp(rng.normal(0.0, 0.05 * (1 + wide), flat.nodes))[flat.owner]
        candidate = walker.solve(choice, now, float(rng.choice(CAPS)) * 2**wide, held)
        idle += 1
        if (candidate == choice).all():
            continue
        candidate = walker.settle(candidate, over, float(rng.choice(TIGHTER)))
        if best.offer(candidate, f"round of {share:.0%}"):
            idle = 0
            choice = best.choice
        elif flat.cost(candidate) <= best.cost * (1 + 1e-4) and flat.fits(candidate):
            choice = candidate
    return "the bound meets the cost"
