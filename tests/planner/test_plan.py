"""Plans: saved and loaded alike, the same on every host, refused by name when they don't fit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from planner import (
    PlanFormatError,
    PlanMismatchError,
    RequestError,
    load_plan,
    make_plan,
)
from planner.graph.ir import Graph
from planner.graph.trace import trace
from planner.plan.contents.interval import step_range
from planner.plan.contents.kinds import plan_kind
from planner.plan.plan import FORMAT, Plan, plan_from_json
from planner.spec import MeshSpec, Sharding, enumerate_meshes, parse_mesh

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import jax, jax.numpy as jnp
from planner import make_plan, shard

def step(state, x):
    def loss(w):
        return jnp.mean((shard(jnp.tanh(x @ w["a"]), "data") @ w["b"]) ** 2)
    w, m = state["w"], state["m"]
    g = jax.grad(loss)(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
    return {"w": jax.tree.map(lambda p, m: p - m, w, m), "m": m}, x.mean()

s = lambda *n: jax.ShapeDtypeStruct(n, jnp.float32)
w = {"a": s(256, 512), "b": s(512, 256)}
for cluster in ("h100:8", "cpu:12"):
    plan = make_plan(step, {"w": w, "m": w}, s(384, 256), cluster=cluster)
    print(plan.digest, plan.mesh, len(plan.collectives))
try:
    jax.devices()
except RuntimeError:
    print("no backend")
"""


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: dict[str, jax.Array], x: jax.Array) -> Any:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


W = {"a": struct(256, 1024), "b": struct(1024, 256)}
X = struct(512, 256)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(step, W, X, cluster="cpu:8", mesh="data=4,model=2")


def graph_of(function: Any, *args: Any) -> Graph:
    return trace(function, args).graph


# ---- saving ------------------------------------------------------------------------------


def test_a_loaded_plan_says_the_same(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = load_plan(path)
    assert loaded.digest == plan.digest
    assert loaded.to_json(folded=True) == path.read_text() == plan.to_json(folded=True)
    assert loaded.to_json() == plan.to_json()
    for name in ("mode", "cluster", "mesh", "inputs", "outputs", "activations", "op_table"):
        assert getattr(loaded, name) == getattr(plan, name), name
    assert [(c.op, c.slot, c.position, c.spec.entries) for c in loaded.constraints] == [
        (c.op, c.slot, c.position, c.spec.entries) for c in plan.constraints
    ]
    assert loaded.as_partition_specs() == plan.as_partition_specs()
    loaded.check_matches(graph_of(step, W, X))
    assert load_plan(path) == loaded
    loaded.save(tmp_path / "again.json")
    assert load_plan(tmp_path / "again.json") == loaded


def test_a_loaded_plan_is_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_planning_time_is_neither_saved_nor_compared(plan: Plan) -> None:
    later = dataclasses.replace(plan, planning_s=1e6)
    assert later == plan and later.digest == plan.digest
    assert "planning_s" not in json.loads(plan.to_json())


def test_the_kind_of_device_is_known_without_being_saved(plan: Plan, tmp_path: Path) -> None:
    assert plan.device == "cpu" and "device" not in json.loads(plan.to_json())
    profile = tmp_path / "ours.toml"
    profile.write_text('[cluster]\ndevice = "h100"\nnodes = 1\n')
    made = make_plan(step, W, X, cluster=f"{profile}:8x1", mesh="data=8")
    assert made.device == "h100" and step_range(made) is not None
    made.save(tmp_path / "plan.json")
    assert step_range(load_plan(tmp_path / "plan.json")) is None, "no file is opened for it"
    named = dataclasses.replace(made, cluster="h100:8", device="")
    assert step_range(named) == step_range(made)
    assert step_range(dataclasses.replace(named, cluster="of a program")) is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"strategy": "FSDP over 8; batch split 8 ways"}, "data"),
        ({"strategy": "data parallel over 8 (ZeRO-1); batch split 8 ways"}, "data"),
        ({"strategy": "one device"}, "data"),
        ({"strategy": "FSDP over 4 x tensor parallel over 2; batch split 4 ways"}, "model"),
        ({"strategy": "data parallel over 4 x sequence parallel over 2; batch"}, "model"),
        ({"strategy": "data parallel over 4 x expert parallel over 2; batch"}, "model"),
        ({"strategy": "FSDP over 8", "stages": 4}, "stages"),
        ({"strategy": "FSDP over 2", "mesh": MeshSpec(("stage", "data"), (4, 2))}, "stages"),
        ({"strategy": "FSDP over 8", "mesh": MeshSpec(("stage", "data"), (1, 8))}, "data"),
        ({"strategy": "", "mesh": MeshSpec(("data", "model2"), (4, 2))}, "model"),
        ({"strategy": "", "mesh": MeshSpec(("data", "model"), (8, 1))}, "data"),
    ],
)
def test_the_kind_of_a_plan(plan: Plan, changes: dict[str, Any], kind: str) -> None:
    assert plan_kind(dataclasses.replace(plan, **changes)) == kind


def test_the_json_is_one_item_a_line(plan: Plan) -> None:
    lines = plan.to_json().splitlines()
    assert json.loads(plan.to_json())["format"] == FORMAT
    for key, items in (("path", (*plan.inputs, *plan.outputs)), ("mesh", plan.meshes)):
        assert sum(line.startswith(f'    {{"{key}":') for line in lines) == len(items)
    assert sum(line.startswith('    {"op":') for line in lines) == len(plan.constraints)


def test_saving_replaces_atomically(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    broken = dataclasses.replace(plan, notes=(object(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    plan.save(path)
    assert load_plan(path).digest == plan.digest
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_nothing_is_left_when_serialising_fails(plan: Plan, tmp_path: Path) -> None:
    broken = dataclasses.replace(plan, notes=(object(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_the_text_is_json_when_memory_is_unlimited() -> None:
    text = make_plan(step, W, X, cluster="cpu:2", memory=float("inf")).to_json()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(text, parse_constant=refuse)


# ---- the same everywhere -----------------------------------------------------------------


@pytest.mark.long
def test_every_host_computes_the_same_plan_without_a_backend() -> None:
    running = []
    for seed in ("1", "2"):
        env = dict(os.environ, PYTHONHASHSEED=seed, JAX_PLATFORMS="nonesuch", PYTHONPATH=str(ROOT))
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM], env=env, stdout=-1, stderr=-1, text=True
            )
        )
    texts = []
    for process in running:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        texts.append(out)
    assert texts[0] == texts[1]
    assert texts[0].splitlines()[-1] == "no backend"
    assert len(texts[0].split()[0]) == 64


def test_the_digest_tells_plans_apart(plan: Plan) -> None:
    again = make_plan(step, W, X, cluster="cpu:8", mesh="data=4,model=2")
    assert again == plan and again.digest == plan.digest
    others = [
        make_plan(step, W, X, cluster="cpu:8", mesh="data=2,model=4"),
        make_plan(step, W, struct(256, 256), cluster="cpu:8", mesh="data=4,model=2"),
        make_plan(step, W, X, cluster="h100:8", mesh="data=4,model=2"),
    ]
    assert len({p.digest for p in [plan, *others]}) == 4


# ---- files that can't be read ------------------------------------------------------------


def test_format_errors_say_what_is_wrong(plan: Plan, tmp_path: Path) -> None:
    def refused(text: str, expected: str) -> None:
        path = tmp_path / "broken.json"
        path.write_text(text)
        with pytest.raises(PlanFormatError, match=expected) as error:
            load_plan(path)
        assert str(path) in str(error.value)

    refused("{", "is not JSON")
    refused("[1]", r"got format 'list', expected 'meshwright-plan-1'")
    refused('{"format": "meshwright-plan-0"}', r"got format 'meshwright-plan-0', expected")
    refused('{"format": "meshwright-plan-2"}', r"a newer meshwright wrote it: upgrade")
    refused("{}", r"got format None")
    raw = json.loads(plan.to_json())
    for key in raw:
        if key not in ("format", "pins", "strategy", "idle", "lowering", "compute"):  # not in older
            less = {k: v for k, v in raw.items() if k != key}
            refused(json.dumps(less), f"field missing or malformed.*{key}")
    refused(json.dumps({**raw, "mesh": 3}), "malformed")
    refused(json.dumps({**raw, "meshes": [{"other": 1}]}), "malformed")
    refused(json.dumps({**raw, "inputs": [None]}), "malformed")


def test_a_mesh_that_cannot_be_is_a_format_error(plan: Plan) -> None:
    raw = json.loads(plan.to_json())
    with pytest.raises(
        PlanFormatError, match="mesh, an axis, is 0, expected a whole number from 1"
    ):
        plan_from_json(json.dumps({**raw, "mesh": {"data": 0}}))


def test_a_missing_file_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(PlanFormatError, match=r"cannot read plan .*none.json: No such file"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(PlanFormatError, match="is not JSON"):
        plan_from_json("")


# ---- plans for another step --------------------------------------------------------------


def test_a_plan_matches_its_own_step(plan: Plan) -> None:
    plan.check_matches(graph_of(step, W, X))
    plan.check_matches(graph_of(jax.jit(step), W, X))


def mismatch(plan: Plan, expected: str, function: Any, *args: Any) -> None:
    with pytest.raises(PlanMismatchError, match=expected):
        plan.check_matches(graph_of(function, *args))


def test_another_shape_or_dtype_is_named(plan: Plan) -> None:
    text = r"argument \[1\] is float32\[256,256\], the plan has \[1\] of float32\[512, 256\]"
    mismatch(plan, text, step, W, struct(256, 256))
    half = {**W, "a": jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)}
    mismatch(
        plan, r"\[0\]\['a'\] is bfloat16\[256,1024\], the plan has .* of float32", step, half, X
    )


def test_another_tree_is_named(plan: Plan) -> None:
    def more(w: Any, x: jax.Array, y: jax.Array) -> Any:
        return step(w, x)

    mismatch(plan, r"got 4 array arguments, expected 3", more, W, X, X)
    renamed = {"a": W["a"], "c": W["b"]}
    mismatch(
        plan,
        r"argument \[0\]\['c'\] .*the plan has \[0\]\['b'\]",
        lambda w, x: step({"a": w["a"], "b": w["c"]}, x),
        renamed,
        X,
    )


def test_the_first_differing_operation_is_named_with_its_line(plan: Plan) -> None:
    def other(w: dict[str, jax.Array], x: jax.Array) -> Any:
        def loss(w: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((jnp.sin(x @ w["a"]) @ w["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    line = other.__code__.co_firstlineno + 2
    text = (
        rf"operation 1 \(test_plan.py:{line}\) is sin\(float32\[512,1024\]\) -> "
        r"float32\[512,1024\].*, the plan has tanh\(float32\[512,1024\]\)"
    )
    mismatch(plan, text, other, W, X)


def test_more_operations_are_counted(plan: Plan) -> None:
    def longer(w: Any, x: jax.Array) -> Any:
        new, value = step(w, x)
        return new, jnp.exp(value)

    count = len(plan.op_index)
    mismatch(plan, f"got {count + 1} operations, expected {count}", longer, W, X)


def test_other_wiring_of_equal_operations_is_another_step() -> None:
    args = (struct(8, 8),) * 3
    made = make_plan(lambda a, b, x: (x @ a) @ b, *args, cluster="cpu:2")
    with pytest.raises(PlanMismatchError):
        made.check_matches(graph_of(lambda a, b, x: (x @ b) @ a, *args))


# ---- meshes and shardings ----------------------------------------------------------------


def test_sharding_entries_round_trip() -> None:
    s = Sharding.of([None, ("a", "b"), "c"], 4)
    assert s.entries == (None, ("a", "b"), "c")
    assert s.dims == ((), ("a", "b"), ("c",), ())
    assert str(s) == "P(None, ('a', 'b'), 'c')"
    mesh = MeshSpec(("a", "b", "c"), (2, 3, 4))
    assert s.shards(mesh) == 24
    assert s.local_shape((5, 12, 8, 7), mesh) == (5, 2, 2, 7)
    with pytest.raises(RequestError, match="dimension 1 has size 4, which 6 devices of axb"):
        s.check((5, 4, 8, 7), mesh)


@pytest.mark.parametrize(
    "text", ["", "data", "data=", "data=0", "data=-2", "=4", "data=2,,a=1", "2=2"]
)
def test_bad_meshes_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected name=size"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("ici_fsdp_parallelism=8", "fsdp=8"),
        ("dcn_data_parallelism=2 ici_fsdp_parallelism=4", "data=2,fsdp=4"),
        ("dcn_fsdp_parallelism=2,ici_fsdp_parallelism=4", "fsdp=8"),
        ("ici_fsdp_parallelism=-1 ici_tensor_parallelism=2", "fsdp=4,tensor=2"),
        ("data=-1", "data=8"),
    ],
)
def test_meshes_in_the_words_of_maxtext(text: str, mesh: str) -> None:
    assert str(parse_mesh(text, 8)) == mesh


@pytest.mark.parametrize("text", ["data=-1,model=-1", "data=-1,model=3", "data=-1,model=16"])
def test_only_one_size_may_be_the_rest(text: str) -> None:
    with pytest.raises(RequestError, match=r"-1 stands for the devices that are left of 8"):
        parse_mesh(text, 8)


def test_an_axis_called_stage_makes_no_stages_and_says_so() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    args = jnp.zeros((64, 64)), jnp.zeros((64, 64))
    plan = make_plan(step, *args, cluster="cpu:8", mesh="stage=2,data=4")
    assert any("the step has no pipeline stages; stages=2 makes some" in n for n in plan.notes)
    plan = make_plan(step, *args, cluster="cpu:8", mesh="part=2,data=4")
    assert not any("stages" in note for note in plan.notes)


def test_meshes() -> None:
    assert parse_mesh(" data = 4 ,model=2") == MeshSpec(("data", "model"), (4, 2))
    with pytest.raises(RequestError, match="the axis data is there twice"):
        parse_mesh("data=2,data=4")
    with pytest.raises(RequestError, match=r"write data=8 for data:8"):
        parse_mesh("data:8")
    with pytest.raises(RequestError, match=r"names \['data'\], sizes \[2, 4\]"):
        MeshSpec(("data",), (2, 4))
    assert [str(m) for m in enumerate_meshes(7)] == ["data=7"]
    assert [str(m) for m in enumerate_meshes(1)] == ["data=1"]
    twelve = enumerate_meshes(12)
    assert all(m.num_devices == 12 for m in twelve) and len(set(twelve)) == len(twelve)
    assert {m.sizes for m in twelve} == {
        (12,), (2, 6), (3, 4), (4, 3), (6, 2), (2, 2, 3), (2, 3, 2), (3, 2, 2),
    }  # fmt: skip
