"""Rules that users register: found, run on shards, tried before they are believed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from executor import compile_plan
from executor.run.compile import CompiledStep
from executor.run.local import checked
from planner import PlanMismatchError, RequestError, make_plan, register_rule
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.rules.kernels import registered as registry
from planner.rules.registry import rules_for

pytestmark = pytest.mark.devices

ROWS, WIDTH = 64, 32


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing is registered before and after."""
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)
    checked._checked.clear()
    for forget in registry._WATCHERS:
        forget()


def primitive(name: str, function: Any) -> Any:
    """A primitive of the user's, of one result that has the shape of the first operand."""
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda x, *rest: x)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) * scale


def step_of(norm: Any) -> Any:
    def step(w: jax.Array, scale: jax.Array, x: jax.Array) -> Any:
        made = norm(x @ w, scale)
        return w - 0.1 * (x.T @ made), jnp.sum(made**2)

    return step


def planned(step: Any, *args: Any) -> Plan:
    """Rows on devices of their own."""
    rows = {r"\[2\]": PartitionSpec("data")}
    return make_plan(step, *args, cluster="cpu:8", mesh="data=8", shardings=rows)


def arguments() -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(0)
    shapes = ((WIDTH, WIDTH), (WIDTH,), (ROWS, WIDTH))
    return tuple(jnp.asarray(draw.normal(size=s), jnp.float32) for s in shapes)


def test_a_primitive_runs_on_shards() -> None:
    norm = primitive("test_norm", normalized)
    step, args = step_of(norm.bind), arguments()
    register_rule("test_norm", "b d, d -> b d", whole="d", cost=lambda x, s: 4.0 * x[0] * x[1])
    plan = planned(step, *args)
    assert not plan.fallbacks
    for a, b in zip(step(*args), compile_plan(step, plan)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    op = next(op for op in trace(step, args).graph.ops if op.kind == "test_norm")
    assert op.work == (("vector", 4.0 * ROWS * WIDTH, 0.0),)


def test_a_false_rule_is_refused_by_its_dimension() -> None:
    norm = primitive("test_false", normalized)
    register_rule("test_false", "b d, d -> b d")
    step, args = step_of(norm.bind), arguments()
    plan = planned(step, *args)
    with pytest.raises(RequestError, match=r"splitting d changes the results.*put d into whole="):
        compile_plan(step, plan)(*args)


def test_a_plan_is_refused_where_its_rule_is_not_registered() -> None:
    norm = primitive("test_absent", normalized)
    register_rule("test_absent", "b d, d -> b d", whole="d")
    step, args = step_of(norm.bind), arguments()
    plan = planned(step, *args)
    registry._REGISTERED.clear()
    with pytest.raises(PlanMismatchError, match=r"the plan has test_absent.*rule b d, d -> b d"):
        compile_plan(step, plan)(*args)


def test_what_can_not_be_tried_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def picky(x: jax.Array, scale: jax.Array) -> jax.Array:
        if x.shape[0] not in (ROWS, ROWS // 8):
            raise ValueError("64 or 8 rows, please")
        return normalized(x, scale)

    norm = primitive("test_picky", picky)
    register_rule("test_picky", "b d, d -> b d", whole="d")
    step, args = step_of(norm.bind), arguments()
    plan = planned(step, *args)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        compile_plan(step, plan)(*args)
    assert "b could not be checked here: 64 or 8 rows, please" in caplog.text


def test_a_pallas_kernel_needs_a_function_of_shards() -> None:
    def body(x: Any, scale: Any, out: Any) -> None:  # without a grid: nothing can be shown of it
        out[...] = normalized(x[...], scale[...])

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(body, out_shape=shape, interpret=True, name="whole_norm")
        return call(x, scale)  # type: ignore[no-any-return]

    step, args = step_of(norm), arguments()
    register_rule("whole_norm", "b d, d -> b d", whole="d")
    with pytest.raises(RequestError, match="needs local="):
        make_plan(step, *args, cluster="cpu:8", mesh="data=8")
    register_rule("whole_norm", "b d, d -> b d", whole="d", local=norm)
    plan = planned(step, *args)
    assert not plan.fallbacks
    for a, b in zip(step(*args), compile_plan(step, plan)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_an_ffi_call_has_smaller_results_on_shards() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((x.shape[0], 4), jnp.float32)
        return jax.ffi.ffi_call("test_target", shape)(x @ w)  # type: ignore[no-any-return]

    args = (jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH)))
    rows = {r"\[0\]": PartitionSpec("data")}
    register_rule("test_target", "b d -> b k", whole="d k")
    plan = make_plan(step, *args, cluster="cpu:8", mesh="data=8", shardings=rows)
    assert not plan.fallbacks and str(plan.outputs[0].spec) == "P('data')"
    lowered = CompiledStep(trace(step, args), plan).jitted.lower(*args).as_text()
    assert f"tensor<{ROWS // 8}x4xf32>" in lowered and "test_target" in lowered


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("b d", {}, "has no results: expected '... -> ...'"),
        ("b d -> ", {}, "no results"),
        ("b ? -> b", {}, r"can't read '\?' in 'b \?'"),
        ("b b -> b", {}, "b stands twice in one array"),
        ("b d -> b d", {"whole": "z"}, "whole has z"),
        ("b d -> b d", {"kind": "sort"}, "kind='sort'"),
    ],
)
def test_rules_that_can_not_be_read(rule: str, options: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        register_rule("test_unread", rule, **options)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("b d -> b d", "1 operands, the call has 2"),
        ("b d e, d -> b d", "operand 0 has 2 dimensions, not 3"),
        ("b b2, b -> b b2", "b is 64 and, in operand 1, 32"),
    ],
)
def test_rules_that_do_not_fit(rule: str, said: str) -> None:
    norm = primitive("test_unfit", normalized)
    register_rule("test_unfit", rule)
    with pytest.raises(RequestError, match=said):
        make_plan(step_of(norm.bind), *arguments(), cluster="cpu:8", mesh="data=8")


def test_dimensions_of_two_letters() -> None:
    grouped = primitive("test_grouped", lambda q, k: q * jnp.repeat(k, 4, 1))
    register_rule("test_grouped", "b (k r) d, b k d -> b (k r) d", whole="r d")
    q, k = jnp.ones((8, 8, 16)), jnp.ones((8, 2, 16))
    traced = trace(lambda q, k: grouped.bind(q, k), (q, k))
    (rule,) = rules_for([e for e in traced.eqns if e is not None])
    assert [rule.sizes[f] for f in sorted(rule.shardable)] == [8, 2]
    assert [len(dim) for dim in rule.operands[0]] == [1, 2, 1]
