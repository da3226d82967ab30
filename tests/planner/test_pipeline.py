"""``make_plan`` from end to end: requests, memory limits, device counts."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import (
    MemoryLimitError,
    MeshSpec,
    MeshwrightError,
    ModelError,
    Plan,
    RequestError,
    make_plan,
    shard,
)
from planner.report.units import bytes_text

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def step(w: dict[str, jax.Array], x: jax.Array) -> Any:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


W = {"a": struct(256, 1024), "b": struct(1024, 256)}
X = struct(512, 256)
KEY = jax.eval_shape(lambda: jax.random.key(0))
INDICES = struct(6, dtype=jnp.int32)


def adam(state: Any, x: jax.Array) -> Any:
    """Three copies of the weights, like Adam; the activations are small."""

    def loss(w: Any) -> jax.Array:
        for k in sorted(w):
            x_next = jnp.tanh(x_now[0] @ w[k])
            x_now[0] = x_next
        return jnp.mean(x_now[0] ** 2)

    x_now = [x]
    w, m, v = state
    value, g = jax.value_and_grad(loss)(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
    w = jax.tree.map(lambda p, m, v: p - m * jax.lax.rsqrt(v + 1e-8), w, m, v)
    return (w, m, v), value


def adam_args(layers: int, width: int, batch: int) -> tuple[Any, Any]:
    w = {str(k): struct(width, width) for k in range(layers)}
    return (w, w, w), struct(batch, width)


def assert_legal(plan: Plan, devices: int) -> None:
    """Every sharding divides its array; sizes on a device are right; the peak fits."""
    assert plan.mesh.num_devices == devices
    for leaf in (*plan.inputs, *plan.outputs):
        local = leaf.spec.local_shape(leaf.shape, plan.mesh)
        if leaf.dtype == "float32":
            assert leaf.nbytes_per_device == 4 * math.prod(local)
        if leaf.used_as is not None:
            leaf.used_as.check(leaf.shape, plan.mesh)
            assert set(leaf.used_as.axes) <= set(leaf.spec.axes)
    for a in plan.activations:
        a.spec.check(a.shape, plan.mesh)
    assert 0 < plan.prediction.peak_bytes <= plan.prediction.limit_bytes
    assert 0 <= plan.search.lower_bound_s <= plan.search.cost_s * (1 + 1e-12)
    assert sum(row.verdict == "chosen" for row in plan.meshes) == 1


# ---- requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"mesh": "data=3,model=2"},
            r"mesh \(data=3,model=2\) needs 6 devices, cluster cpu:8 has 8",
        ),
        ({"mesh": {"data": 16}}, "needs 16 devices"),
        ({"mesh": MeshSpec(("data",), (4,))}, "needs 4 devices"),
        ({"mesh": "data"}, "expected name=size"),
        ({"mode": "MAGIC"}, r"unknown parallel mode 'MAGIC'.*AUTO_PARALLEL"),
        ({"search": "magic"}, r"unknown search 'magic'.*recursive_programming"),
        ({"cluster": "abacus:8"}, r"unknown device 'abacus'.*h100"),
        ({"cluster": "h100:12"}, "at most 8"),
        ({"cluster": "no/such.toml"}, "no/such.toml"),
        ({"memory": "lots"}, "cannot read size 'lots'"),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        make_plan(step, W, X, **{"cluster": "cpu:8", **options})


def test_a_failing_model_is_not_a_request_error() -> None:
    with pytest.raises(ModelError) as error:
        make_plan(step, W, struct(512, 255), cluster="cpu:8")
    assert not isinstance(error.value, RequestError)
    assert isinstance(error.value.__cause__, TypeError)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": 2},  # less than the step's scalars
        {"memory": -5},
        {"memory": math.nan},
        {"search": "brute"},  # too many combinations
        {"mesh": {"data": "8"}},
        {"mesh": {}, "cluster": "cpu:1"},
    ],
    ids=["2 bytes", "negative", "nan", "brute", "size as text", "no axes"],
)
def test_every_request_error_is_ours(options: dict[str, Any]) -> None:
    def counted(w: Any, n: jax.Array, x: jax.Array) -> Any:
        return step(w, x)[0], n + 1

    args = (W, struct(dtype=jnp.int32), X)
    with pytest.raises(RequestError):
        make_plan(counted, *args, **{"cluster": "cpu:8", **options})


def test_a_mark_with_too_many_entries_is_a_pin_error() -> None:
    with pytest.raises(RequestError):
        make_plan(lambda x: shard(x, "a", "b", "c"), struct(8, 8), cluster="cpu:2")


# ---- odd programs ------------------------------------------------------------------------


def draw(x: jax.Array, key: jax.Array) -> jax.Array:
    return x + jax.random.normal(key, x.shape)


def halve(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x)


def no_trips(x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=0)


@pytest.mark.parametrize("mode", ["AUTO_PARALLEL", "DATA_PARALLEL"])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        pytest.param(lambda: jnp.ones(3), (), id="no arguments"),
        pytest.param(lambda x, w: x @ w, (struct(0, 8), struct(8, 8)), id="no elements"),
        pytest.param(lambda x, w: x * 2, (struct(8, 8), struct(8, 8)), id="unused argument"),
        pytest.param(draw, (struct(8, 4), KEY), id="random key"),
        pytest.param(lambda x: jnp.linalg.qr(x)[0], (struct(8, 4),), id="qr"),
        pytest.param(lambda x: jnp.fft.fft(x).real, (struct(8, 4),), id="fft"),
        pytest.param(lambda i, t: t[i], (INDICES, struct(32, 4)), id="gather"),
        pytest.param(halve, (struct(8),), id="while"),
    ],
)
def test_odd_programs_are_planned(function: Any, args: Any, mode: str) -> None:
    plan = make_plan(function, *args, cluster="cpu:6", mode=mode)
    assert len(plan.inputs) == len(jax.tree.leaves(args))
    assert math.isfinite(plan.prediction.step_s)
    assert str(plan)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        pytest.param(lambda x: x, (struct(8, 8),), id="identity"),
        pytest.param(lambda x: x + 1, (struct(),), id="scalar"),
        pytest.param(lambda x: 1.0, (struct(8, 8),), id="constant"),
        pytest.param(lambda x: (x, x, {"y": None}), (struct(7, 5),), id="tree"),
        pytest.param(no_trips, (struct(8),), id="no trips"),
    ],
)
def test_steps_that_cost_nothing_are_planned(function: Any, args: Any) -> None:
    plan = make_plan(function, *args, cluster="cpu:6")
    assert plan.prediction.step_s == 0.0
    assert str(plan)


def test_unknown_trip_counts_are_noted() -> None:
    plan = make_plan(halve, struct(8), cluster="cpu:2")
    (note,) = [note for note in plan.notes if "trip count unknown" in note]
    assert re.fullmatch(r"while \(test_pipeline.py:\d+\): trip count unknown, priced as one", note)


# ---- device counts -----------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 6, 7, 12])
def test_any_device_count_works(devices: int) -> None:
    w = {"a": struct(252, 1008), "b": struct(1008, 252)}
    assert_legal(make_plan(step, w, struct(504, 252), cluster=f"cpu:{devices}"), devices)


@pytest.mark.parametrize(("cluster", "devices"), [("h100:6", 6), ("h100:7", 7), ("h100:4x3", 12)])
def test_more_devices_are_never_slower(cluster: str, devices: int) -> None:
    args = {"a": struct(252, 1008), "b": struct(1008, 252)}, struct(504, 252)
    plan, alone = (make_plan(step, *args, cluster=c) for c in (cluster, "h100:1"))
    assert_legal(plan, devices)
    # a simpler mesh is taken when it costs at most three percent more
    assert plan.prediction.step_s <= 1.03 * alone.prediction.step_s


def test_a_prime_count_that_divides_nothing_replicates() -> None:
    plan = make_plan(step, W, X, cluster="cpu:7")
    assert str(plan.mesh) == "idle=7"  # named after what the axis does
    assert plan.idle.startswith("uses 1 of 7 devices' worth of work")
    assert all(leaf.spec.entries == () for leaf in plan.inputs)
    assert not plan.collectives


@pytest.mark.parametrize("mesh", ["data=3,model=4", "a=2,b=3,c=2", "x=12"])
def test_fixed_meshes_of_twelve(mesh: str) -> None:
    w = {"a": struct(96, 192), "b": struct(192, 96)}
    plan = make_plan(step, w, struct(384, 96), cluster="cpu:12", mesh=mesh)
    assert str(plan.mesh) == mesh and len(plan.meshes) == 1
    assert_legal(plan, 12)


def _sizes(plan: Plan) -> str:
    """The chosen mesh as one that was not chosen is listed: without names."""
    return "x".join(map(str, plan.mesh.sizes))


def test_the_chosen_mesh_is_close_to_the_best_tried() -> None:
    plan = make_plan(step, W, X, cluster="cpu:8")
    assert {row.mesh for row in plan.meshes} >= {"8", "4x2", "2x4"} - {_sizes(plan)}
    assert plan.search.cost_s <= 1.03 * min(r.cost_s for r in plan.meshes if r.cost_s >= 0)
    # and to what the meshes could cost on which no plan was looked for
    assert plan.search.cost_s <= 1.03 * min(row.lower_bound_s for row in plan.meshes)
    (chosen,) = [row for row in plan.meshes if row.verdict == "chosen"]
    assert chosen.mesh == str(plan.mesh)


def test_more_work_than_latency_is_split_over_every_device() -> None:
    w = {"a": struct(1024, 4096), "b": struct(4096, 1024)}
    plan = make_plan(step, w, struct(65536, 1024), cluster="h100:8")
    alone = make_plan(step, w, struct(65536, 1024), cluster="h100:1")
    assert plan.prediction.step_s < alone.prediction.step_s / 6


@pytest.mark.long
def test_examples_mlp_on_four_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    mlp = importlib.import_module("mlp")
    try:
        plan = make_plan(mlp.train_step, *mlp.example_args(), cluster="h100:8x4")
    finally:
        sys.modules.pop("mlp", None)
    assert_legal(plan, 32)
    assert plan.cluster == "h100:8x4"
    assert not plan.fallbacks
    names = {leaf.path for leaf in plan.inputs}
    assert "[0]['params']['first']['kernel']" in names and "[1]['image']" in names
    assert all(leaf.tied == leaf.path.startswith("[0]") for leaf in plan.inputs)
    assert any("mlp.py:" in a.source for a in plan.activations)


# ---- memory ------------------------------------------------------------------------------


@pytest.fixture
def unadvised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, nothing is tried that would help; ``test_advice.py`` tests that."""
    monkeypatch.setattr("planner.advice.case.ADVICE_S", 0.0)


@pytest.mark.long
@pytest.mark.usefixtures("unadvised")
@pytest.mark.parametrize("search", ["auto", "recursive_programming", "dynamic_programming"])
@pytest.mark.parametrize("mesh", [None, "data=4,model=2"])
def test_memory_that_cannot_suffice(search: str, mesh: str | None) -> None:
    options: dict[str, Any] = {"cluster": "cpu:8", "search": search, "mesh": mesh}
    with pytest.raises(MemoryLimitError, match=r"no plan fits in 100 kB per device") as error:
        make_plan(step, W, X, memory="100kB", **options)
    least = error.value.least_bytes
    assert error.value.limit_bytes == 1e5 < least
    assert f"the lowest peak tried is {bytes_text(least)}" in str(error.value)
    assert f"{bytes_text(least - 1e5)} too many" in str(error.value)
    assert "test_pipeline.py:" in str(error.value)  # who holds it
    plan = make_plan(step, W, X, memory=least * 1.01, **options)
    assert plan.prediction.peak_bytes <= least * 1.01
    assert_legal(plan, 8)


@pytest.mark.long
@pytest.mark.usefixtures("unadvised")
def test_tight_memory_shards_the_parameters() -> None:
    args = adam_args(3, 1024, 1024)
    replicated = 9 * 4 * 1024**2
    options: dict[str, Any] = {"cluster": "h100:8", "memory": 0.45 * replicated}
    with pytest.raises(MemoryLimitError) as error:
        make_plan(adam, *args, mode="DATA_PARALLEL", **options)
    assert error.value.least_bytes > replicated
    plan = make_plan(adam, *args, **options)
    assert_legal(plan, 8)
    held = sum(leaf.nbytes_per_device for leaf in plan.inputs if leaf.tied)
    assert held < 0.5 * replicated
    weights = [leaf for leaf in plan.inputs if leaf.path.startswith("[0][0]")]
    assert any(leaf.spec.axes for leaf in weights)
    # what is stored in pieces is gathered, or its products are combined
    assert {row.kind for row in plan.collectives} & {"all_gather", "all_reduce"}
    loose = make_plan(adam, *args, cluster="h100:8")
    assert plan.search.cost_s >= loose.search.lower_bound_s * (1 - 1e-9)


@pytest.mark.long
def test_less_memory_never_makes_a_proved_plan_faster() -> None:
    args = adam_args(2, 256, 512)
    before = 0.0
    for share in (1.0, 0.8, 0.6, 0.4, 0.3):
        full = make_plan(adam, *args, cluster="cpu:4", mode="STAND_ALONE").prediction.peak_bytes
        try:
            plan = make_plan(adam, *args, cluster="cpu:4", mesh="data=4", memory=share * full)
        except RequestError:
            break
        assert plan.prediction.peak_bytes <= share * full
        assert plan.search.lower_bound_s >= 0
        assert plan.search.cost_s >= before * (1 - 1e-9)
        before = plan.search.lower_bound_s


@pytest.mark.long
def test_the_memory_limit_is_the_devices_unless_given() -> None:
    default = make_plan(step, W, X, cluster="h100:8").prediction.limit_bytes
    assert default == 60e9  # 80 GB less a reserve of 25 %
    assert make_plan(step, W, X, cluster="h100:8", memory="1GB").prediction.limit_bytes == 1e9
    assert make_plan(step, W, X, cluster="h100:8", memory=2e9).prediction.limit_bytes == 2e9


def test_donation_counts_in_the_peak() -> None:
    options: dict[str, Any] = {"cluster": "cpu:1", "mode": "STAND_ALONE"}
    args = adam_args(2, 512, 8)
    kept = make_plan(adam, *args, donate_argnums=(), **options).prediction.peak_bytes
    given = make_plan(adam, *args, donate_argnums=0, **options).prediction.peak_bytes
    assert given == make_plan(adam, *args, **options).prediction.peak_bytes
    state = 6 * 4 * 512**2
    assert kept == pytest.approx(given + state, rel=0.2)


@pytest.mark.long
@pytest.mark.usefixtures("unadvised")
def test_every_error_of_tight_limits_is_ours() -> None:
    for power in range(2, 8):
        try:
            make_plan(step, W, X, cluster="cpu:6", memory=10.0**power)
        except MeshwrightError as error:
            assert isinstance(error, MemoryLimitError)
