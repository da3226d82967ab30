"""Memory that every plan takes, and what follows where that is too much."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from planner import make_plan
from planner.choose.floors import floor_of
from planner.errors import MemoryLimitError
from planner.graph.trace import trace
from planner.planning.row import Row
from planner.request.parsed import parse_request

PARAMS = {"up": (512, 2048), "down": (2048, 512)}
STATE_BYTES = 2 * 4 * 512 * 2048


def step(state: Any, x: jax.Array) -> Any:
    """Two layers, by plain gradient descent."""

    def loss(p: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments(batch: int) -> tuple[Any, Any]:
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in PARAMS.items()}
    return shapes, jax.ShapeDtypeStruct((batch, 512), jnp.float32)


def whole(state: Any) -> Any:
    return {rf"\[.{k}.\]": PartitionSpec() for k in state}


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}, None])
@pytest.mark.parametrize("shardings", [None, {r"\['up'\]": PartitionSpec()}])
@pytest.mark.parametrize("batch", [64, 8192])
def test_no_plan_takes_less(mesh: Any, shardings: Any, batch: int) -> None:
    args = arguments(batch)
    options: dict[str, Any] = {"mesh": mesh, "shardings": shardings, "microbatches": 1}
    request = parse_request("h100:8", **options)
    row = Row(trace(step, args), args, request, 0, step)
    floor = floor_of(row.step.quotient, row.step.pins, request)
    assert 0 < floor.start_bytes <= floor.peak_bytes
    for memory in ("60GB", 1.3 * floor.peak_bytes, 1.05 * floor.peak_bytes):
        try:
            plan = make_plan(
                step, *args, cluster="h100:8", memory=memory, remat="none", chunks=1, **options
            )
        except MemoryLimitError as error:
            assert error.least_bytes >= floor.peak_bytes
        else:
            assert plan.search.cost_s > 0 and plan.prediction.peak_bytes >= floor.start_bytes


def test_what_is_pinned_whole_counts_whole() -> None:
    args = arguments(64)
    request = parse_request("h100:8", mesh={"data": 8}, shardings=whole(args[0]))
    row = Row(trace(step, args), args, request, 0, step)
    assert row.floor.start_bytes >= STATE_BYTES
    free = parse_request("h100:8", mesh={"data": 8})
    row = Row(trace(step, args), args, free, 0, step)
    assert row.floor.start_bytes < STATE_BYTES / 4


@pytest.mark.long
def test_where_the_arguments_alone_are_too_large_no_recipe_is_looked_at() -> None:
    args = arguments(64)
    with pytest.raises(MemoryLimitError) as error:
        make_plan(
            step,
            *args,
            cluster="h100:8",
            mesh="data=8",
            shardings=whole(args[0]),
            memory=0.9 * STATE_BYTES,
            microbatches="auto",
            remat="auto",
        )
    text = str(error.value)
    assert "remat, microbatches or chunks: does not suffice" in text
    assert "that is taken before the step begins" in text and "also tried" not in text
    assert not any("of the batch" in line and ": fits" in line for line in text.splitlines())
