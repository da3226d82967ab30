"""Every program of the zoo with its large products in chunks: equal, or left."""

from __future__ import annotations

import jax
import pytest

from planner.chunks.rewrite import chunked
from planner.errors import MeshwrightError
from planner.graph.trace import trace
from tests.zoo.every import names
from tests.zoo.running import difference, load

FIRST = {"mlp_train_step", "decoder_linen_train_step", "remat_dots_policy", "optimization_barrier"}
"""Run in every test; the others with ``slow``."""
CHANGED = FIRST - {"mlp_train_step", "optimization_barrier"}
"""Programs that are known to have large products."""


@pytest.mark.devices
@pytest.mark.parametrize("name", names(FIRST))
def test_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.chunks.labels.LARGE", 0.5)  # the zoo's programs are small
    program = load()[name]
    step, args = program.build()
    try:
        traced = trace(step, args)
    except MeshwrightError:
        pytest.skip("not a step that can be traced alone")
    made, lines = chunked(step, traced, args, 4)
    assert lines or name not in CHANGED
    if not lines:
        return  # no product is that large, or its rows need each other
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 10 * program.tolerance
