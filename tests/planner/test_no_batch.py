"""Steps that make their own examples, as reinforcement learning does: no argument holds a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from planner import make_plan

ADAM = optax.adam(1e-3)
WORLDS, WIDTH, HIDDEN, TURNS = 4096, 64, 512, 8


def policy(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"]


def step(learner: Any, world: jax.Array, key: jax.Array) -> Any:
    """Some turns of many worlds, then an update per group of what was seen."""

    def turn(x: jax.Array, k: jax.Array) -> Any:
        act = policy(learner[0], x) + 0.1 * jax.random.normal(k, x.shape)
        return jnp.sin(x + 0.1 * act), (x, act, -jnp.sum(x**2, -1))

    world, seen = jax.lax.scan(turn, world, jax.random.split(key, TURNS))
    rows = jax.tree.map(lambda x: x.reshape(WORLDS * TURNS, *x.shape[2:]), seen)
    groups = jax.tree.map(
        lambda x: jax.random.permutation(key, x).reshape(4, -1, *x.shape[1:]), rows
    )

    def learn(carry: Any, group: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            x, act, gain = group
            return jnp.mean(jnp.sum((policy(p, x) - act) ** 2, -1) * gain)

        p, o = carry
        value, grads = jax.value_and_grad(loss)(p)
        updates, o = ADAM.update(grads, o, p)
        return (optax.apply_updates(p, updates), o), value

    learner, losses = jax.lax.scan(learn, learner, groups)
    return learner, world, losses.mean()


def arguments() -> Any:
    p = {"a": jnp.zeros((WIDTH, HIDDEN)), "b": jnp.zeros((HIDDEN, WIDTH))}
    return (p, ADAM.init(p)), jnp.zeros((WORLDS, WIDTH)), jax.random.key(0)


@pytest.mark.parametrize(
    "options", [{"mode": "dp"}, {"mode": "fsdp"}, {"zero": 1, "mesh": "data=8"}]
)
def test_modes_split_what_the_step_makes(options: dict[str, Any]) -> None:
    plan = make_plan(step, *jax.eval_shape(arguments), cluster="h100:8", **options)
    free = make_plan(step, *jax.eval_shape(arguments), cluster="h100:8", mesh="data=8")
    assert plan.strategy.endswith("over 8; no argument holds a batch")
    assert plan.prediction.step_s < 1.5 * free.prediction.step_s
    told = [note for note in plan.notes if "no argument holds a batch" in note]
    assert len(told) == ("mode" in options)
    moments = {leaf.path: leaf.spec.axes for leaf in plan.inputs if "u[" in leaf.path}
    assert len(moments) == 4
    assert all(bool(axes) == (options.get("mode") != "dp") for axes in moments.values())


def test_environments_in_the_state_are_no_parameters() -> None:
    """Large worlds that are split, and weights that all devices have, are data parallel."""

    def advance(s: Any) -> Any:
        def loss(p: Any) -> Any:
            def turn(world: jax.Array, key: jax.Array) -> Any:
                scores = policy(p, world)
                act = jax.random.categorical(key, scores)
                chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), act[:, None], 1)
                return 0.9 * world + jax.nn.one_hot(act, WIDTH), (chosen[:, 0], world.sum(-1))

            world, (chosen, gain) = jax.lax.scan(turn, s["env"], jax.random.split(s["key"], TURNS))
            return -jnp.mean(chosen * jax.lax.stop_gradient(gain)), world

        (value, world), grads = jax.value_and_grad(loss, has_aux=True)(s["p"])
        updates, o = ADAM.update(grads, s["o"], s["p"])
        p = optax.apply_updates(s["p"], updates)
        return {"p": p, "o": o, "env": world, "key": jax.random.fold_in(s["key"], 1)}, value

    (p, o), _, key = jax.eval_shape(arguments)
    env = jax.ShapeDtypeStruct((1 << 16, WIDTH), jnp.float32)
    plan = make_plan(advance, {"p": p, "o": o, "env": env, "key": key}, cluster="h100:8")
    assert plan.strategy.startswith("data parallel over 8")
    assert plan.mesh.names == ("data",)
