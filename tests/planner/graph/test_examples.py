"""What holds examples, and what is frozen weights in an argument of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from planner.graph.ir import Role
from planner.graph.trace import trace

N = 32


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state, *rest)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return step


def network(layers: Any, x: Any) -> Any:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]


LAYERS = [
    {"w": array(16, 64), "b": array(64)},
    {"w": array(64, 8), "b": array(8)},
]
INPUTS, LABELS = array(N, 16), array(N, dtype=jnp.int32)


def scanned(layers: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0]


def recurrent(cell: Any, x: Any, weights: Any) -> Any:
    h, _ = jax.lax.scan(
        lambda h, x: (jnp.tanh(x @ cell["w"] + h @ cell["u"]), None), jnp.zeros((N, 16)), x
    )
    return jnp.mean(h**2 * weights[:, None])


def adapted(adapters: Any, base: Any, tokens: Any) -> Any:
    x = base["table"][tokens]
    for frozen, (a, b) in zip(base["blocks"], adapters, strict=True):
        x = x + jnp.tanh(x * frozen["scale"] @ frozen["w"] + (x @ a) @ b)
    return cross_entropy((x @ base["table"].T)[:, 0], tokens[:, 1]).mean()


BASE = {
    "table": array(100, 16),
    "blocks": [{"scale": array(16), "w": array(16, 16)} for _ in range(3)],
}


def message_passing(weights: Any, nodes: Any, senders: Any, receivers: Any, wanted: Any) -> Any:
    for w in weights:
        nodes = jax.nn.relu(jax.ops.segment_sum(nodes[senders] @ w, receivers, 100) + nodes)
    return jnp.mean((nodes.sum(-1) - wanted) ** 2)


def returns(p: Any, seen: Any, taken: Any, gained: Any) -> Any:
    """Time first, and one observation more than actions."""
    made = seen @ p
    value, chance = made[..., 0], jax.nn.log_softmax(made[:-1, ..., 1:])

    def back(after: Any, now: Any) -> Any:
        made = now[0] + 0.9 * after
        return made, made - now[1]

    _, error = jax.lax.scan(back, value[-1], (gained, value[:-1]), reverse=True)
    said = jnp.take_along_axis(chance, taken[..., None], -1)[..., 0]
    return jnp.mean(error**2) - jnp.mean(said * jax.lax.stop_gradient(error))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], set[int]]] = {
    "class weights": (
        lambda p, x, y, w: jnp.mean(cross_entropy(network(p, x), y) * w[y]),
        (LAYERS, INPUTS, LABELS, array(8)),
        {3},
    ),
    "teacher": (
        lambda p, x, t: jnp.mean((network(p, x) - network(t, x)) ** 2),
        (LAYERS, INPUTS, LAYERS),
        {2},
    ),
    "anchor": (
        lambda p, x, y, a: (
            jnp.mean(cross_entropy(network(p, x), y))
            + sum(jnp.sum((w - b) ** 2) for w, b in zip(*map(jax.tree.leaves, (p, a)), strict=True))
        ),
        (LAYERS, INPUTS, LABELS, LAYERS),
        {3},
    ),
    "scanned teacher": (
        lambda p, x, t: jnp.mean((x @ p - scanned(t, x)) ** 2),
        (array(16, 16), INPUTS, array(12, 16, 16)),
        {2},
    ),
    "adapters": (
        adapted,
        ([(array(16, 4), array(4, 16))] * 3, BASE, array(N, 9, dtype=jnp.int32)),
        {1},
    ),
    "statistics": (
        lambda p, x, s: jnp.mean((((x @ p - s["mean"]) / s["scale"]) @ p.T) ** 2),
        (array(16, 64), INPUTS, {"mean": array(64), "scale": array(64)}),
        {2},
    ),
    "two tasks": (
        lambda p, a, b: jnp.mean(network(p, a) ** 2) + jnp.mean(network(p, b) ** 2),
        (LAYERS, INPUTS, array(48, 16)),
        set(),
    ),
    "time first": (
        recurrent,
        ({"w": array(16, 16), "u": array(16, 16)}, array(20, N, 16), array(N)),
        set(),
    ),
    "one observation more": (
        returns,
        (array(16, 8), array(21, N, 16), array(20, N, dtype=jnp.int32), array(20, N)),
        set(),
    ),
    "graph": (
        message_passing,
        (
            [array(16, 16)] * 3,
            array(100, 16),
            array(400, dtype=jnp.int32),
            array(400, dtype=jnp.int32),
            array(100),
        ),
        set(),
    ),
    "pairs": (
        lambda p, a, b: cross_entropy((a @ p["a"]) @ (b @ p["b"]).T, jnp.arange(N)).mean(),
        ({"a": array(16, 8), "b": array(20, 8)}, INPUTS, array(N, 20)),
        set(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_frozen(name: str) -> None:
    loss, args, frozen = CASES[name]
    graph = trace(trained(loss), args).graph
    found = {
        int(path[1:].partition("]")[0])
        for v, path in zip(graph.inputs, graph.input_paths, strict=True)
        if graph.values[v].role is Role.FROZEN
    }
    assert found == frozen
    assert all(graph.values[v].role is not Role.PARAMETER for v in graph.batch)


@pytest.mark.long
def test_every_mode_treats_frozen_weights_as_weights() -> None:
    loss, args, _ = CASES["adapters"]
    step = trained(loss)

    def leaves(**options: Any) -> dict[str, Any]:
        plan = mw.make_plan(step, *args, cluster="cpu:8", **options)
        return {leaf.path: leaf for leaf in plan.inputs}

    alike = leaves(mode="dp")
    assert alike["[2]"].spec.axes and not alike["[2]"].frozen
    assert all(not x.spec.axes and x.frozen for p, x in alike.items() if p.startswith("[1]"))
    sharded = leaves(mode="fsdp")
    assert sharded["[2]"].spec.dims[0] and sharded["[1]['blocks'][0]['w']"].spec.axes
    text = str(mw.make_plan(step, *args, cluster="cpu:8", mode="dp"))
    assert "frozen weights: " in text and "batch split 8 ways" in text


@pytest.mark.long
@pytest.mark.devices
@pytest.mark.parametrize("options", [{"mode": "dp"}, {"mode": "fsdp"}, {"mesh": "data=8"}])
def test_microbatches_leave_frozen_weights(options: dict[str, Any]) -> None:
    loss, args, _ = CASES["adapters"]
    step = trained(loss)
    draw = np.random.default_rng(0)
    given = jax.tree.map(
        lambda s: (
            draw.integers(0, 100, s.shape).astype(s.dtype)
            if s.dtype == jnp.int32
            else draw.normal(size=s.shape).astype(s.dtype) / 4
        ),
        args,
    )
    expected = jax.jit(step)(*given)
    found = mw.parallelize(step, microbatches=2, **options)(*given)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def squared(layers: Any, x: Any) -> Any:
    return jnp.mean(scanned(layers, x) ** 2)


def test_modes_add_remat_or_microbatches_where_a_step_does_not_fit() -> None:
    step = trained(squared)
    args = (array(32, 256, 256), array(65536, 256))
    plain = mw.make_plan(step, *args, cluster="h100:8", mode="fsdp")
    assert plain.microbatches == 1 and plain.remat == "none"
    less = 0.4 * plain.prediction.peak_bytes
    plan = mw.make_plan(step, *args, cluster="h100:8", mode="fsdp", memory=less)
    assert plan.microbatches > 1 or plan.remat != "none"
    assert plan.prediction.peak_bytes <= less
    assert any("does not fit as written" in note for note in plan.notes)


def test_modes_split_examples_where_time_or_parts_come_first() -> None:
    def recurrent_step(cell: Any, x: Any, y: Any) -> Any:
        def loss(cell: Any) -> Any:
            def turn(h: Any, x: Any) -> Any:
                return jnp.tanh(x @ cell["w"] + h @ cell["u"]), None

            h, _ = jax.lax.scan(turn, jnp.zeros((x.shape[1], 256)), x)
            return jnp.mean((h - y) ** 2)

        value, grads = jax.value_and_grad(loss)(cell)
        return jax.tree.map(lambda w, g: w - 0.1 * g, cell, grads), value

    cell = {"w": array(256, 256), "u": array(256, 256)}
    plan = mw.make_plan(
        recurrent_step, cell, array(60, 4096, 256), array(4096, 256), cluster="h100:8", mode="dp"
    )
    x, y = (leaf for leaf in plan.inputs if not leaf.tied)
    assert (x.spec.dims[0], x.spec.dims[1]) == ((), ("data",)) and y.spec.dims[0] == ("data",)
    assert "batch split 8 ways" in plan.strategy and "other dimensions" not in plan.strategy

    def accumulated(w: Any, x: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(w), None

        return w - 0.1 * jax.lax.scan(add, jnp.zeros_like(w), x)[0], jnp.sum(x)

    plan = mw.make_plan(
        accumulated, array(256, 256), array(4, 4096, 256), cluster="h100:8", mode="dp"
    )
    (parts,) = (leaf for leaf in plan.inputs if not leaf.tied)
    assert parts.spec.dims[:2] == ((), ("data",))


def test_a_loop_over_layers_leaves_the_batch_first() -> None:
    args = (array(12, 256, 256), array(4096, 256))
    plan = mw.make_plan(trained(squared), *args, cluster="h100:8", mode="dp")
    (batch,) = (leaf for leaf in plan.inputs if not leaf.tied)
    assert batch.spec.dims[0] == ("data",)
