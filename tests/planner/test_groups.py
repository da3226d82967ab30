"""Groups: what shares a decision, what does not, and what an unknown primitive does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from planner import make_plan
from planner.graph.ir import Graph
from planner.graph.trace import trace
from planner.space.groups import Group, Groups, build_groups
from planner.step.analysis import analyse

mystery = Primitive("mystery_of_groups")
mystery.def_abstract_eval(lambda x: x)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def grouped(function: Callable[..., Any], *args: Any) -> tuple[Graph, Groups]:
    traced = trace(function, args)
    groups = build_groups(traced.graph, traced.rules)
    assert_sound(traced.graph, groups)
    return traced.graph, groups


def assert_sound(graph: Graph, groups: Groups) -> None:
    """Layouts fit the values; no value has one factor twice; numbers are dense."""
    assert [g.index for g in groups.groups] == list(range(len(groups.groups)))

    def check(group: int, layout: tuple[int, ...], shape: tuple[int, ...]) -> None:
        used = [f for f in layout if f >= 0]
        assert len(set(used)) == len(used) and len(layout) == len(shape)
        for f, n in zip(layout, shape, strict=True):
            assert f < 0 or groups.groups[group].sizes[f] == n

    for value, home in zip(graph.values, groups.home, strict=True):
        if home is not None:
            check(*home, value.shape)
    for link in groups.links:
        check(link.a, link.src, graph.values[link.value].shape)
        check(link.b, link.dst, graph.values[link.value].shape)


def home(graph: Graph, groups: Groups, value: int) -> tuple[Group, tuple[int, ...]]:
    found = groups.home[value]
    assert found is not None
    return groups.groups[found[0]], found[1]


def test_an_elementwise_chain_is_one_group() -> None:
    _graph, groups = grouped(lambda x: jnp.exp(jnp.tanh(x) + 1) * 2, struct(8, 4))
    (group,) = groups.groups
    assert (group.kind, group.sizes, group.ops) == ("fused", (8, 4), (0, 1, 2, 3))
    assert groups.links == ()


def test_reductions_broadcasts_and_transposes_stay_in_the_group() -> None:
    def step(x: jax.Array) -> jax.Array:
        y = x - jnp.max(x, axis=1, keepdims=True)
        return (jnp.exp(y) / jnp.sum(jnp.exp(y), axis=1, keepdims=True)).T

    graph, groups = grouped(step, struct(8, 4))
    (group,) = groups.groups
    assert group.sizes == (8, 4)
    before, after = (home(graph, groups, v)[1] for v in (graph.inputs[0], graph.outputs[0]))
    assert after == before[::-1]


def test_residual_and_matmul() -> None:
    graph, groups = grouped(lambda w, x: x + jnp.tanh(x @ w), struct(8, 8), struct(4, 8))
    assert [g.kind for g in groups.groups] == ["input", "input", "anchor", "fused"]
    dot = groups.groups[2]
    assert dot.sizes == (4, 8, 8) and dot.reduction == {1}
    result, _ = home(graph, groups, graph.outputs[0])
    assert [graph.ops[o].kind for o in result.ops] == ["tanh", "add"]
    partial = [x for x in groups.links if x.partial]
    assert [(x.a, x.b, x.src) for x in partial] == [(2, 3, (0, 2))]
    # the residual's operand comes from the input's group, as stored
    assert any(x.a == 1 and x.b == 3 and not x.a_use for x in groups.links)


def test_parameters_that_a_matmul_reads_have_kind_input() -> None:
    graph, groups = grouped(
        lambda w, b, s, x: (x @ w + b) * s, struct(8, 4), struct(4), struct(2, 4), struct(2, 8)
    )
    kinds = [home(graph, groups, v)[0].kind for v in graph.inputs]
    assert kinds == ["input", "fused", "fused", "input"]
    into = {x.value: x.a_use for x in groups.links if x.operand >= 0}
    assert into[graph.inputs[0]] and into[graph.inputs[3]]


def test_a_transpose_that_clashes_does_not_unify() -> None:
    _graph, groups = grouped(lambda x: x + x.T, struct(8, 8))
    (group,) = groups.groups
    assert group.sizes == (8, 8)  # two factors, not one
    (link,) = groups.links  # the transposed operand changes its sharding
    assert (link.a, link.b, link.src, link.dst) == (0, 0, (1, 0), (0, 1))


def test_a_small_value_does_not_tie_two_large_groups() -> None:
    graph, groups = grouped(
        lambda a, b, w: (jnp.sin(a) + w, jnp.cos(b) + w), struct(16, 8), struct(32, 8), struct(8)
    )
    first, second = (home(graph, groups, v)[0].index for v in graph.outputs)
    assert first != second
    assert any({x.a, x.b} == {first, second} for x in groups.links)


def test_a_value_of_equal_rank_does_tie() -> None:
    _graph, groups = grouped(lambda a, b: a + b, struct(16, 8), struct(16, 8))
    assert len(groups.groups) == 1 and groups.links == ()


def test_scan_body_carry_and_stacked_weights() -> None:
    def step(c: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, w)[0]

    graph, groups = grouped(step, struct(4, 8), struct(5, 8, 8))
    stack, layout = home(graph, groups, graph.inputs[1])
    assert [stack.shardable[f] for f in layout] == [False, True, True]  # never the layers
    carry = next(op for op in graph.ops if op.kind == "loop_carry")
    back = next(op for op in graph.ops if op.kind == "loop_back")
    assert home(graph, groups, carry.outputs[0]) == home(graph, groups, graph.outputs[0])
    closing = [x for x in groups.links if x.op == back.index]
    assert [x.weight for x in closing] == [5.0]
    entering = [x for x in groups.links if x.op == carry.index]
    assert [x.weight for x in entering] == [1.0]
    dots = [x for x in groups.links if graph.ops[x.op].kind == "dot_general"]
    assert {x.weight for x in dots} == {5.0}


def test_ties_link_the_new_value_to_the_old() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), x.sum()

    graph, groups = grouped(step, struct(16, 8), struct(4, 16))
    old, new = graph.inputs[0], graph.outputs[0]
    assert home(graph, groups, old)[0].kind == "input"
    source, target = (home(graph, groups, v)[0].index for v in (new, old))
    assert any(x.operand == -1 and (x.a, x.b) == (source, target) for x in groups.links)


def gradient_links(rows: int, columns: int, momentum: bool) -> list[str]:
    def sgd(w: jax.Array, x: jax.Array) -> Any:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), x.sum()

    def heavy_ball(state: Any, x: jax.Array) -> Any:
        w, m = state
        m = 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return (w - m, m), x.sum()

    w, x = struct(rows, columns), struct(4, rows)
    graph, groups = grouped(heavy_ball, (w, w), x) if momentum else grouped(sgd, w, x)
    return [str(graph.values[x.value]) for x in groups.links if x.gradient]


def test_the_gradient_of_a_square_weight_is_marked() -> None:
    assert gradient_links(8, 8, momentum=True) == ["float32[8,8]"]


def test_the_gradient_of_any_weight_is_marked() -> None:
    assert len(gradient_links(16, 8, momentum=True)) == 1


def test_the_gradient_is_marked_without_momentum() -> None:
    assert len(gradient_links(8, 8, momentum=False)) == 1


def test_a_mark_cuts_a_chain() -> None:
    from planner import shard

    graph, groups = grouped(lambda x: {"y": jnp.exp(shard(jnp.tanh(x), "data")) * 2}, struct(8, 4))
    before, after = (home(graph, groups, v)[0].index for v in (graph.inputs[0], graph.outputs[0]))
    assert before != after and len(groups.links) == 1


def test_dead_operations_have_no_group() -> None:
    def step(x: jax.Array) -> jax.Array:
        jnp.exp(x)
        return jnp.sin(x)

    graph, groups = grouped(step, struct(8))
    (group,) = groups.groups
    assert [graph.ops[o].kind for o in group.ops] == ["sin"]


@pytest.mark.parametrize("devices", [4, 6])
def test_an_unknown_primitive_is_replicated_and_recorded(devices: int) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = mystery.bind(jnp.tanh(x @ w))
        return mystery.bind(hidden @ w).sum()

    args = (struct(24, 24), struct(48, 24))
    graph, groups = grouped(step, *args)
    for op in graph.ops:
        if op.kind == "mystery_of_groups":
            group = groups.groups[groups.op_layouts[op.index][0]]  # type: ignore[index]
            assert group.kind == "anchor" and not any(group.shardable)
    plan = make_plan(step, *args, cluster=f"cpu:{devices}")
    first = step.__code__.co_firstlineno
    size = "9.22 kB of operands and results"
    assert plan.fallbacks == tuple(
        f"mystery_of_groups (test_groups.py:{first + k}): no rule, replicated; {size}"
        for k in (1, 2)
    )
    opaque = {op.index for op in graph.ops if op.kind == "mystery_of_groups"}
    sites = [c for c in plan.constraints if c.op in opaque]
    assert sites and all(not c.spec.axes for c in sites if c.slot == "in")


def test_flops_of_a_matmul_and_its_weight_in_a_loop() -> None:
    def step(c: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, w)[0]

    traced = trace(step, (struct(4, 8), struct(5, 8, 8)))
    rules = traced.rules
    found = analyse(traced.graph, rules, build_groups(traced.graph, rules), (False, False))
    matmuls = [w.flops for facts in found.facts for w in facts.work if w.kind == "matmul"]
    assert matmuls == [5 * 2 * 4 * 8 * 8]


def conv_flops(size: int, features: int) -> float:
    def step(x: jax.Array, k: jax.Array) -> jax.Array:
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=names)

    traced = trace(step, (struct(2, size, size, 3), struct(3, 3, 3, features)))
    rules = traced.rules
    found = analyse(traced.graph, rules, build_groups(traced.graph, rules), (False, False))
    return sum(w.flops for facts in found.facts for w in facts.work if w.kind == "convolution")


def test_flops_of_a_convolution_with_many_features() -> None:
    assert conv_flops(16, 64) == 2 * (2 * 16 * 16 * 64) * (3 * 3 * 3)


def test_flops_of_a_convolution_on_a_large_image() -> None:
    assert conv_flops(112, 64) == 2 * (2 * 112 * 112 * 64) * (3 * 3 * 3)


def test_what_is_computed_twice_is_one_decision() -> None:
    """Both products read what one gather gives, though each has a concatenation of its own."""

    def twice(a: jax.Array, b: jax.Array, v: jax.Array, w: jax.Array) -> tuple[Any, Any]:
        a, b = jnp.tanh(a), jnp.tanh(b)
        return jnp.concatenate([a, b], 1) @ v, jnp.concatenate([a, b], 1) @ w

    half, whole = struct(64, 32), struct(64, 48)
    graph, groups = grouped(twice, half, half, whole, whole)
    first, second = (op for op in graph.ops if op.kind == "concatenate")
    assert groups.home[first.outputs[0]] == groups.home[second.outputs[0]]
    products = [
        x for x in groups.links if groups.groups[x.b].name == "dot_general" and x.operand == 0
    ]
    assert len(products) == 2 and len({x.a for x in products}) == 1


def test_stacks_of_loops_are_sent_in_every_iteration() -> None:
    def scanned(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(h: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            made = jnp.tanh(h @ w)
            return made, (made, made.T)

        return jax.lax.scan(body, x, None, length=6)[1]

    graph, groups = grouped(scanned, struct(64, 64), struct(64, 64))
    sent = [x for x in groups.links if graph.ops[x.op].kind == "loop_ys"]
    assert all(x.weight == 6 for x in sent) and sent


def test_carries_that_are_stacked_are_sent_in_every_iteration() -> None:
    """What enters a loop and is stacked as it enters: read by the body, not before it."""

    def scanned(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(h: jax.Array, _: None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            return jnp.tanh(h @ w), (h, h)

        return jax.lax.scan(body, x, None, length=6)[1]

    graph, groups = grouped(scanned, struct(16, 16), struct(64, 16))
    carries = {op.outputs[0] for op in graph.ops if op.kind == "loop_carry"}
    sent = [x for x in groups.links if graph.ops[x.op].kind == "loop_ys" and x.value in carries]
    assert all(x.weight == 6 for x in sent) and sent


def test_a_constraint_that_says_nothing_does_not_part_a_group() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    said = jax.sharding.NamedSharding(mesh, jax.P("x"))

    def constrained(x: jax.Array) -> jax.Array:
        return jnp.sin(jax.lax.with_sharding_constraint(jnp.cos(x), said))

    graph, groups = grouped(constrained, struct(8, 8))
    assert len(groups.groups) == 1 and not groups.links
    assert "sharding_constraint" in {op.kind for op in graph.ops}
