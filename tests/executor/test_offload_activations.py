"""What a model itself puts on the host: offloaded activations, and computing there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on

from costmodels import AnalyticCostModel, parse_cluster
from costmodels.schedule import Overlap, Place
from executor import parallelize
from planner import compat, make_plan

pytestmark = pytest.mark.devices
LAYERS = 3
KEEP = jax.checkpoint_policies.save_only_these_names("h")
POLICIES: dict[str, Any] = {
    "names": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def make_step(policy: Any, scan: bool) -> Callable[..., Any]:
    @functools.partial(jax.checkpoint, policy=policy)
    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        h = checkpoint_name(jnp.tanh(h @ w), "h")
        return jnp.sin(h) * h

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        if scan:
            x, _ = jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)
        else:
            for k in range(LAYERS):
                x = layer(x, ws[k])
        return jnp.mean(x**2)

    def step(ws: Any, x: jax.Array) -> Any:
        value, grad = jax.value_and_grad(loss)(ws, x)
        return ws - 0.1 * grad, value

    return step


def arrays(width: int = 64, batch: int = 64) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(0)
    return (
        jax.random.normal(key, (LAYERS, width, width)) / width**0.5,
        jax.random.normal(key, (batch, width)),
    )


@pytest.mark.parametrize("mesh", ["data=8", "data=2,model=4"])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_offloaded_activations_give_the_same_numbers(name: str, scan: bool, mesh: str) -> None:
    step, (ws, x) = make_step(POLICIES[name], scan), arrays()
    want = jax.jit(step)(ws, x)
    planned = parallelize(step, mesh=mesh)
    got = planned(ws, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-6)
    assert float(got[1]) == pytest.approx(float(want[1]), rel=1e-5)
    assert not planned.plan.fallbacks
    assert "annotate_device_placement" in planned.compiled.jitted.lower(ws, x).as_text()
    # what goes there and comes back, and what enters the rematerialised bodies
    bodies = [str(jax.make_jaxpr(f)(ws, x)) for f in (step, planned.compiled.jitted)]
    assert bodies[0].count("MemorySpace.Host") == bodies[1].count("MemorySpace.Host") > 0
    # equal bodies stand once in the first text
    assert 0 < bodies[0].count("MemorySpace.Device") <= bodies[1].count("MemorySpace.Device")
    assert "<host>" in bodies[1].split("remat2")[0]


@pytest.mark.parametrize("scan", [False, True])
def test_they_take_no_device_memory_and_pay_the_link_both_ways(scan: bool) -> None:
    width, batch, mesh = 512, 65536, "data=8"
    ws, x = (
        jax.ShapeDtypeStruct((LAYERS, width, width), jnp.float32),
        jax.ShapeDtypeStruct((batch, width), jnp.float32),
    )
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": mesh}
    kept = make_plan(make_step(KEEP, scan), ws, x, **options).prediction
    away = make_plan(make_step(POLICIES["names"], scan), ws, x, **options).prediction
    model, one = AnalyticCostModel(parse_cluster("h100:8")), 4 * width * batch / 8
    once = model.host_latency_s + model.host_s_per_byte * one
    assert kept.host_s == 0
    shown = Overlap.of(model).exposed(Place.AHEAD)  # the rest hides under compute
    assert away.host_s == pytest.approx(shown * 2 * LAYERS * once, rel=1e-8)
    assert away.step_s > kept.step_s
    if scan:  # all layers' activations are there at the turn, or none
        assert kept.peak_bytes - away.peak_bytes == pytest.approx(LAYERS * one, rel=0.35)


def test_compute_on_the_host_keeps_its_mark() -> None:
    if compat.marks_places():
        on_the_host = compute_on("device_host")
    else:
        on_the_host = compute_on(
            compute_type="device_host", out_memory_spaces=jax.memory.Space.Device
        )

    @on_the_host
    @jax.jit
    def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table[rows]

    def step(table: jax.Array, rows: jax.Array) -> Any:
        value, grad = jax.value_and_grad(lambda t: jnp.mean(lookup(t, rows) ** 2))(table)
        return table - 0.1 * grad, value

    table, rows = jax.random.normal(jax.random.key(0), (64, 16)), jnp.arange(32) % 7
    want = jax.jit(step)(table, rows)
    planned = parallelize(step, mesh="data=8")
    got = planned(table, rows)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    if not compat.marks_places():  # an operation without a rule: it runs, replicated
        assert "compute_on" in str(planned.plan.fallbacks)
        return
    assert not planned.plan.fallbacks
    text = planned.compiled.jitted.lower(table, rows).as_text()
    on_host = [line for line in text.splitlines() if '_xla_compute_type = "host"' in line]
    assert any('"stablehlo.gather"' in line for line in on_host)
    assert not any("dot_general" in line or "stablehlo.subtract" in line for line in on_host)
