"""Several memories: their common form has the same feasible choices, and plans keep each limit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import MemoryLimitError, RequestError, make_plan, plan_step
from planner.search import SEARCHES, evaluate
from planner.search.folding.folding import fold
from planner.search.pools import pool_peaks, side_by_side
from planner.search.problem import Problem, Usage, profile_of, verify


def random_pools(seed: int) -> tuple[list[np.ndarray], list[Usage], list[tuple[str, float]]]:
    """Costs, usages of three memories, and the limits of these."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, 5)
    costs = [rng.random(n) for n in counts]
    usages = []
    for pool in range(3):
        for node, n in enumerate(counts):
            start = int(rng.integers(0, 6))
            end = start + int(rng.integers(1, 5))
            usages.append(Usage(node, start, end, rng.integers(0, 9, n).astype(float), pool))
    limits = [(name, float(rng.integers(4, 25))) for name in ("device", "host", "disk")]
    return costs, usages, limits


def own_peak(usages: list[Usage], pool: int, choice: tuple[int, ...]) -> float:
    mine = [u for u in usages if u.pool == pool]
    taken = [float(u.bytes[choice[u.node]]) for u in mine]
    return float(profile_of([u.start for u in mine], [u.end for u in mine], taken)[1].max())


@pytest.mark.parametrize("seed", range(40))
def test_one_limit_allows_the_choices_that_all_pools_allow(seed: int) -> None:
    costs, usages, limits = random_pools(seed)
    laid, limit, pools = side_by_side(usages, limits)
    problem = Problem(tuple("abcde"), tuple(costs), (), laid, limit, pools=pools)
    verify(problem)
    best = math.inf
    for choice in itertools.product(*(range(len(c)) for c in costs)):
        own = [own_peak(usages, pool, choice) for pool in range(3)]
        fits = all(peak <= has for peak, (_, has) in zip(own, limits, strict=True))
        cost, peak, moment = evaluate(problem, choice)
        assert (peak <= limit * (1 + 1e-12)) == fits
        told = pool_peaks(problem, choice)
        assert [told[name] for name, _ in limits] == pytest.approx(own)
        assert 0 <= moment < 11  # a moment of the pool, not of the common form
        best = min(best, cost) if fits else best
    for name in ("brute", "recursive_programming", "dynamic_programming"):
        found = SEARCHES[name](problem)
        assert found.feasible == math.isfinite(best)
        assert not found.feasible or found.cost_s >= best - 1e-12
    assert SEARCHES["brute"](problem).cost_s == pytest.approx(best) or best == math.inf
    assert fold(problem).problem.pools == pools


def test_pools_without_limit_or_usages_are_left_out() -> None:
    _, usages, limits = random_pools(1)
    device = [u for u in usages if u.pool == 0]
    assert side_by_side(device, limits) == (tuple(device), limits[0][1], ())
    free = [limits[0], ("host", math.inf), limits[2]]
    laid, _, pools = side_by_side(usages, free)
    assert [p.name for p in pools] == ["device", "disk"]
    assert {u.pool for u in laid} == {0, 1}


# ---- plans ----------------------------------------------------------------------------------


def step(state: Any, x: jax.Array) -> Any:
    """Two layers with momentum."""

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["p"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], m), "m": m}, value


def args() -> tuple[Any, jax.ShapeDtypeStruct]:
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)  # 4.2 MB
    params = {"a": square, "b": square}
    return {"p": params, "m": params}, jax.ShapeDtypeStruct((256, 1024), jnp.float32)


@pytest.mark.long
def test_what_is_kept_on_hosts_must_fit_there() -> None:
    enough = make_plan(step, *args(), cluster="h100:1", offload="'m'", host_memory="10MB")
    assert enough.prediction.host_bytes == 2 * 4 * 1024**2
    with pytest.raises(MemoryLimitError, match=r"hosts of h100:1: .* 8\.39 MB") as error:
        make_plan(step, *args(), cluster="h100:1", offload="'m'", host_memory="8MB")
    assert error.value.limit_bytes == 8e6
    assert error.value.least_bytes == 2 * 4 * 1024**2


def layered(ws: jax.Array, x: jax.Array) -> Any:
    def loss(ws: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(ws)
    return ws - 0.1 * grads, value


@pytest.mark.parametrize("remat", ["offload", "offload:4096"])
def test_activations_on_hosts_count_there(remat: str) -> None:
    args = (
        jax.ShapeDtypeStruct((8, 256, 256), jnp.float32),
        jax.ShapeDtypeStruct((65536, 256), jnp.float32),
    )
    one = {"cluster": "h100:1", "microbatches": 1, "remat": remat, "chunks": 1}
    plan = make_plan(layered, *args, **one)
    stacks = 8 * 65536 * 256 * 4
    assert stacks <= plan.prediction.host_bytes <= 1.3 * stacks
    assert "activations that wait for the backward pass" in str(plan)
    both = make_plan(layered, *args, offload=r"\[0\]", donate_argnums=0, **one)
    assert both.prediction.host_bytes >= stacks + 8 * 256 * 256 * 4
    assert "1 array of the state and activations that wait" in str(both)
    with pytest.raises(MemoryLimitError, match=r"the hosts of h100:1: .* at least [56]\d\d MB"):
        make_plan(layered, *args, host_memory="100MB", **one)


def test_a_plan_splits_what_would_not_fit_on_the_host_whole() -> None:
    made = plan_step(
        step, *args(), cluster="h100:4", mesh="data=4", offload="'m'", host_memory="3MB"
    )
    assert made.plan.prediction.host_bytes <= 3e6
    peaks = pool_peaks(made.extraction.priced.problem, made.extraction.choice)
    assert peaks["host"] == made.plan.prediction.host_bytes


def test_the_search_offloads_no_more_than_the_host_holds() -> None:
    everything = make_plan(step, *args(), cluster="h100:1", offload="auto", memory="1GB")
    assert everything.prediction.host_bytes == 0
    peak = everything.prediction.peak_bytes
    tight = make_plan(
        step, *args(), cluster="h100:1", offload="auto", memory=peak * 0.86, host_memory="5MB"
    )
    assert 0 < tight.prediction.host_bytes <= 5e6
    assert tight.prediction.peak_bytes <= peak * 0.86


def test_a_limit_of_no_bytes_is_refused() -> None:
    with pytest.raises(RequestError, match="host_memory 0: expected a positive number of bytes"):
        make_plan(step, *args(), cluster="h100:1", host_memory=0)
