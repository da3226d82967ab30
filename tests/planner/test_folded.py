"""The lists of a plan's file: short, read back as they were, refused where they make no sense."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import load_plan, make_plan
from planner.plan.contents.folded import fold, fold_plan, unfold, unfold_plan
from planner.plan.plan import PlanFormatError, plan_from_json

LAYERS = 96

texts = st.sampled_from(["w", "layer_{}", "['blocks'][{}]['up']", "f32[7,{}]", "{}", "{}x{}"])
numbers = st.integers(-3, 40)


@st.composite
def blocks(draw: st.DrawFn) -> list[Any]:
    """Rows of which some repeat, with numbers that grow or have an order of their own."""
    out: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        count, period = draw(st.integers(1, 12)), draw(st.integers(1, 6))
        order = draw(st.permutations(range(count))) if draw(st.booleans()) else range(count)
        rows = [
            (draw(texts), draw(numbers), draw(st.integers(0, 9)), draw(st.booleans()))
            for _ in range(period)
        ]
        for i in order:
            for text, base, step, flag in rows:
                name = text.replace("{}", str(abs(base + step * i)))
                out.append(
                    {"name": name, "op": base + step * i, "is": flag, "x": [base, None, 0.5]}
                )
        out += draw(st.lists(st.fixed_dictionaries({"name": texts, "op": numbers}), max_size=3))
    return out


@pytest.mark.long
@given(blocks())
def test_what_is_folded_unfolds(rows: list[Any]) -> None:
    found = json.loads(json.dumps(fold(rows)))
    assert unfold(found) == rows
    assert len(json.dumps(found)) <= len(json.dumps(rows))


def test_names_that_sort_as_texts() -> None:
    order = sorted(range(40), key=str)
    rows = [
        {"path": f"Block_{k}/{name}", "op": 3}
        for k in order
        for name in ("bias", "kernel", "scale")
    ]
    (block,) = fold(rows)
    assert block["repeat"] == 40 and block["order"] == order and len(block["rows"]) == 3
    assert unfold([block]) == rows


def test_texts_that_look_like_a_hole_stay() -> None:
    rows = [{"path": "x{1+2i}", "op": k} for k in range(50)]
    assert fold(rows) == rows


def _deep(layers: Any, x: jax.Array) -> Any:
    def loss(layers: Any) -> jax.Array:
        h = x
        for layer in layers:
            h = h + jnp.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value


@pytest.mark.long
def test_many_layers_take_few_lines(tmp_path: Any) -> None:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": struct(256, 1024), "down": struct(1024, 256), "bias": struct(1024)}
    args = [layer] * LAYERS, struct(4096, 256)
    plan = make_plan(_deep, *args, cluster="h100:8", mesh="data=8")
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text("utf-8")
    assert len(text.splitlines()) <= 300 < len(plan.to_json().splitlines())
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.digest == plan.digest
    assert plan_from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("field", "entry", "said"),
    [
        ("inputs", {"repeat": 0, "rows": []}, "inputs: .*a block is"),
        ("inputs", {"repeat": True, "rows": []}, "inputs: .*a block is"),
        ("inputs", {"repeat": 2, "rows": {}}, "inputs: .*a block is"),
        ("inputs", {"repeat": 2, "rows": [], "more": 1}, "inputs: .*a block is"),
        ("inputs", {"repeat": 2, "order": [1], "rows": []}, "inputs: .*has 2 whole numbers"),
        ("inputs", {"repeat": 2, "order": [1, "2"], "rows": []}, "inputs: .*whole numbers"),
        ("collectives", {"repeat": 10**9, "rows": [{}]}, "collectives: .*more than 1000000 rows"),
        ("pins", {"repeat": 10**6, "rows": ["x" * 2000]}, "pins: .*characters"),
        ("outputs", {"inputs": [0, 10**6]}, "outputs: .*names inputs 0 to 999999 of"),
        ("outputs", {"inputs": [-1, 1]}, "outputs: .*names inputs -1"),
        ("outputs", {"inputs": 3}, "outputs: "),
        ("constraints", {"op": 3, "at": {"in": []}}, "constraints: "),
        ("constraints", {"op": 3, "at": [1]}, "constraints: "),
    ],
)
def test_lists_that_make_no_sense(field: str, entry: Any, said: str) -> None:
    plan = make_plan(
        lambda w, x: w - jnp.mean(x @ w),
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        cluster="cpu:2",
    )
    body = json.loads(plan.to_json(folded=True))
    body[field] = [*body[field], entry]
    with pytest.raises(PlanFormatError, match=said) as caught:
        plan_from_json(json.dumps(body))
    assert len(str(caught.value).splitlines()) == 1


def test_fields_that_are_no_lists_are_left_to_the_reader() -> None:
    assert unfold_plan({"inputs": 3, "mode": "x"}) == {"inputs": 3, "mode": "x"}
    assert unfold_plan(fold_plan({"inputs": [], "outputs": [], "constraints": []})) == {
        "inputs": [],
        "outputs": [],
        "constraints": [],
    }
