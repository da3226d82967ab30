"""Primitives that a library lowers from Python on JAX arrays are planned by what they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from executor import compile_plan
from planner import make_plan
from planner.graph.jaxpr import inlined
from tests.executor.executor_steps import assert_same

pytestmark = pytest.mark.devices
RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32) / 4
X = RNG.normal(size=(4096, 16)).astype(np.float32)


def library_primitive(name: str, run: Any) -> Any:
    """A primitive of one array, made as libraries do: its derivative and batches are ``run``'s."""
    made = Primitive(name)
    made.def_impl(run)
    made.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=False))
    ad.primitive_jvps[made] = lambda primals, tangents: jax.jvp(run, primals, tangents)
    batching.primitive_batchers[made] = lambda xs, dims: (made.bind(*xs), dims[0])
    return made


def settled(x: jax.Array) -> jax.Array:
    """A loop that ends when nothing moves, as a solver's."""

    def turn(z: jax.Array) -> jax.Array:
        return 0.5 * jnp.tanh(z) + 0.5 * x

    return jax.lax.fori_loop(0, 5, lambda _, z: turn(z), x)


SETTLED = library_primitive("settled", settled)
OUTER = library_primitive("outer", lambda x: SETTLED.bind(x) * 1.0)
NEEDS_NUMBERS = library_primitive("needs_numbers", lambda x: jnp.asarray(np.asarray(x)))


@pytest.mark.parametrize("primitive", [SETTLED, OUTER])
@pytest.mark.parametrize("scanned", [False, True])
def test_what_a_primitive_runs_is_split(primitive: Any, scanned: bool) -> None:
    """Also one that binds another, and in the body of a loop."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if scanned:
            x, _ = jax.lax.scan(lambda x, _: (primitive.bind(x), None), x, None, length=2)
        else:
            x = primitive.bind(x)

        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((x @ w) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - 0.1 * g, value

    plan = make_plan(step, W, X, cluster="cpu:8", mode="DATA_PARALLEL")
    assert plan.fallbacks == ()
    (note,) = [n for n in plan.notes if "Python implementation" in n]
    assert str(primitive.name) in note and "settled" in note
    assert not any(row.kind == "all_gather" for row in plan.collectives)
    assert_same(compile_plan(step, plan)(W, X), jax.jit(step)(W, X))


def test_what_can_not_be_traced_stays_one_operation() -> None:
    jaxpr = jax.make_jaxpr(lambda x: NEEDS_NUMBERS.bind(x))(X)
    assert inlined.with_inlined(jaxpr, set()) is jaxpr
    plan = make_plan(lambda x: NEEDS_NUMBERS.bind(x).sum(), X, cluster="cpu:8", mesh="data=8")
    assert any("needs_numbers" in text for text in plan.fallbacks)
    assert not any("Python implementation" in n for n in plan.notes)


def test_a_primitive_that_is_compiled_by_itself_stays_one_operation() -> None:
    made = library_primitive("by_itself", jnp.tanh)
    made.def_impl(lambda x: jax.jit(made.bind)(x))
    jaxpr = jax.make_jaxpr(lambda x: made.bind(x))(X)
    assert inlined.with_inlined(jaxpr, set()) is jaxpr
    plan = make_plan(lambda x: made.bind(x).sum(), X, cluster="cpu:8", mesh="data=8")
    assert not any("Python implementation" in n for n in plan.notes)


def test_steps_without_such_primitives_are_left_alone() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x))(X)
    assert inlined.with_inlined(jaxpr, set()) is jaxpr


def test_a_registered_rule_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    jaxpr = jax.make_jaxpr(lambda x: SETTLED.bind(x))(X)
    assert inlined.with_inlined(jaxpr, set()) is not jaxpr
    monkeypatch.setattr(inlined, "registered", lambda eqn: object())
    assert inlined.with_inlined(jaxpr, set()) is jaxpr
