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
