"""The rule that a ``custom_partitioning`` declares is read, and nothing less strict."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import (
    BATCHING,
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)

from planner import make_plan
from planner.rules.key import EqnKey
from planner.rules.registry import rules_for
from planner.rules.sources.declared import declared_rule


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def key_of(body: Any, shapes: Any, rule: Any, static_argnums: Any = (), **factors: Any) -> EqnKey:
    """The equation of ``body`` with a declared rule."""
    function = custom_partitioning(body, static_argnums=static_argnums)
    function.def_partition(partition=lambda *a: None, sharding_rule=rule, **factors)
    jaxpr = jax.make_jaxpr(function)(*shapes)
    return EqnKey.of(jaxpr.jaxpr.eqns[-1])


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def test_a_contracted_dimension_stays_whole() -> None:
    rule = declared_rule(key_of(matmul, [f32(8, 16), f32(16, 4)], "i k, k j -> i j"))
    text = "([i, j], [j, k])->([i, k]) {i=8, j=16, k=4} replicated={j}"
    assert rule is not None and str(rule) == text and rule.origin == "declared"


def test_need_replication_and_reduction_stay_whole() -> None:
    shapes = [f32(8, 16), f32(16, 4)]
    for factors in (
        {"need_replication_factors": ("j",)},
        {"permutation_factors": ("j",)},
        {"reduction_factors": ("k",)},
    ):
        rule = declared_rule(key_of(matmul, shapes, "i k, k j -> i j", **factors))
        assert rule is not None and not rule.reduction
        split = {rule.sizes[f] for f in rule.shardable}
        assert split == ({8, 4} if "reduction_factors" in factors else {8})


def test_leading_dimensions_and_compound_factors() -> None:
    rule = declared_rule(key_of(jnp.sin, [f32(2, 3, 8)], "...i -> ...i"))
    assert rule is not None and str(rule) == "([i, j, k])->([i, j, k]) {i=2, j=3, k=8}"
    rule = declared_rule(key_of(lambda x: x.reshape(4, 6), [f32(4, 2, 3)], "i a b -> i (a b)"))
    assert rule is not None and str(rule) == "([i, j, k])->([i, jk]) {i=4, j=2, k=3}"
    made = SdyShardingRule(
        (ArrayMapping(BATCHING, CompoundFactor("a", "b")),),
        (ArrayMapping(BATCHING, "a", "b"),),
    )
    rule = declared_rule(key_of(lambda x: x.reshape(4, 2, 3), [f32(4, 6)], made))
    assert rule is not None and str(rule) == "([i, jk])->([i, j, k]) {i=4, j=2, k=3}"


def test_a_function_that_declares() -> None:
    def rule_of(count: int, mesh: Any, ins: Any, outs: Any) -> Any:
        names = " ".join(f"d{n}" for n in range(len(ins[0].shape)))
        assert count == 2 and list(outs[0].shape) == [8, 4]
        return f"{names} -> {names}", {"need_replication_factors": ("d1",)}

    def body(x: Any, count: int) -> Any:
        return x * count

    function = custom_partitioning(body, static_argnums=(1,))
    function.def_partition(partition=lambda *a: None, sharding_rule=rule_of)
    jaxpr = jax.make_jaxpr(lambda x: function(x, 2))(f32(8, 4))
    rule = declared_rule(EqnKey.of(jaxpr.jaxpr.eqns[-1]))
    assert rule is not None and {rule.sizes[f] for f in rule.shardable} == {8}


@pytest.mark.parametrize(
    "declared", [None, "i j k -> i j k", "i j -> i", lambda *a: 1 / 0, lambda *a: 7]
)
def test_what_does_not_fit_is_replicated(declared: Any) -> None:
    key = key_of(jnp.sin, [f32(8, 4)], declared)
    assert declared_rule(key) is None
    (rule,) = rules_for([key])
    assert rule.origin == "opaque" and not rule.shardable


def test_other_primitives_declare_nothing() -> None:
    jaxpr = jax.make_jaxpr(jnp.sin)(f32(8))
    assert declared_rule(EqnKey.of(jaxpr.jaxpr.eqns[0])) is None


def test_in_a_plan() -> None:
    function = custom_partitioning(lambda x: jnp.tanh(x))
    function.def_partition(partition=lambda *a: None, sharding_rule="i j -> i j")
    plain = custom_partitioning(lambda x: jnp.tanh(x))
    plain.def_partition(partition=lambda *a: None)
    x, w = f32(4096, 512), f32(512, 512)
    plan = make_plan(lambda x, w: function(x @ w) @ w, x, w, cluster="h100:8")
    assert plan.fallbacks == ()
    plan = make_plan(lambda x, w: plain(x @ w) @ w, x, w, cluster="h100:8")
    assert len(plan.fallbacks) == 1 and "custom_partitioning" in plan.fallbacks[0]
