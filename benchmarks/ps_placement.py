"""Mixed placement: predicted and measured seconds a step with a table on servers and without.

A next-word model as in ``examples/embedding_hybrid.py``, with tables of several sizes: once with
the table on two servers, by rows (``executor.parameter_server.jobs.hybrid``, one worker), once with
everything under SPMD (``executor.parallelize``), both on 8 virtual CPU devices of one worker
process, in turns. ``planner.placement`` predicts both and chooses one.

    python benchmarks/ps_placement.py                  # prints a table
    python benchmarks/ps_placement.py --backend local  # servers as threads: no Ray needed
    python benchmarks/ps_placement.py --calls          # pulls and pushes alone
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from costmodels.schedule import StageSeconds, step_seconds
from executor import parallelize
from executor.parameter_server import hybrid, train
from planner.frontend.loss import Loss
from planner.graph.lookups.rows import unique_rows
from planner.graph.lookups.tables import find_lookups
from planner.placement.choice import Placed, place_and_plan
from planner.request.parsed import parse_request

DEVICES, SERVERS, WIDTH, HIDDEN, CLASSES = 8, 2, 64, 256, 512
DRAWS, TURNS, BLOCK_S, BLOCK_STEPS = 8, 3, 2.5, 60
optimizer = optax.adagrad(0.1)
Params = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A table of ``rows``, and batches that look up ``batch`` times ``slots`` of them."""

    rows: int
    batch: int
    slots: int

    def params(self) -> Params:
        """Fresh parameters."""
        rng = np.random.default_rng(0)
        shapes = {"embed": (self.rows, WIDTH), "hidden": (WIDTH, HIDDEN), "out": (HIDDEN, CLASSES)}
        return {k: 0.1 * rng.standard_normal(s, np.float32) for k, s in shapes.items()}

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Uniform draws."""
        rng = np.random.default_rng(1)
        return [
            (
                rng.integers(0, self.rows, (self.batch, self.slots)).astype(np.int32),
                rng.integers(0, CLASSES, self.batch).astype(np.int32),
            )
            for _ in range(DRAWS)
        ]


CASES = (Case(4_096, 1024, 8), Case(16_384, 256, 8), Case(65_536, 256, 8), Case(65_536, 4096, 8),
         Case(1_048_576, 256, 8))  # fmt: skip


def loss(params: Params, ids: Any, words: Any) -> jax.Array:
    """Mean cross-entropy; ``ids`` [batch, slots], ``words`` [batch]."""
    h = jnp.take(params["embed"], ids, axis=0).sum(axis=1)
    logits = jax.nn.relu(h @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()


@dataclass(frozen=True)
class Predicted:
    """Seconds a step; what the planner chose; and how it priced the table."""

    served_s: float
    spmd_s: float
    chosen: str
    table: Placed


def predicted(case: Case) -> Predicted:
    """As ``hybrid`` predicts with the first batch."""
    params, batch = case.params(), case.batches()[0]
    request = parse_request(f"cpu:{DEVICES}")
    lookups = find_lookups(loss, params, batch)
    indices = jax.jit(lookups.indices)(*batch)
    tables = zip(lookups.tables, indices, strict=True)
    asked = {t.path: len(unique_rows(t, np.asarray(x))) for t, x in tables}

    def found(placement: Any) -> Any:
        made = (lookups, params, batch, optimizer, placement, request)
        return place_and_plan(*made, asked_for=asked)[0]

    served, spmd = found({"embed": "ps"}), found({"embed": "spmd"})
    (table,) = served.leaves
    chosen = "servers" if found("auto").at("ps") else "SPMD"
    spent = StageSeconds(served.plan.prediction.step_s, wait_s=table.served_s)
    step_s = step_seconds((spent,)).step_s
    return Predicted(step_s, spmd.plan.prediction.step_s, chosen, table)


class Clock:
    """Seconds in the calls of some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on this clock."""

        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begun

        return call


def steps(run: Callable[..., Any], batches: Iterator[tuple[Any, ...]]) -> list[float]:
    """Seconds of each of some steps."""
    taken: list[float] = []
    while sum(taken) < BLOCK_S and len(taken) < BLOCK_STEPS:
        batch = next(batches)
        begun = time.perf_counter()
        jax.block_until_ready(run(*batch))
        taken.append(time.perf_counter() - begun)
    return taken


def measured(case: Case, server: Any) -> tuple[list[float], list[float], list[float]]:
    """Median seconds a step of every turn: served; of that, in calls to the servers; SPMD."""
    clock = Clock()
    server.pull_rows, server.push = clock.timed(server.pull_rows), clock.timed(server.push)
    served = hybrid(loss, case.params(), optimizer, server=server, placement={"embed": "ps"})
    whole = Loss(loss, case.params(), case.batches()[0], optimizer).train_step().function
    spmd = parallelize(whole, donate_argnums=0)
    state: Any = {"params": case.params(), "opt": optimizer.init(case.params())}

    def step(*batch: Any) -> Any:
        nonlocal state
        state, metrics = spmd(state, *batch)
        return metrics["loss"]

    draws = case.batches()
    for batch in draws:  # compiles, for as many rows as any batch asks for
        served(*batch)
    for batch in draws[:2]:
        jax.block_until_ready(step(*batch))
    endless = (draws[k % DRAWS] for k in range(10**9))
    out: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(TURNS):
        clock.seconds = 0.0
        taken = steps(served, endless)
        out[0].append(float(np.median(taken)))
        out[1].append(clock.seconds / len(taken))
        out[2].append(float(np.median(steps(step, endless))))
    return out


OPTIMIZERS = {"SGD": optax.sgd(0.1), "Adagrad": optimizer, "Adam": optax.adam(1e-3)}
SENT = ((1, 64), (1_625, 256), (6_500, 64), (26_000, 64), (26_000, 256))
"""Rows and columns of calls that are measured alone."""


def called(server: Any) -> list[float]:
    """Median seconds of a pull and of a push together, for each of ``SENT``."""
    rng = np.random.default_rng(0)
    widths = sorted({width for _, width in SENT})
    server.init({}, tables={str(w): rng.standard_normal((65_536, w), np.float32) for w in widths})
    out = []
    for rows, width in SENT:
        name = str(width)
        draws = [np.sort(rng.choice(65_536, rows, replace=False)) for _ in range(4)]
        ids = [x.astype(np.int32) for x in draws]
        gradient = rng.standard_normal((rows, width), np.float32)

        def pull(k: int, name: str = name, ids: Any = ids) -> None:
            server.pull_rows({name: ids[k % 4]})

        def push(k: int, name: str = name, ids: Any = ids, gradient: Any = gradient) -> None:
            server.push(None, rows={name: (ids[k % 4], gradient)})

        for k in range(8):  # compiles the update
            pull(k)
            push(k)
        endless = ((k,) for k in range(10**9))
        both = [(steps(pull, endless), steps(push, endless)) for _ in range(2)]
        out.append(sum(float(np.median(np.concatenate(x))) for x in zip(*both, strict=True)))
    return out


def calls_alone(backend: str) -> None:
    """Print what pulls and pushes take, for several optimizers."""
    found = [
        train(called, workers=1, servers=SERVERS, optimizer=x, backend=backend).returned[0]
        for x in OPTIMIZERS.values()
    ]
    print(f"| rows x columns | MB | {' | '.join(OPTIMIZERS)} |", "|---" * 5 + "|", sep="\n")
    for (rows, width), taken in zip(SENT, zip(*found, strict=True), strict=True):
        cells = " | ".join(map(ms, taken))
        print(f"| {rows:,} x {width} | {4e-6 * rows * width:.3g} | {cells} |")


def ms(seconds: float) -> str:
    """Milliseconds, three digits."""
    return f"{1e3 * seconds:.3g}"


def main() -> None:
    """Predict and measure every case, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("local", "ray"), default="ray")
    parser.add_argument("--calls", action="store_true", help="measure pulls and pushes alone")
    options = parser.parse_args()
    backend = options.backend
    if options.calls:
        return calls_alone(backend)
    if backend == "local":
        jax.config.update("jax_num_cpu_devices", DEVICES)
    names = ("table", "looked up", "rows read", "servers: predicted", "of it calls", "measured")
    names = (*names, "of it calls", "SPMD: predicted", "measured", "chosen", "faster")
    print("| " + " | ".join(names) + " |", "|---" * len(names) + "|", sep="\n")
    for case in CASES:

        def loop(server: Any, case: Case = case) -> Any:
            if backend == "ray":
                jax.config.update("jax_num_cpu_devices", DEVICES)
            return measured(case, server)

        told = predicted(case)
        done = train(loop, workers=1, servers=SERVERS, optimizer=optimizer, backend=backend)
        served, calls, spmd = (float(np.median(x)) for x in done.returned[0])
        cells = (
            f"{case.rows:,} x {WIDTH}",
            f"{case.batch} x {case.slots}",
            f"{told.table.rows:,}",
            *map(ms, (told.served_s, told.table.served_s, served, calls, told.spmd_s, spmd)),
            told.chosen,
            "servers" if served < spmd else "SPMD",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
