"""Repeated blocks: unrolled layers are found, other programs have none, and it is fast."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.ir import Block, Graph, Op, Region, Value
from planner.graph.labels.blocks import MIN_LENGTH, repeated_blocks
from planner.graph.trace import trace


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(kinds: Sequence[object]) -> Graph:
    """A chain of unary operations of the given kinds."""
    values = [Value(0, (4,), "float32", 4, -1, "x")]
    ops = []
    for k, kind in enumerate(kinds):
        values.append(Value(k + 1, (4,), "float32", 4, k))
        ops.append(Op(k, str(kind), (k,), (k + 1,), 0))
    regions = (Region(0, "main", -1, 1, 1.0),)
    return Graph(tuple(values), tuple(ops), regions, (0,), (len(kinds),), ("[0]",), ("",), ())


def layer(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 1e-6)
    return x + jnp.tanh(((x - mean) * scale) @ w + b)


def unrolled(layers: int, backward: bool) -> Graph:
    def forward(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for w, b in params:
            x = layer(w, b, x)
        return jnp.sum(x)

    params = [(struct(32, 32), struct(32))] * layers
    return trace(jax.grad(forward) if backward else forward, (params, struct(16, 32))).graph


def assert_sound(graph: Graph, blocks: Sequence[Block]) -> None:
    """Each block really repeats; none overlap; the limits are kept."""
    texts, end = list(graph.texts()), 0
    for block in blocks:
        assert block.start >= end and block.length >= MIN_LENGTH and block.count >= 2
        end = block.end
        assert end <= len(texts)
        first = texts[block.start : block.start + block.length]
        assert texts[block.start : end] == first * block.count


@pytest.mark.parametrize("layers", [2, 3, 12])
def test_every_layer_of_an_unrolled_model_is_one_repetition(layers: int) -> None:
    graph = unrolled(layers, backward=False)
    (block,) = repeated_blocks(graph)
    assert_sound(graph, [block])
    assert block.count == layers
    assert block.length == (len(graph.ops) - 1) // layers  # the sum comes after


def test_forward_and_backward_of_twelve_layers_are_two_blocks() -> None:
    graph = unrolled(12, backward=True)
    blocks = repeated_blocks(graph)
    assert_sound(graph, blocks)
    large = [b for b in blocks if b.count >= 10]
    assert len(large) == 2
    assert all(b.count in (11, 12) for b in large)
    assert sum(b.length * b.count for b in blocks) > 0.8 * len(graph.ops)


def test_a_program_without_repeats_has_no_blocks() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w)
        return jnp.exp(y).sum() + jnp.sort(y, axis=0)[0] @ jnp.linspace(0.0, 1.0, 8)

    assert repeated_blocks(trace(step, (struct(16, 8), struct(4, 16))).graph) == ()
    assert repeated_blocks(graph_of(range(500))) == ()
    assert repeated_blocks(graph_of([])) == ()
    assert repeated_blocks(graph_of(["a"])) == ()


def test_limits_of_length_and_count() -> None:
    assert repeated_blocks(graph_of([*range(7), *range(7)])) == ()  # 7 < 8 operations
    assert repeated_blocks(graph_of([*range(8), *range(8)])) == (Block(0, 8, 2),)
    assert repeated_blocks(graph_of([*range(8), "x", *range(8)])) == ()  # not back to back
    assert repeated_blocks(graph_of("abcd" * 12)) == (Block(0, 8, 6),)  # two at a time
    assert repeated_blocks(graph_of("a" * 40)) == (Block(0, 8, 5),)


def test_shape_and_attributes_tell_operations_apart() -> None:
    def net(x: jax.Array, axes: Sequence[int]) -> jax.Array:
        for axis in axes:
            for fun in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.log, jnp.sqrt, jnp.abs):
                x = fun(x)
            x = jax.lax.cumsum(x, axis=axis)
        return x

    same = trace(lambda x: net(x, (0, 0, 0)), (struct(4, 4),)).graph
    other = trace(lambda x: net(x, (0, 1, 0)), (struct(4, 4),)).graph
    assert [b.count for b in repeated_blocks(same)] == [3]
    assert repeated_blocks(other) == ()


def test_the_longest_coverage_wins_and_several_blocks_are_found() -> None:
    first, second = list(range(100, 110)), list(range(200, 220))
    blocks = repeated_blocks(graph_of(["s", *first * 4, "m", *second * 3, "e"]))
    assert blocks == (Block(1, 10, 4), Block(42, 20, 3))


def test_a_block_that_repeats_parts_inside_is_still_one_block() -> None:
    inner = list(range(9))
    body = [*inner, "a", *inner, "b", *inner, "c"]
    assert repeated_blocks(graph_of(body * 6)) == (Block(0, len(body), 6),)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=14), st.integers(1, 4)), max_size=5))
def test_blocks_are_sound_on_random_programs(pieces: list[tuple[list[int], int]]) -> None:
    graph = graph_of([kind for body, times in pieces for kind in body * times])
    assert_sound(graph, repeated_blocks(graph))


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 60), st.integers(2, 9), st.integers(0, 5), st.integers(0, 5))
def test_a_planted_repeat_is_always_found(length: int, count: int, head: int, tail: int) -> None:
    kinds = [*(f"h{k}" for k in range(head)), *(list(range(length)) * count)]
    kinds += [f"t{k}" for k in range(tail)]
    assert repeated_blocks(graph_of(kinds)) == (Block(head, length, count),)


@pytest.mark.parametrize("kind", ["layers", "one letter", "no repeats", "two letters"])
def test_seven_thousand_operations_take_less_than_a_tenth_of_a_second(kind: str) -> None:
    kinds: list[object] = {
        "layers": [*range(500), *(list(range(500, 600)) * 60), *range(600, 1100)],
        "one letter": ["a"] * 7000,
        "no repeats": list(range(7000)),
        "two letters": [str(k * k % 7 % 2) + str(k % 13 * k % 5) for k in range(7000)],
    }[kind]
    graph = graph_of(kinds)
    spent = []
    for _ in range(5):  # the least of five, so that a busy machine does not decide
        begun = time.process_time()
        repeated_blocks(graph)
        spent.append(time.process_time() - begun)
    assert min(spent) < 0.1
