"""The traced graph: golden texts, invariants, source lines, ties, liveness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import make_plan
from planner.errors import InternalError, ModelError
from planner.graph.ir import SCALAR, Graph
from planner.graph.trace import trace
from planner.step.memory.liveness import Interval, intervals, materialised
from planner.step.memory.materialized import written
from planner.step.op_kinds import extents


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(function: Callable[..., Any], *args: Any) -> Graph:
    graph = trace(function, args).graph
    graph.verify()
    return graph


def assert_text(graph: Graph, golden: str) -> None:
    lines = [line[4:] for line in golden.strip("\n").splitlines()]
    assert str(graph).splitlines() == [line for line in lines if line.strip()]


@jax.custom_jvp
def square(x: jax.Array) -> jax.Array:
    return x * x


square.defjvp(lambda p, t: (square(p[0]), 2 * p[0] * t[0]))


@jax.custom_vjp
def cube(x: jax.Array) -> jax.Array:
    return x * x * x


cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3 * x * x * g,))


def custom(x: jax.Array) -> jax.Array:
    return cube(square(x))


def scan(start: jax.Array, xs: jax.Array, w: jax.Array) -> Any:
    def body(c: jax.Array, x: jax.Array) -> Any:
        c = jnp.tanh(c @ w) + x
        return c, c.sum()

    return jax.lax.scan(body, start, xs)


def sgd(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": value}


STATE = {"a": struct(16, 32), "b": struct(32, 16)}
BATCH = struct(64, 16)

# ---- golden texts ------------------------------------------------------------------------


def test_golden_jit_is_inlined() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.jit(jnp.tanh)(x @ w)

    golden = """
    graph: 2 operations, 4 values
      %0 = input [0]: float32[8,4] frozen
      %1 = input [1]: float32[2,8] batch
      forward:
        %2: float32[2,4] = dot_general(%1, %0)
        %3: float32[2,4] = tanh(%2)
      return %3
    """
    assert_text(graph_of(step, struct(8, 4), struct(2, 8)), golden)
    assert_text(graph_of(jax.jit(step), struct(8, 4), struct(2, 8)), golden)


def test_golden_scan_with_carry_xs_ys_and_a_constant() -> None:
    assert_text(
        graph_of(scan, struct(4, 8), struct(5, 4, 8), struct(8, 8)),
        """
    graph: 10 operations, 12 values
      %0 = input [0]: float32[4,8] examples
      %1 = input [1]: float32[5,4,8] batch
      %2 = input [2]: float32[8,8] frozen
      forward:
        %3: float32[8,8] = loop_const(%2)
        %4: float32[4,8] = loop_carry(%0)
        %5: float32[4,8] = loop_xs(%1)
        %6: float32[4,8] = dot_general(%4, %3) @scan1
        %7: float32[4,8] = tanh(%6) @scan1
        %8: float32[4,8] = add(%7, %5) @scan1
        %9: float32[] = reduce_sum(%8) @scan1
        - = loop_back(%8, %4) @scan1
        %10: float32[4,8] next of %0 = loop_out(%4)
        %11: float32[5] = loop_ys(%9)
      return %10, %11
    """,
    )


def test_golden_while() -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))

    graph = graph_of(step, struct(4, 8), struct(8, 8))
    assert_text(
        graph,
        """
    graph: 11 operations, 10 values
      %0 = input [0]: float32[4,8] batch
      %1 = input [1]: float32[8,8] frozen
      forward:
        %2: float32[8,8] = loop_const(%1)
        %3: int32[] = loop_carry(lit)
        %4: float32[4,8] = loop_carry(%0)
        %5: bool[] = lt(%3, lit) @while1
        - = loop_test(%5, %3, %4) @while1
        %6: int32[] = add(%3, lit) @while1
        %7: float32[4,8] = dot_general(%4, %2) @while1
        - = loop_back(%6, %3) @while1
        - = loop_back(%7, %4) @while1
        %8: int32[] = loop_out(%3)
        %9: float32[4,8] = loop_out(%4)
      return %8, %9
    """,
    )
    assert (graph.regions[1].trips, graph.regions[1].known) == (3, True)  # it counts to a number


def test_golden_cond() -> None:
    def step(p: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.cond(p, lambda x, y: x + y, lambda x, y: x * 2.0, x, y)

    graph = graph_of(step, struct(dtype=bool), struct(4, 8), struct(4, 8))
    assert_text(
        graph,
        """
    graph: 8 operations, 11 values
      %0 = input [0]: bool[] batch
      %1 = input [1]: float32[4,8] examples
      %2 = input [2]: float32[4,8] batch
      forward:
        %3: int32[] = convert_element_type(%0)
        %4: float32[4,8] = branch_in(%1)
        %5: float32[4,8] = branch_in(%2)
        %6: float32[4,8] = mul(%4, lit) @branch1
        %7: float32[4,8] = branch_in(%1)
        %8: float32[4,8] = branch_in(%2)
        %9: float32[4,8] = add(%7, %8) @branch2
        %10: float32[4,8] next of %1 = branch_out(%6, %9)
      return %10
    """,
    )
    assert [r.weight for r in graph.regions] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_golden_remat_and_custom_rules_are_inlined(wrap: Any) -> None:
    assert_text(
        graph_of(wrap(custom), struct(4)),
        """
    graph: 3 operations, 4 values
      %0 = input [0]: float32[4] statistic
      forward:
        %1: float32[4] = mul(%0, %0)
        %2: float32[4] = mul(%1, %1)
        %3: float32[4] next of %0 = mul(%2, %1)
      return %3
    """,
    )


def test_gradient_of_remat_computes_again_and_uses_the_custom_rules() -> None:
    plain = graph_of(jax.grad(lambda x: custom(x).sum()), struct(4))
    again = graph_of(jax.grad(lambda x: jax.checkpoint(custom)(x).sum()), struct(4))
    for graph in (plain, again):
        assert not {"custom_jvp_call", "custom_vjp_call", "remat", "checkpoint"} & {
            op.kind for op in graph.ops
        }
    squares = [sum(op.inputs == (0, 0) for op in g.ops) for g in (plain, again)]
    assert squares == [1, 2]  # the inner square is recomputed


# ---- structure ---------------------------------------------------------------------------


def test_weights_of_nested_loops_multiply() -> None:
    def step(x: jax.Array) -> jax.Array:
        def inner(c: jax.Array, _: None) -> Any:
            return jnp.sin(c), None

        def outer(c: jax.Array, _: None) -> Any:
            return jax.lax.scan(inner, c, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    graph = graph_of(step, struct(4))
    (sine,) = [op for op in graph.ops if op.kind == "sin"]
    region = graph.regions[sine.region]
    assert (region.trips, region.weight) == (3, 15.0)
    assert graph.regions[region.parent].weight == 5.0


def test_user_source_lines_are_kept() -> None:
    def step(x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return jax.nn.gelu(y)

    first = step.__code__.co_firstlineno
    graph = graph_of(step, struct(4))
    assert graph.ops[0].source == f"test_graph.py:{first + 1}"
    assert {op.source for op in graph.ops[1:]} == {f"test_graph.py:{first + 2}"}


def test_source_lines_inside_scan_bodies_and_gradients() -> None:
    first = scan.__code__.co_firstlineno

    def loss(*args: jax.Array) -> jax.Array:
        return scan(*args)[0].sum()

    graph = graph_of(jax.grad(loss, 2), struct(4, 8), struct(5, 4, 8), struct(8, 8))
    dots = [op for op in graph.ops if op.kind == "dot_general"]
    assert len(dots) == 3
    assert {op.source for op in dots} == {f"test_graph.py:{first + 2}"}


def test_constants_closed_over_are_values_without_producer() -> None:
    table = jnp.arange(12.0).reshape(3, 4)
    graph = graph_of(lambda x: x @ table, struct(2, 3))
    (dot,) = graph.ops
    assert graph.values[dot.inputs[1]].op == -1
    assert dot.inputs[1] not in graph.inputs
    view = graph.to_networkx()
    assert view.nodes[f"const{dot.inputs[1]}"]["kind"] == "const"


def test_networkx_view_counts_and_attributes() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w)

    view = graph_of(step, struct(8, 8), struct(4, 8)).to_networkx()
    assert (view.number_of_nodes(), view.number_of_edges()) == (5, 5)
    assert view.nodes["in0"] == {"kind": "input", "path": "[0]"}
    assert view.nodes[0]["kind"] == "dot_general"
    assert view.nodes[0]["source"].startswith("test_graph.py:")
    assert set(view.predecessors(2)) == {"in1", 1}
    edge = view.edges["in0", 0]
    assert (edge["shape"], edge["dtype"], edge["nbytes"]) == ((8, 8), "float32", 256)


def test_consumers_list_each_reader_once() -> None:
    graph = graph_of(lambda x: jnp.exp(x * x) + x, struct(4))
    kinds = [graph.ops[o].kind for o in graph.consumers()[graph.inputs[0]]]
    assert kinds == ["mul", "add"]


def test_op_texts_tell_parameters_apart_but_not_names() -> None:
    texts = [
        next(graph_of(f, struct(4, 4)).texts())
        for f in (
            lambda x: jnp.cumsum(x, 0),
            lambda x: jnp.cumsum(x, 1),
            lambda y: jnp.cumsum(y, 0),
        )
    ]
    assert texts[0] != texts[1] and texts[0] == texts[2]


# ---- ties --------------------------------------------------------------------------------


def named_ties(graph: Graph) -> list[tuple[str, str]]:
    return [(graph.input_paths[i], graph.output_paths[o]) for i, o in graph.ties]


def test_ties_of_state_and_batch_to_state_and_metrics() -> None:
    assert named_ties(graph_of(sgd, STATE, BATCH)) == [
        ("[0]['a']", "[0]['a']"),
        ("[0]['b']", "[0]['b']"),
    ]


def test_ties_follow_the_state_to_another_place() -> None:
    def metrics_first(state: Any, batch: Any) -> Any:
        new, metrics = sgd(state, batch)
        return metrics, new

    def state_only(state: Any, batch: Any) -> Any:
        return sgd(state, batch)[0]

    assert named_ties(graph_of(metrics_first, STATE, BATCH)) == [
        ("[0]['a']", "[1]['a']"),
        ("[0]['b']", "[1]['b']"),
    ]
    assert named_ties(graph_of(state_only, STATE, BATCH)) == [
        ("[0]['a']", "['a']"),
        ("[0]['b']", "['b']"),
    ]


def test_another_dtype_is_no_tie() -> None:
    def step(state: Any) -> Any:
        return {"w": state["w"].astype(jnp.bfloat16), "v": state["v"] + 1}

    graph = graph_of(step, {"w": struct(4), "v": struct(4)})
    assert named_ties(graph) == [("[0]['v']", "['v']")]


# ---- liveness ----------------------------------------------------------------------------


def test_live_ops_drop_dead_code_and_keep_loop_carries() -> None:
    def step(x: jax.Array) -> jax.Array:
        jnp.exp(x).sum()  # dead

        def body(c: Any, _: None) -> Any:
            a, b, dead = c
            return (a + b, jnp.sin(b), jnp.cos(dead)), None

        return jax.lax.scan(body, (x, x, x), None, length=3)[0][0]

    graph = graph_of(step, struct(4))
    kinds = {op.kind for op, live in zip(graph.ops, graph.live_ops(), strict=True) if live}
    assert {"add", "sin", "loop_back", "loop_carry", "loop_out"} <= kinds
    assert not {"exp", "reduce_sum", "cos"} & kinds


def test_the_condition_of_a_while_loop_is_live() -> None:
    def step(x: jax.Array, a: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: jnp.sum(c @ a) > 1, lambda c: c * 0.5, x)

    graph = graph_of(step, struct(8, 8), struct(8, 8))
    live = dict(zip((op.kind for op in graph.ops), graph.live_ops(), strict=True))
    assert live["mul"] and live["dot_general"]


def test_elementwise_chains_are_fused_and_matmul_operands_are_written() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.exp(jnp.sin(jnp.tanh(x)) @ w) * 2

    graph = graph_of(step, struct(4, 8), struct(8, 8))
    fusable = [op.kind != "dot_general" for op in graph.ops]
    kept = materialised(graph, fusable, graph.live_ops())
    named = {op.kind: kept[op.outputs[0]] for op in graph.ops}
    assert named == {"tanh": False, "sin": True, "dot_general": True, "exp": False, "mul": True}


def test_intervals_of_donated_and_kept_inputs() -> None:
    def step(state: jax.Array, x: jax.Array) -> Any:
        return state + x.sum(0), jnp.exp(x).sum()

    graph = graph_of(step, struct(8), struct(4, 8))
    end = len(graph.ops) + 1
    live = graph.live_ops()
    found = written(graph, [True] * len(graph.ops), live)
    state, batch, new = graph.inputs[0], graph.inputs[1], graph.outputs[0]
    spans = {s.value: s for s in intervals(graph, found, live, (False, False))}
    assert spans[state] == Interval(state, 0, end)
    assert spans[new].end == end
    spans = {s.value: s for s in intervals(graph, found, live, (True, True))}
    assert new not in spans  # takes the memory of the donated state
    assert spans[state].end == end
    last = max(op.index for op in graph.ops if op.kind == "reduce_sum")
    assert spans[batch] == Interval(batch, 0, last + 1)  # exp is computed inside the sum


def test_what_a_loop_reads_from_outside_lives_until_the_loop_ends() -> None:
    graph = graph_of(scan, struct(4, 8), struct(5, 4, 8), struct(8, 8))
    fusable = [op.kind != "dot_general" for op in graph.ops]
    found = written(graph, fusable, graph.live_ops())
    begin, stop = extents(graph, found.time)
    assert max(found.reads[graph.inputs[2]]) <= stop[1]
    spans = {s.value: s for s in intervals(graph, found, graph.live_ops(), (False, True, True))}
    assert spans[graph.inputs[1]].end == stop[1] + 1
    (stack,) = [op for op in graph.ops if op.kind == "loop_ys"]
    assert found.kept[stack.outputs[0]]
    assert spans[stack.outputs[0]].start == begin[1]  # its memory is taken with the loop


def test_a_chain_is_computed_again_and_its_source_lives_on() -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        made = x @ w
        act = jnp.tanh(made) * 2
        return (act @ w).sum(), (jnp.sin(act) @ w).sum()

    graph = graph_of(step, struct(64, 64), struct(64, 64))
    fusable = [op.kind != "dot_general" for op in graph.ops]
    at = {op.kind: op.outputs[0] for op in reversed(graph.ops)}
    gpu, tpu = (written(graph, fusable, graph.live_ops(), fused) for fused in (False, True))
    assert (gpu.kept[at["tanh"]], gpu.kept[at["mul"]], gpu.kept[at["sin"]]) == (False, True, True)
    # the first product's kernel writes what two others read; the last computes its own operand
    kept = {kind: tpu.kept[at[kind]] for kind in ("dot_general", "tanh", "mul", "sin")}
    assert kept == {"dot_general": False, "tanh": False, "mul": True, "sin": False}
    last = max(op.index for op in graph.ops if op.kind == "dot_general")
    assert max(tpu.reads[at["mul"]]) == tpu.time[last]  # read by the last product itself


def test_gradients_of_parameters_come_after_the_chain() -> None:
    graph = graph_of(sgd, STATE, BATCH)
    fusable = [op.kind != "dot_general" for op in graph.ops]
    found = written(graph, fusable, graph.live_ops())
    assert sorted(found.order) == list(range(len(graph.ops)))
    for op in graph.ops:  # still an order in which operands come first
        made = [graph.values[i].op for i in op.inputs if i >= 0]
        assert all(found.time[m] < found.time[op.index] for m in made if m >= 0)
    products = [op.index for op in graph.ops if op.kind == "dot_general"]
    weights = {(16, 32), (32, 16)}
    updates = [p for p in products if graph.values[graph.ops[p].outputs[0]].shape in weights]
    assert len(updates) >= 2
    chain = [p for p in products if p not in updates]
    assert max(found.time[p] for p in chain) < max(found.time[p] for p in updates)


# ---- errors ------------------------------------------------------------------------------


def test_tracing_twice_gives_equal_graphs() -> None:
    assert graph_of(sgd, STATE, BATCH) == graph_of(sgd, STATE, BATCH)
    assert graph_of(sgd, STATE, BATCH) != graph_of(sgd, STATE, struct(32, 16))


def test_arrays_and_shapes_give_equal_graphs() -> None:
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (STATE, BATCH))
    assert graph_of(sgd, *arrays) == graph_of(sgd, STATE, BATCH)


def test_model_error_wraps_the_users_exception() -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise KeyError("no such layer")

    with pytest.raises(ModelError, match=r"tracing broken failed: KeyError.*no such layer") as e:
        trace(broken, (struct(4),))
    assert isinstance(e.value.__cause__, KeyError)

    with pytest.raises(ModelError, match="contracting dimensions") as e:
        trace(lambda x, y: x @ y, (struct(4, 3), struct(4, 3)))
    assert isinstance(e.value.__cause__, TypeError)


def test_verify_refuses_broken_graphs() -> None:
    graph = graph_of(lambda x: jnp.sin(jnp.cos(x)), struct(4))
    cos, sine = graph.ops

    def broken(*ops: Any, **other: Any) -> Graph:
        return dataclasses.replace(graph, ops=ops or graph.ops, **other)

    with pytest.raises(InternalError, match="stands at"):
        broken(sine, cos).verify()
    late = dataclasses.replace(cos, inputs=sine.outputs)
    with pytest.raises(InternalError, match="before it is made"):
        broken(late, sine).verify()
    twice = dataclasses.replace(sine, outputs=cos.outputs)
    with pytest.raises(InternalError, match="two producers"):
        broken(cos, twice).verify()
    with pytest.raises(InternalError, match="never made"):
        broken(outputs=(99,)).verify()
    broken(outputs=(SCALAR,)).verify()  # a literal result is fine


def test_only_the_solver_of_a_linear_solve_is_walked() -> None:
    def step(a: Any, b: Any) -> Any:
        return jax.lax.custom_linear_solve(
            lambda x: jnp.sin(a) * x, b, lambda _, b: b / jnp.cos(a), symmetric=True
        )

    graph = trace(step, (jnp.ones((8, 4)), jnp.ones((8, 4)))).graph
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("cos") == 1 and "sin" not in kinds and "custom_linear_solve" not in kinds
    assert graph.ops[-1].kind == "div" and graph.ops[-1].inputs[0] == graph.inputs[1]


def test_a_loop_that_writes_to_a_reference_is_one_operation() -> None:
    def step(x: Any, inside: bool) -> Any:
        total = jax.new_ref(x * 0)

        def body(k: Any, carry: Any) -> Any:
            own = jax.new_ref(carry)
            (own if inside else total)[...] += x * k
            return own[...]

        out = jax.lax.fori_loop(0, 3, body, x)
        return out + total[...]

    outside = trace(lambda x: step(x, False), (jnp.ones(8),)).graph
    assert len(outside.regions) == 1 and "scan" in [op.kind for op in outside.ops]
    within = trace(lambda x: step(x, True), (jnp.ones(8),)).graph
    assert len(within.regions) == 2 and "scan" not in [op.kind for op in within.ops]


def test_what_has_an_effect_is_live() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{m}", m=jnp.sin(x).sum())
        jnp.cos(x).sum()
        return x * 2

    graph = trace(step, (jnp.ones(8),)).graph
    live = {op.kind for op, on in zip(graph.ops, graph.live_ops(), strict=True) if on}
    assert "sin" in live and "cos" not in live and any("debug" in kind for kind in live)


def test_forward_passes_with_optimized_remat_are_walked_through() -> None:
    @jax.custom_vjp
    def square(x: jax.Array) -> jax.Array:
        return x * x

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * x, x

    square.defvjp(forward, lambda x, g: (2.0 * x * g,), optimize_remat=True)
    traced = trace(jax.grad(lambda x: square(x).sum()), (jax.ShapeDtypeStruct((8,), jnp.float32),))
    assert "remat_opt" not in {op.kind for op in traced.graph.ops}


def test_what_newer_jax_has_in_one_piece_is_walked_through() -> None:
    """``SearchSorted`` is one primitive there until it is compiled."""

    shapes = jax.ShapeDtypeStruct((16,), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")

    def step(w: jax.Array, x: jax.Array) -> Any:
        place = jnp.searchsorted(jnp.linspace(-1.0, 1.0, 9), x[:, 0])
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2 * place))(w)
        return w - grad, jnp.sum(place)

    assert make_plan(step, *shapes, cluster="h100:4").fallbacks == ()
