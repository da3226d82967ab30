"""Which draws of random numbers may be computed in parts, or again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import compat
from planner.graph.flat import runs_once


def drawn(function: Any, *args: Any) -> Any:
    """The equation that draws."""
    closed, _ = compat.make_jaxpr(function, args)
    eqns = list(closed.jaxpr.eqns)
    while eqns:
        eqn = eqns.pop()
        if eqn.primitive.name in ("random_gamma", "random_bits"):
            return eqn
        bodies = map(compat.body, eqn.params.values())
        eqns += [e for b in bodies if hasattr(b, "eqns") for e in b.eqns]
    raise AssertionError("draws nothing")


RATES = jnp.ones((8, 4))


def each(rates: jax.Array) -> jax.Array:
    """A key for each element."""
    keys = jax.random.split(jax.random.key(0), rates.shape)
    return jax.vmap(jax.vmap(lambda k, a: jax.random.gamma(k, a)))(keys, rates)


@pytest.mark.long
@pytest.mark.parametrize(
    ("draw", "once"),
    [
        (lambda a: jax.random.gamma(jax.random.key(0), a), True),
        (each, False),
        (lambda a: a * jax.random.normal(jax.random.key(0), a.shape), False),
        (lambda a: a * jax.random.normal(jax.random.key(0, impl="rbg"), a.shape), True),
    ],
    ids=["one key, split by elements", "a key for each", "threefry", "rbg"],
)
def test_draws_that_parts_would_change_run_once(draw: Any, once: bool) -> None:
    assert runs_once(drawn(draw, RATES)) is once
