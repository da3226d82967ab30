"""Transforms, selections and decompositions of a batch that is split, and layouts of tables that
are split twice: XLA gathers them where the executor does not run them on shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodels import parse_cluster
from executor import compile_plan
from executor.verify.hlo.collectives import read_module
from planner import make_plan
from planner.plan.compiled.lowering import default_lowering
from planner.plan.plan import Plan
from tests.executor.executor_steps import assert_same

pytestmark = pytest.mark.devices
RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X = RNG.normal(size=(64, 16, 16)).astype(np.float32)
EYE = np.eye(16, dtype=np.float32)


def gathered(step: Any, plan: Plan, *args: Any) -> float:
    """Bytes that the compiled step gathers; its results are those of the step alone."""
    sharded = compile_plan(step, plan)
    compiled = sharded.prepare(*args)
    assert_same(sharded(*args), jax.jit(step)(*args))
    found = read_module(compiled.text).by_kind().get("all_gather")
    return found.payload_bytes if found else 0.0


def positive(x: jax.Array) -> jax.Array:
    """Symmetric and positive."""
    return x @ jnp.swapaxes(x, -1, -2) + 3 * EYE


ALONE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "fft over the middle": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)),
    "rfft2": lambda x: jnp.abs(jnp.fft.rfft2(x)),
    "top_k": lambda x: jax.lax.top_k(x, 4)[0],
    "top_k over the middle": lambda x: jax.lax.top_k(x, 4, axis=1)[0],
    "cholesky": lambda x: jnp.linalg.cholesky(positive(x)),
    "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(3 * EYE + x, x, lower=True),
    "solve": lambda x: jnp.linalg.solve(positive(x), x),
    "eigh": lambda x: jnp.linalg.eigh(positive(x))[0],
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
}


@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
@pytest.mark.parametrize("name", ALONE)
def test_what_treats_rows_alone_is_not_gathered(name: str, mesh: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda w: jnp.mean(ALONE[name](x * w) ** 2))(w)
        return w - 0.01 * g, value

    plan = make_plan(step, W, X, cluster="cpu:8", mesh=mesh, shardings={r"^\[1\]": ("data",)})
    planned = [row for row in plan.collectives if row.kind == "all_gather"]
    assert gathered(step, plan, W, X) <= sum(row.payload_bytes * row.count for row in planned)


def columns(w: jax.Array, x: jax.Array) -> jax.Array:
    """``vmap`` makes columns of the vectors that share a matrix, as for a Gaussian process."""
    lower = jnp.tril(0.1 * w) + 3 * EYE
    return jax.vmap(lambda v: jax.scipy.linalg.solve_triangular(lower, v, lower=True))(x)


def rows(w: jax.Array, x: jax.Array) -> jax.Array:
    """A right operand."""
    lower = jnp.tril(0.1 * w) + 3 * EYE
    return jax.lax.linalg.triangular_solve(lower, x, left_side=False, lower=True)


@pytest.mark.parametrize("solve", [columns, rows])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_is_solved_for_is_split(solve: Any, microbatches: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda w: jnp.mean(solve(w, x) ** 2))(w)
        return w - 0.01 * g, value

    options: dict[str, Any] = {"microbatches": microbatches} if microbatches > 1 else {}
    many = RNG.normal(size=(16384, 16)).astype(np.float32)
    plan = make_plan(step, W, many, cluster="cpu:8", mode="DATA_PARALLEL", **options)
    planned = [row for row in plan.collectives if row.kind == "all_gather"]
    assert sum(row.payload_bytes * row.count for row in planned) < many.nbytes / 8
    if microbatches == 1:
        assert gathered(step, plan, W, many) <= sum(
            row.payload_bytes * row.count for row in planned
        )
    else:
        assert_same(compile_plan(step, plan)(W, many), jax.jit(step)(W, many))


def test_the_layout_of_a_table_split_twice_is_said_of_shards() -> None:
    """The gradient of a table, rows along one axis and columns along the other, as on TPUs."""

    def step(table: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda t: jnp.mean(jnp.tanh(t[at]) ** 2))(table)
        return table - 0.1 * g, value

    table = RNG.normal(size=(1024, 512)).astype(np.float32)
    at = RNG.integers(0, 1024, (8, 16)).astype(np.int32)
    plan = make_plan(
        step,
        table,
        at,
        cluster="cpu:8",
        mesh="model=2,data=4",
        shardings={r"^\[0\]": ("model", "data")},
    )
    plan = dataclasses.replace(plan, lowering=default_lowering(parse_cluster("v5e:2x4")))
    assert gathered(step, plan, table, at) < table.nbytes / 8
