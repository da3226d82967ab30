"""Meshes that are not searched where memory is short."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import make_plan
from planner.errors import MemoryLimitError
from planner.plan.contents.rows import MeshVerdict

OPTIONS: dict[str, Any] = {"cluster": "h100:8", "microbatches": 1, "remat": "none"}


def step(layers: Any, x: jax.Array) -> Any:
    def loss(layers: Any) -> jax.Array:
        h = x
        for layer in layers:
            h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value


def arguments() -> tuple[Any, ...]:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return [{"up": struct(1024, 4096), "down": struct(4096, 1024)}] * 4, struct(8192, 1024)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.9, 0.65])
def test_what_is_said_of_meshes_that_are_not_searched(share: float) -> None:
    """Their first choice does not fit, and a search on them saves no more than is said."""
    peak = make_plan(step, *arguments(), **OPTIONS).prediction.peak_bytes
    limit = share * peak
    plan = make_plan(step, *arguments(), memory=limit, **OPTIONS)
    best_s = plan.search.cost_s
    rows = [row for row in plan.meshes if row.verdict is MeshVerdict.UNSEARCHED]
    assert rows
    for row in rows:
        assert row.peak_bytes > limit and row.lower_bound_s < best_s
        sizes = row.mesh.split("x")
        mesh = ",".join(f"{name}={size}" for name, size in zip("abc", sizes, strict=False))
        try:
            other = make_plan(step, *arguments(), memory=limit, mesh=mesh, **OPTIONS)
        except MemoryLimitError:
            continue
        assert other.search.cost_s >= row.lower_bound_s
    for row in plan.meshes:
        if row.verdict is MeshVerdict.PRUNED:
            assert row.cost_s == row.peak_bytes == -1.0
