"""Flop of dense linear algebra, as textbooks count it, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import make_plan
from planner.graph.trace import trace
from planner.step.kernels.flops import op_flops

N = 512


def counted(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    """Flop over N cubed."""
    traced = trace(function, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    rules = traced.rules
    return sum(op_flops(traced.graph, op, rules[op.index]) for op in traced.graph.ops) / N**3


@pytest.mark.parametrize(
    ("function", "cubes"),
    [
        (lambda a: a @ a, 2),
        (lambda a: jax.lax.linalg.cholesky(a), 1 / 3),
        (lambda a: jax.lax.linalg.lu(a)[0], 2 / 3),
        (lambda a: jnp.linalg.qr(a, mode="r"), 4 / 3),
        (lambda a: jnp.linalg.eigh(a)[1], 9),
        (lambda a: jnp.linalg.svd(a)[0], 21),
        (lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True), 1),
    ],
)
def test_matrices(function: Callable[..., Any], cubes: float) -> None:
    assert counted(function, (N, N)) == pytest.approx(cubes, rel=0.03)
    assert counted(function, (3, N, N)) == pytest.approx(3 * cubes, rel=0.03)


def test_a_decomposition_on_every_device_is_told() -> None:
    """One matrix can't be split: 8 devices do the work of one."""

    def step(state: Any, g: jax.Array) -> tuple[Any, jax.Array]:
        w, left = state
        left = 0.95 * left + 0.05 * g @ g.T
        values, vectors = jnp.linalg.eigh(left)
        return (w - (vectors * values) @ (vectors.T @ g), left), jnp.sum(g**2)

    big = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    plan = make_plan(step, (big, big), big, cluster="h100:8")
    assert "of 8 devices' worth of work" in plan.idle
