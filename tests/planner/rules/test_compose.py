"""Composition of rules, on values that are plain strings."""

from __future__ import annotations

import pytest

from planner.rules.compose import RuleStep, Unsupported, compose
from planner.rules.factor import FactorRule, canonical_rule, elementwise_rule
from planner.rules.key import Shape

SHAPES: dict[str, Shape] = {
    "x": (6, 8),
    "y": (6, 8),
    "t": (8, 6),
    "r": (6,),
    "m": (6, 6),
    "f": (48,),
}


def run(steps: dict[str, tuple[list[str], FactorRule]], args: list[str], outs: list[str]) -> str:
    """The text of the rule composed from steps given by the value they make."""

    def step_of(value: str) -> RuleStep | None:
        if value not in steps:
            return None
        operands, rule = steps[value]
        return RuleStep(operands, [value], rule)

    rule = compose(args, outs, step_of, SHAPES.__getitem__)
    rule.verify([SHAPES[a] for a in args], [SHAPES[o] for o in outs])
    return f"{rule} {rule.origin}"


def rule_of(ins: list[str], out: str, mapped_in: object, mapped_out: object) -> FactorRule:
    sizes = [6, 8, 6, 4, 12]
    reduction = [1]
    return canonical_rule(
        mapped_in,  # type: ignore[arg-type]
        [mapped_out],  # type: ignore[list-item]
        sizes,
        [SHAPES[name] for name in ins],
        [SHAPES[out]],
        reduction=reduction,
        origin="shardy",
    )


TRANSPOSE = rule_of(["x"], "t", [[[0], [1]]], [[1], [0]])
REDUCE = rule_of(["x"], "r", [[[0], [1]]], [[0]])
ADD = elementwise_rule([(6, 8), (6, 8)], (6, 8))


def test_one_step_keeps_its_origin() -> None:
    assert run({"r": (["x"], REDUCE)}, ["x"], ["r"]) == (
        "([i, j])->([i]) {i=6, j=8} reduction={j} shardy"
    )


def test_a_factor_that_is_summed_and_survives_is_replicated() -> None:
    text = run({"r": (["x"], REDUCE), "t": (["x"], TRANSPOSE)}, ["x"], ["r", "t"])
    assert text == "([i, j])->([i], [j, i]) {i=6, j=8} replicated={j} composed"


def test_a_factor_met_twice_in_one_value_is_replicated() -> None:
    product = rule_of(["x", "t"], "m", [[[0], [1]], [[1], [2]]], [[0], [2]])
    text = run({"t": (["x"], TRANSPOSE), "m": (["x", "t"], product)}, ["x"], ["m"])
    assert text == "([i, j])->([i, i]) {i=6, j=8} reduction={j} replicated={i} composed"


def test_disagreeing_divisions_are_replicated() -> None:
    flat = canonical_rule([[[0], [1]]], [[[0, 1]]], [6, 8], [(6, 8)], [(48,)], origin="shardy")
    other = canonical_rule([[[0, 1]]], [[[0], [1]]], [8, 6], [(48,)], [(8, 6)], origin="shardy")
    text = run({"f": (["x"], flat), "t": (["f"], other)}, ["x"], ["t"])
    assert text == "([i, j])->([k, l]) {i=6, j=8, k=8, l=6} replicated={i, j, k, l} composed"


def test_unused_arguments_and_arguments_returned() -> None:
    assert run({}, ["x", "y"], ["y"]) == (
        "([i, j], [k, l])->([k, l]) {i=6, j=8, k=6, l=8} replicated={i, j} composed"
    )


def test_a_value_from_elsewhere() -> None:
    with pytest.raises(Unsupported):
        run({"x": (["x", "y"], ADD)}, [], ["x"])
