"""Every program of the zoo in pipeline stages: equal to the whole batch, or refused."""

from __future__ import annotations

import jax
import pytest

from planner.errors import MeshwrightError
from planner.recipes import Recipe, rewritten
from tests.zoo.every import names
from tests.zoo.running import difference, load

CHANGED = {
    "scan_over_layers",
    "scan_over_layers_remat",
    "remat_dots_policy",
    "linen_scan_with_remat",
    "nnx_scan_over_layers",
}
"""Programs with layers in a scan; they must not be refused."""
FIRST = {"scan_over_layers", "mlp_train_step", "gru_linen", "unet_with_skips"}
"""Run in every test; the others with ``slow``."""


@pytest.mark.devices
@pytest.mark.parametrize("name", names(FIRST))
def test_equal_or_refused(name: str) -> None:
    program = load()[name]
    step, args = program.build()
    try:
        made = rewritten(step, args, Recipe(microbatches=2, stages=2))
    except MeshwrightError as error:
        assert name not in CHANGED
        assert "stages" in str(error) or "microbatch" in str(error)
        return
    assert difference(jax.jit(made)(*args), jax.jit(step)(*args)) <= 10 * program.tolerance
