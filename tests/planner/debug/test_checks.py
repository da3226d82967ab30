"""Planted faults: each breaks one invariant of one stage, and the check names the place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planner.debug.check import CHECKS
from planner.debug.stage import Stage
from planner.debug.stages import FLAG, passed, reached
from planner.errors import InternalError
from planner.graph.ir import Role
from planner.planning import plan_step
from planner.spec import Sharding
from tests.planner.debug.steps import mlp_arguments, mlp_step
from tests.planner.debug.test_text import deep_plan

Values = tuple[Any, ...]
change = dataclasses.replace


@functools.cache
def sound(stage: Stage) -> Values:
    """What a stage makes of the two layers."""
    arguments = mlp_arguments()
    return reached(
        stage,
        lambda: plan_step(mlp_step, *arguments, cluster="h100:8", mesh="data=4,model=2"),
    )


@functools.cache
def folded(stage: Stage) -> Values:
    """What a stage makes of six equal layers."""
    return reached(stage, deep_plan)


def put(items: tuple[Any, ...], at: int, **fields: Any) -> tuple[Any, ...]:
    """A tuple with fields of one item changed."""
    return (*items[:at], change(items[at], **fields), *items[at + 1 :])


@pytest.mark.parametrize("stage", Stage)
def test_sound_values_pass(stage: Stage) -> None:
    CHECKS[stage](*sound(stage))
    CHECKS[stage](*folded(stage))


def refused(stage: Stage, words: str, *values: Any) -> None:
    with pytest.raises(InternalError, match=words):
        CHECKS[stage](*values)


def graph_with(**fields: Any) -> Any:
    return change(sound(Stage.GRAPH)[0], **fields)


def test_a_graph_with_a_wrong_label_is_refused() -> None:
    graph = sound(Stage.GRAPH)[0]
    last = len(graph.values) - 1
    result = len(graph.outputs) - 1
    cases = {
        r"%33 .* next of %20, which is no input": {"values": put(graph.values, last, of=20)},
        r"%10 .* a gradient of no input": {"values": put(graph.values, 10, role=Role.GRADIENT)},
        r"operation 3 .* in region 7 of 1": {"ops": put(graph.ops, 3, region=7)},
        r"tie of input 0 and result \d: .* becomes float32\[\]": {"ties": ((0, result),)},
        r"ties: \[0\] are carried": {"ties": graph.ties[1:]},
        r"ties: the same input twice": {"ties": ((0, 0), *graph.ties)},
        r"operation 2 .* in segment \(0, 1\)": {"ops": put(graph.ops, 2, segment=(0, 1))},
        r"operation 1 stands at 0": {"ops": graph.ops[1:]},
        r"inputs and paths differ": {"input_paths": ()},
    }
    for words, fields in cases.items():
        refused(Stage.GRAPH, words, graph_with(**fields))


def test_a_block_that_its_operations_do_not_repeat_is_refused() -> None:
    graph = folded(Stage.GRAPH)[0]
    block = graph.blocks[0]
    moved = (change(block, start=block.start + 1), *graph.blocks[1:])
    refused(
        Stage.GRAPH,
        r"block 0: operation \d+ is \w+, in the first copy",
        change(graph, blocks=moved),
    )
    beyond = (*graph.blocks[:-1], change(graph.blocks[-1], count=1000))
    refused(
        Stage.GRAPH,
        rf"block \d: operations \d+ to \d+ of {len(graph.ops)}",
        change(graph, blocks=beyond),
    )


GROUPS: dict[str, Callable[[Any], Any]] = {
    r"group 1 .*: stands at 0": lambda g: change(g, groups=put(g.groups, 0, index=1)),
    r"group 2 .*: sums over factor 5 of 2": lambda g: change(
        g, groups=put(g.groups, 2, reduction=frozenset({5}))
    ),
    r"group 2 .*: 2 factors, 1 marked": lambda g: change(
        g, groups=put(g.groups, 2, shardable=(True,))
    ),
    r"operation \d+: in groups 2 and 3": lambda g: change(
        g, groups=put(g.groups, 3, ops=g.groups[2].ops)
    ),
    r"link of %4 from group 99 to group 6: group 99 of 14": lambda g: change(
        g, links=put(g.links, 0, a=99)
    ),
    r"link of %4 .*source: layout \[0\] has 1 dimensions, its value 2": lambda g: change(
        g, links=put(g.links, 0, src=(0,))
    ),
    r"link of %4 .*target: layout .* factor of group 6, 7 of 3": lambda g: change(
        g, links=put(g.links, 0, dst=(7, 1))
    ),
    r"link of %4 .*target: factor 0 of group 6 has size 4096, its dimension 1024": lambda g: change(
        g, links=put(g.links, 0, dst=(1, 0))
    ),
    r"link of %4 .*: operand 1 of operation 0 is %1": lambda g: change(
        g, links=put(g.links, 0, operand=1)
    ),
    r"link of %4 .*: a gradient without partial sums": lambda g: change(
        g, links=put(g.links, 0, gradient=True)
    ),
    r"link of %4 .*: flows -1.0 times": lambda g: change(g, links=put(g.links, 0, weight=-1.0)),
    r"home of %7 float32\[4096,4096\]: none": lambda g: change(
        g, home=(*g.home[:7], None, *g.home[8:])
    ),
    r"home of %7 .*: layout \[0, 0\] names a factor twice": lambda g: change(
        g, home=(*g.home[:7], (7, (0, 0)), *g.home[8:])
    ),
    r"operation 0 dot_general: laid out by group 8, stands in 6": lambda g: change(
        g, op_layouts=((8, *g.op_layouts[0][1:]), *g.op_layouts[1:])
    ),
}


@pytest.mark.parametrize("words", GROUPS)
def test_broken_groups_are_refused(words: str) -> None:
    groups, graph = sound(Stage.GROUPS)
    refused(Stage.GROUPS, words, GROUPS[words](groups), graph)


def with_work(analysis: Any, group: int, **fields: Any) -> Any:
    work = put(analysis.facts[group].work, 0, **fields)
    return change(analysis, facts=put(analysis.facts, group, work=work))


ANALYSIS: dict[str, Callable[[Any], Any]] = {
    r"facts: 13 for 14 groups": lambda a: change(a, facts=a.facts[1:]),
    r"facts of group 0 .*: sizes is \(4096,\)": lambda a: change(
        a, facts=put(a.facts, 0, sizes=(4096,))
    ),
    r"facts of group 6 .*, work 0: factor 3 of 3": lambda a: with_work(
        a, 6, classes=(frozenset({3}), frozenset({0}), frozenset({2}))
    ),
    r"facts of group 6 .*, work 0: its classes of factors overlap": lambda a: with_work(
        a, 6, classes=(frozenset({0}), frozenset({0}), frozenset({2}))
    ),
    r"facts of group 6 .*, work 0: .* are no counts": lambda a: with_work(a, 6, flops=float("nan")),
    r"buffer of %\d+ in group \d+: there in \[0, 99\) of \[0, 29\)": lambda a: change(
        a, buffers=put(a.buffers, 0, start=0, end=99)
    ),
    r"buffer of %\d+ in group 77: group 77 of 14": lambda a: change(
        a, buffers=put(a.buffers, 0, group=77)
    ),
    r"buffer of %\d+ in group \d+: layout \[0\] has 1 dimensions": lambda a: change(
        a, buffers=put(a.buffers, 0, layout=(0,))
    ),
    r"buffer of %\d+ .*: takes -1 bytes": lambda a: change(a, buffers=put(a.buffers, 0, nbytes=-1)),
    r"edge of the link of %4: number 5 after -1": lambda a: change(a, bundles=(5, *a.bundles[1:])),
    r"readers of %0: operation 99 of 29": lambda a: change(a, reads=((99,), *a.reads[1:])),
    r"donated inputs: 1 entries, expected 6": lambda a: change(
        a, scheduled=change(a.scheduled, donated=(True,))
    ),
}


@pytest.mark.parametrize("words", ANALYSIS)
def test_a_broken_analysis_is_refused(words: str) -> None:
    refused(Stage.ANALYSIS, words, ANALYSIS[words](sound(Stage.ANALYSIS)[0]))


def swapped(quotient: Any) -> Any:
    """Two groups of unlike classes have each other's color."""
    color = list(quotient.color)
    other = next(k for k, c in enumerate(color) if c != color[0])
    color[0], color[other] = color[other], color[0]
    return change(quotient, color=tuple(color))


CLASSES: dict[str, Callable[[Any], Any]] = {
    r"classes: color 99 of": lambda q: change(q, color=(99, *q.color[1:])),
    r"class \d+: counts \d+ groups, has \d+": lambda q: change(
        q, part=change(q.part, counts=(q.part.counts[0] + 1, *q.part.counts[1:]))
    ),
    r"class \d+ .*: group \d+ .* has other facts": swapped,
    r"links from class \d+ to class \d+: have weight": lambda q: change(
        q,
        part=change(
            q.part, groups=change(q.part.groups, links=put(q.part.groups.links, 0, weight=0.5))
        ),
    ),
    r"moments: are not in order": lambda q: change(q, moments=q.moments[::-1]),
    r"class \d+ at operation \d+: holds .* bytes in layout": lambda q: change(
        q, part=change(q.part, buffers=put(q.part.buffers, 0, nbytes=12345.0))
    ),
}


@pytest.mark.parametrize("words", CLASSES)
def test_broken_classes_are_refused(words: str) -> None:
    refused(Stage.CLASSES, words, CLASSES[words](folded(Stage.CLASSES)[0]))


def test_a_broken_problem_is_refused() -> None:
    priced = sound(Stage.PROBLEM)[0]
    chosen = priced.sets[2]

    def with_set(**fields: Any) -> Any:
        return change(priced, sets=(*priced.sets[:2], change(chosen, **fields), *priced.sets[3:]))

    away = np.full_like(chosen.store, 9)
    refused(
        Stage.PROBLEM, r"strategies of group 2 .*: factor 9 of 2", with_set(store=away, use=away)
    )
    refused(
        Stage.PROBLEM,
        r"strategies of group 2 .*: use and store differ",
        with_set(use=np.full_like(chosen.use, -1)),
    )
    refused(
        Stage.PROBLEM,
        r"strategies of group 2 .*: options of shape",
        with_set(options=np.ones((chosen.count, 1), np.int64)),
    )
    broken = change(priced)
    problem = change(priced.problem, usages=put(priced.problem.usages, 0, node=99))
    object.__setattr__(broken, "problem", problem)
    refused(Stage.PROBLEM, r"problem on data=4,model=2: a usage names node 99 of 14", broken)
    twice = change(priced.problem, edges=(*priced.problem.edges, priced.problem.edges[0]))
    object.__setattr__(broken, "problem", twice)
    refused(Stage.PROBLEM, r"edge 4:\[1\]\['x'\] - 6:dot_general: is there twice", broken)


SOLUTIONS: dict[str, dict[str, Any]] = {
    r"13 of 14 choices": {"choice": (0,) * 13},
    r"takes strategy 99 of 25 for node 0:": {"choice": (99,) + (0,) * 13},
    r"states a cost of 1 s": {"cost_s": 1.0},
    r"states a peak of 7 bytes": {"peak_bytes": 7.0},
    r"states a peak at moment 0": {"peak_moment": 0},
    r"feasible is False": {"feasible": False},
    r"its bound 9 s is above its cost": {"lower_bound_s": 9.0},
}


@pytest.mark.parametrize("words", SOLUTIONS)
def test_a_solution_that_is_not_what_it_states_is_refused(words: str) -> None:
    priced, solution = sound(Stage.SOLUTION)[0]
    words = rf"solution on data=4,model=2: {words}"
    key = next(k for k in SOLUTIONS if words.endswith(k))
    refused(Stage.SOLUTION, words, (priced, change(solution, **SOLUTIONS[key])))


def test_a_broken_plan_is_refused() -> None:
    plan, graph = sound(Stage.PLAN)
    split = Sharding((("nowhere",), ()))
    refused(
        Stage.PLAN, r"inputs\[0\].spec", change(plan, inputs=put(plan.inputs, 0, spec=split)), graph
    )
    refused(Stage.PLAN, r"argument \[0\]", change(plan, inputs=plan.inputs[1:]), graph)
    exact = change(plan, prediction=change(plan.prediction, peak_bytes=-1.0))
    refused(Stage.PLAN, r"prediction.peak_bytes is -1.0", exact, graph)


def test_only_the_flag_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = graph_with(ties=())
    monkeypatch.setenv(FLAG, "1")
    with pytest.raises(InternalError, match="have no tie"):
        passed(Stage.GRAPH, broken)
    monkeypatch.setenv(FLAG, "0")
    passed(Stage.GRAPH, broken)
    monkeypatch.delenv(FLAG)
    passed(Stage.GRAPH, broken)
