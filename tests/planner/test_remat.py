"""Steps that compute parts again: equal numbers, fewer residuals."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import compile_plan, parallelize
from executor.run.export import python_text
from planner import make_plan
from planner.errors import RequestError
from planner.graph.flat import flatten, nbytes
from planner.graph.ir import Graph, Phase
from planner.graph.trace import trace
from planner.plan.plan import plan_from_json
from planner.recipes import PLAIN, Recipe
from planner.remat.frontier import Block, Loop, compared_maxima, cut
from planner.remat.policy import Policy, parse_policy
from planner.remat.rewrite import policies, recomputed, rematerialized
from planner.report.table import plan_text


def block(h: jax.Array, p: Any) -> jax.Array:
    y = jnp.tanh(h @ p["w"]) * jax.nn.sigmoid(h @ p["v"])
    return h + jnp.sin(y)


def grads_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def scanned(p: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda h, q: (block(h, q), h.sum()), x, p)[0] ** 2)


def backwards(p: Any, x: Any) -> Any:
    h, sums = jax.lax.scan(lambda h, q: (block(h, q), jnp.tanh(h).sum()), x, p, reverse=True)
    return jnp.sum(h**2) + sums.mean()


def jitted(p: Any, x: Any) -> Any:
    return jax.jit(scanned)(p, jax.jit(jnp.cos)(x))


def unrolled(p: Any, x: Any) -> Any:
    for k in range(6):
        x = block(x, jax.tree.map(lambda w, k=k: w[k], p))
    return jnp.sum(x**2)


def with_skips(p: Any, x: Any) -> Any:
    first = jnp.cos(x)
    for k in range(6):
        x = block(x, jax.tree.map(lambda w, k=k: w[k], p)) + first
    return jnp.sum(x * first)


def accumulated(p: Any, x: Any) -> Any:
    """Microbatches in a loop around the loop over layers."""
    parts = x.reshape(2, -1, x.shape[-1])
    return jax.lax.scan(lambda s, part: (s + scanned(p, part), None), 0.0, parts)[0]


def micro_step(params: Any, x: Any) -> Any:
    """Gradients of microbatches, added up in a loop."""

    def one(total: Any, part: Any) -> Any:
        grads = jax.grad(scanned)(params, part)
        return jax.tree.map(jnp.add, total, grads), None

    parts = x.reshape(2, -1, x.shape[-1])
    total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), jnp.sum(x)


STEPS = {
    **{f.__name__: grads_of(f) for f in (scanned, backwards, jitted, unrolled, with_skips)},
    "accumulated": grads_of(accumulated),
    "micro_step": micro_step,
}


def arguments(batch: int = 16, width: int = 8, layers: int = 6) -> tuple[Any, Any]:
    draw = np.random.default_rng(0).normal
    weights = {n: jnp.asarray(0.3 * draw(size=(layers, width, width))) for n in "wv"}
    return weights, jnp.asarray(draw(size=(batch, width)))


def products(graph: Graph) -> float:
    live = graph.live_ops()
    return sum(
        graph.regions[op.region].weight
        for op in graph.ops
        if op.kind == "dot_general" and live[op.index]
    )


def same(found: Any, expected: Any) -> None:
    """Equal to 1e-5 of the largest number of each array: some of them cancel."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.long
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_numbers_are_those_of_the_step(name: str, on_host: bool) -> None:
    args = arguments()
    traced = trace(STEPS[name], args)
    found = recomputed(traced, parse_policy("offload" if on_host else "full"))
    assert found is not None and "test_remat.py:" in found.what
    again = jax.jit(found.function)(*args)
    expected = jax.jit(STEPS[name])(*args)
    same(again, expected)
    assert products(trace(found.function, args).graph) > products(traced.graph)


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_less_waits_for_the_backward_pass(name: str) -> None:
    """Of each layer only its input is in memory when the backward pass begins."""
    args = arguments(batch=4096)
    traced = trace(STEPS[name], args)
    found = recomputed(traced)
    assert found is not None

    def largest(graph: Graph) -> float:
        """Most bytes of results that are alive between two operations outside of loops."""
        live, last = graph.live_ops(), dict[int, int]()
        for op in graph.ops:
            if live[op.index]:
                last.update(dict.fromkeys(op.inputs, op.index))
        spans = [(v.op, last[v.index], v.nbytes) for v in graph.values if v.index in last]
        spans = [s for s in spans if s[0] >= 0 and graph.ops[s[0]].region == 0]
        return max(sum(n for a, b, n in spans if a <= at < b) for at in range(len(graph.ops)))

    layer = 4096 * 8 * 4
    assert largest(traced.graph) > 6 * 4 * layer
    assert largest(trace(found.function, args).graph) < (6 + 9) * layer


def test_a_step_without_loops_or_equal_blocks_is_left_alone() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    assert recomputed(trace(step, (jnp.ones((4, 4)), jnp.ones((2, 4))))) is None
    layers = STEPS["scanned"], arguments()
    found = recomputed(trace(layers[0], layers[1]))
    assert found is not None
    checkpointed = grads_of(
        lambda p, x: jnp.sum(
            jax.lax.scan(jax.checkpoint(lambda h, q: (block(h, q), None)), x, p)[0]
        )
    )
    assert recomputed(trace(checkpointed, arguments())) is None


# ---- policies -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("policy", ["dots", "20", "60", "4096", "offload:60"])
@pytest.mark.parametrize("name", ["scanned", "unrolled", "with_skips", "micro_step"])
def test_numbers_are_equal_under_every_policy(name: str, policy: str) -> None:
    args = arguments()
    traced = trace(STEPS[name], args)
    function, lines = rematerialized(STEPS[name], traced, args, policy)
    assert lines and all("test_remat.py:" in line for line in lines)
    again, expected = jax.jit(function)(*args), jax.jit(STEPS[name])(*args)
    same(again, expected)
    more = products(trace(function, args).graph) - products(traced.graph)
    assert more == 0 if policy in ("dots", "20") else more >= 0


def test_policies_free_more_and_do_more_again() -> None:
    """Along the prices, bytes kept fall and operations done again grow."""
    args = arguments(width=64)
    traced = trace(STEPS["scanned"], args)
    names = policies(traced)
    assert names[-1] == "full" and len(names) >= 3
    found = [recomputed(traced, parse_policy(n)) for n in names]
    cuts = [f.sites[0].cut for f in found if f is not None]
    kept, flop = [c.kept_bytes for c in cuts], [c.flop for c in cuts]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)
    assert flop == sorted(flop)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_a_minimum_cut_is_the_best_of_all_choices(blocks: int) -> None:
    """Against every set of operations that could be done again, on random blocks."""
    draw = random.Random(blocks)
    for _ in range(blocks):
        block = random_block(draw)
        for price in (8.0, 40.0, 300.0, math.inf):
            policy = Policy(price)
            made = cut(block, policy)
            assert priced(made, price) == pytest.approx(best_of_all(block, price), abs=1.0)


def random_block(draw: random.Random) -> Block:
    """A few operations on vectors of random lengths, some of which the backward pass wants."""

    def program(x: Any) -> Any:
        values = [x, jnp.zeros(draw.choice([2, 64])) + x[0]]
        for _ in range(draw.randint(2, 6)):
            a, b = draw.choice(values), draw.choice(values)
            kind = draw.randrange(4)
            if kind == 0 and a.shape == b.shape:
                values.append(a * b)
            elif kind == 1:
                values.append(jnp.outer(a, b) @ b)
            elif kind == 2:
                values.append(jnp.tanh(a))
            else:
                values.append(jnp.broadcast_to(a[:1], (draw.choice([1, 200]),)))
        return tuple(values)

    flat = flatten(jax.make_jaxpr(program)(jnp.ones(16)))
    made = [v for c in flat.calls for v in c.outs]
    wanted = frozenset(draw.sample(made, min(len(made), draw.randint(1, 4))))
    held = frozenset(draw.sample(sorted(set(made) - wanted), min(1, len(set(made) - wanted))))
    some = (draw.sample(made, min(len(made), 2)) for _ in range(draw.randint(0, 2)))
    loops = tuple(Loop(frozenset(values), draw.uniform(100.0, 9000.0)) for values in some)
    return Block(flat.calls, wanted, {flat.inputs[0]: 64}, held, loops=loops)


def priced(made: Any, price: float) -> float:
    return made.kept_bytes + (0.0 if math.isinf(price) else made.flop / price)


def best_of_all(block: Block, price: float) -> float:
    """The least of ``priced``, by trying all sets of operations to do again."""
    sizes = {
        v: nbytes(o.aval) for c in block.calls for v, o in zip(c.outs, c.eqn.outvars, strict=True)
    }
    sizes.update(block.entries)
    costs = [product_flop(c) + 16.0 * sum(sizes[v] for v in c.outs) for c in block.calls]
    best = math.inf
    for again in itertools.product((False, True), repeat=len(block.calls)):
        made = {v for c, yes in zip(block.calls, again, strict=True) if yes for v in c.outs}
        read = {
            v
            for c, yes in zip(block.calls, again, strict=True)
            if yes
            for v in c.ins
            if isinstance(v, int) and v in sizes
        }
        kept = (read | block.wanted) - made - block.held
        flop = sum(cost for cost, yes in zip(costs, again, strict=True) if yes)
        flop += sum(loop.flop for loop in block.loops if loop.leaving & made)
        total = sum(sizes[v] for v in kept) + (0.0 if math.isinf(price) else flop / price)
        best = min(best, total)
    return best


def product_flop(call: Any) -> float:
    if call.kind != "dot_general":
        return 0.0
    left, right = (math.prod(v.aval.shape) for v in call.eqn.invars)
    out = math.prod(call.eqn.outvars[0].aval.shape)
    return 2.0 * math.sqrt(left * right * out)


def test_what_is_done_again_waits_for_the_cotangent() -> None:
    """Each block begins with a barrier over what it keeps and something of the backward pass."""
    args = arguments()
    traced = trace(STEPS["unrolled"], args)
    found = recomputed(traced)
    assert found is not None
    jaxpr = jax.make_jaxpr(found.function)(*args).jaxpr
    back = {
        v for e in jaxpr.eqns for v in e.outvars if "transpose(" in str(e.source_info.name_stack)
    }
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    assert len(barriers) >= 5
    assert all(back.intersection(e.invars) for e in barriers)
    phases = [op.phase for op in trace(found.function, args).graph.ops]
    assert phases.count(Phase.BACKWARD) > [op.phase for op in traced.graph.ops].count(
        Phase.BACKWARD
    )


def test_a_print_is_not_done_twice() -> None:
    def loud(h: jax.Array, p: Any) -> jax.Array:
        y = jnp.tanh(h @ p["w"])
        jax.debug.print("{}", y.sum())
        return h + jnp.sin(y) * jax.nn.sigmoid(h @ p["v"])

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda h, q: (loud(h, q), None), x, p)[0])

    args = arguments()
    step = grads_of(loss)
    function, lines = rematerialized(step, trace(step, args), args, "full")
    assert lines
    assert str(jax.make_jaxpr(function)(*args)).count("debug_") == str(
        jax.make_jaxpr(step)(*args)
    ).count("debug_")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "again"), [("threefry2x32", True), ("rbg", False)])
def test_random_numbers_are_drawn_again_only_if_they_are_the_same(kind: str, again: bool) -> None:
    """Numbers of XLA's own generator depend on how they are sharded."""

    def loss(p: Any, x: Any, key: Any) -> Any:
        for k, one in enumerate(jax.random.split(key, 6)):
            h = jnp.tanh(x @ p["w"][k])
            x = x + jnp.where(jax.random.bernoulli(one, 0.5, h.shape), jnp.sin(h), h)
        return jnp.sum(x**2)

    params, x = arguments()
    args = (params, x, jax.random.key(0, impl=kind))
    step = jax.grad(loss)
    function, lines = rematerialized(step, trace(step, args), args, "full")
    assert lines
    draws = [
        [op.kind for op in trace(f, args).graph.ops].count("random_bits") for f in (step, function)
    ]
    assert draws == [6, 12 if again else 6]
    expected, found = jax.jit(step)(*args), jax.jit(function)(*args)
    same(found["w"], expected["w"])


@pytest.mark.parametrize(
    "policy",
    [
        "some",
        -1,
        0,
        True,
        float("inf"),
        float("nan"),
        "offload:",
        "offload:0",
        "offload:dots",
        None,
    ],
)
def test_bad_policies(policy: Any) -> None:
    step, args = STEPS["scanned"], arguments()
    with pytest.raises(RequestError, match=r"remat=.*expected auto, none, full, dots, offload"):
        make_plan(step, *args, cluster="cpu:8", remat=policy) if policy is not None else (
            rematerialized(step, trace(step, args), args, "None")
        )


def test_a_plan_tells_what_is_done_again() -> None:
    step, args = STEPS["scanned"], arguments()
    plan = make_plan(step, *args, cluster="h100:8", remat="full")
    assert plan.remat == "full" and "1 of 2 products" not in plan.recomputed[0]
    assert "test_remat.py:" in plan.recomputed[0] and "remat" in plan_text(plan, 120)
    assert plan_from_json(plan.to_json()) == plan
    plain = make_plan(step, *args, cluster="h100:8")
    assert plain.recipe == PLAIN and '"remat"' not in plain.to_json()
    with pytest.raises(RequestError, match="remat full"):
        python_text(plan)


@pytest.mark.long
@pytest.mark.devices
@pytest.mark.parametrize("policy", ["full", "dots", "60", "offload"])
@pytest.mark.parametrize("name", ["scanned", "unrolled", "micro_step"])
def test_sharded_rematerialized_steps_train_as_the_unsharded(name: str, policy: str) -> None:
    step, (params, x) = STEPS[name], arguments()
    run = parallelize(step, cluster="cpu:8", remat=policy)
    here = there = params
    for _ in range(3):
        here, found = run(here, x)
        there, expected = jax.jit(step)(there, x)
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    parts = 1 if name == "micro_step" else 2  # its own loop over parts can't be cut again
    plan = make_plan(step, params, x, cluster="cpu:8", remat=policy, microbatches=parts)
    assert plan.recipe == Recipe(parts, policy)
    _, found = compile_plan(step, plan)(params, x)
    np.testing.assert_allclose(found, jax.jit(step)(params, x)[1], rtol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("policy", ["full", "dots", "20", "50", "100", "1000"])
def test_a_maximum_is_never_kept_beside_scores_that_are_made_again(
    policy: str, scanned: bool
) -> None:
    """The gradient of a maximum divides by the number of scores that are equal to it."""

    def layer(h: Any, w: Any) -> Any:
        scores = jnp.sin((h @ w[0]) * 0.3)
        return h + jnp.exp(scores - jnp.max(scores, -1, keepdims=True)) @ w[1]

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            if scanned:
                return jnp.mean(jax.lax.scan(lambda h, w: (layer(h, w), None), x, p)[0] ** 2)
            return jnp.mean(functools.reduce(layer, p, x) ** 2)

        return jax.value_and_grad(loss)(p)

    args = jnp.ones((4, 2, 16, 16)) * 0.1, jnp.linspace(0, 1, 64 * 16).reshape(64, 16)
    made = recomputed(trace(step, args), parse_policy(policy))
    assert made is not None
    for site in made.sites:
        maxima = compared_maxima(site.block.calls)
        assert maxima and not maxima & (site.cut.kept | site.block.held)
    np.testing.assert_allclose(made.function(*args)[1], jax.jit(step)(*args)[1], atol=1e-7)


@pytest.mark.long
def test_unrolled_blocks_keep_nothing_that_chunks_would_not_hold() -> None:
    """Scores that are made in chunks are made again, not kept: those that only the forward pass
    reads among them."""

    def layer(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhe->bhte", x, w[name]) for name in "qkv")
        scores = jnp.einsum("bhte,bhse->bhts", q, k).astype(jnp.float32)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return x + jnp.einsum("bhts,bhse,hed->btd", weights, v, w["o"])

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = layer(w, jnp.tanh(x))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws, x))

    kind = jnp.bfloat16
    w = {name: jax.ShapeDtypeStruct((512, 4, 128), kind) for name in "qkv"}
    w["o"] = jax.ShapeDtypeStruct((4, 128, 512), kind)
    x = jax.ShapeDtypeStruct((8, 4096, 512), kind)
    options: dict[str, Any] = {"cluster": "v5e:8", "mesh": "data=8", "remat": "128"}
    whole, parts = (make_plan(step, [w] * 4, x, chunks=n, **options) for n in (1, 8))
    score_bytes = 4 * 4096 * 4096 * 2
    assert parts.chunked and any("products" in line for line in parts.recomputed)
    assert parts.prediction.peak_bytes < 4 * score_bytes < whole.prediction.peak_bytes
