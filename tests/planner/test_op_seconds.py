"""Seconds of single operations and single collectives add up to the prediction."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from costmodels.schedule import Place
from planner.cost.op_seconds import op_seconds
from planner.html.timeline import timeline
from planner.planning import Planned, plan_step


def step(state, batch):
    def loss(params):
        x = batch["x"]
        for p in params["layers"]:
            x = x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]
        y, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["stack"])
        return jnp.mean((y - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def args(layers=3, width=512, batch=256):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": of(width, 4 * width), "bias": of(4 * width), "down": of(4 * width, width)}
    state = {"layers": [layer] * layers, "stack": of(4, width, width)}
    return state, {"x": of(batch, width), "y": of(batch, width)}


def planned(mesh: str) -> Planned:
    return plan_step(step, *args(), cluster="h100:8", mesh=mesh)


@pytest.mark.parametrize("cluster", ["h100:8", "v5e:2x4"])
def test_a_table_split_by_rows_is_looked_up_at_all_places(cluster: str) -> None:
    """Each device looks up every index and leaves out what it does not have; in a table that is
    split by columns, or whole for a part of the indices, it takes an eighth of that."""

    def looked_up(table, at):
        return jnp.tanh(table[at])

    table = jax.ShapeDtypeStruct((1 << 20, 1024), jnp.float32)
    at = jax.ShapeDtypeStruct((1 << 16,), jnp.int32)
    seconds = {}
    for name, spec in {
        "rows": P("data"),
        "columns": P(None, "data"),
        "whole": P(),
    }.items():
        found = plan_step(
            looked_up,
            table,
            at,
            cluster=cluster,
            mesh="data=8",
            shardings={r"^\[0\]": spec, r"^\[1\]": P()},
        )
        (op,) = (o.index for o in found.extraction.graph.ops if o.kind == "gather")
        seconds[name] = op_seconds(found.extraction)[op]
    assert seconds["rows"] == pytest.approx(8 * seconds["whole"], rel=0.2)
    assert seconds["rows"] == pytest.approx(8 * seconds["columns"], rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_operations_add_up_to_the_predicted_compute(mesh: str) -> None:
    found = planned(mesh)
    seconds = op_seconds(found.extraction)
    start = found.extraction.priced.model.step_latency_s
    assert sum(seconds) + start == pytest.approx(found.plan.prediction.compute_s, rel=1e-6)
    assert min(seconds) >= 0
    graph = found.extraction.graph
    products = [s for s, op in zip(seconds, graph.ops, strict=True) if op.kind == "dot_general"]
    assert all(s > 0 for s in products)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_collectives_add_up_to_the_predicted_communication(mesh: str) -> None:
    found = planned(mesh)
    sent = found.extraction.sent()
    assert len(sent) == len(found.plan.collectives) > 0
    total = sum(x.time_s for x in sent)
    assert total == pytest.approx(found.plan.prediction.communication_s, rel=1e-6)
    assert any(x.place is Place.AHEAD for x in sent)


@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_a_step_laid_out_ends_at_the_predicted_time(mesh: str) -> None:
    found = planned(mesh)
    plan, prediction = found.extraction, found.plan.prediction
    order = tuple(op.index for op in plan.graph.ops)
    sent = plan.sent()
    laid = timeline(plan, prediction, order, op_seconds(plan), sent)
    assert laid.step_s == pytest.approx(prediction.step_s, rel=1e-6)
    assert sorted(bar.sent for _, bars in laid.lanes for bar in bars) == list(range(len(sent)))
    hidden = 0.0
    for _, bars in laid.lanes:
        for bar, after in zip(bars, [*bars[1:], None], strict=True):
            assert bar.end_s - bar.start_s == pytest.approx(sent[bar.sent].time_s)
            assert bar.end_s <= (laid.step_s if after is None else after.start_s) * (1 + 1e-9)
            hidden += bar.end_s - bar.start_s - bar.pause_s
    assert hidden == pytest.approx(prediction.overlapped_s, rel=1e-6)
    assert all(a <= b for a, b in zip(laid.starts_s, laid.ends_s, strict=True))


@pytest.mark.parametrize(("groups", "slower"), [(128, 20.0), (4, 3.0)])
def test_convolutions_of_groups_of_channels(groups: int, slower: float) -> None:
    """Compiled for v5e (libtpu 0.0.42.1): [32, 56, 56, 128] with a depthwise kernel of 7 x 7 takes
    0.97 ms forward and backward, 0.32 ms for the kernel's gradient."""

    def train(w, x):
        def loss(w):
            numbers = ("NHWC", "HWIO", "NHWC")
            how = {"dimension_numbers": numbers, "feature_group_count": groups}
            y = jax.lax.conv_general_dilated(jnp.tanh(x), w, (1, 1), "SAME", **how)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - grads, value

    w = jax.ShapeDtypeStruct((7, 7, 128 // groups, 128), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((256, 56, 56, 128), jnp.bfloat16)
    found = plan_step(train, w, x, cluster="v5e:2x4", mesh="data=8")
    seconds = op_seconds(found.extraction)
    forward, gradient = (
        seconds[op.index] for op in found.extraction.graph.ops if op.kind == "conv_general_dilated"
    )
    flops = 2 * 32 * 56 * 56 * 128 * 49 * 128 / groups
    assert forward > slower * flops / 197e12
    if groups == 128:
        assert forward == pytest.approx(0.97e-3, rel=0.25)
        assert gradient == pytest.approx(0.32e-3, rel=0.4)
