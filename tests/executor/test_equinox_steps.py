"""Equinox modules: functions and other leaves that are no arrays."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from executor import parallelize, train
from planner import make_plan

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.devices

OPTIMIZER = optax.adam(1e-2)
DATA = "DATA_PARALLEL"


class Net(eqx.Module):
    layers: list
    drop: eqx.nn.Dropout
    final: object
    label: str

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.layers = [eqx.nn.Linear(16, 64, key=a), jax.nn.relu, eqx.nn.Linear(64, 10, key=b)]
        self.drop = eqx.nn.Dropout(0.1)
        self.final, self.label = jnp.tanh, "net"

    def __call__(self, x, key):
        for layer in self.layers:
            x = layer(x)
        return self.final(self.drop(x, key=key))


def loss_fn(model, x, y, key):
    logits = jax.vmap(model)(x, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train_step(model, opt_state, x, y, key):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y, key)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def begin():
    model = Net(jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def batch(step):
    x = np.random.default_rng(step).normal(size=(32, 16)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32), jax.random.key(step)


def trained(step):
    (model, opt_state), losses = begin(), []
    for k in range(6):
        model, opt_state, loss = step(model, opt_state, *batch(k))
        losses.append(float(loss))
    return model, losses


STYLES = {
    "plain": lambda: parallelize(train_step),
    "filter_jit inside": lambda: parallelize(eqx.filter_jit(train_step), mode=DATA),
    "filter_jit outside": lambda: eqx.filter_jit(parallelize(train_step, mode=DATA)),
    "donated": lambda: parallelize(train_step, donate_argnums=(0, 1), mode=DATA),
}


@pytest.mark.parametrize("style", STYLES)
def test_training_equals_filter_jit(style):
    expected, wanted = trained(eqx.filter_jit(train_step))
    model, losses = trained(STYLES[style]())
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert model.layers[1] is expected.layers[1] and model.final is expected.final
    assert (model.label, model.drop.p, model.drop.inference) == ("net", 0.1, False)
    np.testing.assert_allclose(model.layers[0].weight, expected.layers[0].weight, atol=1e-5)


def test_other_static_leaves_plan_again(caplog):
    step, alone = parallelize(train_step, mode=DATA), eqx.filter_jit(train_step)
    model, opt_state = begin()
    other = eqx.tree_at(lambda m: m.final, model, jnp.sin)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for given in (model, other, eqx.nn.inference_mode(model), model, other):
            got = step(given, opt_state, *batch(0))[2]
            wanted = alone(given, opt_state, *batch(0))[2]
            np.testing.assert_allclose(got, wanted, rtol=1e-5)
    said = [r.getMessage() for r in caplog.records if "planning again" in r.getMessage()]
    assert len(said) == 2
    assert "[0].final was tanh, is sin" in said[0]
    assert "[0].drop.inference was False, is True" in said[1]


def test_the_plan_knows_the_state():
    plan = make_plan(train_step, *begin(), *batch(0), cluster="cpu:8")
    paths = [leaf.path for leaf in plan.outputs]
    assert "[0].layers[0].weight" in paths and "[1][0].mu.layers[0].weight" in paths
    assert len(plan.inputs) == 4 + 9 + 3


def test_batch_norm_with_state():
    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.linear = eqx.nn.Linear(16, 8, key=key)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def step(model, state, x):
        def loss(model):
            out, new = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                x, state
            )
            return jnp.mean((out - 1.0) ** 2), new

        (value, new), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), new, value

    def run(f):
        model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
        losses = []
        for k in range(3):
            model, state, value = f(model, state, batch(k)[0])
            losses.append(float(value))
        return losses

    np.testing.assert_allclose(
        run(parallelize(step, mode=DATA)), run(eqx.filter_jit(step)), rtol=1e-5
    )


def test_numbers_outside_modules_are_traced():
    seen = []

    def step(model, rate):
        seen.append(isinstance(rate, jax.core.Tracer))
        return model, rate * 2

    run = parallelize(step, mode=DATA)
    model = begin()[0]
    assert [float(run(model, r)[1]) for r in (0.5, 0.25)] == [1.0, 0.5]
    assert all(seen) and len(run._entries) == 1


def test_a_training_loop_goes_on_from_its_checkpoint(tmp_path):
    def step(state, batch):
        *state, loss = train_step(*state, *batch)
        return tuple(state), {"loss": loss}

    def run(folder, steps):
        batches = (batch(k) for k in range(8))
        done = train(
            parallelize(step), begin(), batches, steps=steps, directory=folder, progress=False
        )
        return done.state

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)
    parts = run(tmp_path / "parts", 6)
    assert parts[0].final is jnp.tanh and parts[0].label == "net"
    both = (jax.tree.leaves(eqx.filter(state, eqx.is_array)) for state in (whole, parts))
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(parts[1][0].count) == 6
