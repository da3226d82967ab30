"""A microbatch in the programs of its stages: cuts, borders and homes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodels import parse_cluster
from planner import make_plan
from planner.errors import RequestError
from planner.graph.trace import trace
from planner.recipes import Recipe, Rewriter
from planner.recipes.wish import SCHEDULES
from planner.stages.programs.cuts import cut_blocks
from planner.stages.programs.handed import handed_places
from planner.stages.programs.homes import ALL
from planner.stages.programs.layered import Apart, taken_apart
from planner.stages.programs.split import BACKWARD, FORWARD, WEIGHTS


def step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        x = batch["x"] @ params["tied"]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ params["tied"] - batch["x"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def args(layers: int = 8) -> Any:
    array = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    batch = {"x": jax.ShapeDtypeStruct((16, 128), jnp.float32)}
    return {"layers": [array] * layers, "tied": array}, batch


def apart(stages: int = 4, weights: bool = True, cuts: Any = ()) -> Apart:
    recipe = Recipe(microbatches=4, stages=stages, schedule="1f1b")
    made, traced = Rewriter(step, args())(recipe)
    assert trace(made, args()).graph.ops == traced.graph.ops
    return taken_apart(traced, 4, stages, weights, cuts)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_cut_where_the_longest_group_is_shortest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds, across = rng.integers(1, 9, 9).tolist(), rng.integers(1, 5, 9).tolist()
    count = int(rng.integers(2, 5))

    def score(begins: Any) -> tuple[float, float]:
        ends = [*begins[1:], len(seconds)]
        longest = max(sum(seconds[a:b]) for a, b in zip(begins, ends, strict=True))
        return longest, sum(across[b] for b in begins)

    found = cut_blocks(seconds, across, count)
    every = ((0, *rest) for rest in itertools.combinations(range(1, len(seconds)), count - 1))
    assert score(found)[0] == min(score(b)[0] for b in every)


def test_only_declared_values_cross_and_each_once_in_its_direction() -> None:
    split = apart().split
    for task in split.tasks.values():
        made = {v for c in task.calls for v in c.outs}
        read = {v for c in task.calls for v in c.ins if isinstance(v, int)}
        assert read <= made | {*task.ins, *task.fixed, *task.rows}
    for value, (kind, source), (_, reader) in split.moves:
        assert source < reader if kind == FORWARD else source > reader, value


def test_what_a_forward_pass_leaves_stays_where_it_is_read() -> None:
    split = apart().split
    for value, (kind, _), (reading, reader) in split.moves:
        if kind == FORWARD and reading != FORWARD:  # the input of a stage, which it has anyway
            assert value in split.tasks[FORWARD, reader].ins


def test_nothing_waits_for_the_gradients_of_weights() -> None:
    split = apart().split
    assert all(not task.outs for key, task in split.tasks.items() if key[0] == WEIGHTS)
    assert any(task.sums for key, task in split.tasks.items() if key[0] == WEIGHTS)
    whole = apart(weights=False).split
    assert not any(kind == WEIGHTS for kind, _ in whole.tasks)
    own = [sum(len(t.own) for t in s.tasks.values()) for s in (split, whole)]
    assert own[0] == own[1]


def test_a_parameter_lives_where_it_is_read_and_a_shared_one_once() -> None:
    found = apart()
    home = found.homes.home
    assert list(home[:8]) == sorted(home[:8]) and set(home[:8]) == {0, 1, 2, 3}
    assert home[8] == 0 and ALL not in home[:9]
    assert len(found.split.pieces) == 8 + 2 + 1  # two stages add up the shared one's gradient


def test_cuts_from_a_plan_are_taken() -> None:
    first = apart()
    assert apart(cuts=first.cuts).cuts == first.cuts
    other = (first.cuts[0], first.cuts[2], first.cuts[3])
    assert apart(stages=3, cuts=other).cuts == other


def test_more_stages_than_blocks() -> None:
    with pytest.raises(RequestError, match="40 stages were requested, and it has"):
        apart(stages=40)


def test_backward_passes_wait_for_those_behind_them() -> None:
    split = apart().split
    assert all(
        any(maker == (BACKWARD, 3) for maker in [split.makers[v]])
        for v in split.tasks[BACKWARD, 2].ins
        if split.makers[v][0] == BACKWARD
    )


@pytest.mark.long
def test_a_plan_says_how_what_leaves_its_stage_is_split() -> None:
    plan = make_plan(step, *args(), cluster="cpu:8", stages=4, microbatches=4, schedule="1f1b")
    _, traced = Rewriter(step, args())(plan.recipe)
    said = {(c.op, c.position) for c in plan.constraints if c.slot == "out"}
    found = handed_places(taken_apart(traced, 4, 4, False, plan.cuts))
    assert len(found) >= 6 and said.issuperset(found)
    assert plan.strategy.startswith("pipeline parallel over 4 by 1f1b; ")
    assert " idle\n" in str(plan)


def rows(dtype: Any, unrolled: bool, width: int = 2048) -> tuple[Any, Any]:
    """Layers scanned or unrolled, in ``dtype`` with a copy in 32 bits, and what they take."""

    def loss(params: Any, x: Any) -> Any:
        if unrolled:
            for w in params:
                x = x + jnp.tanh(x @ w)
        else:
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(state: Any, batch: Any) -> Any:
        wide, narrow = state
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(narrow, batch))
        wide = jax.tree.map(lambda p, g: p - 0.1 * g, wide, grads)
        return wide, jax.tree.map(lambda p: p.astype(dtype), wide)

    def of(dtype: Any) -> Any:
        one = jax.ShapeDtypeStruct((width, width), dtype)
        return [one] * 8 if unrolled else jax.ShapeDtypeStruct((8, width, width), dtype)

    batch = jax.ShapeDtypeStruct((2**13, width), dtype)
    return step, ((of(jnp.float32), of(dtype)), batch)


def test_nothing_that_a_stage_keeps_moves_to_be_added_up() -> None:
    step, shapes = rows(jnp.bfloat16, unrolled=False)
    recipe = Recipe(microbatches=4, stages=4, schedule="1f1b")
    made = taken_apart(Rewriter(step, shapes)(recipe)[1], 4, 4, False)
    made_at = [made.split.makers[p][1] for parts in made.split.pieces for (p,) in parts]
    assert sorted(made_at)[-4:] == [0, 1, 2, 3]
    types = {
        v: var.aval.dtype
        for c in made.split.body.flat.calls
        for v, var in zip(c.outs, c.eqn.outvars, strict=True)
    }
    assert {types[p] for parts in made.split.pieces for (p,) in parts} == {jnp.dtype("float32")}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scanned_layers_take_as_long_as_unrolled_ones(dtype: Any) -> None:
    """Each stage has its own part of the array: it is not cut out in every microbatch."""
    options: Any = {"stages": 4, "microbatches": 16, "schedule": "1f1b", "remat": "none"}
    scanned, unrolled = (
        make_plan(step, *shapes, cluster="h100:8", mesh="stage=4,data=2", **options)
        for step, shapes in (rows(dtype, False), rows(dtype, True))
    )
    assert scanned.prediction.step_s == pytest.approx(unrolled.prediction.step_s, rel=0.15)


@pytest.mark.long
def test_a_slow_network_is_worth_stages() -> None:
    def deep(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for w in params:
                x = x + jnp.tanh(x @ w)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    shapes = [shape] * 8, jax.ShapeDtypeStruct((2**16, 4096), jnp.float32)
    fast = parse_cluster("h100:8x2")
    assert fast.network is not None
    slow = dataclasses.replace(fast, network=dataclasses.replace(fast.network, bytes_per_s=1e9))
    parts: Any = {"remat": "none", "microbatches": 16}
    options = {"stages": "auto", "schedule": "auto", **parts}
    plain, alone = (make_plan(deep, *shapes, cluster=c, **parts) for c in (fast, slow))
    near, far = (make_plan(deep, *shapes, cluster=c, **options) for c in (fast, slow))
    assert far.stages > 1 and far.schedule in SCHEDULES
    assert far.prediction.step_s < alone.prediction.step_s
    assert near.prediction.step_s <= 1.01 * plain.prediction.step_s
    assert "stages by a schedule: " in far.notes[-1] and "planned: " in far.notes[-1]
