"""How many kernels a compiler that fuses would launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.step.analysis import analyse

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def kernels(function: Callable[..., Any], *args: Any) -> float:
    traced = trace(function, args)
    rules = traced.rules
    groups = build_groups(traced.graph, rules)
    found = analyse(traced.graph, rules, groups, (False,) * len(traced.graph.inputs))
    return sum(w.kernels for facts in found.facts for w in facts.work)


def test_a_chain_is_one_kernel() -> None:
    assert kernels(lambda x: jnp.tanh(x * 2.0 + 1.0), X) == 1


def test_a_chain_with_two_results_is_one_kernel() -> None:
    def two(x: jax.Array) -> Any:
        y = jnp.tanh(x)
        return y, y * x

    assert kernels(two, X) == 1


def test_a_product_and_what_follows() -> None:
    assert kernels(lambda x, w: jnp.tanh(x @ w) + 1.0, X, W) == 2


def test_a_residual_is_not_one_kernel_across_a_product() -> None:
    assert kernels(lambda x, w: x + jnp.tanh((x * 2.0) @ w), X, W) == 3


def test_a_reduction_takes_what_it_reads() -> None:
    assert kernels(lambda x: jnp.sum(jnp.tanh(x), 0), X) == 1


def test_a_normalised_array_is_a_reduction_and_a_chain() -> None:
    assert kernels(lambda x: x - jnp.mean(x, 1, keepdims=True), X) == 2


def test_a_new_shape_is_no_kernel() -> None:
    assert kernels(lambda x, w: x.reshape(64, 32) @ w, X, W) == 1


def test_a_loop_counts_every_turn() -> None:
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=5)[0]

    assert kernels(looped, X, W) == 10


def test_an_update_is_one_kernel_per_parameter() -> None:
    tx = optax.adamw(1e-3)
    params = {"a": W, "b": W}
    state = jax.eval_shape(tx.init, params)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    assert kernels(update, params, state, params) == 2
