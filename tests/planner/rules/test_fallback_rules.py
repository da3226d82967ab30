"""Hand-written rules are never less strict than Shardy's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from planner.rules.key import EqnKey
from planner.rules.sources.fallback import ELEMENTWISE, fallback_rule
from planner.rules.sources.shardy import read_rules

SIZES = (1, 2, 3, 4, 6, 8, 12)
shapes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=4).map(tuple)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def f32(shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def axis_of(draw: Draw, shape: tuple[int, ...]) -> int:
    return int(draw(st.integers(0, len(shape) - 1)))


def axes_of(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))


def shape_of(draw: Draw) -> tuple[int, ...]:
    return tuple(draw(shapes))


def a_transpose(draw: Draw) -> Any:
    shape = shape_of(draw)
    order = draw(st.permutations(range(len(shape))))
    return lambda x: lax.transpose(x, order), f32(shape)


def a_reshape(draw: Draw) -> Any:
    shape = shape_of(draw)
    primes = [p for n in shape for p in (2, 2, 2, 3) if n % p == 0]
    left, factors = math.prod(shape), []
    for prime in draw(st.permutations(primes)):
        if left % prime == 0:
            left //= prime
            factors.append(prime)
    factors.append(left)
    pieces: list[int] = [1]
    for factor in factors:
        if draw(st.booleans()):
            pieces.append(factor)
        else:
            pieces[-1] *= factor
    return lambda x: lax.reshape_p.bind(
        x, new_sizes=tuple(pieces), dimensions=None, sharding=None
    ), f32(shape)


def a_broadcast(draw: Draw) -> Any:
    target = shape_of(draw)
    kept = axes_of(draw, target)
    operand = tuple(target[n] if draw(st.booleans()) else 1 for n in kept)
    return lambda x: lax.broadcast_in_dim(x, target, kept), f32(operand)


def a_reduction(draw: Draw) -> Any:
    shape = shape_of(draw)
    axes = axes_of(draw, shape)
    return lambda x: lax.reduce(x, -jnp.inf, lax.max, axes), f32(shape)


def an_argmax(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    return lambda x: lax.argmax(x, axis, jnp.int32), f32(shape)


def a_scan_along(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    kind = draw(st.sampled_from((lax.cumsum, lax.cummax, lax.cumprod, lax.cumlogsumexp)))
    return lambda x: kind(x, axis), f32(shape)


def a_sort(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    return lambda x, y: lax.sort((x, y), dimension=axis), f32(shape), f32(shape)


def a_reversal(draw: Draw) -> Any:
    shape = shape_of(draw)
    axes = axes_of(draw, shape)
    return lambda x: lax.rev(x, axes), f32(shape)


def a_slice(draw: Draw) -> Any:
    shape = shape_of(draw)
    start = [draw(st.integers(0, n - 1)) for n in shape]
    limit = [draw(st.integers(s + 1, n)) for s, n in zip(start, shape, strict=True)]
    strides = [draw(st.integers(1, 2)) for _ in shape]
    return lambda x: lax.slice_p.bind(
        x, start_indices=tuple(start), limit_indices=tuple(limit), strides=tuple(strides)
    ), f32(shape)


def a_dynamic_slice(draw: Draw) -> Any:
    shape = shape_of(draw)
    sizes = tuple(draw(st.integers(1, n)) for n in shape)
    return (
        lambda x, *at: lax.dynamic_slice_p.bind(x, *at, slice_sizes=sizes),
        f32(shape),
        *[i32()] * len(shape),
    )


def a_dynamic_update(draw: Draw) -> Any:
    shape = shape_of(draw)
    sizes = tuple(draw(st.integers(1, n)) for n in shape)
    return (
        lambda x, u, *at: lax.dynamic_update_slice_p.bind(x, u, *at),
        f32(shape),
        f32(sizes),
        *[i32()] * len(shape),
    )


def a_pad(draw: Draw) -> Any:
    shape = shape_of(draw)
    config = [tuple(draw(st.integers(0, 2)) for _ in range(3)) for _ in shape]
    config = [pad if draw(st.booleans()) else (0, 0, 0) for pad in config]
    return lambda x: lax.pad_p.bind(x, 0.0, padding_config=tuple(config)), f32(shape)


def a_concatenation(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    other = (*shape[:axis], draw(st.sampled_from(SIZES)), *shape[axis + 1 :])
    return lambda x, y: lax.concatenate((x, y), axis), f32(shape), f32(other)


def a_split(draw: Draw) -> Any:
    shape = (*shape_of(draw), 6)
    return lambda x: lax.split(x, (2, 4), len(shape) - 1), f32(shape)


def a_top_k(draw: Draw) -> Any:
    shape = shape_of(draw)
    k = draw(st.integers(1, shape[-1]))
    return lambda x: lax.top_k(x, k), f32(shape)


def a_dot(draw: Draw) -> Any:
    lhs, rhs = shape_of(draw), shape_of(draw)
    count = min(len(lhs), len(rhs))
    order_l = draw(st.permutations(range(len(lhs))))
    order_r = draw(st.permutations(range(len(rhs))))
    paired = draw(st.integers(0, count))
    batch = draw(st.integers(0, paired))
    rhs = tuple(
        lhs[order_l[order_r.index(n)]] if order_r.index(n) < paired else size
        for n, size in enumerate(rhs)
    )
    numbers = (
        (tuple(order_l[batch:paired]), tuple(order_r[batch:paired])),
        (tuple(order_l[:batch]), tuple(order_r[:batch])),
    )
    return lambda a, b: lax.dot_general(a, b, numbers), f32(lhs), f32(rhs)


def a_conv(draw: Draw) -> Any:
    batch, spatial, groups = draw(st.sampled_from(SIZES)), 8, draw(st.sampled_from((1, 1, 2)))
    features = groups * draw(st.sampled_from(SIZES)), groups * draw(st.sampled_from(SIZES))
    window = draw(st.integers(1, 4))
    strides = (draw(st.integers(1, 3)),) * 2
    padding = draw(st.sampled_from(("SAME", "VALID")))
    numbers = draw(st.sampled_from((("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC"))))
    sizes = {"N": batch, "H": spatial, "W": spatial, "C": features[0]}
    kernel = {"H": window, "W": window, "I": features[0] // groups, "O": features[1]}
    return (
        lambda x, k: lax.conv_general_dilated(
            x, k, strides, padding, dimension_numbers=numbers, feature_group_count=groups
        ),
        f32(tuple(sizes[c] for c in numbers[0])),
        f32(tuple(kernel[c] for c in numbers[1])),
    )


def a_gather(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    batch = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=2)))
    rank = len(batch) + len(shape) - 1
    offsets = tuple(sorted(draw(st.permutations(range(rank)))[: len(shape) - 1]))
    numbers = lax.GatherDimensionNumbers(offsets, (axis,), (axis,))
    sizes = tuple(1 if n == axis else size for n, size in enumerate(shape))
    mode = draw(st.sampled_from(("fill", "clip", "promise_in_bounds")))
    return lambda x, at: lax.gather(x, at, numbers, sizes, mode=mode), f32(shape), i32(*batch, 1)


def a_scatter(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    count = draw(st.sampled_from(SIZES))
    window = tuple(range(1, len(shape)))
    numbers = lax.ScatterDimensionNumbers(window, (axis,), (axis,))
    update = (count, *(size for n, size in enumerate(shape) if n != axis))
    kind = draw(st.sampled_from((lax.scatter, lax.scatter_add, lax.scatter_max)))
    return (
        lambda x, at, u: kind(x, at, u, numbers, mode="promise_in_bounds"),
        f32(shape),
        i32(count, 1),
        f32(update),
    )


def an_elementwise(draw: Draw) -> Any:
    shape = shape_of(draw)
    kind = draw(st.sampled_from((lax.add_p, lax.max_p, lax.atan2_p)))
    return lambda x, y: kind.bind(x, y), f32(shape), f32(shape if draw(st.booleans()) else ())


def an_iota(draw: Draw) -> Any:
    shape = shape_of(draw)
    axis = axis_of(draw, shape)
    return (lambda: lax.broadcasted_iota(jnp.int32, shape, axis),)


def a_squeeze(draw: Draw) -> Any:
    shape = (*shape_of(draw), 1)
    return lambda x: lax.squeeze(x, (len(shape) - 1,)), f32(shape)


CASES = [value for name, value in sorted(globals().items()) if name.startswith(("a_", "an_"))]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_never_less_strict_than_shardy(case: Callable[[Draw], Any], data: Any) -> None:
    function, *args = case(data.draw)
    eqns = jax.make_jaxpr(function)(*args).jaxpr.eqns
    keys = [EqnKey.of(eqn) for eqn in eqns[-1:]]
    for key, theirs in zip(keys, read_rules(keys), strict=True):
        assert theirs is not None
        theirs.verify(key.in_shapes, key.out_shapes)
        ours = fallback_rule(key.name, key.params, key.in_shapes, key.out_shapes)
        assert ours is not None or key.name in ("scatter_max", "scatter-max")
        if ours is None:
            continue
        ours.verify(key.in_shapes, key.out_shapes)
        allowed = {(sites, f in theirs.reduction) for f, sites in theirs.sites().items()}
        wanted = {(sites, f in ours.reduction) for f, sites in ours.sites().items()}
        assert wanted <= allowed, f"{key.name}: {ours} is less strict than {theirs}"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((4, 6, 8), (24, 8), "([i, j, k])->([ij, k]) {i=4, j=6, k=8}"),
        ((24, 8), (4, 6, 8), "([ij, k])->([i, j, k]) {i=4, j=6, k=8}"),
        ((4, 6, 8), (8, 6, 4), "([i, jk, lm])->([ij, kl, m]) {i=4, j=2, k=3, l=2, m=4}"),
        ((6, 1, 8), (6, 8), "([i, 1, j])->([i, j]) {i=6, j=8}"),
        ((4, 6, 8), (6, 4, 8), "([i, j, k])->([l, m, k]) {i=4, j=6, k=8, l=6, m=4} replicated="),
        ((), (1, 1), "([])->([1, 1])"),
    ],
)
def test_reshape(before: tuple[int, ...], after: tuple[int, ...], text: str) -> None:
    rule = fallback_rule("reshape", {"new_sizes": after}, [before], [after])
    assert rule is not None
    assert str(rule).startswith(text)


def test_families_without_lowering() -> None:
    def text(name: str, params: dict[str, Any], ins: Any, outs: Any) -> str:
        return str(fallback_rule(name, params, ins, outs))

    assert text("expand_dims", {"dimensions": (1,)}, [(6, 8)], [(6, 1, 8)]) == (
        "([i, j])->([i, 1, j]) {i=6, j=8}"
    )
    assert text("argmin", {"axes": (0,)}, [(6, 8)], [(8,)]) == (
        "([i, j])->([j]) {i=6, j=8} replicated={i}"
    )
    assert text("reduce_and", {"axes": (0,)}, [(6, 8)], [(8,)]) == (
        "([i, j])->([j]) {i=6, j=8} reduction={i}"
    )
    assert text("eigh", {}, [(3, 4, 4)], [(3, 4, 4), (3, 4)]) == (
        "([i, j, k])->([i, l, m], [i, n]) {i=3, j=4, k=4, l=4, m=4, n=4} replicated={j, k, l, m, n}"
    )
    assert text("optimization_barrier", {}, [(3,), (4,)], [(3,), (4,)]) == (
        "([i], [j])->([i], [j]) {i=3, j=4}"
    )
    assert text("threefry2x32", {}, [(), (), (6,), (6,)], [(6,), (6,)]) == (
        "([], [], [i], [i])->([i], [i]) {i=6}"
    )


def test_ragged_dot() -> None:
    eqns = jax.make_jaxpr(lax.ragged_dot)(f32((12, 8)), f32((3, 8, 5)), i32(3)).jaxpr.eqns
    key = EqnKey.of(eqns[-1])
    rule = fallback_rule(key.name, key.params, key.in_shapes, key.out_shapes)
    assert rule is not None
    assert str(rule) == (
        "([i, j], [k, j, l], [m])->([n, l])"
        " {i=12, j=8, k=3, l=5, m=3, n=12} reduction={j} replicated={i, k, m, n}"
    )


def test_unknown_names_params_and_shapes() -> None:
    assert fallback_rule("no_such_primitive", {}, [(3,)], [(3,)]) is None
    assert fallback_rule("transpose", {}, [(3, 4)], [(4, 3)]) is None
    assert fallback_rule("transpose", {"permutation": (0,)}, [(3, 4)], [(4, 3)]) is None
    assert fallback_rule("reshape", {}, [(0, 3)], [(0,)]) is None
    assert fallback_rule("add", {}, [(3,), (4,)], [(3,)]) is None
    assert fallback_rule("dot_general", {"dimension_numbers": None}, [(3,)], [(3,)]) is None
    assert fallback_rule("slice", {}, [np.shape(0)], [(4,)]) is None


def test_elementwise_table_has_the_common_names() -> None:
    assert {"add", "mul", "exp", "tanh", "select_n", "convert_element_type"} <= ELEMENTWISE
    drawn_per_element = {"random_gamma", "random_gamma_grad"}
    assert not any(name.startswith("random_") for name in ELEMENTWISE - drawn_per_element)
