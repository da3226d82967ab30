"""Which dimensions of a Pallas kernel's grid may be split, and which may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention as triton_attention
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from planner import compat
from planner.graph.trace import trace
from planner.rules.kernels.pallas.grid import grid_axes, grid_rule
from planner.rules.kernels.pallas.local import local_params
from planner.rules.key import EqnKey

ROWS, WIDTH = 32, 64


def kernels(function: Callable[..., Any], *args: Any) -> list[EqnKey]:
    traced = trace(function, args)
    return [e for op, e in zip(traced.graph.ops, traced.eqns, strict=True) if op.kernel and e]


def splits(function: Callable[..., Any], *args: Any) -> list[list[tuple[int, int]]]:
    """Of each kernel, (dimension of the grid, number of parts)."""
    found = kernels(function, *args)
    return [[(a.dim, a.parts) for a in grid_axes(e.params, e.unused)] for e in found]


def arrays(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


def call(
    body: Callable[..., None], index_in: Any, index_out: Any = None, **options: Any
) -> Callable[[jax.Array], jax.Array]:
    """A kernel over 4 blocks of rows in 2 blocks of columns, unless ``options`` say otherwise."""

    def run(x: jax.Array) -> jax.Array:
        specs = {
            "grid": (4, 2),
            "in_specs": [pl.BlockSpec((8, 32), index_in)],
            "out_specs": pl.BlockSpec((8, 32), index_out or index_in),
            "out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype),
        }
        made = pl.pallas_call(body, **{**specs, "interpret": True, **options})(x)
        return made  # type: ignore[no-any-return]

    return run


def double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def plain(i: Any, j: Any) -> Any:
    return i, j


X = arrays((ROWS, WIDTH))


def test_an_elementwise_kernel_is_split_along_its_grid() -> None:
    assert splits(call(double, plain), *X) == [[(0, 4), (1, 2)]]
    (eqn,) = kernels(call(double, plain), *X)
    rule = grid_rule(eqn)
    assert rule is not None
    rule.verify(eqn.in_shapes, eqn.out_shapes)
    assert [rule.sizes[f] for f in sorted(rule.shardable)] == [4, 2]
    first = [[dim[0] for dim in value] for value in (*rule.operands, *rule.results)]
    assert first == [sorted(rule.shardable)] * 2


def test_a_body_that_reads_its_place_is_not() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] * pl.program_id(0)

    assert splits(call(body, plain), *X) == [[(1, 2)]]

    def hidden(x: Any, out: Any) -> None:
        @pl.when(x[0, 0] > 0)
        def _() -> None:
            out[...] = x[...] * pl.program_id(1)

    assert splits(call(hidden, plain), *X) == [[(0, 4)]]


def test_a_place_that_is_read_and_not_used_does_not_count() -> None:
    def body(x: Any, out: Any) -> None:
        _ = pl.program_id(0) + 1
        out[...] = x[...]

    assert splits(call(body, plain), *X) == [[(0, 4), (1, 2)]]


def test_a_place_modulo_a_number_is_split_into_whole_turns() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] * jax.lax.rem(pl.program_id(0), 2)

    assert splits(call(body, plain), *X) == [[(0, 2), (1, 2)]]


def test_blocks_in_another_order_are_not_split() -> None:
    assert splits(call(double, lambda i, j: (3 - i, j), plain), *X) == [[(1, 2)]]
    assert splits(call(double, lambda i, j: ((i + j) % 4, j), plain), *X) == [[]]
    assert splits(call(double, lambda i, j: (i, 0), plain), *X) == [[(0, 4), (1, 2)]]


def test_a_result_that_all_places_write_is_not_split_along_them() -> None:
    def adds(x: Any, out: Any) -> None:
        out[...] += x[...]

    assert splits(call(adds, plain, lambda i, j: (i, 0)), *X) == [[(0, 4)]]


def test_blocks_that_do_not_fill_the_array_are_not_split() -> None:
    options = {"grid": (5, 2)}
    assert splits(call(double, plain, **options), *arrays((36, 64))) == [[(1, 2)]]


def test_grouped_heads_are_split_in_groups() -> None:
    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return pl.pallas_call(  # type: ignore[no-any-return]
            lambda x, y, out: out.__setitem__(..., x[...] + y[...]),
            grid=(8,),
            in_specs=[
                pl.BlockSpec((1, 128), lambda h: (h, 0)),
                pl.BlockSpec((1, 128), lambda h: (h // 4, 0)),
            ],
            out_specs=pl.BlockSpec((1, 128), lambda h: (h, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            interpret=True,
        )(x, y)

    assert splits(run, *arrays((8, 128), (2, 128))) == [[(0, 2)]]


def scratch(body: Callable[..., None]) -> Callable[[jax.Array], jax.Array]:
    """A kernel that keeps a block of scratch memory."""
    held = pl.MemoryRef(jax.core.ShapedArray((8, 32), jnp.dtype("float32")), pl.ANY)
    return call(body, plain, scratch_shapes=[held])


def test_what_is_carried_from_place_to_place_must_start_anew() -> None:
    def anew(x: Any, out: Any, held: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            held[...] = jnp.zeros((8, 32))

        held[...] += x[...]
        out[...] = held[...]

    assert splits(scratch(anew), *X) == [[(0, 4)]]

    def runs_on(x: Any, out: Any, held: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            held[...] = jnp.zeros((8, 32))

        held[...] += x[...]
        out[...] = held[...]

    assert splits(scratch(runs_on), *X) == [[]]

    def at_each(x: Any, out: Any, held: Any) -> None:
        held[...] = x[...] * pl.program_id(0)
        out[...] = held[...]

    assert splits(scratch(at_each), *X) == [[(1, 2)]]

    def in_part(x: Any, out: Any, held: Any) -> None:
        held[:4] = x[:4] * pl.program_id(0)
        out[...] = held[...]

    assert splits(scratch(in_part), *X) == [[]]


def test_state_that_a_flag_resets_goes_on_from_place_to_place() -> None:
    """As a segmented sum does: the first place along any dimension may go on from the last."""

    def body(x: Any, out: Any, held: Any) -> None:
        @pl.when(x[0, 0] > 0)
        def _() -> None:
            held[...] = jnp.zeros((8, 32))

        held[...] += x[...]
        out[...] = held[...]

    assert splits(scratch(body), *X) == [[]]

    def shifts(x: Any, out: Any, held: Any) -> None:
        out[...] = held[...]
        held[...] = x[...]

    assert splits(scratch(shifts), *X) == [[]]


def test_a_kernel_that_writes_an_operand_is_not_split() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...]

        @pl.when(x[0, 0] > 0)
        def _() -> None:
            x[...] = x[...] + 1

    assert splits(call(body, plain), *X) == [[]]


def test_a_reference_under_two_names_is_one() -> None:
    def body(x: Any, out: Any, held: Any) -> None:
        def both(a: Any, b: Any) -> jax.Array:
            old = a[...]
            b[...] = x[...] * pl.program_id(0)
            return old

        out[...] = jax.jit(both)(held, held)

    assert splits(scratch(body), *X) == [[]]


def test_kernels_that_differ_in_index_maps_are_not_one() -> None:
    square = (arrays((32, 64)),)
    turned = call(double, lambda i, j: (j, i), grid=(2, 4))
    straight = call(double, plain, grid=(4, 2))
    keys = [kernels(run, *square[0])[0] for run in (straight, turned)]
    assert keys[0].signature() != keys[1].signature()
    graphs = [trace(run, square[0]).graph for run in (straight, turned)]
    assert graphs[0].ops[-1].attrs != graphs[1].ops[-1].attrs


def test_a_kernel_that_draws_random_numbers_is_not_split() -> None:
    def body(x: Any, out: Any) -> None:
        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            pltpu.prng_seed(3)

        bits = pltpu.prng_random_bits((8, 32))
        out[...] = x[...] + bits.astype(jnp.float32)

    assert splits(call(body, plain, interpret=False), *X) == [[]]


BATCH, HEADS, TOKENS, DEPTH = 4, 8, 256, 128


def test_attention_kernels_of_jax_are_split_along_batch_and_heads() -> None:
    heads = arrays(*[(BATCH, HEADS, TOKENS, DEPTH)] * 3, dtype=jnp.bfloat16)

    def flash(*args: jax.Array) -> jax.Array:
        return flash_attention.flash_attention(*args, causal=True).astype(jnp.float32).sum()

    grad = jax.grad(flash, argnums=(0, 1, 2))
    assert splits(grad, *heads) == [[(0, BATCH), (1, HEADS)]] * 3

    last = arrays(*[(BATCH, TOKENS, HEADS, 64)] * 3, dtype=jnp.bfloat16)

    def triton(*args: jax.Array) -> jax.Array:
        made = triton_attention.mha(*args, None, causal=True, backward_pass_impl="triton")
        return made.astype(jnp.float32).sum()

    forward, _, backward = splits(jax.grad(triton, argnums=(0, 1, 2)), *last)
    assert forward == [(1, BATCH), (2, HEADS)] and backward == [(0, BATCH), (1, HEADS)]


@pytest.mark.parametrize(("key_heads", "parts"), [(HEADS, HEADS), (2, 2)])
def test_splash_attention_is_split_although_it_keeps_scratch_in_results(
    key_heads: int, parts: int
) -> None:
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    shapes = [(BATCH, h, TOKENS, DEPTH) for h in (HEADS, key_heads, key_heads)]

    def loss(*args: jax.Array) -> jax.Array:
        return jax.vmap(kernel)(*args).astype(jnp.float32).sum()

    found = splits(jax.grad(loss, argnums=(0, 1, 2)), *arrays(*shapes, dtype=jnp.bfloat16))
    assert [dict(axes)[0] for axes in found] == [BATCH] * 3
    assert [[n for d, n in axes if d] for axes in found] == [[parts]] * 3


def test_grouped_products_are_split_along_their_columns() -> None:
    def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return gmm(x, w, sizes, preferred_element_type=jnp.float32)  # type: ignore[no-any-return]

    args = [*arrays((1024, 256), (8, 256, 512), dtype=jnp.bfloat16), *arrays((8,), dtype=jnp.int32)]
    assert splits(run, *args) == [[(0, 4)]]


@pytest.mark.long
def test_a_kernel_on_a_shard_has_a_shorter_grid() -> None:
    (eqn,) = kernels(call(double, plain), *X)
    local = local_params(eqn.params, [(8, WIDTH)], [(8, WIDTH)], frozenset())
    assert local["grid_mapping"].grid == (1, 2)
    x = np.arange(8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
    (made,) = eqn.primitive.bind(jnp.asarray(x), **local)
    np.testing.assert_array_equal(made, 2 * x)
    with pytest.raises(ValueError, match="shards of"):
        local_params(eqn.params, [(4, WIDTH)], [(4, WIDTH)], frozenset())


@pytest.mark.long
def test_the_rule_holds_for_random_shards() -> None:
    """Of every kernel here that is split: the parts, one after the other, are the whole."""

    def body(x: Any, out: Any) -> None:
        out[...] = jnp.cumsum(x[...], 0) * jax.lax.rem(pl.program_id(0), 2)

    run = call(body, plain)
    (eqn,) = kernels(run, *X)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    whole = np.asarray(run(jnp.asarray(x)))
    for axis in grid_axes(eqn.params, frozenset()):
        (site, _) = axis.sites
        shards = np.split(x, axis.parts, axis=site[1])
        shape = shards[0].shape
        local = local_params(eqn.params, [shape], [shape], frozenset())
        parts = [eqn.primitive.bind(jnp.asarray(s), **local)[0] for s in shards]
        np.testing.assert_array_equal(np.concatenate(parts, site[1]), whole)
    assert compat.aval_shape(eqn.out_avals[0]) == (ROWS, WIDTH)
