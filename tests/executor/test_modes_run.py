"""Every mode runs, computes the same numbers and keeps the marks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from executor import parallelize
from planner import MODES, PinError, set_parallel_mode, shard
from tests.executor.executor_steps import assert_same, batch_of, large_args, plain_state, plain_step

pytestmark = pytest.mark.devices
P = jax.sharding.PartitionSpec


def marked_step(state, batch):
    """``plain_step`` with its hidden layer and first matrix marked."""

    def loss_fn(state):
        up = shard(state["up"], None, "model")
        h = shard(jnp.tanh(batch["x"] @ up), "data", "model")
        return jnp.mean((h @ state["down"] - batch["y"]) ** 2), h

    (loss, h), grads = jax.value_and_grad(loss_fn, has_aux=True)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss, "hidden": h}


MARKED = ("HYBRID_PARALLEL", "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL")


@pytest.mark.parametrize(
    "mode, step",
    [*((m, plain_step) for m in MODES), *((m, marked_step) for m in MARKED)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_mode_runs(mode, step):
    set_parallel_mode(mode)
    run = parallelize(step)
    state, batch = plain_state(), batch_of()
    assert_same(run(state, batch), jax.jit(step)(state, batch))
    assert run.plan.mode == mode
    assert not run.plan.fallbacks
    assert run.plan.mesh.num_devices == (1 if mode == "STAND_ALONE" else 8)


def specs(plan):
    return {leaf.path: leaf.spec.entries for leaf in plan.inputs}


def test_data_parallel_splits_the_batch_and_nothing_else():
    run = parallelize(plain_step, mode="DATA_PARALLEL")
    state, _ = run(*large_args())
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state))
    got = specs(run.plan)
    assert got["[1]['x']"][:1] == got["[1]['y']"][:1] == ("data",)
    assert {r.kind for r in run.plan.collectives} == {"all_reduce"}


@pytest.mark.parametrize("mode", MARKED)
def test_marks_are_honoured_in_what_comes_out(mode):
    run = parallelize(marked_step, mode=mode, mesh="data=4,model=2")
    state, metrics = run(plain_state(), batch_of())
    assert metrics["hidden"].sharding.spec == P("data", "model")
    assert state["up"].sharding.spec == P(None, "model")
    module = run.compiled.jitted.lower(plain_state(), batch_of()).compile()
    assert module.output_shardings[0]["up"].spec == P(None, "model")
    assert module.input_shardings[0][0]["up"].spec == P(None, "model")
    if mode == "HYBRID_PARALLEL":
        assert specs(run.plan)["[1]['x']"] in ((), (None, None))
    if mode == "SEMI_AUTO_PARALLEL":
        assert specs(run.plan)["[1]['x']"][0] == "data"


def test_mark_names_make_the_mesh():
    run = parallelize(marked_step, mode="HYBRID_PARALLEL")
    run(plain_state(), batch_of())
    assert set(run.plan.mesh.names) == {"data", "model"}


def test_stand_alone_ignores_the_other_devices():
    run = parallelize(plain_step, mode="STAND_ALONE")
    state, _ = run(plain_state(), batch_of())
    assert state["up"].sharding.device_set == {jax.devices()[0]}
    assert not run.plan.collectives


@pytest.mark.parametrize("mode", ["HYBRID_PARALLEL", "AUTO_PARALLEL"])
def test_path_rules_and_jax_constraints(mode):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    wanted = jax.sharding.NamedSharding(mesh, P(None, "model"))

    def step(state, batch):
        up = jax.lax.with_sharding_constraint(state["up"], wanted)
        return plain_step({**state, "up": up}, batch)

    rules = {r"'x'": P("data"), r"'down'": P("model")}
    run = parallelize(step, mode=mode, mesh="data=2,model=4", shardings=rules)
    state, metrics = run(plain_state(), batch_of())
    assert_same((state, metrics), jax.jit(plain_step)(plain_state(), batch_of()))
    assert state["down"].sharding.spec == P("model")
    assert any(c.spec.entries == (None, "model") for c in run.plan.constraints)


def test_flax_metadata_is_honoured():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
    model = linen.Dense(16, kernel_init=init)
    params = model.init(jax.random.key(0), jnp.zeros((1, 8)))

    def step(params, batch):
        def loss(p):
            return jnp.mean(model.apply(p, batch["x"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    run = parallelize(step, mode="HYBRID_PARALLEL", mesh="data=2,model=4")
    got = run(params, batch_of())
    assert got["params"]["kernel"].value.sharding.spec == P(None, "model")
    assert_same(got, jax.jit(step)(params, batch_of()))


def test_nnx_metadata_is_honoured():
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        graphdef, state = nnx.split(nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0)))

    def step(state, batch):
        def loss(s):
            return jnp.mean(nnx.merge(graphdef, s)(batch["x"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    run = parallelize(step, mode="HYBRID_PARALLEL", mesh="data=2,model=4")
    got = run(state, batch_of())
    assert specs(run.plan)[next(p for p in specs(run.plan) if "kernel" in p)] == (None, "model")
    assert_same(got, jax.jit(step)(state, batch_of()))


def test_marks_that_can_not_hold_are_refused_by_name():
    def uneven(state, batch):
        return shard(state["up"], "model"), jnp.sum(batch["x"])

    with pytest.raises(PinError, match=r"test_modes_run\.py:\d+: mark"):
        parallelize(uneven, mesh="model=8", mode="HYBRID_PARALLEL")(
            {"up": jnp.ones((6, 4))}, batch_of()
        )


@pytest.mark.parametrize("search", ["recursive_programming", "dynamic_programming", "ilp"])
def test_plans_of_every_search_run(search):
    run = parallelize(plain_step, search=search, mesh="data=4,model=2")
    assert_same(run(plain_state(), batch_of()), jax.jit(plain_step)(plain_state(), batch_of()))


@pytest.mark.parametrize("mode", ["DATA_PARALLEL", "AUTO_PARALLEL"])
@pytest.mark.parametrize("zero", [1, 3])
def test_zero_levels_run(zero, mode):
    run = parallelize(plain_step, mode=mode, mesh="data=8", zero=zero)
    state, batch = plain_state(), batch_of()
    assert_same(run(state, batch), jax.jit(plain_step)(state, batch))
    split = {path: "data" in str(entries) for path, entries in specs(run.plan).items()}
    assert any(split[p] for p in split if p.startswith("[0]")) == (zero == 3)


def test_logical_axis_rules_reach_the_compiled_step():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_logical_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            )
            h = linen.Dense(64, kernel_init=init)(x)
            return linen.with_logical_constraint(jnp.tanh(h), ("batch", "mlp"))

    model, x = Model(), jax.random.normal(jax.random.key(1), (16, 8))
    params = model.init(jax.random.key(0), x)
    rules = (("batch", "data"), ("mlp", "model"))
    run = parallelize(model.apply, mesh="data=4,model=2", logical_axis_rules=rules)
    out = run(params, x)
    assert out.sharding.spec == P("data", "model")
    np.testing.assert_allclose(out, model.apply(params, x), rtol=1e-5, atol=1e-6)
    with linen.logical_axis_rules(rules):  # what is in force when the step is called
        ambient = parallelize(model.apply, mesh="data=4,model=2")
        assert ambient(params, x).sharding.spec == P("data", "model")
    assert ambient.plan == run.plan


def test_random_keys_under_logical_axis_rules():
    """A number folded into a key was of the mesh of the names."""

    def step(w, x, key):
        def loss(w):
            noise = jax.random.normal(jax.random.fold_in(key, 3), x.shape)
            return jnp.mean((x @ w + noise) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    args = (jnp.ones((8, 8)), jnp.ones((16, 8)), jax.random.key(2))
    run = parallelize(step, mesh="data=2,model=4", logical_axis_rules=(("embed", "model"),))
    for got, want in zip(run(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_where_arrays_lie_is_a_mark():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    state = plain_state()
    state["up"] = jax.device_put(state["up"], jax.sharding.NamedSharding(mesh, P(None, "b")))
    run = parallelize(plain_step)
    out, _ = run(state, batch_of())
    assert str(run.plan.mesh) == "a=2,b=4"
    assert out["up"].sharding.spec == P(None, "b")
