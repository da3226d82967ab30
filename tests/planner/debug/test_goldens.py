"""Every stage of two small steps against a golden file, on all versions of jax."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.debug.stage import Stage
from planner.debug.stages import reached
from planner.debug.text import stage_text
from planner.planning import plan_step
from tests.planner.debug.steps import decoder_arguments, decoder_step, mlp_arguments, mlp_step

HERE = Path(__file__).parent
STEPS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "mlp": (mlp_step, mlp_arguments),
    "decoder": (decoder_step, decoder_arguments),
}


@pytest.mark.long
@pytest.mark.usefixtures("published_runs")
@pytest.mark.parametrize("name", STEPS)
def test_stages_are_those_of_the_golden_file(name: str) -> None:
    """``MESHWRIGHT_REGENERATE=1`` writes the file anew."""
    step, arguments = STEPS[name]
    parts = []
    for stage in Stage:
        values = reached(stage, lambda: plan_step(step, *arguments(), cluster="h100:8"))
        parts.append(f"==== {stage}\n{stage_text(stage, values)}\n")
    text, golden = "\n".join(parts), HERE / f"golden_{name}.txt"
    if os.environ.get("MESHWRIGHT_REGENERATE"):
        golden.write_text(text)
    assert text == golden.read_text()
