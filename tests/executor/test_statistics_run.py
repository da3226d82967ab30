"""Microbatches with statistics of their own on eight devices: the loop that people write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from executor import check, parallelize
from planner import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = 4


@pytest.mark.devices
@pytest.mark.parametrize(("name", "remat"), [("resnet", "none"), ("moe", "full")])
def test_batch_norm_and_balance(name: str, remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with BatchNorm and one with a balance loss, under plain gradient descent: then the
    state after a step is the mean of the states after a step on each microbatch."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop(name, None)
    module = __import__(name)
    monkeypatch.setattr(module, "OPTIMIZER", optax.sgd(0.1))
    state, batch = module.make_state(), next(module.batches())
    options: dict[str, Any] = {"microbatches": PARTS, "statistics": "per-microbatch"}
    step = parallelize(module.train_step, mode="fsdp", remat=remat, **options)
    parts = [jax.tree.map(lambda x, j=j: x[j::PARTS], batch) for j in range(PARTS)]
    one = jax.jit(module.train_step)
    expected = jax.tree.map(
        lambda *xs: np.mean(np.stack(xs), axis=0), *(one(state, part) for part in parts)
    )
    found = step(state, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.devices
def test_check_compares_with_the_same_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("resnet", None)
    module = __import__("resnet")
    args = module.make_state(), next(module.batches())
    plan = make_plan(
        module.train_step,
        *args,
        cluster="cpu:8",
        mode="dp",
        microbatches=PARTS,
        statistics="per-microbatch",
    )
    assert check(module.train_step, plan, *args).max_rel_difference < 1e-4
