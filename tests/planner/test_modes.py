"""What the process-wide mode takes for a staleness."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner import make_plan
from planner.errors import RequestError
from planner.modes import get_parallel_mode, set_parallel_mode


@pytest.mark.parametrize("value", ["4", 2.5, True, None])
def test_a_staleness_is_a_whole_number(value: Any) -> None:
    before = get_parallel_mode()
    kind = type(value).__name__
    with pytest.raises(RequestError, match=f"staleness={value!r}: got {kind}, expected a whole"):
        set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=value)
    assert get_parallel_mode() == before


def test_numpys_numbers_are_pythons() -> None:
    before = set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=np.int64(4))  # type: ignore[arg-type]
    try:
        found = get_parallel_mode().staleness
        assert found == 4 and type(found) is int
    finally:
        set_parallel_mode(
            before.mode, search=before.search, update=before.update, staleness=before.staleness
        )


def test_modes_by_the_names_of_jax_users() -> None:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def wide(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    shapes = (struct(1024, 1024), struct(8192, 1024))
    plans = {mode: make_plan(wide, *shapes, cluster="h100:8", mode=mode) for mode in ("dp", "FSDP")}
    assert plans["dp"] == make_plan(wide, *shapes, cluster="h100:8", mode="DATA_PARALLEL", zero=0)
    assert (
        plans["FSDP"].strategy.startswith("FSDP over 8") and plans["FSDP"].mode == "DATA_PARALLEL"
    )
    assert plans["dp"].strategy.startswith("data parallel over 8")
    before = set_parallel_mode("fsdp")
    try:
        assert get_parallel_mode().zero == 3
        assert make_plan(wide, *shapes, cluster="h100:8") == plans["FSDP"]
        assert (
            make_plan(wide, *shapes, cluster="h100:8", mode="DATA_PARALLEL", zero=0) == plans["dp"]
        )
        with pytest.raises(RequestError, match=r"zero=1 contradicts the mode in force.*level 3"):
            make_plan(wide, *shapes, cluster="h100:8", zero=1)
    finally:
        set_parallel_mode(before.mode, search=before.search)
    with pytest.raises(RequestError, match=r"zero=3 contradicts the mode dp"):
        make_plan(wide, *shapes, cluster="h100:8", mode="dp", zero=3)
    with pytest.raises(RequestError, match=r"'fdsp'.*dp, fsdp; did you mean FSDP\?"):
        make_plan(wide, *shapes, cluster="h100:8", mode="fdsp")


@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_a_step_is_split_again_behind_a_change_that_cannot_be_avoided(mode):
    """Parts of the batch, one after the other, cut the batch across the devices: once gathered, it
    is split again."""

    def step(params, x):
        def loss(p, x):
            for w in p:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        parts = x.reshape(4, -1, x.shape[1])
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

        grads = jax.lax.scan(add, zeros, parts)[0]
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), jnp.sum(x)

    params = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for _ in range(4)]
    batch = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    plan = make_plan(step, params, batch, cluster="h100:8", mode=mode)
    best = make_plan(step, params, batch, cluster="h100:8", mesh="data=8")
    assert "worth of work" not in str(plan)
    assert plan.prediction.step_s < 2.0 * best.prediction.step_s
