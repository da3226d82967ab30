"""Every program of the zoo under policies of rematerialization: equal, under each."""

from __future__ import annotations

import jax
import pytest

from planner.errors import MeshwrightError
from planner.graph.trace import trace
from planner.remat.rewrite import rematerialized
from tests.zoo.every import names
from tests.zoo.running import difference, load

FIRST = {"mlp_train_step", "decoder_linen_train_step", "remat_dots_policy", "optimization_barrier"}
"""Run in every test; the others with ``slow``."""


@pytest.mark.devices
@pytest.mark.parametrize("policy", ["full", "dots", "100"])
@pytest.mark.parametrize("name", names(FIRST))
def test_equal(name: str, policy: str) -> None:
    program = load()[name]
    step, args = program.build()
    try:
        traced = trace(step, args)
    except MeshwrightError:
        pytest.skip("not a step that can be traced alone")
    again, lines = rematerialized(step, traced, args, policy)
    if not lines:
        return  # no loop or block leaves anything to compute again
    assert difference(jax.jit(again)(*args), jax.jit(step)(*args)) <= 10 * program.tolerance
