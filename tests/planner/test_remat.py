"""Steps that compute parts again: equal numbers, fewer residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.remat.policy import parse_policy
from planner.remat.rewrite import recomputed
from planner.graph.ir import Graph
from planner.graph.trace import trace


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


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_numbers_are_those_of_the_step(name: str, on_host: bool) -> None:
    args = arguments()
    traced = trace(STEPS[name], args)
    found = recomputed(traced, parse_policy("offload" if on_host else "full"))
    assert found is not None and "test_remat.py:" in found.what
    again = jax.jit(found.function)(*args)
    expected = jax.jit(STEPS[name])(*args)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
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
