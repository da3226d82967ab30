"""With replicas, what runs is equal to the whole batch and reduces gradients behind the loop."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodels import parse_cluster
from executor import parallelize
from executor.verify.aot import compile_step, devices_of
from planner import make_plan, shard
from planner.graph.trace import trace
from planner.recipes import rewritten
from tests.zoo.running import difference

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("optimized")]
ROWS, WORDS, WIDTH = 64, 48, 32


def step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        x = params["table"][batch["tokens"]]
        for up, down in zip(params["up"], params["down"], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        scores = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, batch["targets"][..., None], -1))

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = 0.1 / jnp.maximum(norm, 0.1)
    return jax.tree.map(lambda w, g: w - scale * g, params, grads), value


def arguments() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape) / 4, jnp.float32)

    params = {
        "table": array(WORDS, WIDTH),
        "up": [array(WIDTH, 64) for _ in range(4)],
        "down": [array(64, WIDTH) for _ in range(4)],
    }
    tokens = {n: jnp.asarray(draw.integers(0, WORDS, (ROWS, 6))) for n in ("tokens", "targets")}
    return params, tokens


@pytest.mark.parametrize(
    "asked",
    [
        {"replicas": 8, "mesh": "data=8"},
        {"replicas": 4, "mesh": "data=4,model=2"},
        {"replicas": 2, "mesh": "data=2,fsdp=4", "zero": 3},
        {"replicas": 4, "stages": 2, "mesh": "stage=2,data=4", "remat": "none"},
        {"replicas": 4, "stages": 2, "schedule": "zb-h1", "remat": "none"},
    ],
    ids=lambda asked: "-".join(f"{k}={v}" for k, v in asked.items()),
)
def test_equal_to_the_whole_batch(asked: dict[str, Any]) -> None:
    args = arguments()
    expected = jax.jit(step)(*args)
    run = parallelize(step, microbatches=4, **asked)
    assert difference(jax.device_get(run(*args)), expected) <= 2e-5
    assert run.plan.replicas == asked["replicas"]


@pytest.mark.parametrize("replicas", [2, 8])
def test_equal_without_microbatches(replicas: int) -> None:
    args = arguments()
    expected = jax.jit(step)(*args)
    run = parallelize(step, replicas=replicas, mesh="data=8")
    assert difference(jax.device_get(run(*args)), expected) <= 2e-5
    assert (run.plan.microbatches, run.plan.replicas) == (1, replicas)


def compiled_sums(replicas: int) -> float:
    """Bytes that a device sends for sums of whole gradients, in a step in 4 microbatches."""
    args = arguments()
    options: dict[str, Any] = {"microbatches": 4, "replicas": replicas, "mode": "DATA_PARALLEL"}
    plan = make_plan(step, *args, cluster="cpu:8", **options)
    cluster = parse_cluster("cpu:8")
    assert devices_of(cluster)
    made = rewritten(step, args, plan.recipe)
    compiled = compile_step(trace(made, args), plan, cluster)
    kinds = ("all_reduce", "reduce_scatter")
    found = [c for c in compiled.module.collectives if c.kind in kinds]
    return sum(c.count * c.wire_bytes for c in found)


def test_the_compiled_step_reduces_gradients_once() -> None:
    once, each = compiled_sums(8), compiled_sums(1)
    assert each > 3 * once > 0


def test_replicas_that_were_chosen_are_no_lack_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    """The step was cut because the user asked; only how gradients are reduced was chosen."""
    args = arguments()
    run = parallelize(step, microbatches=4, replicas=2)
    run(*args)
    plan = dataclasses.replace(run.plan, replicas=2)
    with caplog.at_level(logging.INFO, "meshwright"):
        run._tell(plan, {"microbatches": 4})
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "does not fit" not in record.message
    assert "once per step, in 2 replicas (replicas=1 " in record.message


def constrained(x: jax.Array) -> jax.Array:
    """As JAX says it, on the user's mesh."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return jax.lax.with_sharding_constraint(x, spec)


@pytest.mark.parametrize("mark", [lambda x: shard(x, "data", None, None), constrained])
@pytest.mark.parametrize("scanned", [False, True])
def test_marks_on_examples_leave_replicas_alone(mark: Any, scanned: bool) -> None:
    """A mark that splits the examples says nothing against groups of them on devices of their own:
    gradients are reduced once, and no activation moves."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["table"][batch["tokens"]]
        if scanned:
            layers = jnp.stack(params["up"]), jnp.stack(params["down"])

            def layer(x: Any, pair: Any) -> Any:
                return mark(x + jnp.tanh(x @ pair[0]) @ pair[1]), None

            x, _ = jax.lax.scan(layer, x, layers)
        else:
            for up, down in zip(params["up"], params["down"], strict=True):
                x = mark(x + jnp.tanh(x @ up) @ down)
        return jnp.mean(x**2)

    def marked(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    args = arguments()
    whole = {r"^\[0\]": jax.sharding.PartitionSpec(), r"^\[1\]": jax.sharding.PartitionSpec("data")}
    run = parallelize(
        marked, microbatches=4, replicas=8, mesh="data=8", shardings=whole, cluster="cpu:8"
    )
    assert difference(jax.device_get(run(*args)), jax.jit(marked)(*args)) <= 2e-5
    assert {c.count for c in run.plan.collectives} == {1.0}


def test_a_batch_that_a_mode_can_not_split_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    args = arguments()
    args[1].update({k: v[:60] for k, v in args[1].items()})
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        run = parallelize(step, mode="fsdp")
        assert difference(jax.device_get(run(*args)), jax.jit(step)(*args)) <= 2e-5
    (record,) = (r for r in caplog.records if "are not split over 8 devices" in r.message)
    assert "56 or 64 examples would be" in record.message


def test_pipelines_that_a_mode_asks_for_are_no_surprise(caplog: pytest.LogCaptureFixture) -> None:
    """A warning must not advise ``stages=1``, which contradicts the mode."""
    args = arguments()
    expected = jax.jit(step)(*args)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        run = parallelize(step, mode="pp", remat="none")
        assert difference(jax.device_get(run(*args)), expected) <= 2e-5
    assert run.plan.stages > 1
    assert not [r.message for r in caplog.records if "turns that off" in r.message]
