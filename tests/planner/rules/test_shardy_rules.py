"""Rules read from Shardy, as text, for the main families of primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from planner.rules.key import EqnKey
from planner.rules.sources.shardy import read_rules


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def last_key(function: Callable[..., Any], *args: Any) -> EqnKey:
    """The key of the last equation of a traced function."""
    return EqnKey.of(jax.make_jaxpr(function)(*args).jaxpr.eqns[-1])


def conv(x: Any, k: Any, groups: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), groups
    )


TAKE = lax.GatherDimensionNumbers((1,), (0,), (0,))
PUT = lax.ScatterDimensionNumbers((1,), (0,), (0,))
A, B, X = f32(6, 8), f32(8, 4), f32(4, 6, 8)

GOLDEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "dot": (jnp.dot, (A, B), "([i, j], [j, k])->([i, k]) {i=6, j=8, k=4} reduction={j}"),
    "batched dot": (
        lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))),
        (X, f32(4, 8, 5)),
        "([i, j, k], [i, k, l])->([i, j, l]) {i=4, j=6, k=8, l=5} reduction={k}",
    ),
    "transpose": (
        lambda x: lax.transpose(x, (2, 0, 1)),
        (X,),
        "([i, j, k])->([k, i, j]) {i=4, j=6, k=8}",
    ),
    "merge": (
        lambda x: lax.reshape(x, (24, 8)),
        (X,),
        "([i, j, k])->([ij, k]) {i=4, j=6, k=8}",
    ),
    "split": (
        lambda x: lax.reshape(x, (4, 2, 3, 8)),
        (X,),
        "([i, jk, l])->([i, j, k, l]) {i=4, j=2, k=3, l=8}",
    ),
    "broadcast": (
        lambda a: lax.broadcast_in_dim(a, (5, 6, 8), (1, 2)),
        (A,),
        "([i, j])->([k, i, j]) {i=6, j=8, k=5}",
    ),
    "broadcast a unit": (
        lambda a: lax.broadcast_in_dim(a, (6, 8), (0, 1)),
        (f32(6, 1),),
        "([i, 1])->([i, j]) {i=6, j=8}",
    ),
    "sum": (
        lambda x: lax.reduce_sum_p.bind(x, axes=(0, 2), out_sharding=None),
        (X,),
        "([i, j, k])->([j]) {i=4, j=6, k=8} reduction={i, k}",
    ),
    "argmax": (
        lambda a: lax.argmax(a, 1, jnp.int32),
        (A,),
        "([i, j])->([i]) {i=6, j=8} reduction={j}",
    ),
    "cumsum": (
        lambda a: lax.cumsum(a, 0),
        (A,),
        "([i, j])->([i, j]) {i=6, j=8} replicated={i}",
    ),
    "sort": (
        lambda a, b: lax.sort((a, b), dimension=1),
        (A, A),
        "([i, j], [i, j])->([i, j], [i, j]) {i=6, j=8} replicated={j}",
    ),
    "top_k": (
        lambda a: lax.top_k(a, 2),
        (A,),
        "([i, j])->([i, k], [i, l]) {i=6, j=8, k=2, l=2} replicated={j, k, l}",
    ),
    "slice": (
        lambda a: lax.slice(a, (1, 0), (3, 8)),
        (A,),
        "([i, j])->([k, j]) {i=6, j=8, k=2} replicated={i, k}",
    ),
    "dynamic slice": (
        lambda a, n, m: lax.dynamic_slice_p.bind(a, n, m, slice_sizes=(2, 8)),
        (A, i32(), i32()),
        "([i, j], [], [])->([k, j]) {i=6, j=8, k=2} replicated={i, k}",
    ),
    "pad": (
        lambda a: lax.pad(a, 0.0, ((1, 0, 0), (0, 0, 0))),
        (A,),
        "([i, j], [])->([k, j]) {i=6, j=8, k=7} replicated={i, k}",
    ),
    "concatenate": (
        lambda a, b: lax.concatenate((a, b), 0),
        (A, A),
        "([i, j], [k, j])->([l, j]) {i=6, j=8, k=6, l=12} replicated={i, k, l}",
    ),
    "reverse": (
        lambda a: lax.rev(a, (0,)),
        (A,),
        "([i, j])->([i, j]) {i=6, j=8} replicated={i}",
    ),
    "split in parts": (
        lambda a: lax.split(a, (2, 4), 0),
        (A,),
        "([i, j])->([k, j], [l, j]) {i=6, j=8, k=2, l=4} replicated={i, k, l}",
    ),
    "conv": (
        conv,
        (f32(2, 8, 8, 4), f32(3, 3, 4, 6)),
        "([i, j, k, l], [m, n, l, o])->([i, j, k, o]) {i=2, j=8, k=8, l=4, m=3, n=3, o=6}"
        " reduction={l} replicated={j, k, m, n}",
    ),
    "depthwise conv": (
        lambda x, k: conv(x, k, 4),
        (f32(2, 8, 8, 4), f32(3, 3, 1, 8)),
        "([i, j, k, l], [m, n, 1, lo])->([i, j, k, lo]) {i=2, j=8, k=8, l=4, m=3, n=3, o=2}"
        " replicated={j, k, m, n}",
    ),
    "pooling": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (f32(2, 8, 8, 4),),
        "([i, j, k, l])->([i, m, n, l]) {i=2, j=8, k=8, l=4, m=4, n=4} replicated={j, k, m, n}",
    ),
    "embedding": (
        lambda a, n: lax.gather(a, n, TAKE, (1, 8), mode="fill"),
        (A, i32(3, 1)),
        "([i, j], [k, 1])->([k, j]) {i=6, j=8, k=3} reduction={i}",
    ),
    "embedding gradient": (
        lambda a, n, u: lax.scatter_add(a, n, u, PUT, mode="drop"),
        (A, i32(3, 1), f32(3, 8)),
        "([i, j], [k, 1], [k, j])->([i, j]) {i=6, j=8, k=3} reduction={k}",
    ),
    "set rows": (
        lambda a, n, u: lax.scatter(a, n, u, PUT, mode="drop"),
        (A, i32(3, 1), f32(3, 8)),
        "([i, j], [k, 1], [k, j])->([i, j]) {i=6, j=8, k=3} replicated={k}",
    ),
    "iota": (
        lambda: lax.broadcasted_iota(jnp.int32, (3, 4), 1),
        (),
        "()->([i, j]) {i=3, j=4}",
    ),
    "unit broadcasting": (
        lambda a, b: lax.add_p.bind(a, b),
        (A, f32()),
        "([i, j], [])->([i, j]) {i=6, j=8}",
    ),
    "fft": (
        lambda a: lax.fft_p.bind(a, fft_type=lax.FftType.FFT, fft_lengths=(8,)),
        (jax.ShapeDtypeStruct((6, 8), jnp.complex64),),
        "([i, j])->([i, j]) {i=6, j=8} replicated={j}",
    ),
}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The rules of all golden cases, read together."""
    rules = read_rules([last_key(function, *args) for function, args, _ in GOLDEN.values()])
    return dict(zip(GOLDEN, map(str, rules), strict=True))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, texts: dict[str, str]) -> None:
    assert texts[name] == GOLDEN[name][2]


def test_update_maps_the_untouched_dimensions() -> None:
    """Releases differ in the updated dimension, which may or may not be shardable."""
    (rule,) = read_rules(
        [last_key(lambda a, u, n: lax.dynamic_update_slice_p.bind(a, u, n, n), A, f32(2, 8), i32())]
    )
    assert rule is not None
    assert rule.operands[0] == rule.results[0]
    assert rule.operands[1][1] == rule.results[0][1]
    assert rule.results[0][1][0] in rule.shardable


def test_select_and_scatter() -> None:
    def loss(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum()

    eqns = jax.make_jaxpr(jax.grad(loss))(A).jaxpr.eqns
    key = next(EqnKey.of(e) for e in eqns if "select_and_scatter" in e.primitive.name)
    (rule,) = read_rules([key])
    assert str(rule) == ("([i, j], [i, k])->([i, k]) {i=6, j=4, k=8} replicated={j, k}")


def test_random_bits_of_keys() -> None:
    """Keys have a hidden dimension in the lowered module, which the rule leaves out."""
    keys = jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype)
    call = jax.make_jaxpr(jax.vmap(lambda key: jax.random.bits(key, (4,))))(keys).jaxpr.eqns[0]
    while "jaxpr" in call.params:
        call = call.params["jaxpr"].jaxpr.eqns[0]
    assert call.primitive.name == "random_bits"
    (rule,) = read_rules([EqnKey.of(call)])
    assert str(rule) == "([i])->([i, j]) {i=3, j=4}"


def test_random_primitives_do_not_crash() -> None:
    def function(data: Any) -> Any:
        key = jax.random.wrap_key_data(data)
        return jax.random.key_data(jax.random.fold_in(key, 3))

    eqns = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2,), jnp.uint32)).jaxpr.eqns
    keys = [EqnKey.of(eqn) for eqn in eqns]
    for key, rule in zip(keys, read_rules(keys), strict=True):
        if rule is not None:
            rule.verify(key.in_shapes, key.out_shapes)
    key = last_key(
        lambda k: lax.rng_bit_generator(k, (4, 8)), jax.ShapeDtypeStruct((4,), jnp.uint32)
    )
    (rule,) = read_rules([key])
    assert rule is None or rule.operands[0][0][0] in rule.replicated


def test_threefry_is_composed() -> None:
    key = EqnKey(
        primitive=last_key(
            lambda k: jax.extend.random.threefry2x32_p.bind(k, k, k, k),
            jax.ShapeDtypeStruct((6,), jnp.uint32),
        ).primitive,
        params={},
        in_avals=(jax.ShapeDtypeStruct((6,), jnp.uint32),) * 4,
        out_avals=(jax.ShapeDtypeStruct((6,), jnp.uint32),) * 2,
    )
    (rule,) = read_rules([key])
    assert str(rule) == "([i], [i], [i], [i])->([i], [i]) {i=6}"
    assert rule is not None and rule.origin == "composed"


def test_bad_items_do_not_spoil_the_others() -> None:
    good = last_key(jnp.dot, A, B)
    bad_params = EqnKey(good.primitive, {}, good.in_avals, good.out_avals)
    wrong_shape = EqnKey(good.primitive, good.params, good.in_avals, (f32(5, 5),))
    empty = last_key(lambda a: lax.transpose(a, (1, 0)), f32(0, 3))
    loop = last_key(lambda a: lax.while_loop(lambda _: False, lambda x: x, a), A)
    inverse = last_key(lambda a: lax.igamma(a, a), A)  # a loop once lowered
    rules = read_rules([bad_params, good, wrong_shape, empty, loop, inverse, good])
    assert [rule is not None for rule in rules] == [False, True, False, False, False, False, True]
    assert rules[1] == rules[6]


def test_repeated_and_returned_arguments() -> None:
    copied = last_key(lambda a: lax.copy_p.bind(a), A)
    one = last_key(lambda a: jnp.dot(a, a), f32(4, 4))
    rules = read_rules([copied, one])
    assert str(rules[0]) == "([i, j])->([i, j]) {i=6, j=8}"
    assert str(rules[1]) == "([i, j], [j, k])->([i, k]) {i=4, j=4, k=4} reduction={j}"


def test_nothing_to_read() -> None:
    assert read_rules([]) == []
