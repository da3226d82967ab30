"""Invariants and text of factor rules."""

from __future__ import annotations

import dataclasses

import pytest

from planner.rules.factor import (
    FactorRule,
    RuleError,
    canonical_rule,
    elementwise_rule,
    factor_name,
    identity_rule,
    opaque_rule,
)


def matmul() -> FactorRule:
    return canonical_rule(
        [[[7], [3]], [[3], [5]]],
        [[[7], [5]]],
        [0, 0, 0, 8, 0, 4, 0, 6],
        [(6, 8), (8, 4)],
        [(6, 4)],
        reduction=[3],
        origin="shardy",
    )


def test_text_and_numbering() -> None:
    rule = matmul()
    assert str(rule) == "([i, j], [j, k])->([i, k]) {i=6, j=8, k=4} reduction={j}"
    assert rule.sizes == (6, 8, 4)
    assert rule.shardable == {0, 1, 2}
    rule.verify([(6, 8), (8, 4)], [(6, 4)])


def test_factor_names() -> None:
    assert [factor_name(n) for n in (0, 17, 18, 19)] == ["i", "z", "z_1", "z_2"]


def test_sites_give_the_stride() -> None:
    rule = canonical_rule([[[0], [1]]], [[[0, 1]]], [4, 6], [(4, 6)], [(24,)], origin="x")
    assert rule.sites() == {
        0: {("operand", 0, 0, 1), ("result", 0, 0, 6)},
        1: {("operand", 0, 1, 1), ("result", 0, 0, 1)},
    }


def test_elementwise_with_scalars_and_unit_dimensions() -> None:
    rule = elementwise_rule([(), (1, 8), (6, 8), (6, 1)], (6, 8))
    assert str(rule) == "([], [1, i], [j, i], [j, 1])->([j, i]) {i=8, j=6}"
    rule.verify([(), (1, 8), (6, 8), (6, 1)], [(6, 8)])
    with pytest.raises(RuleError):
        elementwise_rule([(6,)], (6, 8))


def test_identity_keeps_operands_apart() -> None:
    rule = identity_rule([(6, 8), (8,)])
    assert str(rule) == "([i, j], [k])->([i, j], [k]) {i=6, j=8, k=8}"


def test_opaque_and_empty() -> None:
    rule = opaque_rule([(6, 1)], [(6, 0)])
    assert str(rule) == "([i, 1])->([j, 1]) {i=6, j=6} replicated={i, j}"
    rule.verify([(6, 1)], [(6, 0)])
    assert str(opaque_rule([], [])) == "()->()"


def test_canonical_blocks_what_is_unsound() -> None:
    mismatch = canonical_rule([[[0]]], [[[0]]], [8], [(8,)], [(4,)], origin="x")
    assert str(mismatch) == "([i])->([j]) {i=8, j=4} replicated={i, j}"
    twice = canonical_rule([[[0]]], [[[0], [0]]], [8], [(8,)], [(8, 8)], origin="x")
    assert str(twice) == "([i])->([i, i]) {i=8} replicated={i}"
    dangling = canonical_rule([[[0]]], [[]], [8], [(8,)], [()], origin="x")
    assert str(dangling) == "([i])->([]) {i=8} replicated={i}"
    minor = canonical_rule(
        [[[0, 1]]], [[[0], [1]]], [4, 2], [(8,)], [(4, 2)], replicated=[0], origin="x"
    )
    assert str(minor) == "([ij])->([i, j]) {i=4, j=2} replicated={i, j}"
    kept = canonical_rule([[[0]]], [[[0]]], [8], [(8,)], [(8,)], reduction=[0], origin="x")
    assert not kept.reduction


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (6, 9, 4)}, "shape"),
        ({"sizes": (6, 8, 1)}, "smaller than two"),
        ({"sizes": (6, 8, 4, 3)}, "order"),
        ({"replicated": frozenset({1})}, "both"),
        ({"replicated": frozenset({9})}, "exist"),
        ({"reduction": frozenset({0, 1})}, "result"),
        ({"reduction": frozenset()}, "operands only"),
        ({"results": (((0,),),)}, "operands only"),
        ({"results": (((0,), (2,)), ((0,), (0,)))}, "twice"),
    ],
)
def test_verify_finds_faults(change: dict[str, object], message: str) -> None:
    rule = dataclasses.replace(matmul(), **change)
    with pytest.raises(RuleError, match=message):
        rule.verify([(6, 8), (8, 4)], [(6, 4)])


def test_verify_checks_ranks() -> None:
    with pytest.raises(RuleError, match="rank"):
        matmul().verify([(6, 8), (8, 4)], [(6, 4, 1)])
    with pytest.raises(RuleError, match="values"):
        matmul().verify([(6, 8)], [(6, 4)])
