"""State in host memory: what a plan says, what it costs, when copies are on the device."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from costmodels import AnalyticCostModel, parse_cluster
from planner import make_plan
from planner.compare.difference import difference
from planner.errors import RequestError
from planner.graph.fetches import fetches
from planner.graph.trace import trace
from planner.plan.plan import plan_from_json

D, LAYERS, MESH = 2048, 3, "data=8"
W = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * LAYERS
STATE = {"params": W, "opt": {"m": W, "v": W, "count": jax.ShapeDtypeStruct((), jnp.int32)}}
X = jax.ShapeDtypeStruct((512, D), jnp.float32)


def loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def adam(state: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    opt = state["opt"]
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, opt["v"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state["params"], m, v
    )
    return {"params": params, "opt": {"m": m, "v": v, "count": opt["count"] + 1}}, value


def planned(**options: Any) -> Any:
    return make_plan(adam, STATE, X, **{"cluster": "h100:8", "mesh": MESH, **options})


def test_what_is_named_is_in_host_memory_and_its_copies_are_paid() -> None:
    here, there = planned(zero=1), planned(zero=1, offload="opt")
    away = [leaf for leaf in there.inputs if leaf.memory == "pinned_host"]
    assert len(away) == 2 * LAYERS and all("opt" in leaf.path for leaf in away)
    assert [leaf.path for leaf in there.outputs if leaf.memory != "device"] == [
        leaf.path for leaf in away
    ]
    shard = 4 * D * D / 8
    assert there.prediction.host_bytes == sum(leaf.nbytes_per_device for leaf in away)
    assert there.prediction.host_bytes == 2 * LAYERS * shard
    model = AnalyticCostModel(parse_cluster("h100:8"))
    once = model.host_latency_s + model.host_s_per_byte * shard
    assert there.prediction.host_s == pytest.approx(2 * 2 * LAYERS * once)  # there and back
    p = there.prediction
    assert p.step_s == pytest.approx(
        p.compute_s + p.communication_s - p.overlapped_s + p.host_s, rel=1e-8
    )
    assert p.peak_bytes < here.prediction.peak_bytes
    # what the search minimises has the copies in it, too
    assert there.search.cost_s == pytest.approx(here.search.cost_s + p.host_s, rel=1e-6)


def test_a_plan_without_host_memory_has_no_word_of_it_and_others_come_back_from_json() -> None:
    text = planned().to_json()
    assert not any(word in text for word in ('memory"', "fetched", "host_s", "host_bytes"))
    plan = planned(offload=("opt", "params"))
    again = plan_from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    raw = json.loads(plan.to_json())
    leaf = next(x for x in raw["inputs"] if x["path"] == "[0]['params'][1]")
    assert leaf["memory"] == "pinned_host" and len(leaf["fetched"]) == 3
    del leaf["memory"], leaf["fetched"]
    assert plan_from_json(json.dumps(raw)) != plan


def test_a_parameter_is_copied_for_each_of_its_uses() -> None:
    graph = trace(adam, (STATE, X)).graph
    found = fetches(graph, graph.live_ops(), graph.inputs)
    spans = {path: found[v] for path, v in zip(graph.input_paths, graph.inputs, strict=True)}
    readers = graph.consumers()
    for path, v in zip(graph.input_paths, graph.inputs, strict=True):
        read = [k for k in readers[v] if graph.live_ops()[k]]
        assert spans[path][0][0] == read[0] and spans[path][-1][1] == read[-1]
        kinds = [graph.ops[first].kind for first, _ in spans[path]]
        if "opt" in path:
            assert len(spans[path]) == 1
        elif path == "[0]['params'][1]":  # forward, backward, update
            assert kinds == ["dot_general", "dot_general", "sub"]
        elif path == "[0]['params'][0]":  # the input has no gradient
            assert kinds == ["dot_general", "sub"]


@pytest.mark.long
def test_parameters_used_piece_by_piece_take_less_than_parameters_in_place() -> None:
    layers = [jax.ShapeDtypeStruct((D, D), jnp.float32)] * 12

    def sgd(params: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    x = jax.ShapeDtypeStruct((8, D), jnp.float32)
    options: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8", "zero": 0}
    here = make_plan(sgd, layers, x, **options).prediction
    there = make_plan(sgd, layers, x, offload=r"^\[0\]", **options).prediction
    one = 4.0 * D * D
    # in place: all parameters and one gradient at least; from the host: a few of each
    assert here.peak_bytes > 13 * one
    assert there.peak_bytes < here.peak_bytes - 8 * one


@pytest.mark.parametrize(
    ("offload", "text"),
    [
        ("nothing", r"offload: no argument path matches 'nothing'; paths look like \"\[0\]"),
        (r"\[1\]", r"matches argument \[1\], which does not come back as a result"),
        ("count", "offload: only scalars match 'count'"),
        ("[", "offload: '\\[' is no regular expression"),
        ((3,), "offload: 3 is no regular expression"),
    ],
)
def test_refusals_say_what_was_wrong(offload: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        planned(offload=offload)


@pytest.mark.parametrize("mode", ["DATA_PARALLEL", "SEMI_AUTO_PARALLEL", "STAND_ALONE"])
def test_the_mark_holds_in_every_mode(mode: str) -> None:
    plan = planned(offload="'m'", mode=mode, mesh=None)
    assert [leaf.path for leaf in plan.inputs if leaf.memory != "device"] == [
        f"[0]['opt']['m'][{k}]" for k in range(LAYERS)
    ]


@pytest.mark.long
def test_reports_name_the_host() -> None:
    before, after = planned(), planned(offload="opt")
    text = str(after)
    assert "to and from the host" in text and "host memory" in text and "pinned_host" in text
    assert "host" not in str(before).partition("constants")[0]  # some are those of its link
    moved = difference(before, after)
    assert all(m.after.endswith("in pinned_host") for m in moved.moved)
    assert [f.name for f in moved.figures if f.name.startswith("host")] == [
        "host copies",
        "host memory",
    ]


def test_a_cluster_file_says_how_fast_the_host_link_is(tmp_path: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        '[cluster]\ndevice = "h100"\n[host]\nbytes_per_s = 4.5e11\nefficiency = 1.0\n'
        "latency_s = 1.0e-5\n"
    )
    fast, slow = planned(cluster=str(path), offload="opt"), planned(offload="opt")
    copies, nbytes = 4 * LAYERS, 2 * fast.prediction.host_bytes
    assert fast.prediction.host_s == pytest.approx(copies * 1e-5 + nbytes / 4.5e11)
    assert slow.prediction.host_s == pytest.approx(copies * 1e-5 + nbytes / (0.8 * 6.3e10))
