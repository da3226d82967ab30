"""Transposes beside products are moved to the smallest array; loops repeat broadcasts inside."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan
from executor.run.compile import CompiledStep
from executor.run.local.turned import multiplied, of_operand, of_result, turned_products
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.compiled.lowering import Lowering
from tests.executor.executor_steps import assert_same

pytestmark = pytest.mark.usefixtures("optimized")

RNG = np.random.default_rng(0)


def product(a: Any, b: Any, numbers: Any) -> tuple[Any, Any]:
    """The equation of a product, with what the tracer writes down of it."""
    eqn = jax.make_jaxpr(lambda a, b: jax.lax.dot_general(a, b, numbers))(a, b).eqns[0]
    avals = SimpleNamespace(
        params=eqn.params,
        in_avals=[v.aval for v in eqn.invars],
        out_avals=[v.aval for v in eqn.outvars],
    )
    return eqn, avals


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_transposes_of_large_results() -> None:
    a, b = normal(2, 7, 3, 4, 2), normal(2, 6, 3, 2)  # batch, time, group, head, width
    numbers = (((4,), (3,)), ((0, 2), (0, 2)))  # -> batch, group, time, head, other time
    eqn, avals = product(a, b, numbers)
    plain = np.asarray(jax.lax.dot_general(a, b, numbers))
    turned = 0
    for order in itertools.permutations(range(5)):
        how = of_result(avals, order)
        together = set(order[:2]) == {0, 1} and order[3] != 4
        assert (how is not None) == together, order
        if how is not None:
            turned += 1
            assert not how.last
            np.testing.assert_allclose(
                multiplied(eqn, [a, b], how), plain.transpose(order), rtol=1e-5, atol=1e-6
            )
    assert turned == 8  # two orders of what both have, and of the two sides, and of a side


def test_small_results_stay() -> None:
    _, avals = product(normal(4, 64), normal(64, 4), (((1,), (0,)), ((), ())))
    assert of_result(avals, (1, 0)) is None


@pytest.mark.parametrize("operand", [0, 1])
def test_transposes_of_large_operands(operand: int) -> None:
    large, small = normal(2, 3, 6, 7, 8), normal(2, 6, 3, 7, 2)
    sides_swapped = 0
    orders = list(itertools.permutations(range(5)))[::7]
    for order in orders:
        turned = large.transpose(order)
        at = [order.index(d) for d in range(5)]
        sums, batch = ([at[2], at[3]], [1, 3]), ([at[1], at[0]], [2, 0])
        sides = [turned, small] if operand == 0 else [small, turned]
        whole = [x if operand == 0 else x[::-1] for x in (sums, batch)]
        numbers = tuple((tuple(left), tuple(right)) for left, right in whole)
        eqn, avals = product(*sides, numbers)
        plain = jax.lax.dot_general(*sides, numbers)
        how = of_operand(avals, operand, order)
        assert how is not None
        given = [large if x is turned else small for x in sides]
        np.testing.assert_allclose(multiplied(eqn, given, how), plain, rtol=1e-5, atol=1e-5)
        other = of_operand(avals, operand)
        if other is not None:  # the other way around
            sides_swapped += 1
            np.testing.assert_allclose(multiplied(eqn, sides, other), plain, rtol=1e-5, atol=1e-5)
        assert list(how.numbers[0][operand]) == sorted(how.numbers[0][operand])
    assert 0 < sides_swapped < len(orders)


WIDTH, GROUPS, HEADS, HEAD, LAYERS = 16, 2, 2, 4, 3


def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    q = jnp.einsum("btd,dghk->btghk", x, p["q"])
    k, v = (jnp.einsum("btd,dgk->btgk", x, p[n]) for n in "kv")
    scores = jnp.einsum("btghk,bsgk->bghts", q, k)
    causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    return x + jnp.einsum("btghk,ghkd->btd", jnp.einsum("bghts,bsgk->btghk", weights, v), p["o"])


def grouped(params: dict[str, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    """A step of grouped-query attention in scanned layers."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        y = jax.lax.scan(lambda c, p: (layer(c, p), None), x, params)[0]
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(batch: int = 8, time: int = 64) -> tuple[dict[str, np.ndarray], np.ndarray]:
    params = {
        "q": normal(LAYERS, WIDTH, GROUPS, HEADS, HEAD),
        "k": normal(LAYERS, WIDTH, GROUPS, HEAD),
        "v": normal(LAYERS, WIDTH, GROUPS, HEAD),
        "o": normal(LAYERS, GROUPS, HEADS, HEAD, WIDTH),
    }
    return {k: v / 4 for k, v in params.items()}, normal(batch, time, WIDTH)


@pytest.mark.devices
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2", "data=2,model=2,seq=2"])
@pytest.mark.parametrize("options", [{}, {"remat": "full"}, {"microbatches": 2}])
def test_equal_on_devices(mesh: str, options: dict[str, Any]) -> None:
    args = arguments()
    plan = make_plan(grouped, *args, cluster="cpu:8", mesh=mesh, **options)
    assert plan.lowering.turned
    assert_same(compile_plan(grouped, plan)(*args), jax.jit(grouped)(*args))


@pytest.mark.devices
def test_scores_are_not_transposed() -> None:
    args = arguments()
    plan = make_plan(grouped, *args, cluster="cpu:8", mesh="data=8")
    counts = []
    for turned in (False, True):
        mine = dataclasses.replace(plan, lowering=Lowering(turned=turned))
        step = CompiledStep(trace(grouped, args), mine, devices=jax.devices())
        text = step.jitted.lower(*args).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]+)\]\S* (?:transpose|copy)\(", text)
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        counts.append(sizes.count(GROUPS * HEADS * 64 * 64))
    before, after = counts
    assert before > 0
    assert after == 0


@pytest.mark.devices
def test_loops_take_what_is_repeated() -> None:
    """JAX moves the mask's broadcast to the shape of the scores out of the scan."""
    args = arguments()
    scores = f"8x{GROUPS}x{HEADS}x64x64xi1"
    plan = make_plan(grouped, *args, cluster="cpu:8", mesh="data=1,model=8")
    step = CompiledStep(trace(grouped, args), plan, devices=jax.devices())
    plain, ours = (
        [x for x in f.lower(*args).as_text().splitlines() if "stablehlo.return" in x]
        for f in (jax.jit(grouped), step.jitted)
    )
    assert any(scores in carried for carried in plain)
    assert ours
    assert not any(scores in carried for carried in ours)


def drawn(seed: int) -> tuple[Any, tuple[Any, ...]]:
    """A step of attention whose arrays have their dimensions in any order, and its arguments."""
    draw = np.random.default_rng(seed)
    sizes = dict(zip("bghtsk", (8, 2, int(draw.integers(2, 4)), 16, 24, 2), strict=True))
    q, k, s, o, v = ("".join(draw.permutation(list(x))) for x in ORDERS)
    scanned, masked = draw.random(2) < 0.6
    seen = np.tril(np.ones((16, 24), bool))
    seen = (seen if s.index("t") < s.index("s") else seen.T).reshape(
        [sizes[c] if c in "ts" else 1 for c in s]
    )

    def layer(x: jax.Array, w: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        scores = jnp.einsum(f"{q},{k}->{s}", jnp.einsum(f"{q},ghk->{q}", x, w), keys)
        scores = jnp.where(seen, scores, -1e9) if masked else scores
        weights = jax.nn.softmax(scores, axis=s.index("s"))
        made = jnp.einsum(f"{s},{v}->{o}", weights, values)
        return x + jnp.einsum(f"{o}->{q}", made)

    def loss(weights: jax.Array, x: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        if scanned:
            x = jax.lax.scan(lambda x, w: (layer(x, w, keys, values), None), x, weights)[0]
        else:
            for w in weights:
                x = layer(x, w, keys, values)
        return jnp.mean(x**2)

    def step(weights: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, *rest)
        return weights - 0.1 * gradient, value

    shapes = [(2, *(sizes[c] for c in "ghk")), *(tuple(sizes[c] for c in x) for x in (q, k, v))]
    return step, tuple(draw.normal(size=x).astype(np.float32) for x in shapes)


ORDERS = ("btghk", "bsgk", "bghts", "btghk", "bsgk")
MESHES = ("data=8", "data=4,model=2", "data=2,model=2,seq=2")


@pytest.mark.devices
@pytest.mark.parametrize("seed", range(6))
def test_dimensions_in_any_order(seed: int) -> None:
    step, args = drawn(seed)
    plan = make_plan(step, *args, cluster="cpu:8", mesh=MESHES[seed % 3])
    traced = trace(step, args)
    assert turned_products(traced, (), ())
    assert_same(compile_plan(step, plan)(*args), jax.jit(step)(*args))


@pytest.mark.devices
def test_typed_keys_may_be_repeated() -> None:
    """A key of the program's own, and one in a loop: neither is a number."""
    key = jax.random.key(0)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jnp.broadcast_to(key, (4,))
        y, _ = jax.lax.scan(
            lambda c, _: (c + jax.random.normal(keys[1], c.shape), None), x @ w, None, length=3
        )
        return w * 0.9, jnp.mean(y**2)

    args = (normal(16, 16), normal(16, 16))
    plan = make_plan(step, *args, cluster="cpu:8", mesh="data=8")
    assert_same(compile_plan(step, plan)(*args), jax.jit(step)(*args))
