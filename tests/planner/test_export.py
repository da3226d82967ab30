"""Plans as specs and logical rules for other projects."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.linen import logical_to_mesh_axes
from jax.sharding import PartitionSpec as P

from planner import PlanMismatchError, make_plan
from planner.export.text import logical_rules_text, partition_specs_text
from planner.plan.contents.rows import Leaf
from planner.plan.plan import Plan
from planner.plan.specs.logical_rules import logical_axes
from planner.spec import Sharding


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = ({"a": struct(64, 256), "b": struct(256, 64), "c": struct(64)}, struct(128, 64))


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] + w["c"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.fixture(scope="module")
def plan() -> Plan:
    pins = {r"\['a'\]": P(None, "model"), r"\['b'\]": P("model", "data"), r"\[1\]": P("data")}
    return make_plan(step, *ARGS, cluster="h100:8", mesh="data=4,model=2", shardings=pins)


def leaf(path: str, shape: tuple[int, ...], *entries: Any, tied: bool = True) -> Leaf:
    return Leaf(path, shape, "float32", Sharding.of(entries, len(shape)), 0, None, tied)


def test_specs_by_path_and_in_a_tree_like_the_arguments(plan: Plan) -> None:
    specs = plan.as_partition_specs()
    assert specs["[0]['a']"] == P(None, "model") and specs["[1]"] == P("data")
    weights, batch = plan.as_partition_specs(*ARGS)
    assert weights["b"] == P("model", "data") and batch == P("data")
    assert jax.tree.structure(weights) == jax.tree.structure(ARGS[0])


def test_specs_for_other_arguments_are_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match=r"\['d'\] is not in the plan"):
        plan.as_partition_specs({**ARGS[0], "d": struct(2)}, ARGS[1])
    with pytest.raises(PlanMismatchError, match=r"\[1\] is missing"):
        plan.as_partition_specs(ARGS[0])


def test_equal_roles_share_a_name_and_unlike_ones_do_not() -> None:
    found = logical_axes(
        [
            leaf("up", (64, 256), None, "model"),
            leaf("down", (256, 64), "model"),
            leaf("mu", (256, 64), "model", "data"),
            leaf("wide", (256, 8), ("data", "model")),
            leaf("x", (64, 64), "data", tied=False),
            leaf("y", (32,), "data", tied=False),
            leaf("z", (32,), "model", tied=False),
        ]
    )
    assert found.names == {
        "up": (None, "model_256"),
        "down": ("model_256", None),
        "mu": ("model_256", "data_64"),
        "wide": ("data_model_256", None),
        "x": ("batch", None),
        "y": ("batch",),
        "z": ("batch_2",),
    }
    assert found.rules == (
        ("model_256", "model"),
        ("data_64", "data"),
        ("data_model_256", ("data", "model")),
        ("batch", "data"),
        ("batch_2", "model"),
    )


def test_flax_applies_the_rules_to_the_plans_own_shardings(plan: Plan) -> None:
    found, specs = plan.as_logical_axis_rules(), plan.as_partition_specs()
    assert len(dict(found.rules)) == len(found.rules)
    for path, names in found.names.items():
        got = logical_to_mesh_axes(names, rules=found.rules)
        assert Sharding.of(tuple(got)).entries == tuple(specs[path]), path
    assert any(any(names) for names in found.names.values())


def test_texts_are_modules_that_say_the_same(plan: Plan) -> None:
    for text in (partition_specs_text(plan), logical_rules_text(plan)):
        space: dict[str, Any] = {}
        exec(compile(text, "exported.py", "exec"), space)
        assert space["MESH_AXES"] == {"data": 4, "model": 2}
        assert plan.digest[:16] in space["__doc__"]
        if "IN_SPECS" in space:
            assert space["IN_SPECS"] == plan.as_partition_specs()
            assert list(space["OUT_SPECS"]) == [x.path for x in plan.outputs]
        else:
            found = plan.as_logical_axis_rules()
            assert space["LOGICAL_AXES"] == found.names
            assert space["LOGICAL_AXIS_RULES"] == found.rules
            with nn.logical_axis_rules(space["LOGICAL_AXIS_RULES"]):
                assert nn.get_logical_axis_rules() == found.rules
