"""State in host memory as the search's own choice, against every combination there is."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import make_plan
from planner.errors import MemoryLimitError
from planner.planning import plan_step
from planner.search.problem import evaluate
from planner.space.decisions.host_memory import OFFLOAD

WIDTHS = (1024, 2048, 512, 1536)
PARAMS = [jax.ShapeDtypeStruct((512, n), jnp.float32) for n in WIDTHS]
STATE = {"params": PARAMS, "opt": {"m": PARAMS}}
X = jax.ShapeDtypeStruct((64, 512), jnp.float32)


def momentum(state: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in params)  # type: ignore[return-value]

    value, grads = jax.value_and_grad(loss)(state["params"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"]["m"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], m)
    return {"params": params, "opt": {"m": m}}, value


def planned(**options: Any) -> Any:
    return plan_step(
        momentum, STATE, X, **{"cluster": "h100:1", "offload": "auto", "mesh": "data=1", **options}
    )


def least_and_most() -> tuple[float, float]:
    """Peaks with everything in host memory and with nothing there."""
    return (
        make_plan(momentum, STATE, X, cluster="h100:1", offload=r"\[0\]").prediction.peak_bytes,
        make_plan(momentum, STATE, X, cluster="h100:1").prediction.peak_bytes,
    )


@pytest.mark.long
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_what_is_moved_is_the_cheapest_that_fits(share: float) -> None:
    least, most = least_and_most()
    limit = least + share * (most - least)
    found = planned(memory=limit)
    priced = found.extraction.priced
    problem = priced.problem
    # one device: strategies differ in memory alone, so one of each memory stands for all
    options = [np.unique(s.option(OFFLOAD), return_index=True)[1].tolist() for s in priced.sets]
    for cost, chosen in zip(problem.cost_s, priced.sets, strict=True):
        for host in (False, True):
            assert len(set(cost[chosen.option(OFFLOAD) == host].tolist())) <= 1
    assert sum(len(rows) == 2 for rows in options) == 2 * len(WIDTHS)
    best = min(
        cost
        for choice in itertools.product(*options)
        for cost, peak, _ in [evaluate(problem, choice)]
        if peak <= problem.limit_bytes
    )
    assert found.plan.search.cost_s == pytest.approx(best, rel=1e-8)  # kept to nine digits
    away = [leaf for leaf in found.plan.inputs if leaf.memory != "device"]
    assert 0 < len(away) < len(found.plan.inputs)
    assert found.plan.prediction.host_s > 0


def test_nothing_is_moved_where_everything_fits() -> None:
    free, plain = planned().plan, make_plan(momentum, STATE, X, cluster="h100:1", mesh="data=1")
    assert free.prediction.host_bytes == 0
    assert free.search.cost_s == plain.search.cost_s
    assert free.inputs == plain.inputs


@pytest.mark.long
def test_a_plan_that_was_not_possible_becomes_possible_and_the_refusal_says_so() -> None:
    least, most = least_and_most()
    limit = (least + most) / 2
    with pytest.raises(MemoryLimitError, match="no plan fits") as refused:
        make_plan(momentum, STATE, X, cluster="h100:1", memory=limit)
    line = next(x for x in str(refused.value).splitlines() if 'offload="auto"' in x)
    assert ": fits, peak" in line
    plan = planned(memory=limit).plan
    assert plan.prediction.peak_bytes <= limit and plan.prediction.host_bytes > 0
    with pytest.raises(MemoryLimitError, match="no plan fits") as refused:
        planned(memory=0.5 * least)
    relief = str(refused.value).split("what would help")[1].splitlines()
    assert not any('offload="auto"' in line and "fits" in line for line in relief)
    assert any("remat none, 1 or 4 chunks" in line for line in relief), relief


@pytest.mark.long
def test_sharding_further_is_taken_where_it_is_cheaper_than_the_host() -> None:
    """On eight devices the state can be split for little; then nothing moves."""
    _, most = least_and_most()
    plan = planned(cluster="h100:8", mesh="data=8", memory=most / 2).plan
    assert plan.prediction.peak_bytes <= most / 2 and plan.prediction.host_bytes == 0
    assert any(leaf.spec.axes for leaf in plan.inputs if leaf.tied)


@pytest.mark.long
def test_equal_layers_may_differ_where_some_must_move() -> None:
    """Folded layers are told apart if moving all of them costs more than moving a few."""
    w = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 6
    state = {"params": w, "opt": {"m": w}}
    whole: dict[str, Any] = {"cluster": "h100:1", "mesh": "data=1"}
    most = make_plan(momentum, state, jax.ShapeDtypeStruct((64, 1024), jnp.float32), **whole)
    limit = most.prediction.peak_bytes - 1.5 * 4 * 1024**2
    plan = make_plan(
        momentum,
        state,
        jax.ShapeDtypeStruct((64, 1024), jnp.float32),
        memory=limit,
        offload="auto",
        **whole,
    )
    moved = sum(leaf.memory != "device" for leaf in plan.inputs)
    assert plan.prediction.peak_bytes <= limit and 0 < moved <= 6
