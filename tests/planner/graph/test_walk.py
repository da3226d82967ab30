"""The walk through jaxprs: structure of regions, names and lines, new calls in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

from executor import compile_plan
from planner import compat, make_plan
from planner.graph.flat import flatten
from planner.graph.jaxpr import walk
from planner.graph.jaxpr.depends import depends
from planner.graph.jaxpr.places import PlacedWalk
from planner.graph.jaxpr.walk import Body, Loop, Walk
from planner.graph.lookups.tables import find_lookups
from planner.graph.trace import trace


class Interpreted(Walk[Any]):
    """Evaluates loops and branches in Python, by nothing but their structure."""

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        return compat.evaluate_equation(eqn, ins)

    def loop(self, eqn: Any, ins: list[Any], loop: Loop) -> Sequence[Any]:
        consts, carries, over = loop.split(ins)
        stacked: list[list[Any]] = []
        turn = 0
        while loop.trips is None or turn < loop.trips:
            operands = [*consts, *carries, *(x[turn] for x in over)]
            for body in loop.bodies:
                outs = self.run(body.jaxpr, body.args(operands))
                if body.closing == ("loop_test",):
                    if not outs[0]:
                        return carries
                    continue
                assert len(body.closing) == loop.carries
                carries = outs[: loop.carries]
                stacked.append(outs[loop.carries :])
            turn += 1
        return [*carries, *(jnp.stack(column) for column in zip(*stacked, strict=True))]

    def cond(self, eqn: Any, ins: list[Any], branches: tuple[Body, ...]) -> Sequence[Any]:
        body = branches[int(ins[0])]
        return self.run(body.jaxpr, body.args(ins))


def scanned(x: jax.Array, w: jax.Array) -> Any:
    def body(carry: Any, row: Any) -> Any:
        a, n = carry
        return (a * 0.5 + row * w, n + 1), (a.sum(), row - n)

    return jax.lax.scan(body, (x[0], 0.0), x, unroll=2)


def whiled(x: jax.Array, w: jax.Array) -> Any:
    limit, step = w.sum() * 8, w * 0.25
    return jax.lax.while_loop(
        lambda c: (c[0].sum() < limit) & (c[1] < 9), lambda c: (c[0] + step, c[1] + 1), (x[0], 0)
    )


def chosen(x: jax.Array, w: jax.Array) -> Any:
    branches = [lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a - b]
    return [jax.lax.switch(k, branches, x[k], w) for k in range(3)]


def solved(x: jax.Array, w: jax.Array) -> Any:
    scale = w + 2.0
    return jax.lax.custom_linear_solve(
        lambda v: scale * v, x[0], lambda _, b: b / scale, lambda _, b: b / scale
    )


def called(x: jax.Array, w: jax.Array) -> Any:
    constant = np.arange(4, dtype=np.float32)
    inner = jax.checkpoint(jax.jit(lambda a: jnp.sin(jax.nn.relu(a) * constant)))
    return jax.grad(lambda a: inner(a * w).sum())(x)


@pytest.mark.long
@pytest.mark.parametrize("function", [scanned, whiled, chosen, solved, called])
def test_bodies_take_the_right_operands(function: Any) -> None:
    x = jnp.linspace(-1, 1, 24).reshape(6, 4)
    w = jnp.array([0.5, 1.0, 1.5, 2.0])
    closed, _ = compat.make_jaxpr(function, (x, w))
    found = Interpreted().run(closed, [x, w])
    expected = jax.tree.leaves(function(x, w))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_results_depend_on_what_they_are_computed_from() -> None:
    def function(a: Any, b: Any, c: Any, k: Any) -> Any:
        apart = jax.jit(lambda x, y: (x * 2, y + 1))(a, b)
        either = jax.lax.cond(k > 0, lambda x, y: (x, y), lambda x, y: (x * x, x), a, c)
        looped = jax.lax.fori_loop(0, 3, lambda _, x: x * b, c)
        return *apart, *either, looped, jnp.ones(2)

    closed, _ = compat.make_jaxpr(function, (1.0, 2.0, 3.0, 4))
    found = depends(closed, [frozenset({k}) for k in range(4)])
    assert [sorted(x) for x in found] == [[0], [1], [0, 3], [0, 2, 3], [1, 2], []]


class Named(PlacedWalk[Any]):
    """Collects (primitive, names, line) of all operations, those inside loops too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, str]] = []

    def literal(self, atom: Any) -> Any:
        return None

    def operation(self, eqn: Any, ins: list[Any]) -> Sequence[Any]:
        self.seen.append((eqn.primitive.name, self.place.names, self.place.line))
        return [None] * len(eqn.outvars)

    def loop(self, eqn: Any, ins: list[Any], loop: Loop) -> Sequence[Any]:
        for body in loop.bodies:
            self.run(body.jaxpr, body.args(ins))
        return self.operation(eqn, ins)


def test_names_are_those_from_the_top() -> None:
    def loss(w: jax.Array) -> jax.Array:
        def body(h: jax.Array, row: jax.Array) -> Any:
            with jax.named_scope("inner"):
                return jax.jit(jnp.tanh)(h * row), None

        with jax.named_scope("outer"):
            return jax.lax.scan(body, w[0], w)[0].sum()

    closed, _ = compat.make_jaxpr(jax.grad(loss), (jax.ShapeDtypeStruct((3, 4), jnp.float32),))
    named = Named()
    named.run(closed, [None])
    (tanh,) = [x for x in named.seen if x[0] == "tanh"]
    assert tanh[1] == "jvp(outer)/inner"
    assert tanh[2].startswith("test_walk.py:")
    backward = {names for _, names, _ in named.seen if "transpose(" in names}
    assert "transpose(jvp(outer))/inner" in backward
    assert named.place.names == named.place.line == ""


@pytest.fixture
def new_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A call-like primitive that only ``walk`` is told of: applies a function."""
    primitive = jex_core.Primitive("made_up_call")
    primitive.multiple_results = True
    primitive.def_impl(lambda *args, jaxpr: jex_core.jaxpr_as_fun(jaxpr)(*args))
    primitive.def_abstract_eval(lambda *args, jaxpr: list(jaxpr.out_avals))
    monkeypatch.setattr(walk, "CALLS", walk.CALLS | {"made_up_call"})
    monkeypatch.setattr(walk, "STRUCTURED", walk.STRUCTURED | {"made_up_call"})

    def apply(function: Any, *args: Any) -> Any:
        closed, _ = compat.make_jaxpr(function, [jax.typeof(x) for x in args])
        return primitive.bind(*args, jaxpr=closed)[0]

    yield apply


@pytest.mark.long
@pytest.mark.devices
def test_a_new_call_is_entered_in_one_place(new_call: Any) -> None:
    def step(table: jax.Array, ids: jax.Array) -> Any:
        rows = new_call(lambda t, i: t.at[i].get(mode="clip") * 2.0, table, ids)
        return jax.lax.scan(lambda c, r: (new_call(jnp.sin, c) + r, None), rows[0], rows)[0]

    table, ids = jnp.linspace(-1, 1, 64).reshape(16, 4), jnp.arange(8) * 2
    kinds = [op.kind for op in trace(step, (table, ids)).graph.ops]
    assert {"gather", "sin"} <= {*kinds} and "made_up_call" not in kinds
    assert "made_up_call" not in [c.kind for c in flatten(trace(step, (table, ids)).jaxpr).calls]
    assert [t.path for t in find_lookups(step, table, (ids,)).tables] == [""]
    plan = make_plan(step, table, ids, cluster="cpu:8", mesh="data=8")
    rows = (table[ids] * 2.0).astype(jnp.float32)
    expected = rows[0]
    for row in rows:
        expected = jnp.sin(expected) + row
    np.testing.assert_allclose(compile_plan(step, plan)(table, ids), expected, rtol=1e-5)
