"""The memory of values that are sent to the layout of their readers: for how long, how wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import parse_cluster
from planner.graph.trace import trace
from planner.recipes import Recipe, rewritten
from planner.space.buffer import Buffer
from planner.space.groups import GroupLink, build_groups
from planner.step.analysis import Analysis, analyse


def analysis_of(function: Callable[..., Any], *args: Any) -> Analysis:
    traced = trace(function, args)
    graph = traced.graph
    donated = [False] * len(graph.inputs)
    device = parse_cluster("v5p:2x2x2").device
    return analyse(graph, traced.rules, build_groups(graph, traced.rules), donated, device)


def sent(found: Analysis, moves: Callable[[GroupLink], bool]) -> list[Buffer]:
    return list(found.scheduled.buffers(found.graph, found.groups, moves).buffers)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_view_that_is_sent_stays_until_the_loop_that_reads_it_ends() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)
        rows = h.reshape(64, 4, 16, 64).transpose(1, 0, 2, 3)

        def turn(total: jax.Array, rows: jax.Array) -> Any:
            return total + jnp.sum(jnp.sin(rows @ w) @ w), None

        return jax.lax.scan(turn, jnp.float32(0), rows)[0]

    found = analysis_of(step, struct(64, 64, 64), struct(64, 64))
    graph = found.graph
    view = next(op for op in graph.ops if op.kind == "reshape")
    base = view.inputs[0]
    moving = [
        x
        for x in found.groups.links
        if x.op == view.index and x.value in (base, *view.outputs) and x.operand != -1
    ]
    assert moving
    last = max(op.index for op in graph.ops if op.region > 0)
    for link in moving:
        held = sent(found, lambda x, link=link: x is link)
        new = [b for b in held if b.layout == link.dst and b.value == link.value]
        assert max(b.end for b in new) >= 2 * last


@pytest.mark.parametrize("read", ["product", "sum"])
def test_parameters_that_enter_microbatches_are_sent_as_products_read_them(read: str) -> None:
    """XLA:TPU converts what only products read before it gathers it, in front of the loop over
    microbatches; the barrier inside of this loop doesn't stop it."""

    def step(ws: jax.Array, x: jax.Array) -> Any:
        def loss(ws: jax.Array) -> jax.Array:
            def layer(h: jax.Array, w: jax.Array) -> Any:
                more = jnp.sin(w).sum() if read == "sum" else 0.0
                return jnp.tanh(h @ w) + more, None

            return jnp.mean(jax.lax.scan(layer, x, ws)[0])

        return ws - jax.grad(loss)(ws)

    args = struct(6, 64, 64), struct(32, 64)
    found = analysis_of(rewritten(step, args, Recipe(microbatches=4)), *args)
    graph = found.graph
    stack = graph.inputs[0]
    (link,) = (
        x
        for x in found.groups.links
        if x.value == stack and x.operand >= 0 and graph.ops[x.op].kind == "loop_const"
    )
    whole = 4 * 6 * 64 * 64
    share = 0.5 if read == "product" else 1.0
    assert link.nbytes == pytest.approx(share * whole)
    for buffers in (sent(found, lambda x: x is link), found.buffers):  # of a plan, of the search
        held = [b for b in buffers if b.value == stack and b.group == link.b]
        assert [b.nbytes for b in held] == [pytest.approx(share * whole, rel=0.11)]
    inner = {op.outputs[op.inputs.index(stack)] for op in graph.ops if stack in op.inputs}
    copies = {
        o
        for op in graph.ops
        if op.kind == "optimization_barrier"
        for i, o in zip(op.inputs, op.outputs, strict=True)
        if i in inner
    }
    assert copies
    held = [b for b in sent(found, lambda x: x is link) if b.value in copies]
    # what came as bfloat16 is not converted again; a float32 stack is, for the backward loop
    assert len(held) == (0 if read == "product" else 1)
