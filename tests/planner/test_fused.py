"""Fused attention: a named function priced as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import Device, attention_drag, parse_cluster
from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.step.analysis import Analysis, analyse

B, S, H, D = 2, 64, 4, 16
Q = jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16)
PRODUCT = 2.0 * B * H * S * S * D
SIZE = 2.0 * B * S * H * D


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def named(name: str) -> Callable[..., jax.Array]:
    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v)

    body.__name__ = name
    return jax.jit(body)


def analysed(function: Callable[..., Any], *args: Any, device: Device | None = None) -> Analysis:
    traced = trace(function, args)
    rules = traced.rules
    groups = build_groups(traced.graph, rules)
    return analyse(traced.graph, rules, groups, (False,) * len(traced.graph.inputs), device)


def works(found: Analysis) -> list[Any]:
    return [w for facts in found.facts for w in facts.work]


def grads(attention: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.value_and_grad(lambda *a: attention(*a).astype(jnp.float32).sum(), (0, 1, 2))(
            q, k, v
        )

    return step


@pytest.mark.parametrize(
    ("name", "share"), [("flash_attention", 1.0), ("flash_attention_causal", 0.5)]
)
def test_a_forward_is_one_kernel_of_two_products(name: str, share: float) -> None:
    found = works(analysed(named(name), Q, Q, Q))
    drag = attention_drag(D, S, "causal" in name)
    assert sum(w.flops for w in found) == pytest.approx(2 * PRODUCT * share * drag)
    assert sum(w.kernels for w in found) == 1
    assert {w.kind for w in found if w.flops} == {"attention"}
    assert sum(w.nbytes for w in found) == 4 * SIZE


def test_a_backward_is_charged_five_products() -> None:
    found = works(analysed(grads(named("flash_attention")), Q, Q, Q))
    attention = [w for w in found if w.kind == "attention"]
    drag = attention_drag(D, S, False)
    assert sum(w.flops for w in attention) == pytest.approx(7 * PRODUCT * drag)
    assert sum(w.kernels for w in attention) == 2


def scores_held(found: Analysis) -> float:
    """Bytes of the values of the scores' size that are ever in memory."""
    values = [found.graph.values[b.value] for b in found.buffers]
    return sum(v.nbytes for v in values if v.shape.count(S) >= 2)


def test_the_scores_are_never_in_memory() -> None:
    assert scores_held(analysed(grads(named("flash_attention")), Q, Q, Q)) == 0
    assert scores_held(analysed(grads(attend), Q, Q, Q)) > 0


def test_nor_through_a_loop() -> None:
    def step(attention: Callable[..., jax.Array]) -> Callable[..., Any]:
        def loss(q: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda x, _: (attention(x, x, x), None), q, length=3)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss)

    found = analysed(step(named("flash_attention")), Q)
    assert scores_held(found) == 0
    assert scores_held(analysed(step(attend), Q)) > 0
    attention = [w for w in works(found) if w.kind == "attention"]
    assert sum(w.kernels for w in attention) == 3 * 2


def test_scores_that_leave_are_in_memory() -> None:
    @jax.jit
    def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", scores, v), scores

    assert scores_held(analysed(flash_attention, Q, Q, Q)) == 2.0 * B * H * S * S


def test_any_other_name_is_ordinary() -> None:
    found = works(analysed(named("attention"), Q, Q, Q))
    assert not [w for w in found if w.kind == "attention"]
    assert sum(w.kernels for w in found) > 2


def test_on_tpu_a_kernel_moves_its_arguments_and_its_result_alone() -> None:
    v5p = parse_cluster("v5p:2x2x2").device
    found = works(analysed(named("flash_attention"), Q, Q, Q, device=v5p))
    assert sum(w.nbytes for w in found) == 4 * SIZE  # q, k, v and the result; no scores


def test_on_tpu_a_kernel_absorbs_nothing_outside_it() -> None:
    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(named("flash_attention")(jnp.sin(q), k, v))

    v5p = parse_cluster("v5p:2x2x2").device
    vector = [w for w in works(analysed(step, Q, Q, Q, device=v5p)) if w.kind == "vector"]
    lanes = 2 * SIZE  # 32-bit lanes, heads of 16 side by side
    assert sum(w.nbytes for w in vector) >= 4 * lanes  # both read and write
