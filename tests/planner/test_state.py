"""Requests about the training state: ZeRO levels, a threshold, opt-outs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from planner import Plan, RequestError, make_plan
from tests.planner.test_pins import MESH, W, X, specs, step, struct


def adam(state: Any, x: jax.Array) -> Any:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] + w["c"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    return {"w": jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], m), "m": m}, value


WC = {**W, "c": struct(256)}
STATE = {"w": WC, "m": WC}


def stored(plan: Plan) -> dict[str, bool]:
    """Whether the arrays of the state are split over data."""
    split = {leaf.path: "data" in leaf.spec.axes for leaf in plan.inputs}
    return {p: s for p, s in split.items() if p.startswith("[0]")}


@pytest.mark.parametrize("mode", ["DATA_PARALLEL", "AUTO_PARALLEL"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_levels_split_what_they_say(zero: int, mode: str) -> None:
    plan = make_plan(adam, STATE, X, cluster="h100:8", mesh="data=8", mode=mode, zero=zero)
    expected = {
        f"[0]['{part}']['{name}']": name != "c" and zero >= (1 if part == "m" else 3)
        for part in "mw"
        for name in "abc"
    }
    assert stored(plan) == expected
    for leaf in plan.inputs:
        if leaf.path.startswith("[0]['w']") and zero == 3 and leaf.used_as is not None:
            assert leaf.used_as.axes == ()  # gathered for use: not tensor parallel
    if mode == "DATA_PARALLEL":
        kinds = {row.kind for row in plan.collectives}
        assert ("reduce_scatter" in kinds and "all_gather" in kinds) == (zero > 0)


def test_a_level_holds_along_the_data_axes_only() -> None:
    plan = make_plan(
        adam,
        STATE,
        X,
        cluster="h100:8",
        mesh=MESH,
        zero=3,
        shardings={r"\['a'\]": P(None, "model")},
    )
    assert specs(plan)["[0]['w']['a']"] == (None, "model")  # what was pinned keeps its storage
    assert stored(plan)["[0]['w']['b']"]


def test_small_arrays_stay_whole_on_request() -> None:
    split = make_plan(adam, STATE, X, cluster="h100:8", mesh="data=8", zero=3)
    assert any(stored(split).values())
    whole = make_plan(
        adam, STATE, X, cluster="h100:8", mesh="data=8", zero=3, whole_below="1025KiB"
    )
    assert not any(stored(whole).values())
    exact = make_plan(adam, STATE, X, cluster="h100:8", mesh="data=8", zero=3, whole_below=2**20)
    assert stored(exact) == stored(split)


def test_never_fsdp_stores_an_array_as_it_is_used() -> None:
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8", "zero": 3}
    plan = make_plan(adam, STATE, X, never_fsdp=r"'w'.*'a'", **options)
    assert not stored(plan)["[0]['w']['a']"] and stored(plan)["[0]['w']['b']"]
    with pytest.raises(RequestError, match=r"never_fsdp: no argument path matches 'nothing'"):
        make_plan(adam, STATE, X, never_fsdp="nothing", **options)
    with pytest.raises(RequestError, match="never_fsdp: '\\[' is no regular expression"):
        make_plan(adam, STATE, X, never_fsdp="[", **options)


def test_broken_requests_about_the_state_are_refused() -> None:
    with pytest.raises(RequestError, match="zero=4: expected a ZeRO level"):
        make_plan(step, W, X, cluster="cpu:8", zero=4)
    with pytest.raises(RequestError, match="whole_below=-1"):
        make_plan(step, W, X, cluster="cpu:8", whole_below=-1)
    with pytest.raises(RequestError, match="64 parsecs"):
        make_plan(step, W, X, cluster="cpu:8", whole_below="64 parsecs")
