"""The order in which XLA:GPU runs a step, and what its kernels write over.

What is asserted was read from modules compiled for h100:8 (docs/explanation/measurements.md).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner.graph.ir import SCALAR, Graph, Phase
from planner.graph.trace import trace
from planner.step.memory.liveness import intervals
from planner.step.memory.materialized import Written, written
from tests.zoo.fast import FAST
from tests.zoo.running import load

ZOO = load()


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def found(graph: Graph, normalizes: bool = True) -> Written:
    fusable = [op.kind != "dot_general" for op in graph.ops]
    return written(graph, fusable, graph.live_ops(), late=True, normalizes=normalizes)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAST))
def test_every_operation_runs_behind_those_that_it_reads(name: str) -> None:
    step, args = ZOO[name].build()
    graph = trace(step, args).graph
    late, live = found(graph), graph.live_ops()
    assert sorted(late.order) == list(range(len(graph.ops)))
    for op in graph.ops:
        for i in op.inputs if live[op.index] and op.kind != "loop_back" else ():
            made = graph.values[i].op if i != SCALAR else -1
            assert made < 0 or late.time[made] < late.time[op.index]
    for region in graph.regions[1:]:  # bodies stay in one piece
        inner = {region.index}
        for other in graph.regions[1:]:
            if other.parent in inner:
                inner.add(other.index)
        times = sorted(late.time[op.index] for op in graph.ops if op.region in inner)
        assert not times or times[-1] - times[0] == len(times) - 1


def attention(x: jax.Array, w: Any) -> jax.Array:
    q, k, v = (jnp.einsum("btd,dhe->bhte", x, w[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bhte,bhse->bhts", q, k))
    return x + jnp.einsum("bhte,hed->btd", jnp.einsum("bhts,bhse->bhte", weights, v), w["o"])


def attended(w: Any, x: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        return jnp.mean(jnp.sin(attention(jnp.tanh(x * w["first"]), w)))

    return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))


WEIGHTS = {
    **dict.fromkeys("qkv", struct(32, 4, 8)),
    "o": struct(4, 8, 32),
    "first": struct(32),
}
SCORES = (2, 4, 64, 64)


def big(graph: Graph, value: int) -> bool:
    """Whether a value is as large as the scores."""
    return sorted(graph.values[value].shape) == sorted(SCORES)


def test_the_probabilities_stay_until_the_softmax_is_differentiated() -> None:
    graph = trace(attended, (WEIGHTS, struct(2, 64, 32))).graph
    seen = found(graph)
    products = [op for op in graph.ops if op.kind == "dot_general" and op.phase is Phase.BACKWARD]
    (scores,) = [op for op in products if big(graph, op.outputs[0])]
    readers = [op for op in products if any(i != SCALAR and big(graph, i) for i in op.inputs)]
    assert len(readers) == 3  # of the probabilities, and two of the scores' cotangent
    values = min(readers, key=lambda op: op.index)
    assert values.index < min(op.index for op in readers if op is not values)  # as traced
    kernel = max(
        seen.time[graph.values[i].op]
        for op in readers
        if op is not values
        for i in op.inputs
        if i != SCALAR and big(graph, i)
    )
    assert seen.time[scores.index] < kernel < seen.time[values.index]


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_softmax_is_not_differentiated_in_place(normalizes: bool) -> None:
    graph = trace(attended, (WEIGHTS, struct(2, 64, 32))).graph
    seen, live = found(graph, normalizes), graph.live_ops()
    spans = intervals(graph, seen, live, [True] * len(graph.inputs))
    alive = [
        sum(s.start <= t < s.end for s in spans if big(graph, s.value))
        for t in range(len(graph.ops))
    ]
    # scores or probabilities, their two cotangents: one is written over the other, or not
    assert max(alive) == (4 if normalizes else 3)


def summed(w: Any, batch: jax.Array) -> Any:
    """Gradients added up over microbatches; the head's is made first."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ p), None

        h, _ = jax.lax.scan(layer, x, w["layers"])
        return jnp.mean(jnp.sin(h @ w["head"]))

    def turn(total: Any, x: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

    total, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, w), batch)
    return jax.tree.map(lambda p, g: p - g, w, total)


def test_a_gradient_that_a_loop_adds_up_waits_for_the_end_of_its_body() -> None:
    w = {"layers": struct(3, 64, 64), "head": struct(64, 256)}
    graph = trace(summed, (w, struct(4, 32, 64))).graph
    seen = found(graph)
    shapes = ((64, 256), (256, 64))
    (head,) = [
        op
        for op in graph.ops
        if op.kind == "dot_general" and graph.values[op.outputs[0]].shape in shapes
    ]
    inner = [r.index for r in graph.regions if r.parent == head.region and r.index != head.region]
    layers = [seen.time[op.index] for op in graph.ops if op.region in inner]
    assert layers and seen.time[head.index] > max(layers)


def test_sums_for_the_update_run_with_what_they_add_up() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            h = x
            for p in w:
                h = jnp.tanh(h @ p["kernel"] + p["bias"])
            return jnp.mean(h)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    layers = [{"kernel": struct(64, 64), "bias": struct(64)}] * 4
    graph = trace(step, (layers, struct(32, 64))).graph
    seen = found(graph)
    backward = [
        op
        for op in graph.ops
        if op.phase is Phase.BACKWARD and graph.values[op.outputs[0]].shape == (32, 64)
    ]
    products = sorted(seen.time[op.index] for op in backward if op.kind == "dot_general")
    sums = sorted(
        seen.time[op.index]
        for op in graph.ops
        if op.kind == "reduce_sum" and op.phase is Phase.BACKWARD
    )
    assert len(products) == 3
    for k, product in enumerate(products):  # two for each layer whose bias has a gradient by then
        assert sum(s < product for s in sums) == 2 * (k + 1)
