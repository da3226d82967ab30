"""Two plans in words: figures, shardings and collectives that differ."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from planner import make_plan
from planner.compare.difference import difference
from planner.compare.text import difference_json, difference_parts
from planner.plan.plan import Plan
from planner.report.layout import plain_text


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h = x
        for layer in w:
            h = jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


ARGS = ([{"up": struct(256, 512), "down": struct(512, 256)} for _ in range(3)], struct(512, 256))


def plan(mesh: str, **pins: P) -> Plan:
    rules = {r"\['up'\]": pins.get("up", P()), r"\['down'\]": pins.get("down", P())}
    rules[r"^\[1\]"] = P("data")
    return make_plan(
        step, *ARGS, cluster="h100:8", mesh=mesh, shardings=rules, never_fsdp="up|down"
    )


@pytest.fixture(scope="module")
def both() -> tuple[Plan, Plan]:
    tensor = {"up": P(None, "model"), "down": P("model")}
    return plan("data=8"), plan("data=2,model=4", **tensor)


@pytest.mark.long
def test_a_plan_does_not_differ_from_itself(both: tuple[Plan, Plan]) -> None:
    for one in both:
        found = difference(one, one)
        assert found.same_step and not (found.settings or found.moved or found.exchanges)
        assert all(f.before == f.after for f in found.figures)
        text = plain_text(difference_parts(found, "a", "a"), 80)
        assert "the same" in text and "more" not in text


def test_settings_figures_and_folded_arguments(both: tuple[Plan, Plan]) -> None:
    found = difference(*both)
    assert found.same_step and found.arguments == 7
    assert {(s.name, s.before, s.after) for s in found.settings} >= {
        ("mesh", "data=8", "data=2,model=4")
    }
    by_name = {f.name: f for f in found.figures}
    assert by_name["step time"].before == both[0].prediction.step_s
    assert by_name["peak memory"].after == both[1].prediction.peak_bytes
    assert {(m.path, m.count, m.before, m.after) for m in found.moved} == {
        ("[0][*]['up']", 3, "P()", "P(None, 'model')"),
        ("[0][*]['down']", 3, "P()", "P('model')"),
    }


def test_collectives_gained_and_lost_add_up(both: tuple[Plan, Plan]) -> None:
    found = difference(*both)
    assert any(e.axes == ("model",) for e in found.gained)
    assert not any("model" in e.axes for e in found.lost)
    for k, one in enumerate(both):
        spent = sum(r.count * r.time_s for r in one.collectives)
        other = sum(r.count * r.time_s for r in both[1 - k].collectives)
        change = sum(e.time_s[k] - e.time_s[1 - k] for e in found.exchanges)
        assert change == pytest.approx(spent - other, abs=1e-12)
    assert len(found.gained) + len(found.lost) + len(found.changed) == len(found.exchanges)


def test_words(both: tuple[Plan, Plan]) -> None:
    found = difference(*both)
    text = plain_text(difference_parts(found, "before.json", "after.json"), 80)
    assert max(map(len, text.splitlines())) <= 80 and text.isascii()
    assert text.startswith("before.json -> after.json\n")
    word = "slower" if both[1].prediction.step_s > both[0].prediction.step_s else "faster"
    assert word in text and "collectives gained" in text and "x3" in text
    assert json.loads(json.dumps(difference_json(found)))["arguments"] == 7


def test_another_step_is_said_and_its_arguments_are_listed(both: tuple[Plan, Plan]) -> None:
    first = both[0]
    renamed = dataclasses.replace(first.inputs[0], path="[0][0]['new']")
    other = dataclasses.replace(first, inputs=(renamed, *first.inputs[1:]))
    found = difference(first, other)
    assert not found.same_step
    assert {(m.path, m.before, m.after) for m in found.moved} == {
        (first.inputs[0].path, "P()", ""),
        ("[0][0]['new']", "", "P()"),
    }
    assert "different steps" in plain_text(difference_parts(found, "a", "b"), 80)
