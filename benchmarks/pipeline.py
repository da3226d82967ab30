"""Pipeline schedules: what they take, and what running them takes.

    python benchmarks/pipeline.py [--quick]

Four tables. *Schedules*: bubble of equal stages from the simulator, beside the closed form (GPipe
and 1F1B (p - 1)/(m + p - 1), interleaved (p - 1)/(vm + p - 1)), and the simulator's own time.
*Predicted*: a decoder on clusters, in one program and by schedule. *Equality*: `examples/gpt.py` on
8 virtual CPU devices, the state after a step under every schedule against the plain step (norm of
the difference relative to the norm). *Host*: what the host does for a pass, from the time until a
step's call returns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np

from costmodels.orders import Work, named_order, simulate
from executor import parallelize
from planner import make_plan
from planner.errors import MeshwrightError

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")


def schedules() -> None:
    """The simulator."""
    print("\nSchedules of equal stages, F = B = W (a backward pass of both: twice F)")
    print(f"{'stages x microbatches':24}{'schedule':14}{'bubble':>9}{'formula':>9}{'seconds':>9}")
    for p, m in ((4, 8), (8, 64), (16, 128), (32, 512)):
        for name in (*SCHEDULES, "interleaved"):
            v = 2 if name == "interleaved" else 1
            begun = time.perf_counter()
            order = named_order(name, p, m, v)
            one = Work(1.0, 1.0, 1.0) if order.splits_weights else Work(1.0, 2.0)
            ran = simulate(order, [one] * (p * v))
            spent = time.perf_counter() - begun
            formula = "" if name.startswith("zb") else f"{(p - 1) / (v * m + p - 1):8.2%}"
            label = name + (f" x{v}" if v > 1 else "")
            print(f"{f'{p} x {m}':24}{label:14}{ran.bubble:9.2%}{formula:>9}{spent:9.3f}")


def runs(quick: bool) -> None:
    """Equality and the host's time."""
    import gpt

    shapes = gpt.example_args()[1]
    rng = np.random.default_rng(0)
    batch = jax.tree.map(lambda s: jnp.asarray(rng.integers(0, 100, s.shape), s.dtype), shapes)
    state = gpt.make_state()
    plain = jax.jit(gpt.train_step)
    want = plain(state, batch)
    base = timed(lambda: plain(state, batch))[1]
    print(
        f"\nexamples/gpt.py, 8 microbatches, 8 virtual devices; the plain step on one: {base:.3f} s"
    )
    print(
        f"{'stages':8}{'schedule':14}{'difference':>12}{'step s':>9}{'ratio':>8}"
        f"{'host ms a pass':>16}"
    )
    for stages in (4,) if quick else (2, 4):
        for name in ("1f1b", "zb-h1") if quick else (None, *SCHEDULES):
            options = {} if name is None else {"schedule": name}
            step = parallelize(
                gpt.train_step, stages=stages, microbatches=8, remat="none", **options
            )
            got = step(state, batch)
            host, whole = timed(lambda step=step: step(state, batch))
            passes = 8 * stages * (3 if (name or "").startswith("zb") else 2)
            each = "" if name is None else f"{1e3 * host / passes:.2f}"
            label = name or "one program"
            print(
                f"{stages:<8}{label:14}{apart(got, want):12.1e}{whole:9.3f}{whole / base:8.2f}"
                f"{each:>16}"
            )


def timed(run: Any) -> tuple[float, float]:
    """Seconds until the call returns, and until its results are there: the least of five."""
    hosts, wholes = [], []
    for _ in range(5):
        begun = time.perf_counter()
        results = run()
        hosts.append(time.perf_counter() - begun)
        jax.block_until_ready(results)
        wholes.append(time.perf_counter() - begun)
    return min(hosts), min(wholes)


def apart(got: Any, want: Any) -> float:
    """Norm of the difference relative to the norm."""
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    off = sum(float(np.sum((a - b) ** 2)) for a, b in pairs)
    norm = sum(float(np.sum(b**2)) for _, b in pairs)
    return (off / norm) ** 0.5


def decoder(layers: int, width: int, words: int) -> tuple[Any, tuple[Any, Any]]:
    """A step on layers of an attention-free decoder, and shapes of its arguments."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = params["embed"][batch["tokens"]]
            for layer in params["layers"]:
                x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
            scores = jax.nn.log_softmax(x @ params["head"])
            return -jnp.mean(jnp.take_along_axis(scores, batch["targets"][..., None], -1))

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = {"up": array(width, 4 * width), "down": array(4 * width, width)}
    params = {"embed": array(words, width), "layers": [layer] * layers, "head": array(width, words)}
    tokens = array(256, 512, dtype=jnp.int32)
    return step, (params, {"tokens": tokens, "targets": tokens})


def predictions(quick: bool) -> None:
    """What plans promise."""
    print("\nPredicted step times of a decoder (16 layers of width 2048, 32,000 words), ms")
    names = ("one program", *SCHEDULES)
    print(f"{'cluster':12}{'stages':8}{'m':4}" + "".join(f"{n:>13}" for n in names))
    step, args = decoder(16, 2048, 32_000)
    refusals: list[str] = []
    for cluster, stages, parts in (
        (("h100:8x2", 4, 16),)
        if quick
        else (("h100:8x2", 4, 16), ("h100:8x8", 8, 16), ("h100:8x8", 8, 32))
    ):
        row = []
        for name in names:
            options = {} if name == "one program" else {"schedule": name}
            try:
                plan = make_plan(
                    step, *args, cluster=cluster, stages=stages, microbatches=parts, **options
                )
            except MeshwrightError as error:
                refusals.append(f"{cluster}, {name}: {error}")
                row.append(f"{'refused':>13}")
                continue
            row.append(f"{1e3 * plan.prediction.step_s:13.1f}")
        print(f"{cluster:12}{stages:<8}{parts:<4}" + "".join(row))
    print(*refusals, sep="\n")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    quick = parser.parse_args().quick
    schedules()
    predictions(quick)
    runs(quick)


if __name__ == "__main__":
    main()
