"""The terms of the memory model, each on its own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from costmodels import parse_cluster
from planner import make_plan
from planner.cost.peak import buffer_bytes
from planner.graph.ir import Phase
from planner.graph.trace import trace
from planner.plan.extract import Extraction
from planner.plan.plan import plan_from_json
from planner.planning import plan_step
from planner.space.buffer import Port, Tiled
from planner.space.groups import GroupLink, build_groups
from planner.step.analysis import PACKING, TPU_RESERVE, Analysis, analyse
from planner.step.buffers import Lifetimes
from planner.step.memory.lanes import image_lanes
from planner.step.memory.liveness import intervals
from planner.step.memory.materialized import written
from planner.step.memory.schedule import activations_first
from planner.step.memory.tiles import padding, paddings
from planner.step.memory.updates import gradients_in_updates
from planner.step.memory.workspace import pads_unevenly
from planner.step.op_kinds import extents

TILE = (8, 128)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def analysis_of(function: Callable[..., Any], *args: Any, cluster: str = "h100:8") -> Analysis:
    traced = trace(function, args)
    rules = traced.rules
    carried = {i for i, _ in traced.graph.ties}
    donated = [k in carried for k in range(len(traced.graph.inputs))]
    device = parse_cluster(cluster).device
    return analyse(traced.graph, rules, build_groups(traced.graph, rules), donated, device)


def told(found: Analysis, moves: Callable[[GroupLink], bool]) -> Lifetimes:
    return found.scheduled.buffers(found.graph, found.groups, moves)


def spans(held: Lifetimes, value: int) -> list[tuple[int, int]]:
    return sorted((b.start, b.end) for b in held.buffers if b.value == value)


# ---- bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tile", "expected"),
    [
        ((8192, 10), TILE, 16 / 10),  # 10 becomes 16 rows, not 128 lanes
        ((16, 8, 8, 32), TILE, 128 / 32),  # 32 channels on 128 lanes
        ((64, 32, 32, 32), TILE, 128 / 64),  # the batch on the lanes wastes less
        ((32, 84, 84, 4), TILE, 128 / 84),  # tiles of 4 rows, as libtpu 0.0.42.1 has them
        ((8192, 20, 17), TILE, 24 / 20),
        ((1 << 17, 3), TILE, 4 / 3),
        ((256, 128), TILE, 1.0),
        ((7,), TILE, 1.0),
        ((7, 3), (1, 1), 1.0),
    ],
)
def test_arrays_are_padded_to_whole_tiles(
    shape: tuple[int, ...], tile: tuple[int, int], expected: float
) -> None:
    assert padding(shape, tile) == pytest.approx(expected)


def test_the_search_counts_gaps_between_temporaries() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    found = analysis_of(step, struct(64, 64), struct(64, 64), cluster="v5e:2x4")
    stays = {*found.graph.inputs, *found.graph.outputs}
    ratios = {b.nbytes / (2 * 64 * 64) for b in found.buffers if b.value not in stays}
    assert ratios == {TPU_RESERVE, 2 * TPU_RESERVE}
    whole = {b.nbytes for b in found.buffers if b.value in stays and b.port is not Port.GATHERED}
    assert whole == {4.0 * 64 * 64}


def test_many_shapes_are_padded_like_one() -> None:
    rng = np.random.default_rng(0)
    for rank, lying in ((2, ()), (3, ()), (3, (2,)), (4, (3, 0))):
        shapes = rng.integers(1, 300, (rank, 50))
        found = paddings(list(shapes), Tiled((1,) * rank, TILE, lying))
        one = [padding(tuple(map(int, s)), TILE, lying) for s in shapes.T]
        np.testing.assert_allclose(found, one)


def test_the_search_counts_the_tiles_of_shards() -> None:
    """16 of 64 columns take 128 lanes, whichever strategy makes them so few."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w.T

    planned = plan_step(step, struct(32, 24, 64), struct(64, 96), cluster="v5e:2x4")
    priced = planned.extraction.priced
    graph, seen = planned.extraction.graph, set()
    for b in priced.analysis.buffers:
        for row in range(priced.sets[b.group].count):
            choice = [0] * len(priced.sets)
            choice[b.group] = row
            chosen = Extraction(priced, tuple(choice))
            where = "store" if b.port is Port.STORE else "use"
            shape = graph.values[b.value].shape
            local = chosen.sharding(b.group, b.layout, where).local_shape(shape, priced.mesh)
            share = math.prod(local) / math.prod(shape)
            (found,) = buffer_bytes(chosen, [b])
            if found or b.port is not Port.GATHERED:
                assert found == pytest.approx(b.nbytes * share * padding(local, TILE))
            seen.add(padding(local, TILE))
    assert len(seen) > 2


def residual(params: Any, x: Any) -> Any:
    """Two residual layers, trained."""

    def loss(params: Any) -> Any:
        h = x
        for up, down in params:
            h = h + jnp.tanh(h @ up) @ down
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.mark.long
def test_a_plan_that_takes_more_than_was_searched_for_is_searched_again() -> None:
    """Arrays are in two layouts at once as the plan runs, in one for the search."""
    args = ([(struct(512, 1024), struct(1024, 512))] * 2, struct(2048, 512))
    said = {}
    for memory in (9.0e6, 8.5e6, 7.5e6, 7.0e6):
        planned = plan_step(
            residual, *args, cluster="v5e:2x4", mesh="a=2,b=4", microbatches=1, memory=memory
        )
        plan = planned.plan
        told = [note for note in plan.notes if "in two layouts at once" in note]
        assert bool(told) == (plan.prediction.peak_bytes > memory)
        said[memory] = bool(told)
        assert plan.prediction.limit_bytes == planned.request.limit_bytes == memory
        assert planned.extraction.priced.limit_bytes == memory
    assert said == {9.0e6: False, 8.5e6: False, 7.5e6: False, 7.0e6: True}


def test_weights_that_stay_on_one_device_are_not_counted_twice() -> None:
    """Products cast them as they read them."""

    def step(frozen: Any, scales: Any, x: Any) -> Any:
        def loss(scales: Any) -> Any:
            h = x
            for w, s in zip(frozen, scales, strict=True):
                h = jnp.tanh(h @ w.astype(jnp.bfloat16)) * s
            return jnp.sum(h.astype(jnp.float32))

        return jax.tree.map(lambda s, g: s - g, scales, jax.grad(loss)(scales))

    bfloat16 = [jax.ShapeDtypeStruct((512,), jnp.bfloat16)] * 4
    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    args = ([struct(512, 512)] * 4, bfloat16, x)
    free = make_plan(step, *args, cluster="v5e:1x1").prediction.peak_bytes
    assert (
        make_plan(step, *args, cluster="v5e:1x1", memory=1.1 * free).prediction.peak_bytes <= free
    )


def test_only_tpus_pad_arrays_in_the_prediction() -> None:
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    plain = 4 * 1024 * 10  # what comes out takes the memory of what goes in
    peaks = {
        c: make_plan(double, struct(1024, 10), cluster=c, mode="STAND_ALONE").prediction.peak_bytes
        for c in ("h100:1", "v5p:1x1x1")
    }
    assert peaks == {"h100:1": plain, "v5p:1x1x1": plain * 1.6}


def test_gaps_are_counted_between_temporaries_alone() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    plan = make_plan(step, struct(64, 64), struct(64, 64), cluster="h100:1", mode="STAND_ALONE")
    each = 4 * 64 * 64  # x, which the result takes over, and w stay; a product's result does not
    assert plan.prediction.peak_bytes == pytest.approx((2 + PACKING) * each)


# ---- kernels and their buffers -------------------------------------------------------------


def test_a_product_that_is_scattered_is_there_in_both_layouts() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) + 1

    found = analysis_of(step, struct(64, 64), struct(64, 64))
    (product,) = [op for op in found.graph.ops if op.kind == "dot_general"]
    at, made = 2 * product.index, product.outputs[0]
    still = spans(told(found, lambda _: False), made)
    moved = spans(told(found, lambda link: link.operand <= -2), made)
    assert [s for s, _ in still] == [at]
    assert (at, at + 2) in moved and [s for s, _ in moved] == [at, at + 1]


def test_an_operand_that_is_sent_is_there_twice_until_the_source_has_no_reader() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    found = analysis_of(step, struct(64, 64), struct(64, 64))
    act = next(op.outputs[0] for op in found.graph.ops if op.kind == "tanh")
    first, second = [op.index for op in found.graph.ops if op.kind == "dot_general"]
    assert spans(told(found, lambda _: False), act) == [(2 * first + 2, 2 * second + 1)]

    def sent(link: GroupLink) -> bool:
        return link.value == act and link.operand >= 0

    assert spans(told(found, sent), act) == [
        (2 * first + 2, 2 * second),
        (2 * second - 1, 2 * second + 1),
    ]


def test_a_strided_convolution_is_padded_on_one_side() -> None:
    layouts = ((0, 1, 2, 3), (4, 5, 3, 6), (0, 7, 8, 6))
    halved = [(8, 32, 32, 16), (3, 3, 16, 32), (8, 16, 16, 32)]
    assert pads_unevenly(halved, layouts)  # 15 * 2 + 3 - 32 = 1
    pointwise = [(8, 32, 32, 16), (1, 1, 16, 32), (8, 16, 16, 32)]
    assert not pads_unevenly(pointwise, layouts)  # nothing is padded
    same = [(8, 32, 32, 16), (3, 3, 16, 32), (8, 32, 32, 32)]
    assert not pads_unevenly(same, ((0, 1, 2, 3), (4, 5, 3, 6), (0, 1, 2, 6)))


def sgd(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


@pytest.mark.parametrize("cluster", ["h100:8", "v5p:2x2x2"])
def test_an_update_takes_the_memory_of_the_donated_input(cluster: str) -> None:
    found = analysis_of(sgd, struct(64, 64), struct(32, 64), cluster=cluster)
    assert spans(told(found, lambda _: False), found.graph.outputs[0]) == []


def gradient(found: Analysis) -> int:
    (made,) = [
        op.outputs[0]
        for op in found.graph.ops
        if op.kind == "dot_general" and op.phase is Phase.BACKWARD
    ]
    return made


def test_a_gradient_that_stays_can_be_updated_in_its_products_kernel() -> None:
    found = analysis_of(sgd, struct(64, 64), struct(32, 64), cluster="v5p:2x2x2")
    rest = (found.graph, found.groups, found.graph.live_ops())
    inside = gradients_in_updates(*rest, lambda _: False)
    assert inside == {gradient(found)}
    assert gradients_in_updates(*rest, lambda link: link.operand <= -2) == set()  # it is sent

    def stays(link: GroupLink) -> bool:
        return False

    assert spans(told(found, stays), gradient(found))
    fused = found.scheduled.buffers(found.graph, found.groups, stays, inside)
    assert spans(fused, gradient(found)) == []


TOKENS, WIDTH = 32768, 4096


def adam(state: tuple[jax.Array, jax.Array, jax.Array], x: jax.Array) -> Any:
    w, m, v = state
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


@pytest.mark.parametrize(
    ("cluster", "tokens", "apart"),
    [
        ("v5p:2x2x1", TOKENS, 1),
        ("v5p:2x2x1", TOKENS // 4, 0),  # x is 67 MB, tanh's gradient 17 MB: one of them fits
        ("v5e:2x2", TOKENS, 0),  # 67 MB fit into a core of v5e
        ("h100:4", TOKENS, 0),
    ],
)
def test_an_update_is_kept_apart_from_a_product_whose_operands_do_not_fit_the_core(
    cluster: str, tokens: int, apart: int
) -> None:
    state = (struct(WIDTH, WIDTH),) * 3
    pins = {r"^\[0\]": PartitionSpec(None, "model"), r"^\[1\]": PartitionSpec()}
    options = {"cluster": cluster, "mesh": "model=4", "shardings": pins, "donate_argnums": 0}
    plan = make_plan(adam, state, struct(tokens, WIDTH), **options)
    assert len(plan.apart) == apart
    assert [plan.op_table[plan.op_index[op]].split("(")[0] for op in plan.apart] == (
        ["dot_general"] * apart
    )
    raw = json.loads(plan.to_json())
    assert raw.get("apart", []) == list(plan.apart)
    assert plan_from_json(plan.to_json()) == plan


def clipped(w: jax.Array, x: jax.Array) -> jax.Array:
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    return w - 0.1 * gradient / jnp.sqrt(jnp.sum(gradient**2))


def guarded(w: jax.Array, x: jax.Array) -> jax.Array:
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    return jnp.where(jnp.all(jnp.isfinite(gradient)), w - gradient, w)


@pytest.mark.parametrize("step", [clipped, guarded])
def test_a_gradient_that_is_read_twice_is_written(step: Callable[..., Any]) -> None:
    found = analysis_of(step, struct(64, 64), struct(32, 64), cluster="v5p:2x2x2")
    assert spans(told(found, lambda _: False), gradient(found))


def test_what_is_sent_is_written_even_if_products_could_compute_it() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        half = w.astype(jnp.bfloat16)
        return jnp.sum(jax.nn.relu(x @ half) @ half)

    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    found = analysis_of(step, struct(64, 64), x, cluster="v5p:2x2x2")
    half = next(op.outputs[0] for op in found.graph.ops if op.kind == "convert_element_type")
    first, second = [op.index for op in found.graph.ops if op.kind == "dot_general"]
    assert spans(told(found, lambda _: False), half) == []
    copies = {g.index for g in found.groups.groups if g.kind == "copy"}
    sent = told(found, lambda link: link.value == half and link.b in copies)
    assert spans(sent, half) == [(2 * first - 1, 2 * second + 1)]  # once for both readers


def test_on_tpus_a_weights_gradient_comes_behind_the_activations() -> None:
    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v))

    shapes = (struct(64, 128), struct(128, 32), struct(16, 64))
    graph = trace(jax.grad(loss, argnums=(0, 1)), shapes).graph
    order = activations_first(graph, graph.live_ops())
    assert sorted(order) == list(range(len(graph.ops)))
    place = {op: k for k, op in enumerate(order)}
    for op in graph.ops:  # what an operation reads is there
        for i in op.inputs:
            if i >= 0 and graph.values[i].op >= 0:
                assert place[graph.values[i].op] < place[op.index]
    products = [op for op in graph.ops if op.kind == "dot_general" and op.phase is Phase.BACKWARD]
    by_shape = {graph.values[op.outputs[0]].shape: place[op.index] for op in products}
    assert by_shape[16, 128] < min(by_shape.get((128, 32), 99), by_shape.get((32, 128), 99))


# ---- what XLA:TPU writes ----------------------------------------------------------------------


def kept_of(
    function: Callable[..., Any], *args: Any, stored: bool = False
) -> dict[str, list[bool]]:
    """By kind of operation, whether its results are written."""
    traced = trace(function, args)
    groups = build_groups(traced.graph, traced.rules)
    live = traced.graph.live_ops()
    found = written(traced.graph, groups.fusable, live, True, stored=stored)
    out: dict[str, list[bool]] = {}
    for op in traced.graph.ops:
        out.setdefault(op.kind, []).extend(found.kept[o] for o in op.outputs[:1])
    return out


HALF = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


def test_a_product_writes_what_its_only_reader_makes() -> None:
    def step(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        wide = (x @ w).astype(jnp.float32) * b
        return wide - wide.max(-1, keepdims=True)

    found = kept_of(step, HALF, HALF, struct(64, 64))
    assert found["dot_general"] == [False] and found["convert_element_type"] == [False]
    assert found["mul"] == [True]


def test_a_product_writes_the_narrow_array_that_its_readers_convert() -> None:
    """As compiled for v5e and v5p (libtpu 0.0.42): bfloat16 and the maxima of its rows."""

    def step(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
        wide = jnp.where(mask, (x @ w).astype(jnp.float32) * 3, -1e9)
        return wide - wide.max(-1, keepdims=True)

    found = kept_of(step, HALF, HALF, jax.ShapeDtypeStruct((64,), jnp.bool_))
    assert found["dot_general"] == [True] and not any(found["mul"] + found["select_n"])
    large = kept_of(step, HALF, HALF, jax.ShapeDtypeStruct((64, 64), jnp.bool_))
    assert large["dot_general"] == [False] and large["select_n"] == [True]

    def sliced(x: jax.Array, w: jax.Array) -> jax.Array:
        wide = (x @ w).astype(jnp.float32)
        return jnp.concatenate([wide[:, 32:], wide[:, :32]], 1)

    assert kept_of(sliced, HALF, HALF)["convert_element_type"] == [True]


@pytest.mark.parametrize("stored", [False, True])
def test_a_softmax_that_two_products_read(stored: bool) -> None:
    """Written once as compiled for v5p; v5e and v6e compute it in both."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        weights = jax.nn.softmax((q @ k).astype(jnp.float32)).astype(q.dtype)
        return weights @ v, weights.T @ v

    found = kept_of(step, HALF, HALF, HALF, stored=stored)
    assert found["convert_element_type"] == [False, stored] and found["exp"] == [False]


def test_a_kernel_has_one_product() -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a @ b + b @ a, axis=0)

    assert kept_of(step, struct(64, 64), struct(64, 64))["dot_general"] == [True, False]


def test_a_barrier_ends_the_kernel_of_a_product() -> None:
    def step(x: jax.Array, k: jax.Array) -> Any:
        z, y = jax.lax.optimization_barrier((jnp.sin(x), x @ k))
        return y @ k, jnp.sum(z)

    assert kept_of(step, struct(64, 64), struct(64, 64))["dot_general"] == [True, True]


def labels_loss(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logp, labels[:, None], -1).mean()


def test_the_gradient_at_labels_is_a_comparison_and_is_written_once() -> None:
    labels = jax.ShapeDtypeStruct((32,), jnp.int32)
    found = kept_of(jax.grad(labels_loss), struct(64, 128), struct(32, 64), labels)
    (scatter,) = [v for k, v in found.items() if k.startswith("scatter")]
    assert scatter == [False]
    assert found["add_any"] == [True]  # with the softmax, as the products read it


def test_a_table_s_gradient_is_written() -> None:
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    found = kept_of(jax.grad(lambda w, i: jnp.sin(w[i]).sum()), struct(1000, 64), ids)
    (scatter,) = [v for k, v in found.items() if k.startswith("scatter")]
    assert scatter == [True]


def test_a_scatter_of_rows_is_written_whatever_its_sizes() -> None:
    def last(h: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(h[jnp.arange(8), at]))

    at = jax.ShapeDtypeStruct((8,), jnp.int32)
    for width in (256, 512):  # as long as the sequence, and not
        found = kept_of(jax.grad(last), struct(8, 256, width), at)
        (scatter,) = [v for k, v in found.items() if k.startswith("scatter")]
        assert scatter == [True]


def test_a_slice_with_several_readers_is_cut_once() -> None:
    def step(x: jax.Array) -> Any:
        cut = jnp.sin(x)[:, :-1]
        return jnp.exp(cut).sum(), jnp.cos(cut).sum()

    assert kept_of(step, struct(64, 64))["slice"] == [True]
    assert kept_of(lambda x: jnp.exp(x[:, :-1]).sum(), struct(64, 64))["slice"] == [False]


@pytest.mark.parametrize("whole", [False, True])
def test_what_enters_a_loop_is_written_before_it(whole: bool) -> None:
    """By rows, also in another order, and whole; a kernel outside would compute it itself."""

    def looped(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)
        rows = jnp.moveaxis(y.reshape(8, 8, 64), 1, 0)

        def turn(h: jax.Array, row: jax.Array) -> Any:
            return h + (jnp.cos(y[0]) if whole else row.sum(0)), None

        return jax.lax.scan(turn, jnp.zeros(64), rows)[0]

    assert kept_of(looped, struct(64, 64))["sin"] == [True]
    assert kept_of(lambda x: jnp.sin(x).sum(0), struct(64, 64))["sin"] == [False]


def test_gathered_copies_of_cast_weights_are_counted_in_the_search() -> None:
    """Products compute the cast as they read it; what is gathered for them is written."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16)).astype(jnp.float32))

        return w - jax.grad(loss)(w)

    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    found = analysis_of(step, struct(128, 512), x, cluster="v5e:2x4")
    cast = next(op.outputs[0] for op in found.graph.ops if op.kind == "convert_element_type")
    assert not kept_of(step, struct(128, 512), x)["convert_element_type"][0]
    assert [b for b in found.buffers if b.value == cast]


def test_what_a_loop_only_stacks_is_not_held_for_its_turns() -> None:
    """Nothing in the loop reads an array that comes out once per turn as it went in."""

    def step(x: Any) -> Any:
        h = jnp.tanh(x)
        return jax.lax.scan(lambda c, row: (c + row, (h, c)), x[0], x)

    found = analysis_of(step, struct(64, 8))
    buffers = [*found.buffers, *told(found, lambda link: True).buffers]
    assert buffers and all(0 <= b.start < b.end for b in buffers)


@pytest.mark.parametrize(("cluster", "count"), [("h100:8", 0), ("v5p:2x2x2", 1)])
def test_stacks_that_products_read_are_converted_once(cluster: str, count: int) -> None:
    found = analysis_of(jax.grad(scan_loss), struct(6, 64, 64), struct(32, 64), cluster=cluster)
    stack = found.graph.inputs[0]
    held = [b for b in told(found, lambda _: False).buffers if b.value == stack]
    assert sum(b.nbytes == pytest.approx(2 * 6 * 64 * 64) for b in held) == count


def test_features_of_convolutions_lie_along_lanes() -> None:
    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(y)

    traced = trace(conv, (struct(8, 128, 128, 3), struct(3, 3, 3, 64)))
    groups = build_groups(traced.graph, traced.rules)
    found = image_lanes(traced.graph, groups.op_layouts, groups.fusable)
    image, kernel = traced.graph.inputs
    (out,) = traced.graph.outputs
    made = traced.graph.ops[traced.graph.values[out].op].inputs[0]
    assert found == {out: (3, 0), made: (3, 0)}
    assert image not in found and kernel not in found  # arguments lie as their callers made them
    assert padding((8, 128, 128, 64), TILE, (3,)) == padding((8, 128, 128, 64), TILE, (3, 0)) == 2.0
    assert padding((64, 32, 32, 16), TILE, (3, 0)) == 2.0  # the batch along lanes
    assert padding((8, 128, 128, 64), TILE) == 1.0


# ---- order -----------------------------------------------------------------------------------


def scan_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(h: jax.Array, wk: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ wk), None

    return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)


def test_in_a_loop_gradients_that_are_stacked_come_last() -> None:
    graph = trace(jax.grad(scan_loss), (struct(6, 64, 64), struct(32, 64))).graph
    fusable = [op.kind != "dot_general" for op in graph.ops]
    region = max(op.region for op in graph.ops)
    late = written(graph, fusable, graph.live_ops(), late=True)
    inside = [op for op in graph.ops if op.region == region and op.kind == "dot_general"]
    weights = [op for op in inside if graph.values[op.outputs[0]].shape == (64, 64)]
    chain = [op for op in inside if graph.values[op.outputs[0]].shape == (32, 64)]
    assert weights and chain
    times = [late.time[op.index] for op in chain]
    assert max(times) < min(late.time[op.index] for op in weights)
    assert extents(graph, late.time)[1][region] >= max(late.time[op.index] for op in weights)


def test_stacks_of_a_shape_begin_together_where_kernels_are_merged() -> None:
    def step(x: jax.Array) -> Any:
        def body(h: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return jnp.sin(h), jnp.cos(h)

        h, first = jax.lax.scan(body, x, None, length=5)
        return first, jax.lax.scan(body, h * 2, None, length=5)[1]

    graph = trace(step, (struct(8, 8),)).graph
    live, begins = graph.live_ops(), {}
    found = written(graph, [True] * len(graph.ops), live)
    for merges in (True, False):
        one = dataclasses.replace(found, merges=merges)
        begin = {s.value: s.start for s in intervals(graph, one, live, (False,))}
        begins[merges] = [begin[o] for o in graph.outputs]
    assert begins[True][0] == begins[True][1] == begins[False][0] < begins[False][1]


def perceptron(params: Any, x: Any) -> Any:
    """A gradient step; the activations of all layers wait for the gradients of weights."""

    def loss(p: Any) -> Any:
        h = x
        for w in p:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_a_compiler_short_of_memory_keeps_to_the_order_of_the_trace() -> None:
    args = ([struct(256, 256)] * 6, struct(4096, 256))
    options: dict[str, Any] = {"cluster": "h100:1", "mode": "STAND_ALONE"}
    free = make_plan(perceptron, *args, **options).prediction
    least = analysis_of(perceptron, *args)
    moments: dict[int, float] = {}
    for b in least.buffers:
        moments[b.start] = moments.get(b.start, 0.0) + b.nbytes
        moments[b.end] = moments.get(b.end, 0.0) - b.nbytes
    live, early = 0.0, 0.0
    for at in sorted(moments):
        live += moments[at]
        early = max(early, live)
    assert early < free.peak_bytes
    middle = (early + free.peak_bytes) / 2
    tight = make_plan(
        perceptron, *args, cluster="h100:1", mode="STAND_ALONE", memory=middle
    ).prediction
    assert tight.peak_bytes == pytest.approx(middle, rel=1e-6)


def test_a_value_that_every_turn_of_a_loop_sends_stays_until_the_loop_ends() -> None:
    def step(x: jax.Array, w: jax.Array, ws: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)

        def turn(c: jax.Array, u: jax.Array) -> Any:
            c = jnp.sin(h @ u) * c
            for _ in range(4):
                c = jnp.tanh(c @ u)
            return c, None

        return jax.lax.scan(turn, x, ws)[0]

    found = analysis_of(
        step, struct(64, 64), struct(64, 64), struct(3, 64, 64), cluster="v5p:2x2x2"
    )
    graph = found.graph
    act = next(op.outputs[0] for op in graph.ops if op.kind == "tanh")
    inner = next(op.outputs[0] for op in graph.ops if op.kind == "loop_const")

    def sent(link: GroupLink) -> bool:
        return link.value == inner and link.operand >= 0

    inside = [op.index for op in graph.ops if op.region > 0]
    assert max(end for _, end in spans(told(found, sent), act)) >= 2 * inside[-1]
