"""Padded batches on eight devices: equal to the plain step, and split over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor import compile_plan, parallelize
from planner import load_plan, make_plan
from planner.errors import RequestError
from planner.microbatch.errors import NotExactError

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
WIDTH, ROWS, FULL = 128, 1001, 1008


def loss(p: Any, x: Any, y: Any) -> Any:
    h = jnp.tanh(x @ p["a"] + p["b"])
    logits = h @ p["c"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(p: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(p, batch["x"], batch["y"])
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), {"loss": value}


def given() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape) / 8, jnp.float32)

    p = {"a": normal(WIDTH, WIDTH), "b": normal(WIDTH), "c": normal(WIDTH, 10)}
    batch = {"x": normal(ROWS, WIDTH), "y": jnp.asarray(draw.integers(0, 10, ROWS))}
    return p, batch


def apart(got: Any, want: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


def test_a_padded_step_is_the_step_over_all_devices(tmp_path: Path) -> None:
    p, batch = given()
    plan = make_plan(step, p, batch, cluster="cpu:8", mode="DATA_PARALLEL", pad_batch=FULL)
    assert not any("not split" in note for note in plan.notes)
    assert plan.pad_batch == FULL and f"padded to {FULL} examples, 0.7 % more" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.recipe == plan.recipe and again.digest == plan.digest
    planned = compile_plan(step, again)
    compiled = planned.prepare(p, batch)
    text = compiled.jitted.lower(p, batch).compile().as_text()
    assert f"f32[{FULL // 8},{WIDTH}]" in text and f"f32[{FULL},{WIDTH}]" not in text
    want, got = p, p
    for _ in range(3):
        want, _ = jax.jit(step)(want, batch)
        got, _ = planned(got, batch)
    assert apart(got, want) < 1e-6


def test_the_next_number_that_the_devices_divide() -> None:
    p, batch = given()
    run = parallelize(step, pad_batch="auto", mode="DATA_PARALLEL")
    assert apart(run(p, batch), jax.jit(step)(p, batch)) < 1e-6
    assert run.plan.pad_batch == FULL
    assert any(note.startswith(f"batch padded to {FULL}: ") for note in run.plan.notes)
    small = jax.tree.map(lambda x: x[:1000], batch)
    same = make_plan(step, p, small, cluster="cpu:8", mode="DATA_PARALLEL", pad_batch="auto")
    assert same.pad_batch == 0 and not any("padded" in note for note in same.notes)


def test_what_is_coupled_is_not_padded() -> None:
    p, batch = given()

    def normed(p: Any, batch: Any) -> Any:
        def coupled(p: Any) -> Any:
            h = batch["x"] @ p["a"]
            return loss({**p, "a": p["a"]}, h - jnp.mean(h, 0), batch["y"])

        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(coupled)(p))

    with pytest.raises(NotExactError, match="can't be padded"):
        make_plan(normed, p, batch, cluster="cpu:8", pad_batch=FULL)
    plan = make_plan(normed, p, batch, cluster="cpu:8", mode="DATA_PARALLEL", pad_batch="auto")
    assert plan.pad_batch == 0
    assert any(note.startswith("batch not padded: this step can't") for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pad_batch": "often"}, "pad_batch='often': expected a whole number"),
        ({"pad_batch": 1000}, "a batch of 1001 examples can't be padded to 1000"),
        ({"pad_batch": FULL, "microbatches": 7}, "pad_batch=1008 and microbatches=7"),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], told: str) -> None:
    p, batch = given()
    with pytest.raises(RequestError, match=told):
        make_plan(step, p, batch, cluster="cpu:8", **options)
