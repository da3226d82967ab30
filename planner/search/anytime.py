"""What is too wide to eliminate, or held by memory: bounds, neighbourhoods, and an integer program.

1. *Dual.*  Lagrange multipliers price memory (`dual`); under each price min-sum diffusion (`trws`)
   gives a bound, and a decoded choice that conditioned elimination (`buckets`) improves.  Every
   choice is brought under the limit (`walks`).
2. *Fixing.*  Strategies that the bound excludes from anything cheaper than the best choice go.
3. *Neighbourhoods.*  Round after round, some nodes are held and all others are solved exactly at
   the memory's prices, then repaired and polished under the limit; the best choice is kept.
4. *Integer program.*  Beside the rounds, on another processor, HiGHS solves what fixing left once
   that is small (`integer`); its bound and its choice count like any other.

One seed and one thread give the same rounds in the same order; how many of them fit into the time
limit depends on the machine.

Complexity: O(table entries) per sweep; per round at most the capped work of one elimination.
Papers: Lemarechal, Nemirovskii and Nesterov 1995 (bundles); Kolmogorov 2006 (sequential message
passing); Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", CP 1998 (large neighbourhoods); Savchynskyy et al. 2013 (fixing by a relaxation).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.search import buckets, walks
from planner.search.dual import Choice, Dual, ascend
from planner.search.flat import Flat, flatten
from planner.search.integer import solve_integer
from planner.search.problem import Array
from planner.search.progress import Monitor, Progress, current
from planner.search.reduction import Reduction, reduce_problem
from planner.search.trws import Messages

SMALL = 400_000
"""Table entries up to which what fixing left is given to the integer program."""
DUAL_SHARE = 0.35
"""Share of the time that the dual may take."""
FIRST_SHARE = 0.4
"""Share of the time left that the integer program gets at first; cut off, it may start again on
what a better choice leaves of the problem, or with all the time left."""
DUAL_ROUNDS, DUAL_PATIENCE = 100, 10
IDLE = 2000
"""Rounds without gain after which the search stops."""
CLOSED = 1e-9
"""Relative gap at which a choice is proved the best."""
CAPS = (1e3, 1e4, 1e4, 3e4, 1e5)
"""Entries of one join in a round, drawn at random."""


@dataclass(frozen=True, eq=False)
class Found:
    """The best choice of the reduced problem, a lower bound of its cost, and why it stopped."""

    choice: list[int]
    lower_s: float
    feasible: bool
    reason: str


class Incumbent:
    """The best choice so far and the best bound; safe to share between threads.

    Args:
        flat: the problem.
        begun: monotonic time of the start.
        monitor: told of every gain.
    """

    def __init__(self, flat: Flat, begun: float, monitor: Monitor) -> None:
        self.flat, self.begun, self.monitor = flat, begun, monitor
        self.choice = np.zeros(flat.nodes, np.int64)
        self.cost, self.peak, self.lower = math.inf, math.inf, -math.inf
        self._lock = threading.Lock()

    @property
    def proved(self) -> bool:
        """Whether the bound meets the cost."""
        return self.cost - self.lower <= CLOSED * abs(self.cost)

    def offer(self, choice: Array, note: str) -> bool:
        """Keep a choice when it fits and is cheaper, or, while none fits, when its peak is lower."""
        profile = self.flat.memory.profile(choice)
        cost, peak = self.flat.cost(choice), float(profile.max(initial=0.0))
        with self._lock:
            if self.flat.memory.excess(profile) <= 0 and cost < math.inf:
                better = cost < self.cost
                if better:
                    self.cost = cost
            else:
                better = self.cost == math.inf and peak < self.peak
            if better:
                self.choice, self.peak = choice.copy(), peak
        if better:
            self.report(note)
        return better

    def bound(self, lower_s: float, note: str) -> None:
        """Take note of a lower bound."""
        with self._lock:
            better = lower_s > self.lower
            self.lower = max(self.lower, lower_s)
        if better:
            self.report(note)

    def report(self, note: str) -> None:
        """Tell the monitor."""
        now = time.monotonic() - self.begun
        self.monitor.report(Progress(now, self.cost, self.lower, self.cost < math.inf, note))


class Walker:
    """Rounds over one flat problem with random numbers of its own."""

    def __init__(self, flat: Flat, seed: int) -> None:
        self.flat, self.rng = flat, np.random.default_rng(seed)
        self._scope_at, self._scope, self._data_at, self._data = flat.factors()
        self._priced = self._data.copy()

    def solve(self, choice: Array, prices: Array, cap: float, held: Array) -> Array:
        """Solve all nodes exactly that are not held, under prices; some more are held if needed."""
        count = self.flat.unary.size
        np.add(self._data[:count], prices, out=self._priced[:count])
        found, noise = choice.copy(), self.rng.uniform(0.3, 1.0, self.flat.nodes)
        parts = (self._scope_at, self._scope, self._data_at, self._priced)
        buckets.eliminate(self.flat.sizes, *parts, found, held, float(cap), noise, True)
        return found

    def settle(self, choice: Array, until: Callable[[], bool]) -> Array:
        """Bring a choice under the limit, if it can be, and descend there."""
        flat, found = self.flat, choice.copy()
        profile = flat.memory.profile(found)
        graph, memory = flat.graph, flat.memory.arrays
        while flat.memory.excess(profile) > 0:
            before = found.copy()
            walks.repair(graph, memory, flat.memory.node, found, profile, 200)
            if until() or (before == found).all():
                return found
        walks.descend(graph, memory, found, profile, self.rng.permutation(flat.nodes), 20)
        return found

    def held(self, share: float) -> Array:
        """Hold all nodes but a ball around a random one."""
        n = self.flat.nodes
        inside = np.zeros(n, np.bool_)
        wanted = max(2, round(share * n))
        while np.count_nonzero(inside) < wanted:
            start = int(self.rng.integers(n))
            left = wanted - int(np.count_nonzero(inside))
            part = np.zeros(n, np.bool_)
            shuffle = self.rng.integers(0, 1 << 30, n)
            walks.ball(self.flat.graph, start, left, shuffle, part)
            inside |= part
        return ~inside


def anytime(
    reduction: Reduction, deadline: float, begun: float, *, seed: int = 0, threads: int = 2
) -> Found:
    """Search a reduced problem until the deadline, a proof, or many rounds without gain.

    Args:
        reduction: a problem reduced with ``keep_memory=True``.
        deadline: monotonic time to stop at.
        begun: monotonic time of the start, for progress reports.
        seed: of the random numbers.
        threads: processors to use; the second one runs the integer program.

    Returns:
        What was found.
    """
    count = len(reduction.problem.cost_s)
    flat, monitor = flatten(reduction.problem), current()
    best = Incumbent(flat, begun, monitor)

    def over(at: float) -> bool:
        return time.monotonic() >= at or monitor.should_stop()

    if not flat.nodes:
        best.offer(best.choice, "nothing to decide")
        fits = best.cost < math.inf
        return Found(flat.whole(best.choice, count), flat.constant_s, fits, "nothing to decide")
    walker, messages = Walker(flat, seed), Messages(flat)
    dual = _ascend(best, messages, walker, deadline, over)
    program = Program(best, reduction, messages, dual, deadline)
    half = (time.monotonic() + deadline) / 2
    rounds_end = deadline if threads > 1 else half
    beside = program if threads > 1 else None
    reason = _rounds(best, walker, dual.prices, beside, lambda: over(rounds_end))
    if threads == 1 and not best.proved and not over(deadline):
        program.start()
        program.wait(lambda: over(deadline))
        reason = _rounds(best, walker, dual.prices, None, lambda: over(deadline))
    if best.proved:
        reason = "the bound meets the cost"
    found = flat.whole(best.choice, count)
    return Found(found, best.lower, best.cost < math.inf, reason)


def _ascend(
    best: Incumbent,
    messages: Messages,
    walker: Walker,
    deadline: float,
    over: Callable[[float], bool],
) -> Dual:
    """Price memory for a share of the time; ``messages`` are left at the best prices."""
    flat, memory = best.flat, best.flat.memory
    until = time.monotonic() + DUAL_SHARE * max(0.0, deadline - time.monotonic())
    nobody = np.zeros(flat.nodes, np.bool_)
    last: list[Array] = []

    def priced(choice: Array, prices: Array) -> float:
        return flat.cost(choice) + float(prices[flat.at[:-1] + choice].sum())

    def oracle(prices: Array, sweeps: int = 4) -> tuple[float, Array]:
        messages.price(prices)
        messages.sweep(sweeps)
        value = messages.bound()
        choice = min([messages.decode(), *last], key=lambda start: priced(start, prices))
        for _ in range(2):
            found = walker.solve(choice, prices, 1e4, nobody)
            if priced(found, prices) <= priced(choice, prices):
                choice = found
        last[:] = [choice]
        return value, choice

    def on_choice(choice: Choice, _: Array) -> float:
        given = np.asarray(choice, np.int64)
        best.offer(given, "dual")
        best.offer(walker.settle(given, lambda: over(until)), "dual")
        return best.cost

    start = oracle(np.zeros(flat.unary.size), 20)
    best.bound(start[0], "dual")
    dual = ascend(
        oracle,
        lambda choice: flat.cost(np.asarray(choice, np.int64)),
        on_choice,
        memory,
        memory.limit,
        start,
        until,
        DUAL_ROUNDS if memory.base.size else 0,
        DUAL_PATIENCE,
        lambda value: best.bound(value, "dual"),
    )
    messages.price(dual.prices)
    while not over(until):
        before = messages.bound() + dual.shift
        messages.sweep(20)
        after = messages.bound() + dual.shift
        best.bound(after, "diffusion")
        if after - before <= 1e-3 * (best.cost - after):
            break
    messages.bound()
    return dual


class Program:
    """The integer program over what the bound leaves, in a thread of its own.

    Args:
        best: the incumbent.
        reduction: the reduced problem.
        messages: left at the dual's prices, their ``extra`` up to date.
        dual: the dual.
        deadline: monotonic time to stop at.
    """

    def __init__(
        self,
        best: Incumbent,
        reduction: Reduction,
        messages: Messages,
        dual: Dual,
        deadline: float,
    ) -> None:
        self.best, self.reduction, self.deadline = best, reduction, deadline
        self.extra, self.lower = messages.extra, messages.bound() + dual.shift
        memory = best.flat.memory
        self.times = memory.moments[np.array(dual.moments, np.int64)]
        self.cost, self.finished = math.inf, False
        self._thread: threading.Thread | None = None
        self._next = 0.0

    @property
    def running(self) -> bool:
        """Whether HiGHS is at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start HiGHS when it is idle, something changed, and what is left is small enough."""
        now = time.monotonic()
        if self.running or now < self._next or not math.isfinite(self.best.cost):
            return
        again = not self.best.cost < self.cost
        if again and self.finished:
            return
        self._next = now + 1.0
        cost = self.best.cost
        inner = self._left(cost)
        if inner.dead is not None:
            self.best.bound(cost, "fixing")
            return
        small = flatten(inner.problem)
        if small.table.size > SMALL:
            return
        self.cost = cost
        until = self.deadline if again else now + FIRST_SHARE * (self.deadline - now)
        arguments = (inner, small, cost, until)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def wait(self, over: Callable[[], bool]) -> None:
        """Wait until HiGHS is done or time is up."""
        while self.running and not over():
            time.sleep(0.02)

    def _left(self, cost: float) -> Reduction:
        """The problem without the strategies that the bound excludes below ``cost``."""
        flat, problem = self.best.flat, self.reduction.problem
        room = cost - self.lower
        kept = self.extra <= room + 1e-9 * abs(cost)
        domains = [np.arange(own.size) for own in problem.cost_s]
        for node, low, high in zip(flat.free, flat.at[:-1], flat.at[1:], strict=True):
            domains[node] = np.flatnonzero(kept[low:high])
        return reduce_problem(problem, keep_memory=True, domains=domains)

    def _run(self, inner: Reduction, small: Flat, cost: float, until: float) -> None:
        """Solve, and tell the incumbent."""
        moments = np.searchsorted(small.memory.moments, self.times, side="right") - 1
        answer = solve_integer(small, until, [int(m) for m in np.unique(moments) if m >= 0])
        lower, self.finished = min(answer.lower_s, cost), answer.finished
        if answer.choice is not None:
            whole = inner.decode(small.whole(answer.choice, len(inner.problem.cost_s)))
            choice = np.array(whole, np.int64)[self.best.flat.free]
            self.best.offer(choice, "integer program")
            value = self.best.flat.cost(choice)
            if answer.finished and value - lower <= 1e-7 * abs(value):
                lower = min(value, cost)
        self.best.bound(lower, "integer program")


def _rounds(
    best: Incumbent,
    walker: Walker,
    prices: Array,
    program: Program | None,
    over: Callable[[], bool],
) -> str:
    """Hold some nodes, solve the others, settle; again and again."""
    flat, rng = best.flat, walker.rng
    nobody = np.zeros(flat.nodes, np.bool_)
    idle, choice = 0, best.choice
    while not best.proved:
        if over():
            return "out of time"
        if program is not None:
            program.start()
        if idle >= IDLE:
            if program is None or not program.running:
                return f"{IDLE} rounds without gain"
            program.wait(over)
            continue
        if idle % 20 == 0:
            choice = best.choice
        share = float(rng.choice((0.01, 0.03, 0.1, 0.3, 1.0)))
        held = nobody if share == 1.0 else walker.held(share)
        now = prices * float(rng.choice((0.7, 0.9, 1.0, 1.0, 1.1, 1.4)))
        now *= np.exp(rng.normal(0.0, 0.05, flat.nodes))[flat.owner]
        found = walker.solve(choice, now, float(rng.choice(CAPS)), held)
        idle += 1
        if (found == choice).all():
            continue
        found = walker.settle(found, over)
        if best.offer(found, f"round of {share:.0%}"):
            idle = 0
            choice = best.choice
        elif flat.cost(found) <= best.cost * (1 + 1e-4) and flat.fits(found):
            choice = found
    return "the bound meets the cost"
