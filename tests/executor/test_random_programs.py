"""Random small programs: planned for eight devices and run, they compute what they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import planner
from executor import compile_plan
from planner import make_plan
from tests.executor import random_jaxprs
from tests.executor.executor_steps import assert_same
from tests.zoo.running import SEARCHES, cluster, difference, is_split

pytestmark = pytest.mark.devices


def matmul(x, other):
    a, b = x.reshape(-1, x.shape[-1]), other.reshape(-1, other.shape[-1])
    return a @ b.T if a.shape[1] == b.shape[1] else a.T @ a / a.shape[0]


def conv(x, other):
    image = x.reshape(1, 1, -1, x.shape[-1])
    kernel = jnp.full((2, 1, 3, 3), 0.1).at[1, 0, 1, 1].set(-0.5)
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")[0]


OPS = {
    "matmul": matmul,
    "transpose": lambda x, o: jnp.transpose(x),
    "swap": lambda x, o: jnp.swapaxes(x, 0, -1),
    "split": lambda x, o: x.reshape(2, -1, *x.shape[1:]) if x.shape[0] % 2 == 0 else x[None],
    "merge": lambda x, o: x.reshape(-1, x.shape[-1]),
    "flatten": lambda x, o: x.reshape(-1)[None, :],
    "sum": lambda x, o: jnp.sum(x, axis=-1, keepdims=True) + x,
    "mean0": lambda x, o: jnp.mean(x, axis=0, keepdims=True) * x,
    "drop": lambda x, o: jnp.max(x, axis=0) if x.ndim > 2 else x,
    "softmax": lambda x, o: jax.nn.softmax(x, axis=-1),
    "softmax0": lambda x, o: jax.nn.softmax(x, axis=0),
    "concatenate": lambda x, o: jnp.concatenate([x, x * 2], axis=0),
    "concatenate1": lambda x, o: jnp.concatenate([x, -x], axis=-1),
    "slice": lambda x, o: x[: max(1, x.shape[0] // 2)],
    "strided": lambda x, o: x[..., ::2],
    "shift": lambda x, o: x[1:] if x.shape[0] > 1 else x,
    "take": lambda x, o: jnp.take(x, jnp.arange(6) * 5 % x.shape[0], axis=0),
    "take1": lambda x, o: jnp.take(x, jnp.arange(8) % x.shape[-1], axis=-1),
    "pick": lambda x, o: jnp.take_along_axis(x, jnp.argsort(x, axis=-1), axis=-1),
    "cumsum": lambda x, o: jnp.cumsum(x, axis=0) / x.shape[0],
    "cumsum1": lambda x, o: jnp.cumsum(x, axis=-1) / x.shape[-1],
    "sort": lambda x, o: jnp.sort(x, axis=-1),
    "sort0": lambda x, o: jnp.sort(x, axis=0),
    "where": lambda x, o: jnp.where(x > 0.1, x, -0.5 * x + 1),
    "conv": conv,
    "pad": lambda x, o: jnp.pad(x, [(1, 2)] + [(0, 0)] * (x.ndim - 1)),
    "flip": lambda x, o: jnp.flip(x, axis=0) + 0.25,
    "roll": lambda x, o: jnp.roll(x, 1, axis=-1),
    "argmax": lambda x, o: x + jnp.argmax(x, axis=-1, keepdims=True),
    "scatter": lambda x, o: x.at[jnp.arange(3) % x.shape[0]].add(1.0),
    "norm": lambda x, o: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1),
    "sharedrow": lambda x, o: x + o[0, : x.shape[-1]] if o.shape[-1] >= x.shape[-1] else x,
}


def program(names, grad):
    def run(x, w):
        y = x
        for name in names:
            y = OPS[name](y, w)
            if y.size > 4096:
                y = y.reshape(-1)[:4096].reshape(64, 64)
            y = jnp.tanh(y)
        return y

    if not grad:
        return run

    def train(x, w):
        def loss(w):
            return jnp.mean(run(x @ w, w) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - g, value

    return train


def compare(names, rows, columns, grad):
    rng = np.random.default_rng(len(names) * 100 + rows)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    w = rng.normal(size=(columns, columns)).astype(np.float32) / columns
    function = program(names, grad)
    plan = make_plan(function, x, w, cluster="cpu:8", search="recursive_programming")
    assert_same(compile_plan(function, plan)(x, w), jax.jit(function)(x, w), 1e-5)


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24])
shapes = st.lists(sizes, max_size=3).map(tuple) | st.just((16, 8))


def outcome(body, shapes, grad, free, search, mesh):
    """Whether the plan of a random program splits anything; it computes what the program does."""
    function, args = random_jaxprs.program(body, grad), random_jaxprs.arguments(shapes)
    options = {"cluster": cluster(), "mesh": mesh} if free else {"cluster": "cpu:8"}
    plan = make_plan(function, *args, search=search, **options)
    got, expected = compile_plan(function, plan)(*args), jax.jit(function)(*args)
    assert difference(got, expected) <= 2e-5
    return "split" if is_split(plan) else "whole"


def outcomes(seed, count):
    """Plan, run and compare that many random programs; count those that are split."""
    return random_jaxprs.outcomes_of(
        outcome,
        seed,
        count,
        body=st.lists(random_jaxprs.instructions, min_size=2, max_size=8),
        shapes=st.lists(shapes, min_size=2, max_size=3),
        grad=st.booleans(),
        free=st.booleans(),
        search=st.sampled_from(SEARCHES),
        mesh=st.sampled_from([None, "data=2,model=4", "a=2,b=2,c=2"]),
    )


def test_random_jaxprs():
    ran = outcomes(0, 15)
    assert ran.total() >= 15 and ran["split"] > ran.total() / 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_random_jaxprs(seed):
    assert outcomes(seed, 50).total() >= 50


def test_scatter_at_one_index():
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    def function(x):
        return jnp.take(x.at[0].add(1.0), jnp.arange(8), axis=-1)

    plan = make_plan(function, x, cluster="cpu:8", search="recursive_programming")
    assert_same(compile_plan(function, plan)(x), jax.jit(function)(x))


@pytest.mark.parametrize("rank", [1, 2])
def test_the_gradient_of_a_kernel_over_images_split_in_space(rank):
    """XLA adds up the wrong shards where an axis of the mesh splits neither operand."""
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(1, *(6,) * rank, 3)).astype(np.float32) for _ in range(2))
    numbers = ("NWC", "WIO", "NWC") if rank == 1 else ("NHWC", "HWIO", "NHWC")

    def gradient(x, g):
        def out(w):
            ones = (1,) * rank
            return jax.lax.conv_general_dilated(x, w, ones, "SAME", dimension_numbers=numbers)

        return jax.vjp(out, jnp.zeros((3,) * (rank + 2)))[1](g)[0]

    options = {"cluster": cluster(), "mesh": "data=2,model=4"}
    pins = {"": jax.sharding.PartitionSpec(None, "data")}
    plan = make_plan(gradient, x, g, shardings=pins, **options)
    found, expected = compile_plan(gradient, plan)(x, g), jax.jit(gradient)(x, g)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("part", range(4))
def test_every_operation(part):
    compare(sorted(OPS)[part::4], 16, 8, grad=True)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
@pytest.mark.parametrize("many", [False, True])
def test_a_slice_that_reaches_past_the_end(many, dtype):
    """XLA alone loses the earlier start where the result is sharded along the slice."""
    x = np.random.default_rng(0).normal(size=(512, 4)).astype(np.float32)

    def one(x, i):
        return jax.lax.dynamic_slice(x, (i, jnp.zeros_like(i)), (8, 4))

    def function(x, i):
        y = jax.vmap(one, (None, 0))(x, i) if many else one(x, i[0])
        return planner.shard(y, *([None] * many), "data")

    i = jnp.asarray([250 if dtype == "uint8" else 509]).astype(dtype)
    x = x[:252] if dtype == "uint8" else x
    plan = make_plan(function, x, i, cluster="cpu:8", mesh="data=8")
    assert is_split(plan)
    assert_same(compile_plan(function, plan)(x, i), jax.jit(function)(x, i))
