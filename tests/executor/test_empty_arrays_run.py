"""Steps with arrays without elements give equal numbers under their plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan
from planner import make_plan
from tests.executor.executor_steps import assert_same
from tests.planner.test_empty_arrays import chunked, concatenated, scanned, train

pytestmark = pytest.mark.devices
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8, 32)).astype(np.float32)
W = {n: (RNG.normal(size=s) / 8).astype(np.float32) for n, s in (("a", (32, 64)), ("b", (64, 32)))}


@pytest.mark.parametrize("mesh", ["data=8", "data=2,model=4"])
@pytest.mark.parametrize(
    "between", [lambda h: chunked(h, 8), concatenated, scanned], ids=["chunk", "concat", "scan"]
)
def test_equal_numbers(between, mesh):
    step = train(between)
    plan = make_plan(step, W, X, cluster="cpu:8", mesh=mesh)
    assert_same(compile_plan(step, plan)(W, X), jax.jit(step)(W, X))


def test_split_along_the_dimension_that_is_joined():
    P = jax.sharding.PartitionSpec

    def step(x):
        return jnp.concatenate([x[:, :0], jnp.sin(x)], axis=1) * 2

    rules = {r"^\[0\]": P(None, "data")}
    plan = make_plan(step, X, cluster="cpu:8", mesh="data=8", shardings=rules)
    assert plan.outputs[0].spec.entries == (None, "data")
    assert_same(compile_plan(step, plan)(X), step(X))
