"""Sums over examples or tasks that make gradients: explicit reduce-scatters, equal numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from executor.run.compile import CompiledStep
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.compiled.lowering import PLAIN, Lowering
from tests.planner.test_unusual_steps import private, tasks
from tests.zoo.running import difference


@pytest.mark.devices
@pytest.mark.parametrize(
    ("step", "rows", "sums"),
    [(private, (64, 32), 2), (tasks, (16, 16, 32), 4)],
    ids=["private", "tasks"],
)
def test_gradients_of_examples_are_scattered(
    step: Callable[..., Any], rows: tuple[int, ...], sums: int
) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    p = {
        "a": jax.random.normal(keys[0], (32, 128)) / 6,
        "b": jax.random.normal(keys[1], (128, 32)) / 11,
    }
    zeros = jax.tree.map(jnp.zeros_like, p)
    state = {"p": p, "m": zeros, "v": zeros}
    x, y = jax.random.normal(keys[2], rows), jax.random.normal(keys[3], rows)
    plan = make_plan(step, state, x, y, cluster="v5e:2x4", mode="fsdp")
    traced, counts = trace(step, (state, x, y)), []
    want = jax.device_get(jax.jit(step)(state, x, y))
    for how in (Lowering(scattered=True), PLAIN):
        run = CompiledStep(traced, dataclasses.replace(plan, lowering=how), devices=jax.devices())
        counts.append(run.jitted.lower(state, x, y).as_text().count("stablehlo.reduce_scatter"))
        assert difference(jax.device_get(run(state, x, y)), want) <= 5e-6
    assert counts[0] >= sums and counts[1] == 0
