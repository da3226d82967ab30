"""The first state of a step: sharded as planned, the numbers of the function that makes it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from executor import compile_plan, init, parallelize
from planner import make_plan
from planner.errors import ModelError, RequestError

pytestmark = pytest.mark.devices
OPTIMIZER = optax.adamw(1e-3)
BATCH = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def make_state() -> Any:
    one, two = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(one, (256, 1024)),
        "down": jax.random.normal(two, (1024, 256)),
    }
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_every_array_lies_as_the_plan_stores_it() -> None:
    step = parallelize(train_step, mode="fsdp", donate_argnums=0)
    state = init(step, make_state, BATCH)
    same(state, make_state())
    stored = step.compiled.in_shardings[0]
    for array, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(stored), strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for array in (*state["params"].values(), *state["opt"][0].mu.values()):
        assert {s.data.size for s in array.addressable_shards} == {array.size // 8}
    x = jnp.ones((64, 256))
    got, expected = step(state, x), train_step(make_state(), x)
    same(got[1], expected[1])
    assert step.plan is step.compiled.plan and len(step._entries) == 1  # planned once


def test_a_saved_plan() -> None:
    plan = make_plan(train_step, jax.eval_shape(make_state), BATCH, cluster="cpu:8", mode="fsdp")
    step = compile_plan(train_step, plan)
    state = init(step, make_state, BATCH)
    assert {s.data.size for s in state["params"]["up"].addressable_shards} == {256 * 1024 // 8}
    same(state, make_state())


class Model(nnx.Module):
    """A tied layer, dropout with its own keys, a running mean."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(256, 1024, rngs=rngs)
        self.norm = nnx.BatchNorm(1024, rngs=rngs)
        self.down = nnx.Linear(1024, 256, rngs=rngs)
        self.tied = self.down
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x``: [rows, 256]."""
        return self.dropout(self.tied(nnx.relu(self.norm(self.up(x)))))


def test_nnx_objects() -> None:
    def make() -> tuple[Model, nnx.Optimizer]:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
        optimizer.update(model, grads)
        return value

    sharded = parallelize(step, mode="fsdp")
    model, optimizer = init(sharded, make, BATCH, unpack=True)
    other, its = make()
    assert model.tied is model.down
    kernel = model.up.kernel[...]
    assert {s.data.size for s in kernel.addressable_shards} == {256 * 1024 // 8}
    same(nnx.state(model, nnx.Param), nnx.state(other, nnx.Param))
    x = jax.random.normal(jax.random.key(3), (64, 256))
    for _ in range(3):
        np.testing.assert_allclose(
            sharded(model, optimizer, x), step(other, its, x), rtol=1e-5, atol=1e-6
        )


def test_equinox_modules() -> None:
    def make() -> eqx.nn.MLP:
        return eqx.nn.MLP(256, 256, 1024, 1, key=jax.random.key(0))

    def step(model: Any, x: jax.Array) -> Any:
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    sharded = parallelize(step, mode="fsdp")
    model = init(sharded, make, BATCH)
    assert model.activation is not None
    weight = model.layers[0].weight
    assert {s.data.size for s in weight.addressable_shards} == {256 * 1024 // 8}
    x = jnp.ones((64, 256))
    np.testing.assert_allclose(sharded(model, x)[1], step(make(), x)[1], rtol=1e-5)


def test_keywords_and_bad_requests() -> None:
    def step(state: Any, *, x: jax.Array) -> Any:
        return train_step(state, x)

    state = init(parallelize(step, mode="fsdp"), make_state, x=BATCH)
    same(state, make_state())
    with pytest.raises(RequestError, match="unpack=True, but make_state gives a dict"):
        init(parallelize(train_step), make_state, BATCH, unpack=True)
    with pytest.raises(RequestError, match="the step is a function; expected one from parallel"):
        init(train_step, make_state, BATCH)
    with pytest.raises(RequestError, match="make_state is a dict; expected a function"):
        init(parallelize(train_step), make_state(), BATCH)
    with pytest.raises(ModelError, match=r"gives a tuple of 2; init\(..., unpack=True\)"):
        init(parallelize(lambda a, b, c: (a, b)), lambda: (BATCH, BATCH), BATCH)


def test_state_in_host_memory() -> None:
    step = parallelize(train_step, mode="fsdp", offload=["opt.*mu"])
    state = init(step, make_state, BATCH)
    same(state, make_state())
    hosted = [leaf.path for leaf in step.plan.inputs if leaf.memory != "device"]
    assert len(hosted) == 2 and all("mu" in path for path in hosted)
    stored = step.compiled.in_shardings[0]["opt"][0].mu["up"]
    assert state["opt"][0].mu["up"].sharding.memory_kind == stored.memory_kind
    x = jnp.ones((64, 256))
    np.testing.assert_allclose(step(state, x)[1], train_step(make_state(), x)[1], rtol=1e-5)
