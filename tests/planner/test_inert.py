"""Steps that do not train are said to: in the plan, and first."""

import logging

import jax
import jax.numpy as jnp
import pytest

from executor import parallelize
from planner import make_plan

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def loss_of(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def trains(state, x):
    return {"w": state["w"] - 0.1 * jax.grad(loss_of)(state["w"], x)}, loss_of(state["w"], x)


def scans(state, x):
    def layer(h, _):
        return jnp.tanh(h @ state["w"]), None

    loss = jnp.mean(jax.lax.scan(layer, x, None, length=3)[0])
    return {"w": state["w"] * 0.9}, loss


def only_state(state, x):
    return {"w": state["w"] - 0.1 * jax.grad(loss_of)(state["w"], x)}


def evaluates(state, x):
    return loss_of(state["w"], x)


def unchanged(state, x):
    return state, loss_of(state["w"], x)


def apart(state, x):
    return {"w": state["w"] * 0.9}, jnp.mean(x)


@pytest.mark.parametrize(
    "step, said",
    [
        (trains, None),
        (scans, None),
        (only_state, None),
        (evaluates, "no argument comes back as a result"),
        (unchanged, "every argument that comes back comes back unchanged"),
        (apart, "the loss does not depend on the parameters"),
    ],
)
def test_a_step_that_does_not_train_says_so_first(step, said, caplog):
    plan = make_plan(step, {"w": W}, X, cluster="cpu:8")
    words = ("comes back", "depend")
    if said is None:
        assert not [n for n in plan.notes if any(w in n for w in words)]
    else:
        assert said in plan.notes[0]
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        parallelize(step, mode="STAND_ALONE").prepare({"w": W}, X)
    messages = [r.getMessage() for r in caplog.records]
    assert [m for m in messages if said and said in m] or (said is None and not messages)


def test_an_argument_that_nothing_reads_is_named():
    def step(params, state, x):
        return {"w": state["w"] * 0.9}, jnp.sum(state["w"]) * jnp.mean(x)

    plan = make_plan(step, {"kernel": W, "bias": W[0]}, {"w": W}, X, cluster="cpu:8")
    assert plan.notes[0].startswith("no result depends on argument [0] (2 arrays)")
