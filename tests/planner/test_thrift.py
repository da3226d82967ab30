"""What is dominated is never taken; batches are fed in shards."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.explain.alternatives import alternatives
from planner.explain.setting import setting_of
from planner.planning import plan_step
from planner.search.local.ties import less_memory
from planner.search.problem import Edge, Problem, Usage

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    sys.path.insert(0, str(EXAMPLES))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module.train_step, module.example_args()


def dominated(planned):
    """Arguments and results that another sharding would serve in the same time, with less."""
    setting, graph = setting_of(planned), planned.extraction.graph
    homes = planned.extraction.priced.analysis.groups.home
    nodes = {}
    for value in (*graph.inputs, *(v for v in graph.outputs if v >= 0)):
        if homes[value] is not None and graph.values[value].shape:
            nodes.setdefault(setting.node[homes[value][0]], value)
    out = []
    for node, value in nodes.items():
        for row in alternatives(setting, node, homes[value][1])[0]:
            for price in (row.alone, row.best):
                if price is not None and price.fits and price.extra_s <= 1e-9:
                    faster = price.extra_s < -1e-9
                    if faster or price.extra_bytes < -1:
                        out.append((graph.values[value].name, str(row.stored), price))
    return out


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cluster", "search"),
    [
        ("mlp", "cpu:8", "auto"),
        ("mlp", "h100:8", "ilp"),
        ("mlp", "cpu:8", "dynamic_programming"),
        ("mlp", "cpu:8", "recursive_programming"),
    ],
)
def test_no_plan_of_an_example_is_dominated(name, cluster, search):
    step, args = example(name)
    planned = plan_step(step, *args, cluster=cluster, search=search, donate_argnums=0)
    assert dominated(planned) == []


def linear_step(width, rows):
    def step(state, batch):
        def loss(w):
            return jnp.mean((jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    state = {"a": of(width, 4 * width), "b": of(4 * width, width)}
    return step, (state, {"x": of(rows, width), "y": of(rows, width)})


@pytest.mark.parametrize("search", ["auto", "ilp", "recursive_programming"])
def test_a_batch_is_fed_in_shards(search):
    step, args = linear_step(1024, 65536)
    plan = plan_step(step, *args, cluster="h100:8x4", search=search).plan
    batch = {leaf.path: leaf for leaf in plan.inputs if not leaf.tied}
    assert {leaf.spec.dims[0] != () for leaf in batch.values()} == {True}
    assert all(leaf.spec.shards(plan.mesh) == 32 for leaf in batch.values())
    assert plan.search.gap < 1e-6


def looked_up(vocab, width, rows, seq):
    """Token numbers that an embedding reads, a table that FSDP cuts."""

    def step(state, batch):
        def loss(p):
            x = p["table"][batch["tokens"]]
            for _ in range(12):
                x = x + jnp.tanh(x @ p["w"]) @ p["head"]
            return jnp.mean((x - batch["y"][..., None]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    state = {"table": of(vocab, width), "w": of(width, 4 * width), "head": of(4 * width, width)}
    tokens = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    return step, (state, {"tokens": tokens, "y": of(rows, seq)})


def test_token_numbers_are_fed_in_shards_though_a_lookup_reads_all_of_them():
    step, args = looked_up(128_000, 4096, 64, 4096)
    plan = plan_step(step, *args, cluster="h100:8x4", mesh="data=32").plan
    batch = [leaf for leaf in plan.inputs if not leaf.tied]
    assert all(leaf.spec.shards(plan.mesh) > 1 for leaf in batch), batch


def test_frozen_parameters_beside_the_state_are_not_fed():
    from planner.graph.trace import trace
    from planner.step.feeding import fed_inputs

    def step(state, batch):
        y = batch @ state["frozen"] @ state["w"]
        return {"frozen": None, "w": state["w"] - y.sum(0)[:, None]}, y.sum()

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    args = ({"frozen": of(8, 8), "w": of(8, 8)}, of(16, 8))
    graph = trace(step, args).graph
    paths = [graph.input_paths[graph.inputs.index(v)] for v in fed_inputs(graph)]
    assert paths == ["[1]"]


def test_a_step_without_state_is_fed_only_what_is_known_to_be_examples():
    from planner.graph.trace import trace
    from planner.step.feeding import fed_inputs

    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 4), (16, 8)))
    assert fed_inputs(trace(lambda w, x: jnp.sum(w) + jnp.sum(x), (w, x)).graph) == ()
    assert fed_inputs(trace(lambda w, x: x @ w, (w, x)).graph) == (1,)


def small(cost, table, nbytes, limit=np.inf):
    usages = tuple(Usage(k, 0, 2, np.array(b, float)) for k, b in enumerate(nbytes))
    edges = (Edge(0, 1, np.array(table, float)),)
    return Problem(("a", "b"), tuple(np.array(c, float) for c in cost), edges, usages, limit)


def taken(problem, choice):
    return less_memory(problem, choice, [np.zeros(c.size) for c in problem.cost_s]).tolist()


def test_a_pair_moves_where_no_single_node_can():
    # both at 0 or both at 1 cost nothing; only together do they get to fewer bytes
    problem = small([[0, 0], [0, 0]], [[0, 1], [1, 0]], [[10, 4], [10, 4]])
    assert taken(problem, [0, 0]) == [1, 1]


def test_bytes_never_win_over_seconds():
    problem = small([[0, 1e-6], [0, 1e-6]], [[0, 0], [0, 0]], [[10, 1], [10, 1]])
    assert taken(problem, [0, 0]) == [0, 0]
    assert taken(problem, [1, 1]) == [0, 0]


def test_seconds_are_not_saved_above_the_limit():
    problem = small([[1, 0], [0, 0]], [[0, 0], [0, 0]], [[4, 40], [4, 4]], limit=10)
    assert taken(problem, [0, 0]) == [0, 0]


def test_a_batch_whose_copy_takes_longer_than_the_step_is_fed_in_shards() -> None:
    """Little work on a large batch: fed whole, the step would wait for the copy."""

    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x[:, :8] @ w) ** 2))(w)
        return w - 0.1 * grad, value

    args = (
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        jax.ShapeDtypeStruct((16384, 8192), jnp.float32),
    )
    plan = plan_step(step, *args, cluster="h100:8").plan
    (batch,) = (leaf for leaf in plan.inputs if leaf.path == "[1]")
    assert batch.nbytes_per_device <= 16384 * 8192 * 4 / 8
