"""Fourier transforms between reshardings: XLA:CPU must not give them a collective's layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan
from executor.run.export import python_text
from planner import make_plan
from tests.executor.executor_steps import assert_same

pytestmark = pytest.mark.devices
RNG = np.random.default_rng(0)
W = {n: (RNG.normal(size=s) / 8).astype(np.float32) for n, s in (("a", (32, 64)), ("b", (64, 32)))}
X = RNG.normal(size=(16, 16, 32)).astype(np.float32)


def both_ways(x):
    """FNet's mixing: one transform over the features, one over the sequence."""
    return jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=-2).real


def step(w, x):
    def loss(w):
        h = x
        for _ in range(2):
            h = both_ways(h) * 0.1
            h = h + jnp.tanh(h @ w["a"]) @ w["b"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=2,fsdp=2,model=2"])
def test_mixing_over_two_axes_runs_on_every_mesh(mesh):
    plan = make_plan(step, W, X, cluster="cpu:8", mesh=mesh)
    assert_same(compile_plan(step, plan)(W, X), jax.jit(step)(W, X))
    space = {}
    exec(compile(python_text(plan), "sharded.py", "exec"), space)
    run = space["shard_step"](step, W, X, mesh=space["make_mesh"]())
    args = jax.device_put((W, X), space["in_shardings"](space["make_mesh"](), W, X))
    assert_same(run(*args), jax.jit(step)(W, X))
