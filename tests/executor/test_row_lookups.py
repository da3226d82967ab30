"""Lookups in tables that are split by rows: each shard finds its own, and the sum is scattered."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from executor.run.compile import CompiledStep
from executor.run.local.products import LOCAL, Scatter, scattered
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.compiled.lowering import PLAIN, Lowering

pytestmark = pytest.mark.usefixtures("optimized")

MODES: list[Any] = [None, "clip", "fill", "promise_in_bounds"]
KINDS: list[tuple[Any, Any]] = [
    (jnp.float32, jnp.int32),
    (jnp.bfloat16, jnp.uint8),
    (jnp.int32, jnp.int8),
    (jnp.uint8, jnp.int32),
]


@pytest.mark.devices
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("kind", "index"), KINDS, ids=str)
def test_modes_inside_and_outside_of_the_table(mode: Any, kind: Any, index: Any) -> None:
    """Rows along two mesh axes, columns along a third; indices that no row has, too."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    draw = np.random.default_rng(0)
    table = jnp.asarray(draw.integers(0, 9, (24, 6)), kind)
    places = draw.integers(0, 24, (8, 3))
    if mode != "promise_in_bounds":
        signed = np.issubdtype(np.dtype(index), np.signedinteger)
        places[0] = (-60, 24, 100) if signed else (24, 100, 255)
    at = jnp.asarray(places, index)

    def look(table: jax.Array, at: jax.Array) -> jax.Array:
        return table.at[at].get(mode=mode, wrap_negative_indices=False)

    (eqn,) = (e for e in gathers(jax.make_jaxpr(look)(table, at).jaxpr))
    operands = [table, at.astype(eqn.invars[1].aval.dtype)[..., None]]
    rows, none = (("b", "a"), ("c",)), ((), (), ())
    local, sums = LOCAL["gather"](eqn.params, rows, none)
    assert local == ((), (), ("c",)) and sums == {"a", "b"}
    out, own = (("b",), (), ("c",)), (("b",), (), ())
    how = Scatter(-1, (0, 1, 2), (rows, none), out, own, ("a",))
    run = jax.jit(lambda *x: scattered(eqn, x, how, mesh))
    found, want = run(*operands), jax.jit(look)(table, at)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(*(np.asarray(x, np.float64) for x in (found, want)))
    assert "stablehlo.reduce_scatter" in run.lower(*operands).as_text()


def gathers(jaxpr: Any) -> list[Any]:
    """The lookups of a program and what it calls."""
    found = []
    for e in jaxpr.eqns:
        inner = e.params.get("jaxpr")
        found += [e] if e.primitive.name == "gather" else gathers(inner.jaxpr) if inner else []
    return found


def step(state: Any, tokens: jax.Array) -> Any:
    def loss(state: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(state["table"][tokens] @ state["head"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


@pytest.mark.devices
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_a_large_table_is_looked_up_where_its_rows_are(mesh: str) -> None:
    draw = np.random.default_rng(0)
    state = {
        "table": jnp.asarray(draw.normal(size=(64000, 256)), jnp.float32),
        "head": jnp.asarray(draw.normal(size=(256, 64)) / 16, jnp.float32),
    }
    tokens = jnp.asarray(draw.integers(-3, 64001, (2048, 2)))
    pins: Any = {r"table": PartitionSpec(tuple(n.split("=")[0] for n in mesh.split(",")))}
    plan = make_plan(step, state, tokens, cluster="v5e:2x4", mesh=mesh, shardings=pins)
    traced = trace(step, (state, tokens))
    counts = []
    for how in (Lowering(scattered=True), PLAIN):
        run = CompiledStep(traced, dataclasses.replace(plan, lowering=how), devices=jax.devices())
        counts.append(run.jitted.lower(state, tokens).as_text().count("stablehlo.reduce_scatter"))
        for a, b in zip(
            jax.tree.leaves(run(state, tokens)),
            jax.tree.leaves(jax.jit(step)(state, tokens)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert counts[0] >= len(mesh.split(",")) and counts[1] == 0


def test_look_ups_that_are_left_to_constraints() -> None:
    """More than one index a row, rows that reach into the next, rows of each example's own."""
    table = jnp.zeros((16, 8))

    def params(look: Any, *args: Any) -> Any:
        (eqn,) = gathers(jax.make_jaxpr(look)(*args).jaxpr)
        return eqn.params

    at = jnp.zeros((4, 2), jnp.int32)
    split, none = (("data",), ()), ((), ())
    entries = params(lambda t, a: t[a[:, 0], a[:, 1]], table, at)
    assert LOCAL["gather"](entries, split, none)[0] is None
    slices = params(
        lambda t, a: jax.vmap(lambda i: jax.lax.dynamic_slice(t, (i, 0), (2, 8)))(a),
        table,
        at[:, 0],
    )
    assert LOCAL["gather"](slices, split, none)[0] is None
    own = params(jax.vmap(lambda t, i: t[i]), jnp.zeros((4, 16, 8)), at)
    assert LOCAL["gather"](own, ((), ("data",), ()), ((), (), ()))[0] is None
    whole = params(lambda t, a: t[a], table, at)
    assert LOCAL["gather"](whole, split, (("data",), (), ()))[0] is None
