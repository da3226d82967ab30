"""Meshes that are not searched where memory is short."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import make_plan
from planner.choose.meshes import SCOUTED
from planner.choose.simplest import SAME
from planner.errors import MemoryLimitError
from planner.plan.assemble import _mesh_row
from planner.plan.contents.rows import MeshVerdict
from planner.search.problem import Solution
from planner.spec import MeshSpec

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
    """Their first choice does not fit, and a search on them saves no more than is said,
    and nothing to speak of."""
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
        assert other.search.cost_s >= max(row.lower_bound_s, best_s / SAME)
    for row in plan.meshes:
        if row.verdict is MeshVerdict.PRUNED:
            assert row.cost_s == row.peak_bytes == -1.0


BEST = Solution((0,), 2.0, 1.9, 50.0, 0, True, "auto", "", 0.0)
FIRST = Solution((0,), 2.5, 1.5, 90.0, 0, False, "recursive_programming", SCOUTED, 0.0)


@pytest.mark.parametrize(
    ("solution", "verdict", "known"),
    [
        (FIRST, "unsearched", True),
        (dataclasses.replace(FIRST, lower_bound_s=2.1), "pruned", False),
        (dataclasses.replace(FIRST, reason="the lowest peak misses the limit"), "unfit", True),
        (dataclasses.replace(FIRST, feasible=True), "slower", True),
        (dataclasses.replace(FIRST, choice=()), "pruned", True),
    ],
)
def test_verdicts(solution: Solution, verdict: str, known: bool) -> None:
    """A first choice that does not fit counts for nothing where the bound rules the mesh out."""
    mesh = MeshSpec(("data", "model"), (4, 2))
    priced: Any = SimpleNamespace(
        mesh=mesh, analysis=SimpleNamespace(scheduled=SimpleNamespace(chosen=False))
    )
    row = _mesh_row(priced, solution, BEST, mesh, names=False)
    assert (row.mesh, row.verdict) == ("4x2", verdict)
    assert (row.cost_s, row.peak_bytes) == ((2.5, 90.0) if known else (-1.0, -1.0))
    assert row.lower_bound_s == solution.lower_bound_s
