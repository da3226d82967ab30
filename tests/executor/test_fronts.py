"""Sums that XLA:TPU scatters only along a dimension in front: which they are, and the same sums."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from costmodels import parse_cluster
from executor.run.compile import CompiledStep
from executor.run.local.fronts import in_front
from executor.run.local.products import Scatter, scattered
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.compiled.lowering import by_axis, default_lowering

pytestmark = pytest.mark.usefixtures("optimized")

SIZES = {"a": 4, "b": 4, "c": 2}
BOTH = ("a", "b")


@pytest.mark.parametrize(
    ("shape", "own", "itemsize", "found"),
    [
        # what was compiled for v5e, v5p and v6e
        ((1152, 4608), ((), BOTH), 2, {"a", "b"}),  # shards of 1152 and 288 lanes
        ((1152, 6144), ((), BOTH), 2, {"b"}),  # 1536 and 384
        ((1152, 4096), ((), BOTH), 2, set()),
        ((1152, 6144), ((), BOTH), 4, set()),
        ((4608, 1152), (BOTH, ()), 2, set()),
        ((2048, 3, 16, 128), ((), (), BOTH, ()), 2, {"a", "b"}),
        ((2048, 3, 256, 128), ((), (), BOTH, ()), 2, {"a", "b"}),
        ((2048, 16, 128), ((), BOTH, ()), 4, set()),
        ((2048, 16, 128), (BOTH, (), ()), 2, set()),
        ((15261, 1024), ((), BOTH), 2, set()),  # rows that fill no tiles
        ((2048,), (BOTH,), 2, set()),
    ],
)
def test_which_they_are(shape: Any, own: Any, itemsize: int, found: set[str]) -> None:
    assert in_front(shape, own, own, itemsize, SIZES) == found


@pytest.mark.devices
@pytest.mark.parametrize("d", [0, 1, 2])
@pytest.mark.parametrize("front", [{"a"}, {"b"}, {"c"}, {"a", "b"}, {"b", "c"}, {"a", "b", "c"}])
def test_sums_are_the_same(d: int, front: set[str]) -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    draw = np.random.default_rng(0)
    x, y = (jnp.asarray(draw.normal(size=(16, *n)), jnp.float32) for n in ((8, 16), (24,)))

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())))

    (eqn,) = jax.make_jaxpr(product)(x, y).jaxpr.eqns
    axes = ("b", "a", "c")
    split = tuple(axes if k == d else () for k in range(3))
    ins = ((axes, (), ()), (axes, ()))
    how = Scatter(-1, (0, 1, 2), ins, split, split, (), frozenset(front))
    run = jax.jit(lambda *v: scattered(eqn, v, how, mesh))
    np.testing.assert_allclose(run(x, y), product(x, y), rtol=1e-4, atol=1e-5)
    text = run.lower(x, y).as_text()
    dims = [line for line in text.splitlines() if "scatter_dimension" in line]
    groups = [list(g) for _, g in itertools.groupby(axes, front.__contains__)]
    assert len(dims) == sum(map(len, groups)) == 3


@pytest.mark.devices
def test_a_plan_of_narrow_shards_is_lowered_so() -> None:
    """288 columns over 8 chips: shards of 36 lanes."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grads, value

    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(512, 288)), jnp.float32)
    x = jnp.asarray(draw.normal(size=(32768, 512)), jnp.float32)
    pins: Any = {"0": jax.sharding.PartitionSpec(None, "data")}
    plan = make_plan(step, w, x, cluster="v5e:2x4", mesh="data=8", shardings=pins)
    assert plan.lowering == default_lowering(parse_cluster("v5e:2x4"))
    traced = trace(step, (w, x))
    for how in (plan.lowering, by_axis(parse_cluster("v5e:2x4"))):
        run = CompiledStep(traced, dataclasses.replace(plan, lowering=how), devices=jax.devices())
        assert "scatter_dimension = 0" in run.jitted.lower(w, x).as_text()
        for a, b in zip(run(w, x), jax.jit(step)(w, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
