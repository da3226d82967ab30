"""Printers and stages: repeated blocks are printed once, a stage ends the planning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner.cli.main import main
from planner.debug.stage import Stage
from planner.debug.stages import passed, reached
from planner.debug.text import stage_text
from planner.errors import InternalError, MemoryLimitError
from planner.planning import plan_step
from tests.planner.debug.steps import mlp_arguments, mlp_step, struct

STEPS = Path(__file__).with_name("steps.py")
LAYERS = 6


def deep_step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        y = x
        for layer in params:
            y = y + jnp.sin(y @ layer["up"]) @ layer["down"]
        return jnp.sum(y)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def deep_plan() -> object:
    layers = [{"up": struct(256, 1024), "down": struct(1024, 256)} for _ in range(LAYERS)]
    return plan_step(deep_step, layers, struct(512, 256), cluster="h100:8", mesh="data=8")


@pytest.mark.parametrize("stage", [Stage.GRAPH, Stage.GROUPS, Stage.ANALYSIS])
def test_repeated_blocks_are_printed_once(stage: Stage) -> None:
    values = reached(stage, deep_plan)
    folded, whole = (stage_text(stage, values, whole=w).splitlines() for w in (False, True))
    assert len(folded) < 0.8 * len(whole)
    graph = values[0] if stage is Stage.GRAPH else reached(Stage.GRAPH, deep_plan)[0]
    assert graph.blocks
    if stage is Stage.GRAPH:
        block = graph.blocks[0]
        assert f"the first of {block.count} copies" in "\n".join(folded)
        assert f"block 0, copy {block.count} of {block.count}:" in "\n".join(whole)
    else:
        assert any("of repeated blocks left out" in line for line in folded)
        assert not any("left out" in line for line in whole)


@pytest.mark.parametrize("stage", [Stage.PROBLEM, Stage.SOLUTION])
def test_the_problem_of_the_classes_is_smaller_and_costs_the_same(stage: Stage) -> None:
    values = reached(stage, deep_plan)
    folded, whole = (stage_text(stage, values, whole=w).splitlines() for w in (False, True))
    nodes = [sum(line.startswith("  node ") for line in lines) for lines in (folded, whole)]
    assert nodes[0] < 0.6 * nodes[1]
    assert any(re.search(r"^  node \S+ x\d:", line) for line in folded)
    if stage is Stage.SOLUTION:
        assert folded[1].split(" at moment")[0] == whole[1].split(" at moment")[0]


@pytest.mark.long
def test_a_stage_ends_the_planning_before_memory_runs_out() -> None:
    def plan() -> object:
        return plan_step(mlp_step, *mlp_arguments(), cluster="h100:8", memory="1MB")

    (_, solution), _ = reached(Stage.SOLUTION, plan)
    assert not solution.feasible
    with pytest.raises(MemoryLimitError):
        reached(Stage.PLAN, plan)


def test_a_planning_that_ends_early_is_told() -> None:
    with pytest.raises(InternalError, match="ended before stage plan"):
        reached(Stage.PLAN, lambda: None)
    passed(Stage.PLAN, *reached(Stage.PLAN, deep_plan))  # nobody waits for it now


@pytest.mark.parametrize("stage", Stage)
def test_the_command_prints_a_stage(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(STEPS), "--stage", stage, "--mesh", "data=4,model=2"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{stage}") and len(rest) > 10


def test_the_command_refuses_as_the_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", str(STEPS), "--stage", "shards"]) == 2
    assert main(["debug", str(STEPS)]) == 2
    assert main(["debug", str(STEPS), "--stage", "plan", "--mesh", "data=3"]) == 2
    assert main(["debug", "no_such_file.py", "--stage", "graph"]) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("planner: error: ")]
    assert len(errors) == 4 and all("see planner debug" in x for x in set(lines) - set(errors))
