"""Pipeline stages that nobody asked for: tried on several nodes, where they can save something."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from costmodels import parse_cluster
from planner import make_plan
from planner.planning.outer import pipelines

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SLOW = parse_cluster("h100:4x2")
SLOW = dataclasses.replace(
    SLOW, network=dataclasses.replace(SLOW.network, bytes_per_s=SLOW.network.bytes_per_s / 8)
)
"""Two nodes, the wire between them an eighth of what is usual."""


def planned(monkeypatch: pytest.MonkeyPatch, cluster: Any, **options: Any) -> Any:
    """A decoder of 8B parameters whose gradients are much larger than what layers hand on."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    llama = importlib.import_module("llama")
    try:
        config = dataclasses.replace(llama.SIZES["8b"], batch=16)
        make_state, step, batch = llama.build(config)
        known = {"remat": "full", "chunks": 1, "microbatches": 8, "replicas": 1, **options}
        return make_plan(step, jax.eval_shape(make_state), batch, cluster=cluster, **known)
    finally:
        sys.modules.pop("llama", None)


@pytest.mark.long
def test_a_slow_network_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, SLOW)
    assert plan.stages == 2 and any("pipelines of up to 8 stages" in n for n in plan.notes)
    without = planned(monkeypatch, SLOW, stages=1)
    assert without.stages == 1 and not any("pipelines" in n for n in without.notes)
    assert plan.prediction.step_s < 0.8 * without.prediction.step_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("h100:4", {"memory": "1TB"}),
        (SLOW, {"microbatches": 1, "replicas": None, "memory": "1TB"}),
        (SLOW, {"mode": "fsdp", "replicas": None, "memory": "1TB"}),
    ],
    ids=["one node", "one microbatch", "another mode"],
)
def test_not_where_something_else_is_asked(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(pipelines, "HOPE", -9.0)  # whatever there is to save
    plan = planned(monkeypatch, cluster, **options)
    assert plan.stages == 1 and not any("pipelines" in n for n in plan.notes)
