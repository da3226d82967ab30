"""How a step may be called: static and keyword arguments, methods, partials, other objects."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from executor import parallelize
from planner import ModelError, RequestError, make_plan
from tests.executor.executor_steps import assert_same, batch_of, plain_state, plain_step

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def scaled(kind, x, scale=2.0, *, shift=0.0):
    """Doc."""
    if kind == "up":
        return x * scale + shift
    return x / scale - shift


FORMS = [
    {"static_argnums": 0},
    {"static_argnames": "kind"},
    {"static_argnames": ("kind", "scale")},
    {"static_argnums": (0, 2), "static_argnames": "shift"},
]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_static_and_keyword_arguments_are_those_of_jit(options):
    planned, jitted = parallelize(scaled, **options), jax.jit(scaled, **options)
    for f in (
        lambda f: f("up", X),
        lambda f: f("down", X, 4.0),
        lambda f: f("up", x=X, scale=3.0),
        lambda f: f("up", X, shift=1.0),
        lambda f: f("down", scale=8.0, x=X, shift=2.0),
    ):
        np.testing.assert_array_equal(f(planned), f(jitted))


def test_static_values_are_compared():
    traces = []

    def step(x, mode):
        traces.append(mode)
        return x + len(mode)

    run = parallelize(step, static_argnames="mode")
    for mode in ("a", "bb", "a", "bb", "a"):
        np.testing.assert_array_equal(run(X, mode), X + len(mode))
    count = len(traces)
    run(X, mode="a")
    assert len(traces) == count and set(traces) == {"a", "bb"}


def test_positions_in_plans_stay():
    step = parallelize(lambda name, state, batch: plain_step(state, batch), static_argnums=0)
    step("x", plain_state(), batch=batch_of())
    paths = [leaf.path for leaf in step.plan.inputs]
    assert {p[:3] for p in paths} == {"[1]", "[2]"}
    plan = make_plan(
        lambda name, state, batch: plain_step(state, batch),
        "x",
        plain_state(),
        batch_of(),
        cluster="cpu:8",
        static_argnums=0,
        donate_argnums=(),
    )
    assert plan == step.plan


def test_keywords_are_arguments():
    step = parallelize(plain_step)
    first = step(plain_state(), batch=batch_of())
    assert_same(first, jax.jit(plain_step)(plain_state(), batch_of()))
    plan = step.plan
    step(batch=batch_of(), state=plain_state())
    assert step.plan is plan
    with pytest.raises(ModelError, match="unexpected keyword argument 'bach'"):
        step(plain_state(), bach=batch_of())


@pytest.mark.parametrize("how", ["donate_argnums", "donate_argnames"])
def test_donated_by_name_or_number(how):
    step = parallelize(plain_step, mode="DATA_PARALLEL", **{how: 0 if "nums" in how else "state"})
    state, _ = step(plain_state(), batch_of())
    step(state, batch_of())
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_bad_names_and_numbers():
    for options, text in (
        ({"static_argnames": "nothing"}, "has no argument 'nothing'"),
        ({"static_argnums": 5}, "positional arguments, got 5"),
        ({"static_argnums": 0, "donate_argnums": 0}, "static and donated at once"),
        ({"max_plans": 0}, "max_plans=0"),
    ):
        with pytest.raises(RequestError, match=text):
            parallelize(scaled, **options)
    with pytest.raises(RequestError, match=r"static argument 0 is a list"):
        parallelize(scaled, static_argnums=0)(["up"], X)


def test_partials_methods_and_callable_objects():
    class Model:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, x):
            return x @ self.weight

        @parallelize
        def decorated(self, x):
            return x @ self.weight

        def plain(self, x):
            return x @ self.weight

    model = Model(jnp.eye(8) * 2)
    part = parallelize(functools.partial(scaled, "up", shift=1.0))
    np.testing.assert_array_equal(part(X), X * 2 + 1)
    assert part.__name__ == "scaled"
    plain = parallelize(model.plain)
    for factor in (2, 3):  # another weight is seen, not the one of the first trace
        model.weight = jnp.eye(8) * factor
        np.testing.assert_array_equal(model.decorated(X), X * factor)
        np.testing.assert_array_equal(plain(X), X * factor)
    assert model.decorated.plan.cluster == "cpu:8"
    assert Model.decorated.__name__ == "decorated"
    np.testing.assert_array_equal(parallelize(model)(X), X * 3)


def test_nnx_objects_that_are_constants_are_said(caplog):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(RequestError, match="holds the NNX object Linear"):
        parallelize(functools.partial(lambda model, x: model(x), model))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        parallelize(lambda x: (x, model(x)))(X)
    assert any("reads the NNX object 'model'" in r.getMessage() for r in caplog.records)


def test_traced_values_on_a_static_object_are_an_error():
    class Trainer:
        @parallelize
        def step(self, x):
            self.last = x * 2
            return x.sum()

    with pytest.raises(ModelError, match=r"assigns a traced value to 'last'.*Trainer"):
        Trainer().step(X)


def test_attributes_are_those_of_jit():
    step = parallelize(scaled, static_argnums=0)
    assert (step.__name__, step.__doc__, step.__wrapped__) == ("scaled", "Doc.", scaled)
    assert not hasattr(step, "plan") and not hasattr(step, "compiled")
    lowered = step.lower("up", X)
    assert "stablehlo" in lowered.as_text()
    assert hasattr(step, "plan")
    text = step.lower("up", jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile().as_text()
    assert "HloModule" in text


def test_leaves_that_are_no_arrays_come_back():
    def step(state, batch):
        return {**state, "w": state["w"] - batch.mean(0)}, {"loss": state["w"].sum(), "tag": "x"}

    state = {"w": jnp.ones(8), "act": jax.nn.relu, "name": "a", "none": None}
    run = parallelize(step)
    for _ in range(3):
        state, metrics = run(state, X)
    assert metrics["tag"] == "x" and state["act"] is jax.nn.relu and state["name"] == "a"
    np.testing.assert_allclose(state["w"], 1 - 3 * X.mean(0))
    assert len(run._entries) == 1


def test_under_another_transformation_the_plan_is_used():
    step = parallelize(plain_step)
    outer = jax.jit(lambda state, batch: step(state, batch))
    state, expected = plain_state(), plain_state()
    for k in range(3):
        state, metrics = outer(state, batch_of(seed=k))
        expected, wanted = jax.jit(plain_step)(expected, batch_of(seed=k))
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
    assert_same(state, expected)
    assert step.plan.mesh.num_devices == 8
    assert_same(step(plain_state(), batch_of()), jax.jit(plain_step)(plain_state(), batch_of()))
    loss = parallelize(lambda w, x: jnp.sum((x @ w) ** 2))
    got = jax.grad(loss)(jnp.ones((8, 8)), X)
    np.testing.assert_allclose(got, jax.grad(loss.__wrapped__)(jnp.ones((8, 8)), X), rtol=1e-5)


def test_plans_are_bounded(caplog):
    step = parallelize(lambda s, x: (s + x.sum(), x), mode="STAND_ALONE", max_plans=3)
    s = jnp.zeros(())
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for rows in (1, 2, 3, 1, 4):
            s, _ = step(s, np.ones(rows, np.float32))
    assert float(s) == 11
    shapes = {key[2][1][0] for key in step._entries}
    assert shapes == {(3,), (1,), (4,)}
    said = [r.getMessage() for r in caplog.records if "dropped" in r.getMessage()]
    assert len(said) == 1 and "more than 3 planned steps" in said[0]


COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
@pytest.mark.parametrize("batches", ["numpy", "jax", "committed"])
@pytest.mark.parametrize("states", ["numpy", "jax", "committed"])
def test_compiles_once(states, batches, donate):
    counted = []

    def listen(name, seconds, **_):
        if name == COMPILED:
            counted.append(name)

    def step(state, batch):
        loss = jnp.mean(jnp.tanh(batch @ state["w"]) ** 2)
        return {"w": state["w"] * state["rate"], "rate": state["rate"], "n": state["n"] + 1}, loss

    def put(kind, tree, device):
        if kind == "committed":
            return jax.device_put(tree, jax.devices()[device])
        return tree if kind == "numpy" else jax.tree.map(jnp.asarray, tree)

    run = parallelize(step, donate_argnums=donate)
    state = put(states, {"w": X / 64, "rate": 0.5, "n": 0}, 0)
    each = []
    given = [jax.block_until_ready(put(batches, X + k, 1)) for k in range(3)]
    run.prepare(state, given[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in given:
            counted.clear()
            state, _ = run(state, batch)
            each.append(len(counted))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert each[1:] == [0, 0] and each[0] >= 1


def test_python_numbers_and_arrays_promote_as_under_jit():
    def step(w, scale):
        return w.astype(jnp.bfloat16) * scale, (w * scale).sum()

    planned, jitted = parallelize(step), jax.jit(step)
    w = jnp.ones((8, 8))
    for scale in (2.0, np.float32(2), 3.0, jnp.float32(3), np.float64(2), jnp.asarray(2.0)):
        got, expected = planned(w, scale), jitted(w, scale)
        assert got[0].dtype == expected[0].dtype
        np.testing.assert_array_equal(got[1], expected[1])
    assert len(planned._entries) == 2


def test_a_state_whose_weak_types_settle_takes_the_same_plan(caplog):
    def step(state, x):
        return {"w": state["w"] - x.mean(), "loss": (x * state["w"]).sum()}

    run, state = parallelize(step), {"w": jnp.ones((8, 8)), "loss": 0.0}
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for _ in range(3):
            state = run(state, X)
    assert "planning again" not in caplog.text
    assert len({id(entry.step.plan) for entry in run._entries.values()}) == 1


@pytest.mark.parametrize("mode", ["DATA_PARALLEL", "AUTO_PARALLEL"])
def test_an_array_that_is_donated_twice_is_copied(mode):
    def step(state, x):
        w = state["w"] - x.mean()
        return {"w": w, "mean": 0.9 * state["mean"] + 0.1 * w}, state["mean"].sum()

    run = parallelize(step, donate_argnums=0, mode=mode)
    plain, w, same = jax.jit(step), jnp.ones((8, 8)), jnp.ones((8, 8))
    state, expected = {"w": w, "mean": w}, {"w": same, "mean": same}
    for k in range(4):
        if k == 2:  # the average starts anew, as target networks do
            state, expected = {**state, "mean": state["w"]}, {**expected, "mean": expected["w"]}
        state, mean = run(state, X)
        expected, wanted = plain(expected, X)
        np.testing.assert_allclose(mean, wanted, rtol=1e-6)
    assert_same(state, expected)


def test_attributes_of_self_that_change_are_seen(caplog):
    class Part:
        weight, factor = jnp.ones((8, 8)), 2.0

        def __init__(self):
            self.weight, self.factor = Part.weight, Part.factor

    class Trainer:
        def __init__(self):
            self.scale, self.part, self.options, self.calls = 2.0, Part(), {"shift": 1.0}, 0

        def shifted(self, x):
            return x + self.options["shift"]

        def evaluate(self, x):
            scaled = lambda w: w * self.scale * self.part.factor  # noqa: E731
            return self.shifted((x @ scaled(self.part.weight)).sum())

    trainer = Trainer()
    step = parallelize(trainer.evaluate)
    assert step(X) == trainer.evaluate(X)
    plan = step.plan
    trainer.calls += 1  # the step does not read it
    assert step(X) == trainer.evaluate(X) and step.plan is plan
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        trainer.scale = 3.0
        assert step(X) == trainer.evaluate(X)
    assert "['self'].scale was 2.0, is 3.0" in caplog.text
    trainer.part.factor = 5.0
    assert step(X) == trainer.evaluate(X)
    trainer.part.weight = jnp.ones((8, 8)) * 7
    assert step(X) == trainer.evaluate(X)
    trainer.options["shift"] = 2.0
    assert step(X) == trainer.evaluate(X)
    assert len(step._entries) == 5


def test_a_callable_object_is_an_argument_of_its_call():
    @dataclasses.dataclass
    class Step:
        rate: float
        weight: jax.Array

        def __call__(self, x):
            return self.weight - self.rate * x

    class Layer(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            return x * self.count[...]

    plain, layer = Step(0.5, jnp.ones((8, 8))), Layer()
    step, run = parallelize(plain), parallelize(layer)
    assert (step.__name__, run.__name__) == ("Step", "Layer")
    for rate in (0.5, 0.25):
        plain.rate = rate
        np.testing.assert_array_equal(step(X), 1 - rate * X)
    plain.weight = jnp.zeros((8, 8))
    np.testing.assert_array_equal(step(X), -0.25 * X)
    for k in (1, 2, 3):
        np.testing.assert_array_equal(run(X), X * k)
    assert float(layer.count[...]) == 3


class Trainer:
    """Holds the model that its step takes as an argument."""

    def __init__(self, reads: bool) -> None:
        self.model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.scale, self.name = 2.0, "model" if reads else ""

    def step(self, model: nnx.Linear, x: jax.Array) -> jax.Array:
        own = getattr(self, self.name).bias.get_value().sum() if self.name else 0.0

        def loss(m: nnx.Linear) -> jax.Array:
            return self.scale * jnp.mean(m(x) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return value + own


@pytest.mark.parametrize("reads", [False, True])
def test_a_trainer_that_holds_the_model(reads: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its arrays are new at every call; they matter where a step reads them from the object, by
    whatever name."""
    mine, plain = Trainer(reads), Trainer(reads)
    run = parallelize(mine.step)
    for turn in range(4):
        x = jnp.full((16, 8), 1.0 + turn)
        want = plain.step(plain.model, x)
        np.testing.assert_allclose(run(mine.model, x), want, rtol=1e-5)
    assert ("planning again" in caplog.text) == reads
    mine.scale = plain.scale = 3.0
    np.testing.assert_allclose(run(mine.model, x), plain.step(plain.model, x), rtol=1e-5)
