"""Sums over examples or tasks that make gradients: explicit reduce-scatters, equal numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from executor.run.compile import CompiledStep
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.compiled.lowering import PLAIN, Lowering
from tests.planner.test_unusual_steps import private, small_arguments, tasks
from tests.zoo.running import difference

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.mark.devices
@pytest.mark.parametrize(
    ("step", "rows", "sums"),
    [(private, (64, 32), 2), (tasks, (16, 16, 32), 4)],
    ids=["private", "tasks"],
)
def test_gradients_of_examples_are_scattered(
    step: Callable[..., Any], rows: tuple[int, ...], sums: int
) -> None:
    state, x, y = small_arguments(rows)
    plan = make_plan(step, state, x, y, cluster="v5e:2x4", mode="fsdp")
    traced, counts = trace(step, (state, x, y)), []
    want = jax.device_get(jax.jit(step)(state, x, y))
    for how in (Lowering(scattered=True), PLAIN):
        run = CompiledStep(traced, dataclasses.replace(plan, lowering=how), devices=jax.devices())
        counts.append(run.jitted.lower(state, x, y).as_text().count("stablehlo.reduce_scatter"))
        assert difference(jax.device_get(run(state, x, y)), want) <= 5e-6
    assert counts[0] >= sums and counts[1] == 0
