"""Options: every door takes all of them or refuses them by name; none is dropped."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import executor
from costmodels.schedule import Place
from executor.parameter_server import hybrid
from planner import MemoryLimitError, RequestError, make_placement, make_plan, plan_step
from planner.compare import compare
from planner.plan.compiled.option_sets import OFFLOADED
from planner.report.table import plan_text
from planner.request.options import OPTIONS, flags
from planner.request.parsed import parse_request


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, value


SHAPES = tuple(jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(2))
PARAMS = {"table": jnp.ones((64, 8)), "w": jnp.ones((8, 8))}


def loss(params: Any, ids: jax.Array) -> jax.Array:
    return jnp.mean((params["table"][ids] @ params["w"]) ** 2)


@pytest.mark.parametrize("door", [make_plan, plan_step, executor.parallelize, compare, hybrid])
def test_a_signature_lists_every_option(door: Any) -> None:
    assert set(OPTIONS) <= set(inspect.signature(door).parameters)


def test_the_command_line_has_every_option_that_is_text() -> None:
    assert set(OPTIONS) - set(flags()) == {"shardings", "logical_axis_rules", "dump_problem"}


def doors(**options: Any) -> dict[str, Any]:
    ids = jnp.zeros(4, jnp.int32)
    return {
        "make_plan": lambda: make_plan(step, *SHAPES, cluster="cpu:8", **options),
        "parallelize": lambda: executor.parallelize(step, **options),
        "compare": lambda: compare(step, *SHAPES, cluster="cpu:8", **options),
        "make_placement": lambda: make_placement(
            loss, PARAMS, optax.sgd(0.1), ids, cluster="cpu:8", **options
        ),
        "hybrid": lambda: hybrid(
            loss, PARAMS, optax.sgd(0.1), server=None, cluster="cpu:8", **options
        ),
    }


@pytest.mark.parametrize("door", list(doors()))
def test_an_unknown_option_is_refused_with_the_nearest_one(door: str) -> None:
    with pytest.raises(TypeError, match=r"'memmory'; did you mean 'memory'\?"):
        doors(memmory="1GB")[door]()


@pytest.mark.parametrize("door", ["make_placement", "hybrid"])
@pytest.mark.parametrize(
    "option",
    [
        {"logical_axis_rules": (("a", "data"),)},
        {"dump_problem": "problem.json"},
        {"microbatches": 2},
        {"remat": "full"},
        {"chunks": 8},
    ],
)
def test_what_placement_does_not_support_is_refused(door: str, option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(RequestError, match=f"{name}.* not supported"):
        doors(**option)[door]()


def test_zero_and_empty_text_are_values_not_defaults() -> None:
    assert parse_request("cpu:8", time_limit_s=0.0).time_limit_s == 0.0
    assert parse_request("cpu:8").time_limit_s == 60.0
    assert parse_request("cpu:8", zero=0).state.zero == 0
    assert parse_request("cpu:8", never_fsdp="").state.never_fsdp == ("",)
    assert parse_request("cpu:8", offload="").decided["offload"].patterns == ("",)
    with pytest.raises(RequestError, match="memory 0"):
        parse_request("cpu:8", memory=0)


def test_none_is_the_default() -> None:
    given: Any = dict.fromkeys(OPTIONS)
    assert make_plan(step, *SHAPES, cluster="cpu:8", **given) == make_plan(
        step, *SHAPES, cluster="cpu:8"
    )


@pytest.mark.long
@pytest.mark.parametrize("option", [{"memory": 1e3}, {"offload": r"\[0\]", "host_memory": 1e3}])
def test_doors_pass_limits_on(option: dict[str, Any]) -> None:
    with pytest.raises(MemoryLimitError):
        make_plan(step, *SHAPES, cluster="h100:1", **option)
    with pytest.raises(MemoryLimitError):
        executor.parallelize(step, cluster="h100:1", **option).prepare(*SHAPES)


@pytest.mark.long
def test_an_unconfirmed_step_time_says_what_it_counts_on() -> None:
    def text(cluster: str, mode: str = "DATA_PARALLEL") -> str:
        return " ".join(
            plan_text(make_plan(step, *SHAPES, cluster=cluster, mode=mode), 120).split()
        )

    words = "counts on collectives on SparseCores (compiler options); by default they block"
    for cluster in ("v6e:2x4", "v5p:2x2x2", "v5p-16"):
        assert words in text(cluster)
        assert words not in text(cluster, mode="STAND_ALONE")  # sends nothing
    assert "SparseCores" not in text("v5e:2x4")
    plan = make_plan(step, *SHAPES, cluster="v6e:2x4", mode="DATA_PARALLEL")
    assert words not in plan_text(dataclasses.replace(plan, compiler_options=OFFLOADED), 200)


@pytest.mark.parametrize(("cluster", "shares"), [("v5e:2x4", (0.3, 0.8, 0.0)), ("h100:8", None)])
def test_what_hides_is_counted_by_place(cluster: str, shares: tuple[float, ...] | None) -> None:
    """FSDP: gathers of the parameter run ahead, the reduction of its gradient behind."""
    big = tuple(jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for _ in range(2))
    planned = plan_step(step, *big, cluster=cluster, mode="DATA_PARALLEL", zero=3)
    model = planned.request.model
    sent = planned.extraction.sent()
    by_kind = {x.step.kind: x.place for x in sent}
    assert by_kind["all_gather"] is Place.AHEAD
    assert by_kind.get("reduce_scatter", by_kind.get("all_reduce")) is Place.BEHIND
    hidden = sum((shares or model.overlap)[x.place] * x.time_s for x in sent)
    found = planned.plan.prediction
    assert found.overlapped_s == pytest.approx(min(hidden, found.compute_s), rel=1e-6)
