"""Flax NNX in its own style: modules, optimizers, metrics and random streams as arguments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from executor import compile_plan, parallelize, train
from executor.verify.check import check
from planner import ModelError, make_plan

pytestmark = pytest.mark.devices
DATA = "DATA_PARALLEL"


class CNN(nnx.Module):
    """The model of Flax's MNIST tutorial, smaller."""

    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.linear1 = nnx.Linear(4 * 4 * 8, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x))))
        x = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(self.dropout2(nnx.relu(self.linear1(x))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, logits


def train_step(model, optimizer, metrics, batch):
    """Train for a single step."""
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def objects(make=CNN):
    model = make(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def digits(step, rows=32):
    rng = np.random.default_rng(step)
    label = rng.integers(0, 10, rows).astype(np.int32)
    image = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
    image[np.arange(rows), label % 8, :, 0] += 2.0
    return {"image": image, "label": label}


def trained(step, steps=6):
    model, optimizer, metrics = objects()
    history = []
    for k in range(steps):
        step(model, optimizer, metrics, digits(k))
        history.append({name: float(value) for name, value in metrics.compute().items()})
        metrics.reset()
    return model, history


@pytest.fixture(scope="module")
def expected():
    return trained(nnx.jit(train_step))


STYLES = {
    "plain": lambda: parallelize(train_step),
    "nnx.jit inside": lambda: parallelize(nnx.jit(train_step), mode=DATA),
    "nnx.jit outside": lambda: nnx.jit(parallelize(train_step, mode=DATA)),
    "donated": lambda: parallelize(train_step, donate_argnums=(0, 1, 2), mode=DATA),
    "pinned": lambda: parallelize(
        train_step,
        mesh="data=4,model=2",
        shardings={r"linear1'\]\['kernel": jax.sharding.PartitionSpec(None, "model")},
    ),
}


QUICK = ("plain", "nnx.jit inside", "pinned")


@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in STYLES]
)
def test_mnist_trains_as_under_nnx_jit(style, expected):
    model, history = trained(STYLES[style]())
    assert history[-1]["loss"] < 0.95 * history[0]["loss"]
    for got, wanted in zip(history, expected[1], strict=True):
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=2e-5)
        assert got["accuracy"] == wanted["accuracy"]
    for got, wanted in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        jax.tree.leaves(nnx.state(expected[0], nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-5)
    assert int(model.dropout1.rngs.count[...]) == int(expected[0].dropout1.rngs.count[...]) == 6
    if style == "pinned":
        assert tuple(model.linear1.kernel[...].sharding.spec) == (None, "model")


def test_objects_stay_usable_and_lie_where_the_plan_says():
    step = parallelize(train_step, donate_argnums=(0, 1, 2))
    model, optimizer, metrics = objects()
    kernel = model.linear1.kernel
    for k in range(3):
        step(model, optimizer, metrics, digits(k))
    assert model.linear1.kernel is kernel
    leaves = jax.tree.leaves(nnx.state((model, optimizer, metrics)))
    assert not any(x.is_deleted() for x in leaves)
    assert all(len(x.devices()) == 8 for x in leaves)
    placed = {leaf.path: leaf.spec.entries for leaf in step.plan.inputs}
    assert tuple(kernel[...].sharding.spec) == placed["[0]['linear1']['kernel'].value"]


def test_the_plan_knows_the_state():
    model, optimizer, metrics = objects()
    plan = make_plan(train_step, model, optimizer, metrics, digits(0), cluster="cpu:8")
    ins, outs = [leaf.path for leaf in plan.inputs], [leaf.path for leaf in plan.outputs]
    assert "[0]['linear1']['kernel'].value" in ins
    assert "[1]['opt_state'][0]['mu']['linear1']['kernel'].value" in ins
    assert {p for p in ins if "kernel" in p} <= set(outs)
    assert sum(row.payload_bytes for row in plan.collectives) > 1000  # gradients are reduced


def test_abstract_modules_are_planned_alike():
    abstract = nnx.eval_shape(lambda: objects())
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, digits(0)))
    plan = make_plan(train_step, *abstract, shapes, cluster="cpu:8")
    assert plan == make_plan(train_step, *objects(), digits(0), cluster="cpu:8")
    model, optimizer, metrics = objects()
    step = compile_plan(train_step, plan, donate_argnums=(0, 1))
    before = np.asarray(model.linear2.bias[...])
    step(model, optimizer, metrics, digits(0))
    assert np.abs(np.asarray(model.linear2.bias[...]) - before).max() > 0
    report = check(train_step, plan, *objects(), digits(0))
    assert report.max_rel_difference < 1e-3


def test_an_evaluation_step_follows_and_leaves_the_model():
    step, model_optimizer_metrics = parallelize(train_step), objects()
    model, _, metrics = model_optimizer_metrics
    step(*model_optimizer_metrics, digits(0))
    model.eval()
    metrics.reset()
    evaluate = parallelize(eval_step, like=step)
    before = jax.device_get(nnx.state(model))
    evaluate(model, metrics, digits(1))
    twin = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    eval_step(nnx.merge(nnx.graphdef(model), before), twin, digits(1))
    np.testing.assert_allclose(metrics.compute()["loss"], twin.compute()["loss"], rtol=1e-5)
    assert not [leaf for leaf in evaluate.plan.outputs if leaf.path.startswith("[0]")]


class Tied(nnx.Module):
    """An output layer that shares its weights with the embedding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.out = self.embed
        self.rngs = rngs

    def __call__(self, x):
        h = self.embed(x) + 0.01 * self.rngs.normal((8,))
        return self.out.attend(h)


def test_shared_weights_nested_arguments_and_returned_objects():
    def step(bundle, batch):
        model, optimizer = bundle["model"], bundle["more"][0]

        def loss(model):
            logits = model(batch)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return {"loss": value, "model": model, "head": nnx.Param(value[None])}

    def run(f):
        model = Tied(nnx.Rngs(3))
        bundle = {"model": model, "more": (nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param),)}
        out = []
        for k in range(4):
            batch = np.random.default_rng(k).integers(0, 16, (8, 4)).astype(np.int32)
            result = f(bundle, batch)
            assert result["model"] is model and model.embed is model.out
            assert isinstance(result["head"], nnx.Param)
            out.append(float(result["loss"]))
        return out

    np.testing.assert_allclose(run(parallelize(step)), run(nnx.jit(step)), rtol=1e-5)


def test_new_variables_plan_again_once():
    class Lazy(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            h = self.linear(x)
            if not hasattr(self, "mean"):
                self.mean = nnx.BatchStat(jnp.zeros(8))
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * h.mean(0)
            return h - self.mean[...]

    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        )
        return loss

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    runs = []
    for f in (parallelize(step), nnx.jit(step)):
        model = Lazy(nnx.Rngs(0))
        runs.append(([float(f(model, x)) for _ in range(4)], np.asarray(model.mean[...])))
        if f is not step and hasattr(f, "_entries"):
            assert len(f._entries) == 2
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-5)
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-4, atol=1e-6)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    """Layers made by ``nnx.vmap`` and run by ``nnx.scan``, each under ``nnx.remat``."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.split(3))
        self.head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def layer(x, block):
            return block(x)

        return self.head(layer(self.embed(tokens), self.blocks))


def transformer_step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def transformer_losses(step, steps=5):
    model = Transformer(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
    return [float(step(model, optimizer, tokens)) for _ in range(steps)]


def test_a_transformer_of_scanned_layers():
    expected = transformer_losses(nnx.jit(transformer_step))
    got = transformer_losses(parallelize(transformer_step, donate_argnums=(0, 1)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got[-1] < got[0] - 0.2


def test_a_state_stays_a_pytree():
    graphdef, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))

    def step(state, x):
        model = nnx.merge(graphdef, state)
        model.kernel[...] = model.kernel[...] * 0.5
        return nnx.state(model), model(x).sum()

    before = np.asarray(state["kernel"][...])
    new, _ = parallelize(step)(state, np.ones((8, 8), np.float32))
    np.testing.assert_array_equal(state["kernel"][...], before)
    np.testing.assert_array_equal(new["kernel"][...], before * 0.5)


def test_a_module_of_a_bound_method_is_an_argument():
    class Trainer(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((8, 8)))

        def step(self, x):
            self.weight[...] -= 0.1 * x
            return self.weight[...].sum()

    trainer = Trainer()
    step = parallelize(trainer.step)
    assert float(step(np.ones((8, 8), np.float32))) == pytest.approx(57.6)
    assert float(step(np.ones((8, 8), np.float32))) == pytest.approx(51.2)
    assert float(trainer.weight[...].sum()) == pytest.approx(51.2)


def test_a_module_that_is_closed_over_is_an_error():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def step(x):
        model.kernel[...] = model.kernel[...] + x.sum()
        return model(x)

    with pytest.raises(ModelError, match="trace level"):
        parallelize(step)(np.ones((8, 8), np.float32))


def test_cached_partial_updates_the_model():
    def run(f):
        model = Transformer(nnx.Rngs(1))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step = nnx.cached_partial(f, model, optimizer)
        tokens = np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)
        losses = [float(step(tokens)) for _ in range(3)]
        return losses, np.asarray(model.head.bias[...])

    got, expected = run(parallelize(transformer_step)), run(nnx.jit(transformer_step))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-3, atol=1e-6)


def test_a_cached_model_that_a_step_changes_is_an_error():
    def step(model, x):
        model.scale = nnx.Variable(x.sum())
        return model(x)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"attributes of an object that nnx\.cached_partial"):
        nnx.cached_partial(parallelize(step), model)(np.ones((8, 8), np.float32))


def test_a_training_loop_goes_on_from_its_checkpoint_in_the_same_objects(tmp_path):
    def step(state, batch):
        model, optimizer, metrics = state
        train_step(model, optimizer, metrics, batch)
        return state, metrics.compute()

    def run(folder, steps, state):
        batches = (digits(k) for k in range(8))
        train(parallelize(step), state, batches, steps=steps, directory=folder, progress=False)
        return nnx.state(state[0]), nnx.state(state[1])

    whole = run(tmp_path / "whole", 6, objects())
    run(tmp_path / "parts", 3, objects())
    state = objects()
    parts = run(tmp_path / "parts", 6, state)
    both = zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True)
    for a, b in both:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
    assert int(state[1].step[...]) == 6


def test_a_configuration_with_a_list_and_its_change_in_place(caplog):
    """Gemma's configuration holds a list: it can't be hashed, and it may be changed."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        scales: list

    class Model(nnx.Module):
        def __init__(self, config, *, rngs):
            self.config = config
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            for scale in self.config.scales:
                x = jnp.tanh(self.layer(x)) * scale
            return x

    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss

    x = jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)
    model, plain = (Model(Config([1.0, 2.0]), rngs=nnx.Rngs(0)) for _ in range(2))
    run = parallelize(step)
    for _ in range(2):
        np.testing.assert_allclose(run(model, x), step(plain, x), rtol=1e-5)
    assert not caplog.records
    for one in (model, plain):
        one.config.scales.append(3.0)
    np.testing.assert_allclose(run(model, x), step(plain, x), rtol=1e-5)
    assert any("planning again" in r.message for r in caplog.records)
