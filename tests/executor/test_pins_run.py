"""Pins in the compiled module: products of local shards, and equal numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan
from planner import StoredAs, make_plan, shard
from tests.executor.executor_steps import assert_same

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
D, WIDE, BATCH = 64, 512, 32
MESH = "data=2,model=4"


def array(*shape):
    return (RNG.normal(size=shape) / 8).astype(np.float32)


W = {"up": array(D, WIDE), "down": array(WIDE, D), "scale": array(D)}
X = array(BATCH, 16, D)
MEGATRON = {r"'up'": P(None, "model"), r"'down'": P("model")}


def norm(x, scale):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def step_with(mark):
    def loss(w, x):
        for _ in range(2):
            h = mark(norm(mark(x, "data", "model", None), w["scale"]), "data", None, None)
            h = mark(jnp.tanh(h @ w["up"]), "data", None, "model")
            x = x + mark(h @ w["down"], "data", "model", None)
        return jnp.mean(x**2)

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    return step


bare, marked = step_with(lambda x, *entries: x), step_with(shard)


def products(function, shardings):
    """(result, contracted size) of every product on a device."""
    plan = make_plan(function, W, X, cluster="cpu:8", mesh=MESH, shardings=shardings)
    compiled = compile_plan(function, plan).prepare(W, X)
    text = compiled.jitted.lower(W, X).compile().as_text()
    shapes = dict(re.findall(r"(%[\w.-]+) = f32\[([\d,]*)\]", text))
    out = set()
    for result, lhs, dims in re.findall(
        r"= f32\[([\d,]+)\]\S* dot\((%[\w.-]+), .*lhs_contracting_dims=\{([\d,]+)\}", text
    ):
        sizes = [int(n) for n in shapes[lhs].split(",")]
        contracted = int(np.prod([sizes[int(d)] for d in dims.split(",")]))
        out.add((int(np.prod([int(n) for n in result.split(",")])), contracted))
    return out


def test_parameters_pinned_over_model_are_multiplied_as_shards():
    rows, hidden = BATCH // 2 * 16, WIDE // 4
    found = products(bare, {**MEGATRON, r"^\[1\]": P("data")})
    assert (rows * hidden, D) in found  # x @ up: all columns of a shard
    assert (rows * D, hidden) in found  # h @ down: a part of the sum
    assert not {k for _, k in found} & {WIDE}
    stored = {n: StoredAs(spec) for n, spec in MEGATRON.items()}
    found = products(bare, {**stored, r"^\[1\]": P(("data", "model"))})
    assert (BATCH // 8 * 16 * WIDE, D) in found  # gathered: the batch is split instead


@pytest.mark.parametrize("shardings", [None, MEGATRON])
def test_sequence_parallel_marks_around_a_norm_give_equal_numbers(shardings):
    plan = make_plan(marked, W, X, cluster="cpu:8", mesh=MESH, shardings=shardings)
    assert_same(compile_plan(marked, plan)(W, X), jax.jit(bare)(W, X))


def test_arguments_of_one_sum_pinned_differently_give_equal_numbers():
    rules = {r"^\[0\]": P(None, "model"), r"^\[1\]": P("data")}
    a, b = array(32, 16), array(32, 16)

    def add(a, b):
        return a + b, jnp.sin(a)

    plan = make_plan(add, a, b, cluster="cpu:8", mesh=MESH, shardings=rules)
    assert_same(compile_plan(add, plan)(a, b), add(a, b))


INTEGERS = RNG.integers(0, 100, (16, 24)).astype(np.int32)


@pytest.mark.parametrize(
    "reduced",
    [
        lambda x: jax.lax.reduce_xor_p.bind(x, axes=(0,)),
        lambda x: jax.lax.reduce_or_p.bind(x, axes=(0,)),
        lambda x: jax.lax.reduce_and_p.bind(x, axes=(0,)),
        lambda x: jax.lax.reduce(x, np.int32(0), lambda a, b: a ^ b, (0,)),
        lambda x: jnp.any(x > 90, axis=0),
    ],
    ids=["xor", "or", "and", "custom", "any"],
)
def test_a_reduction_that_no_all_reduce_combines_is_not_split(reduced):
    def step(x):
        return reduced(x * 3 + 1)

    plan = make_plan(step, INTEGERS, cluster="cpu:8", mesh="data=8", shardings={"0": P("data")})
    assert plan.inputs[0].spec.entries == ("data",)
    assert_same(compile_plan(step, plan)(INTEGERS), step(INTEGERS))
