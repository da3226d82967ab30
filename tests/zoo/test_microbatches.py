"""Every program of the zoo in microbatches: equal to the whole batch, or refused."""

from __future__ import annotations

import jax
import pytest

from planner.errors import MeshwrightError
from planner.microbatch.rewrite import microbatched
from tests.zoo.every import names
from tests.zoo.running import difference, load

FIRST = {"mlp_train_step", "decoder_linen_train_step", "contrastive_loss", "numpy_arguments"}
"""Run in every test; the others with ``slow``."""


@pytest.mark.devices
@pytest.mark.parametrize("name", names(FIRST))
@pytest.mark.parametrize("replicas", [1, 2])
def test_equal_or_refused(name: str, replicas: int) -> None:
    program = load()[name]
    step, args = program.build()
    try:
        cut = microbatched(step, args, 2, replicas=replicas)
    except MeshwrightError as error:
        assert "microbatch" in str(error)
        return
    assert difference(jax.jit(cut)(*args), jax.jit(step)(*args)) <= 10 * program.tolerance
