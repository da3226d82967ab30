"""The examples: planned for eight devices, run on them, equal to the unsharded run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from executor import parallelize
from planner import make_plan

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ["gpt", "gpt_linen_scan", "lstm", "mlp", "moe", "resnet"]
TOLERANCE = {"moe": 1e-2}  # a token near a routing border may go to another expert
SERVED = ["embedding_hybrid", "mnist_like_async", "word2vec_ps"]  # programs of parameter servers
SIZED = ["llama"]  # a program that takes its size from the command line
QUICK = ("mlp",)
STEPS = 3


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of(step, state, data):
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, next(data))
        losses.append(float(metrics["loss"]))
    return losses, state


def printed_by(name, steps):
    """What an example prints that runs as a program; fails if the program does."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", str(steps)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_examples_are_here():
    assert sorted(p.stem for p in EXAMPLES.glob("*.py")) == sorted(NAMES + SERVED + SIZED)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]
)
def test_example(name):
    module = load(name)
    state = jax.jit(module.make_state)()
    expected, alone = losses_of(jax.jit(module.train_step), state, module.batches())
    step = parallelize(module.train_step, donate_argnums=0, mode="AUTO_PARALLEL")
    got, trained = losses_of(step, state, module.batches())
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE.get(name, 1e-4))
    assert jax.tree.structure(trained) == jax.tree.structure(alone)

    plan = step.plan
    assert plan.cluster == "cpu:8" and plan.mesh.num_devices == 8
    assert not plan.fallbacks
    assert any(leaf.spec.axes for leaf in plan.inputs)
    for x, leaf in zip(jax.tree.leaves(trained), plan.inputs, strict=False):
        assert leaf.path.startswith("[0]")
        assert x.sharding.spec == jax.sharding.PartitionSpec(*leaf.spec.entries)
    abstract = make_plan(
        module.train_step, *module.example_args(), cluster="cpu:8", donate_argnums=0
    )
    assert abstract.digest == plan.digest


@pytest.mark.slow
def test_llama_trains_in_microbatches_with_remat():
    """Its own main does so and fails if the losses part from those of the unsharded run."""
    printed = printed_by("llama", steps=3)
    assert "microbatches" in printed and "largest difference" in printed


@pytest.mark.slow
def test_llama_at_full_size_fits_and_says_how():
    module = load("llama")
    make_state, step, batch = module.build(module.SIZES["8b"])
    plan = make_plan(step, jax.eval_shape(make_state), batch, cluster="v5p:4x4x4")
    assert plan.microbatches > 1 and plan.remat != "none"
    assert plan.prediction.peak_bytes <= plan.prediction.limit_bytes
    assert "llama.py:" in plan.recomputed[0] and "does not fit as written" in plan.notes[-1]


@pytest.mark.slow
def test_gpt_program_ends_with_the_difference():
    printed = printed_by("gpt", steps=3)
    last = printed.strip().splitlines()[-1]
    assert last.startswith("largest difference from the unsharded losses: ")
    assert last.endswith("(over 3 steps)")
    assert float(last.split(": ")[1].split()[0]) <= 1e-2


def test_mixed_placement_program_ends_with_the_difference():
    printed = printed_by("embedding_hybrid", steps=5)
    assert "on parameter servers" in printed
    last = printed.strip().splitlines()[-1]
    assert float(last.split(": ")[1].split()[0]) <= 1e-4
