"""One device: step time as predicted, as measured under the plan, and of a plain ``jax.jit``.

The six examples at their own size, and decoders of a billion parameters: as written, computed
again (``remat="full"``), in four microbatches, and with the optimizer's state in host memory.
Steps follow each other without a wait, as in a training; a time is the median of some rounds.
``peak`` is what the compiler says is alive at once (``peak_memory_in_bytes``) beside the
prediction.

    python benchmarks/one_device.py --cluster h100:1
    planner calibrate --cluster h100:1 --out profile.toml
    python benchmarks/one_device.py --cluster h100:1 --profile profile.toml

``--trace DIR`` traces three steps of the first decoder that runs, with its plan, for
``planner profile``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from executor import compile_plan
from planner import make_plan
from planner.graph.trace import abstract

EXAMPLES = ("mlp", "gpt", "gpt_linen_scan", "resnet", "moe", "lstm")
ROUND_S = 0.5
"""Seconds of steps in a round."""
ROUNDS = 5
LOSSES: dict[str, float] = {}
"""The first loss of each program under ``jax.jit``."""


@dataclass(frozen=True)
class Case:
    """A program: its step, its state when asked for, a batch, and options of the planner."""

    name: str
    step: Callable[..., Any]
    state: Callable[[], Any]
    batch: Any
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = True
    """Whether the plain step is timed beside."""


def example_case(name: str) -> Case:
    module = importlib.import_module(name)
    return Case(name, module.train_step, module.make_state, next(iter(module.batches())))


def decoder_cases(tiny: bool) -> list[Case]:
    """GPT-2 1.0B and Llama 1B, bfloat16 activations, float32 parameters and moments."""
    gpt, llama = importlib.import_module("gpt"), importlib.import_module("llama")
    few = gpt.Config(2, 64, 4, 32, 8, 128, dtype="bfloat16")
    sizes = few if tiny else gpt.Config(16, 2048, 16, 1024, 8, 50304, dtype="bfloat16")
    other = llama.SIZES["toy" if tiny else "1b"]
    small = dataclasses.replace(other, seq=64 if tiny else 2048, batch=4)
    out = []
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("", {}),
        (", remat", {"remat": "full"}),
        (", 4 microbatches", {"microbatches": 4}),
        (", moments on the host", {"offload": [r"\['opt'\].*\['[mn]u'\]|mu|nu"]}),
    )
    for label, module, config in (("gpt 1b", gpt, sizes), ("llama 1b", llama, small)):
        make, step, batch = module.build(config)
        shapes = jax.eval_shape(make)
        for suffix, options in variants:
            state = functools.partial(filled, shapes)
            tokens = {k: _tokens(v, config.vocab) for k, v in batch.items()}
            out.append(Case(label + suffix, step, state, tokens, options, not suffix))
    return out


def _tokens(shape: Any, vocab: int) -> Any:
    return jax.random.randint(jax.random.key(1), shape.shape, 0, vocab, shape.dtype)


def filled(shapes: Any) -> Any:
    """A state of random numbers: of either sign for parameters, positive for moments."""

    def fill() -> Any:
        leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
        most = max(x.size for _, x in leaves)
        numbers = 0.02 * jax.random.normal(jax.random.key(0), (most,))  # one generator to compile
        out = []
        for path, x in leaves:
            if jnp.issubdtype(x.dtype, jnp.integer):
                out.append(jnp.zeros(x.shape, x.dtype))
                continue
            value = numbers[: x.size].reshape(x.shape).astype(x.dtype)
            out.append(value if "params" in jax.tree_util.keystr(path[:1]) else jnp.abs(value))
        return jax.tree_util.tree_unflatten(tree, out)

    return jax.jit(fill)()


def timed(step: Callable[..., Any], state: Any, batch: Any) -> tuple[float, float, float]:
    """Median seconds of a step, the middle half of the rounds over it, and the first step's loss.

    The state is given away.
    """
    state, metrics = step(state, batch)
    first = float(jax.tree_util.tree_leaves(metrics)[0])
    begun = time.perf_counter()
    for _ in range(3):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    runs = max(1, round(ROUND_S / ((time.perf_counter() - begun) / 3)))
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(runs):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append((time.perf_counter() - begun) / runs)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / middle, first


def plain(case: Case) -> tuple[float, float, float]:
    """`timed` of the step under ``jax.jit``."""
    return timed(jax.jit(case.step, donate_argnums=0), case.state(), case.batch)


def row(case: Case, clusters: dict[str, str], folder: Path | None) -> list[str]:
    """A row of the table: predictions by the catalog and by the profile, measurements, ratios."""
    shapes = abstract((jax.eval_shape(case.state), case.batch))
    begun = time.perf_counter()
    plans = {
        key: make_plan(case.step, *shapes, cluster=text, donate_argnums=0, **case.options)
        for key, text in clusters.items()
    }
    planned_s = time.perf_counter() - begun
    plan = plans["catalog"]
    step = compile_plan(case.step, plan, donate_argnums=0).prepare(*shapes)
    begun = time.perf_counter()
    ours_s, spread, loss = timed(step, *step.place(case.state(), case.batch))
    built_s = time.perf_counter() - begun
    assert step.program is not None
    memory = step.program.memory_analysis()
    assert memory is not None
    peak = memory.peak_memory_in_bytes
    jit_s, label = None, case.name.partition(",")[0]
    if case.alone:
        jit_s, _, LOSSES[label] = plain(case)
    jit_loss = LOSSES.get(label)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / "plan.json")
        (folder / "program.hlo.txt").write_text(step.text)
        state, batch = step.place(case.state(), case.batch)
        with jax.profiler.trace(str(folder / "trace")):
            for _ in range(3):
                state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
    predicted = {key: p.prediction.step_s for key, p in plans.items()}
    print(f"  {case.name}: planned {planned_s:.1f} s, run {built_s:.1f} s", plan.recipe, flush=True)
    return [
        case.name,
        *(f"{1e3 * s:.2f}" for s in predicted.values()),
        f"{1e3 * ours_s:.2f}",
        f"{spread:.0%}",
        "" if jit_s is None else f"{1e3 * jit_s:.2f}",
        "" if jit_s is None else f"{ours_s / jit_s:.3f}",
        *(f"{ours_s / s:.2f}" for s in predicted.values()),
        f"{plan.prediction.peak_bytes / 1e9:.2f}",
        f"{peak / 1e9:.2f}",
        "" if jit_loss is None else f"{abs(loss - jit_loss) / max(abs(jit_loss), 1e-9):.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True, help="one device, such as h100:1")
    parser.add_argument("--profile", help="a file that planner calibrate wrote for it")
    parser.add_argument("--tiny", action="store_true", help="decoders of a few parameters")
    parser.add_argument("--only", help="cases whose name has this")
    parser.add_argument("--trace", type=Path, help="a folder")
    args = parser.parse_args()
    clusters = {"catalog": args.cluster} | ({"profile": args.profile} if args.profile else {})
    table = Table(title=f"one step on {jax.devices()[0].device_kind}, jax {jax.__version__} (ms)")
    heads = ["program", *(f"by {key}" for key in clusters), "measured", "spread", "jax.jit"]
    heads += ["of jit", *(f"of {key}" for key in clusters), "peak", "compiled (GB)", "loss off"]
    for head in heads:
        table.add_column(head, justify="left" if head == "program" else "right")
    cases: list[Callable[[], Case]] = [functools.partial(example_case, n) for n in EXAMPLES]
    cases += [functools.partial(lambda c: c, c) for c in decoder_cases(args.tiny)]
    traced = False
    for make in cases:
        case = make()
        if args.only and args.only not in case.name:
            continue
        folder = args.trace if "1b" in case.name and not traced else None
        try:
            cells = row(case, clusters, folder)
            traced = traced or folder is not None
        except Exception:
            traceback.print_exc()
            cells = [case.name, "failed"]
        print(*cells, sep=" | ", flush=True)
        table.add_row(*cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
