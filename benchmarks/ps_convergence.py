"""How many steps stale training needs for the loss of synchronous training, and how much time.

Word vectors (``examples/word2vec_ps.py``) and digits (``examples/mnist_like_async.py``) on
parameter servers, with 4 workers that are alike, and with one that is 3 times slower. Values,
gradients, clocks and optimizers are real: every read and push is one of ``ParameterServer``. Time
alone is counted instead of measured, so that figures do not depend on the machine: a gradient takes
a worker 1 step of the fastest (times 0.8 to 1.2, drawn; times 3 for the slow one), messages take
none, and reads and pushes come in the order of that clock.

Synchronous training makes one update of all workers' gradients where the others make one of each,
so each mode has the best of four learning rates, 1, 2, 4 and 8 times that of the example: for
synchronous training the one of the least loss within its steps, which is the loss to reach, for the
others the one that reaches it first with workers that are alike.

    python benchmarks/ps_convergence.py            # prints a table, writes docs/images/ps-*.svg
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from executor.parameter_server import ParameterServer, Rule, WaitError
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.tables import joined

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import mnist_like_async as digits
import word2vec_ps as words

WORKERS, SERVERS, SLOW, BOUND = 4, 2, 3.0, 1.5
RATES = (1, 2, 4, 8)
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
RULES = {
    "sync": Rule("sync"),
    "ssp, 4": Rule("ssp", 4),
    "async": Rule("async"),
}


class Direct:
    """Servers called directly in this thread; see ``parameter_server.transport.links``."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.count = len(shards)

    def host(self) -> str:
        return "127.0.0.1"

    def room(self, sizes: Sequence[Mapping[str, int]]) -> None:
        return None

    def call(
        self, method: str, args: Sequence[tuple[Any, ...] | None], wait_s: float, first: Any = None
    ) -> list[Any]:
        return [
            None if a is None else getattr(s, method)(*a)
            for s, a in zip(self.shards, args, strict=True)
        ]


@dataclass(frozen=True)
class Job:
    """Something to train.

    Attributes:
        optimizer: of the servers, given how many times the example's learning rate.
        init: gives a worker its parameters.
        read: (server, number) reads for a worker's step of this number.
        push: (server, number, what was read) pushes its gradients.
        loss: of the servers' values, on what is held out.
        rounds: synchronous steps.
        every: steps from one evaluation to the next.
    """

    optimizer: Callable[[float], Any]
    init: Callable[[Any], Any]
    read: Callable[[Any, int], Any]
    push: Callable[[Any, int, Any], Any]
    loss: Callable[[Sequence[Shard], Any], float]
    rounds: int
    every: int


@dataclass(frozen=True)
class Point:
    """Time in steps of the fastest worker, steps (pushes / workers), held-out loss."""

    time: float
    steps: float
    loss: float


def trained(
    job: Job,
    rule: Rule,
    *,
    slow: float,
    rounds: int,
    times: float = 1.0,
    goal: float = np.inf,
    seed: int = 0,
) -> list[Point]:
    """Train until there are ``rounds`` pushes of each worker, on average; for a loss that is not
    reached by then, at most ``BOUND`` times as many."""
    shards = [Shard(rule, WORKERS, job.optimizer(times), 0.0) for _ in range(SERVERS)]
    servers = [ParameterServer(Direct(shards), k, WORKERS, rule=rule) for k in range(WORKERS)]
    for server in servers:
        job.init(server)
    draw = np.random.default_rng(seed)
    pace = [1.0] * (WORKERS - 1) + [slow]
    number, reading = [0] * WORKERS, list(range(WORKERS))
    computing: list[tuple[float, int, Any]] = []
    points, now, pushes = [Point(0.0, 0.0, job.loss(shards, servers[0]))], 0.0, 0
    while pushes < rounds * WORKERS * (BOUND if reached(points, goal) is None else 1):
        for rank in list(reading):  # who may read does
            try:
                got = job.read(servers[rank], number[rank])
            except WaitError:
                continue
            reading.remove(rank)
            took = pace[rank] * draw.uniform(0.8, 1.2)
            heapq.heappush(computing, (now + took, rank, got))
        now, rank, got = heapq.heappop(computing)
        job.push(servers[rank], number[rank], got)
        number[rank] += 1
        reading.append(rank)
        pushes += 1
        if pushes % (job.every * WORKERS) == 0:
            points.append(Point(now, pushes / WORKERS, job.loss(shards, servers[0])))
    return points


def reached(points: Sequence[Point], loss: float) -> Point | None:
    """When this loss was reached; between two evaluations, on the line from one to the other."""
    if points[0].loss <= loss:
        return points[0]
    for before, after in itertools.pairwise(points):
        if after.loss <= loss:
            share = (before.loss - loss) / max(before.loss - after.loss, 1e-12)
            time = before.time + share * (after.time - before.time)
            return Point(time, before.steps + share * (after.steps - before.steps), loss)
    return None


def of_words() -> Job:
    """Word vectors, by rows of two tables."""
    data = words.prepare()
    batch = functools.cache(lambda rank, number: words.batch(data, rank, WORKERS, number))

    def loss(shards: Sequence[Shard], server: Any) -> float:
        tables = joined([shard.tables() for shard in shards])
        return words.held_loss(data, functools.partial(words.of_tables, tables))

    return Job(
        lambda times: optax.adagrad(times * words.RATE),
        lambda server: server.init({}, tables=words.fresh(len(data.words))),
        lambda server, number: words.pull(server, *batch(server.rank, number)),
        lambda server, number, got: words.push(server, *batch(server.rank, number), got),
        loss,
        rounds=100,
        every=5,
    )


def of_digits() -> Job:
    """Digits, with dense parameters."""
    data, test = digits.prepare()

    def push(server: Any, number: int, params: Any) -> None:
        batch = digits.batch(data, server.rank, WORKERS, number)
        server.push(jax.device_get(digits.gradient(params, batch)))

    def loss(shards: Sequence[Shard], server: Any) -> float:
        params = server.layout.gather([shard.now()[0].values for shard in shards])
        return float(digits.loss(params, test))

    return Job(
        lambda times: optax.adam(times * digits.RATE),
        lambda server: server.init(digits.fresh()),
        lambda server, number: server.pull(),
        push,
        loss,
        rounds=150,
        every=5,
    )


def tried(run: Callable[..., list[Point]], rule: Rule, goal: float, times: float) -> float:
    """Steps to the loss with this rate; where it is not reached, more than any, by the loss."""
    points = run(rule, slow=1.0, times=times, goal=goal)
    found = reached(points, goal)
    return found.steps if found else 1e6 * (1 + points[-1].loss)


def drawn(curves: dict[str, list[Point]], title: str, goal: float) -> str:
    """Loss over time, as SVG."""
    width, height, left, low = 620, 340, 60, 50
    most = max(p.time for x in curves.values() for p in x)
    losses = [p.loss for x in curves.values() for p in x]
    bottom, top = 0.95 * min(losses), max(losses)

    def x(time: float) -> float:
        return left + (width - left - 20) * time / most

    def y(loss: float) -> float:
        return 40 + (height - 40 - low) * (top - loss) / (top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">{title}</text>',
        f'<text x="{left}" y="{height - 12}">time, in steps of the fastest worker</text>',
        f'<line x1="{left}" x2="{width - 20}" y1="{y(goal):.1f}" y2="{y(goal):.1f}" '
        'stroke="#888" stroke-dasharray="4"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        loss, time = bottom + share * (top - bottom), share * most
        out.append(f'<text x="8" y="{y(loss) + 4:.1f}">{loss:.2f}</text>')
        out.append(f'<text x="{x(time) - 10:.1f}" y="{height - low + 18}">{time:.0f}</text>')
    colours = ("#0072b2", "#e69f00", "#009e73")
    for k, ((name, points), colour) in enumerate(zip(curves.items(), colours, strict=True)):
        path = " ".join(f"{x(p.time):.1f},{y(p.loss):.1f}" for p in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{width - 90}" y="{50 + 18 * k}" fill="{colour}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Print the table, write the figures; ends with 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="synchronous steps; default: of each job")
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    missed = False
    print("| what | workers | mode | rate | loss to reach | steps | / sync | time | / sync |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, job in (("word2vec", of_words()), ("digits", of_digits())):
        rounds = args.rounds or job.rounds
        run = functools.partial(trained, job, rounds=rounds, seed=args.seed)
        goal = min(p.loss for t in RATES for p in run(RULES["sync"], slow=1.0, times=t))
        best = {
            mode: min(RATES, key=functools.partial(tried, run, rule, goal))
            for mode, rule in RULES.items()
        }
        for kind, slow in (("alike", 1.0), (f"one {SLOW:g}x slower", SLOW)):
            curves = {
                mode: run(rule, slow=slow, times=best[mode], goal=goal)
                for mode, rule in RULES.items()
            }
            sync = reached(curves["sync"], goal)
            for mode, points in curves.items():
                row = f"| {name} | {WORKERS}, {kind} | {mode} | x{best[mode]} | {goal:.4f} |"
                found = reached(points, goal)
                if found is None or sync is None:
                    missed = True
                    print(f"{row} not in {points[-1].steps:.0f}: {points[-1].loss:.4f} | | | |")
                    continue
                print(
                    f"{row} {found.steps:.0f} | {found.steps / sync.steps:.2f} | "
                    f"{found.time:.0f} | {found.time / sync.time:.2f} |",
                    flush=True,
                )
            suffix = "uneven" if slow > 1 else "alike"
            args.images.mkdir(parents=True, exist_ok=True)
            (args.images / f"ps-{name}-{suffix}.svg").write_text(
                drawn(curves, f"{name}: held-out loss, {WORKERS} workers, {kind}", goal),
                encoding="utf-8",
            )
    print(f"bound: {BOUND} of the synchronous steps: {'missed' if missed else 'held'}")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
