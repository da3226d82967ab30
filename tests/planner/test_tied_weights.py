"""Gradients of a table whose rows are looked up and that is also the weights of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.step.memory.updates import gradients_in_updates


def in_updates(step: Callable[..., Any], *args: Any) -> list[str]:
    """The gradients that are computed in the kernels of their updates, as operation and shape."""
    traced = trace(step, args)
    graph = traced.graph
    found = gradients_in_updates(
        graph, build_groups(graph, traced.rules), graph.live_ops(), lambda _: False
    )
    makers = [graph.ops[graph.values[v].op] for v in sorted(found)]
    return [f"{op.kind} {graph.values[op.outputs[0]].shape}" for op in makers]


def args() -> tuple[Any, ...]:
    return (
        jax.ShapeDtypeStruct((64, 16), jnp.float32),
        jax.ShapeDtypeStruct((32,), jnp.int32),
    )


def test_the_product_of_tied_weights_runs_with_the_update() -> None:
    """What lookups add to the gradient is added there."""

    def step(table: Any, tokens: Any) -> Any:
        def loss(table: Any) -> Any:
            rows = table.astype(jnp.bfloat16)[tokens]
            return jnp.sum(jnp.sin((rows @ table.astype(jnp.bfloat16).T).astype(jnp.float32)))

        return table - jax.grad(loss)(table)

    assert in_updates(step, *args()) == ["dot_general (64, 16)"]


def test_of_two_products_neither_does() -> None:
    def step(table: Any, tokens: Any) -> Any:
        def loss(table: Any) -> Any:
            rows = jnp.sin(table[tokens] @ table.T)
            return jnp.sum(jnp.sin(rows @ table))

        return table - jax.grad(loss)(table)

    assert in_updates(step, *args()) == []
