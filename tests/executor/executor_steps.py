"""Small train steps that several tests share; run as a script it prints a plan's digest."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

ADAMW = optax.adamw(1e-2, weight_decay=0.01)


def batch_of(rows=16, seed=0, inputs=8):
    """A batch of host arrays."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, inputs)).astype(np.float32),
        "y": rng.normal(size=(rows, 4)).astype(np.float32),
    }


def plain_state(width=16, inputs=8):
    """Two matrices in a plain dict."""
    rng = np.random.default_rng(7)
    return {
        "up": jnp.asarray(rng.normal(size=(inputs, width)) / inputs**0.5, jnp.float32),
        "down": jnp.asarray(rng.normal(size=(width, 4)) / width**0.5, jnp.float32),
    }


def large_args():
    """Arguments of ``plain_step`` for which splitting the work is worth its collectives."""
    return plain_state(width=256, inputs=64), batch_of(rows=2048, inputs=64)


def plain_step(state, batch):
    """Gradient descent on the squares of a two-layer net."""

    def loss_fn(state):
        h = jnp.tanh(batch["x"] @ state["up"])
        return jnp.mean((h @ state["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


class Dense(linen.Module):
    """Linen."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(linen.gelu(linen.Dense(16)(x)))


class Net(nnx.Module):
    """NNX."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


@functools.cache
def graphdef():
    """The static half of ``Net``."""
    return nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))[0]


def linen_state():
    """Linen parameters and AdamW moments."""
    params = jax.jit(Dense().init)(jax.random.key(0), jnp.zeros((1, 8)))
    return {"params": params, "opt": ADAMW.init(params)}


def nnx_state():
    """An ``nnx.State`` of Variables and AdamW moments over it."""
    params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)[1]
    return {"params": params, "opt": ADAMW.init(params)}


def _adamw_step(apply):
    def step(state, batch):
        def loss_fn(params):
            return jnp.mean((apply(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = ADAMW.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step


linen_step = _adamw_step(lambda params, x: Dense().apply(params, x))
nnx_step = _adamw_step(lambda params, x: nnx.merge(graphdef(), params)(x))

PROGRAMS = {
    "plain": SimpleNamespace(state=plain_state, step=plain_step, columns=r"'up'"),
    "linen": SimpleNamespace(state=linen_state, step=linen_step, columns=r"Dense_0.*kernel"),
    "nnx": SimpleNamespace(state=nnx_state, step=nnx_step, columns=r"up.*kernel"),
}


def losses_of(step, state, steps=4, rows=16):
    """Losses of several steps on fresh batches, and the last state."""
    losses = []
    for k in range(steps):
        state, metrics = step(state, batch_of(rows, seed=k))
        losses.append(float(metrics["loss"]))
    return losses, state


def assert_same(got, expected, tolerance=1e-5):
    """Equal pytrees of arrays, relative to the largest value of each leaf."""
    a, b = jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(jax.device_get(expected))
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = x.astype(np.float64), y.astype(np.float64)
        scale = max(1.0, float(np.max(np.abs(y), initial=0.0)))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def assert_placed(args, plan):
    """Every leaf of ``args`` is sharded as the plan says of its inputs."""
    leaves = jax.tree.leaves(args)
    assert len(leaves) == len(plan.inputs)
    for x, leaf in zip(leaves, plan.inputs, strict=True):
        spec = jax.sharding.PartitionSpec(*leaf.spec.entries)
        mesh = x.sharding.mesh
        assert dict(mesh.shape) == dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
        expected = jax.sharding.NamedSharding(mesh, spec)
        assert x.sharding.is_equivalent_to(expected, x.ndim), leaf.path


if __name__ == "__main__":
    from planner import make_plan

    for name in ("plain", "linen"):
        program = PROGRAMS[name]
        state = jax.eval_shape(program.state)
        print(name, make_plan(program.step, state, batch_of(), cluster="cpu:8").digest)
