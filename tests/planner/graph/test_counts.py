"""Turns of while loops that count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import compat
from planner.graph.jaxpr.counts import counted
from planner.graph.trace import trace

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def loop(test: Callable[[Any], Any], first: Any, step: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(x: jax.Array) -> jax.Array:
        out = jax.lax.while_loop(
            lambda s: test(s[0]), lambda s: (step(s[0]), jnp.tanh(s[1])), (first, x)
        )
        return out[1]

    return run


COUNTS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "up": (loop(lambda i: i < 16, 0, lambda i: i + 1), 16),
    "by three": (loop(lambda i: i < 16, 1, lambda i: 3 + i), 5),
    "up to and with": (loop(lambda i: i <= 16, 0, lambda i: i + 4), 5),
    "turned around": (loop(lambda i: jax.lax.gt(16, i), 2, lambda i: i + 1), 14),
    "down": (loop(lambda i: i > 0, 7, lambda i: i - 1), 7),
    "down to and with": (loop(lambda i: i >= 0, 7, lambda i: i + -2), 4),
    "never": (loop(lambda i: i < 0, 3, lambda i: i + 1), None),
    "endless": (loop(lambda i: i < 5, 3, lambda i: i - 1), None),
    "doubles": (loop(lambda i: i < 16, 1, lambda i: i * 2), None),
    "not equal": (loop(lambda i: i != 16, 0, lambda i: i + 1), None),
    "until it is small": (loop(lambda e: e > 1e-3, math.inf, lambda e: e * 0.5), None),
    "in fractions": (loop(lambda t: t < 1.0, 0.0, lambda t: t + 0.1), None),
    "both": (loop(lambda i: (i < 16) & (i > -1), 0, lambda i: i + 1), None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_turns(name: str) -> None:
    run, turns = COUNTS[name]
    closed, _ = compat.make_jaxpr(run, (X,))
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "while"]
    assert counted(eqn) == turns


def test_turns_that_depend_on_the_data_are_not_known() -> None:
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 16.0, jnp.tanh, x)

    closed, _ = compat.make_jaxpr(run, (X,))
    assert counted(closed.jaxpr.eqns[-1]) is None


def test_a_loop_that_counts_weighs_as_a_scan() -> None:
    def outer(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (COUNTS["up"][0](x), None), x, None, length=3)[0]

    regions = trace(outer, (X,)).graph.regions
    (inner,) = [r for r in regions if r.kind == "while"]
    assert (inner.weight, inner.known) == (48.0, True)
