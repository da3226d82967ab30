"""Every program of the zoo with a padded batch: equal to the step as written, or refused."""

from __future__ import annotations

import jax
import pytest

from planner.errors import MeshwrightError
from planner.graph.trace import trace
from planner.microbatch.rewrite import batch_size
from planner.padding.rewrite import padded
from tests.zoo.every import names
from tests.zoo.running import difference, load

FIRST = {"mlp_train_step", "decoder_linen_train_step", "contrastive_loss", "numpy_arguments"}
"""Run in every test; the others with ``slow``."""
CHANGED = {"mlp_train_step", "decoder_linen_train_step", "scan_over_layers"}
"""Programs whose examples meet in sums alone; they must not be refused."""


@pytest.mark.devices
@pytest.mark.parametrize("name", names(FIRST))
def test_equal_or_refused(name: str) -> None:
    program = load()[name]
    step, args = program.build()
    try:
        rows = batch_size(trace(step, args)) + 3
        longer = padded(step, args, rows)
    except MeshwrightError as error:
        assert name not in CHANGED
        assert "padded" in str(error) or "batch" in str(error)
        return
    assert difference(jax.jit(longer)(*args), jax.jit(step)(*args)) <= 10 * program.tolerance
