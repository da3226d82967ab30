"""Plans by hand beside the chosen one: each is what its name says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from planner import make_plan, shard
from planner.cli import main as cli
from planner.compare.manual_plans import Candidate, Comparison, compare
from planner.compare.text import comparison_json, comparison_parts
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.report.layout import plain_text
from planner.request.axes.sequence import sequences


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


LAYERS, WIDTH, HEADS, VOCAB = 2, 256, 8, 512


def step(state: Any, tokens: Any) -> Any:
    """A decoder without norms, trained with momentum."""

    def loss(w: Any) -> Any:
        h = w["embed"][tokens]
        for layer in w["layers"]:
            q, k, v = (jnp.einsum("bsd,dhe->bshe", h, layer[n]) for n in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k), -1)
            mixed = jnp.einsum("bhst,bthe->bshe", scores, v)
            h = h + jnp.einsum("bshe,hed->bsd", mixed, layer["o"])
            h = h + jax.nn.relu(h @ layer["up"]) @ layer["down"]
        logits = h @ w["head"]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    value, grads = jax.value_and_grad(loss)(state["w"])
    moved = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"w": jax.tree.map(lambda p, m: p - 0.1 * m, state["w"], moved), "m": moved}, value


def example(batch: int = 16, length: int = 128) -> tuple[Any, Any]:
    each = WIDTH // HEADS
    layer = {n: struct(WIDTH, HEADS, each) for n in "qkv"}
    layer |= {
        "o": struct(HEADS, each, WIDTH),
        "up": struct(WIDTH, 1024),
        "down": struct(1024, WIDTH),
    }
    w = {
        "embed": struct(VOCAB, WIDTH),
        "head": struct(WIDTH, VOCAB),
        "layers": [layer] * LAYERS,
    }
    return {"w": w, "m": w}, struct(batch, length, dtype=jnp.int32)


ARGS = example()


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(step, *ARGS, cluster="h100:8")


def named(found: Comparison, name: str) -> Plan:
    (one,) = [c for c in found.candidates if c.name == name]
    assert one.plan is not None
    return one.plan


def axes_of(plan: Plan, part: str) -> dict[str, tuple[str, ...]]:
    return {x.path: x.spec.axes for x in plan.inputs if f"['{part}']" in x.path}


def used(plan: Plan) -> list[tuple[str, ...]]:
    return [(x.used_as or x.spec).axes for x in plan.inputs if "['w']" in x.path]


@pytest.mark.long
def test_every_kind_stands_there_once_and_in_order(found: Comparison) -> None:
    assert [c.name for c in found.candidates] == [
        "chosen",
        "data parallel",
        "ZeRO-1",
        "FSDP",
        "tensor 2",
        "tensor 4",
        "tensor 8",
        "FSDP 4 x tensor 2",
        "FSDP 2 x tensor 4",
        "sequence 2",
        "sequence 4",
        "sequence 8",
    ]
    assert found.chosen.plan == make_plan(step, *ARGS, cluster="h100:8")
    assert all(c.fits and not c.refused for c in found.candidates)
    limits = {c.plan.prediction.limit_bytes for c in found.candidates if c.plan}
    assert limits == {found.limit_bytes}


@pytest.mark.long
def test_the_chosen_plan_is_no_slower_than_any_by_hand(found: Comparison) -> None:
    best = min(c.plan.prediction.step_s for c in found.candidates if c.plan and c.fits)
    assert found.chosen.plan is not None
    assert found.chosen.plan.prediction.step_s <= 1.03 * best


def test_data_parallel_zero_and_fsdp(found: Comparison) -> None:
    data, zero, full = (named(found, n) for n in ("data parallel", "ZeRO-1", "FSDP"))
    for plan in (data, zero, full):
        assert str(plan.mesh) == "data=8" and plan.inputs[-1].spec.entries == ("data",)
        assert not any(used(plan))
    assert not any(axes_of(data, "w").values()) and not any(axes_of(data, "m").values())
    assert not any(axes_of(zero, "w").values()) and all(axes_of(zero, "m").values())
    assert all(axes_of(full, "w").values()) and all(axes_of(full, "m").values())
    assert {c.kind for c in found.candidates[1].collectives} == {"all_reduce"}
    assert {"all_gather", "reduce_scatter"} <= {c.kind for c in found.candidates[3].collectives}


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_tensor_parallel_splits_every_matrix_and_the_batch(found: Comparison, degree: int) -> None:
    plan = named(found, f"tensor {degree}")
    assert plan.mesh.size("model") == degree
    assert plan.inputs[-1].spec.entries == (
        ("data",) if degree < 8 else plan.inputs[-1].spec.entries
    )
    assert all("model" in axes for axes in used(plan))
    assert not any("data" in axes for axes in axes_of(plan, "w").values() if degree < 8)


@pytest.mark.long
def test_tensor_parallel_is_megatrons() -> None:
    """Whole activations are summed after attention and after the feed-forward part, forward and
    backward, also where gathering the weights would be cheaper."""
    wide = compare(step, *example(batch=64, length=512), cluster="h100:8")
    plan = named(wide, "tensor 8")
    whole = 64 * 512 * WIDTH * 4
    sums = [
        r
        for r in plan.collectives
        if (r.kind, r.axes, r.payload_bytes) == ("all_reduce", ("model",), whole)
    ]
    assert sum(r.count for r in sums) >= 4 * LAYERS
    gathers = [r for r in plan.collectives if r.kind == "all_gather"]
    assert all(r.payload_bytes >= whole for r in gathers)  # of activations, not of weights


def test_mixed_gathers_over_data_and_sequence_over_its_axis(found: Comparison) -> None:
    mixed = named(found, "FSDP 4 x tensor 2")
    assert any({"data", "model"} <= set(axes) for axes in axes_of(mixed, "w").values())
    assert any(r.kind == "all_gather" and r.axes == ("data",) for r in mixed.collectives)
    for degree in (2, 4):
        plan = named(found, f"sequence {degree}")
        assert plan.inputs[-1].spec.entries == ("data", "sequence")
        assert not any(used(plan))
        keys = [r for r in plan.collectives if r.axes == ("sequence",) and r.kind == "all_gather"]
        assert sum(r.count for r in keys) >= 2 * LAYERS  # keys and values of every layer
        large = [a for a in plan.activations if len(a.shape) == 3]
        assert large and all("sequence" in a.spec.axes for a in large)


@pytest.mark.long
def test_what_does_not_fit_is_shown_with_the_memory_it_needs(found: Comparison) -> None:
    whole, split = named(found, "data parallel"), named(found, "FSDP")
    limit = (whole.prediction.peak_bytes + split.prediction.peak_bytes) / 2
    tight = compare(step, *ARGS, cluster="h100:8", memory=limit)
    by_name = {c.name: c for c in tight.candidates}
    assert not by_name["data parallel"].fits and by_name["FSDP"].fits
    plan = by_name["data parallel"].plan
    assert plan is not None and plan.prediction.peak_bytes > limit
    assert plan.prediction.step_s == pytest.approx(whole.prediction.step_s)
    assert plan.prediction.limit_bytes == limit and math.isfinite(limit)


@pytest.mark.long
def test_marks_hold_in_every_kind_or_are_its_refusal() -> None:
    def marked(w: Any, x: Any) -> Any:
        return jnp.mean(shard(x @ w, "expert", "model") ** 2)

    found = compare(marked, struct(64, 64), struct(64, 64), cluster="cpu:8")
    assert all(c.plan is not None for c in found.candidates)

    def odd(w: Any, x: Any) -> Any:
        return jnp.mean(shard(x @ w, None, "data") ** 2)

    by_name = {
        c.name: c for c in compare(odd, struct(64, 6), struct(64, 64), cluster="cpu:8").candidates
    }
    assert (
        by_name["FSDP"].plan is None
        and "8 devices of data do not divide" in by_name["FSDP"].refused
    )
    assert by_name["tensor 4"].plan is not None
    assert by_name["data parallel"].plan is not None  # marks wait for another mode there


@pytest.mark.long
def test_options_are_for_the_chosen_plan_alone() -> None:
    seen: list[str] = []
    found = compare(
        step,
        *ARGS,
        cluster="h100:8",
        mesh="data=2,model=4",
        shardings={r"embed": P("model")},
        progress=seen.append,
    )
    assert str(found.chosen.plan and found.chosen.plan.mesh) == "data=2,model=4"
    assert seen == [c.name for c in found.candidates]
    assert str(named(found, "FSDP").mesh) == "data=8"


def test_one_device_has_one_kind() -> None:
    found = compare(lambda w, x: x @ w, struct(8, 8), struct(8, 8), cluster="cpu:1")
    assert [c.name for c in found.candidates] == ["chosen", "data parallel"]
    assert all(isinstance(c, Candidate) and not c.collectives for c in found.candidates)


def test_sequences_are_tokens_or_three_dimensions() -> None:
    def graph(*shapes: jax.ShapeDtypeStruct) -> list[tuple[int, ...]]:
        found = trace(lambda *xs: xs, shapes).graph
        return [found.values[v].shape for v in sequences(found)]

    tokens = struct(8, 16, dtype=jnp.int32)
    assert graph(tokens) == []  # it comes back, so it is carried on
    found = trace(
        lambda *xs: sum(x.sum() for x in xs), (tokens, struct(8, 4), struct(8, 4, 2))
    ).graph
    assert [found.values[v].shape for v in sequences(found)] == [(8, 16), (8, 4, 2)]


@pytest.mark.long
def test_what_is_not_quite_what_it_is_called_has_a_note(found: Comparison) -> None:
    assert [c.note for c in found.candidates] == [""] * len(found.candidates)

    def cast(state: Any, x: Any) -> Any:
        """A parameter that is only read through a cast shares a decision with its state."""

        def loss(w: Any) -> Any:
            return jnp.mean((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        moved = 0.9 * state["m"] + grad
        return {"w": state["w"] - 0.1 * moved, "m": moved}, value

    w = struct(256, 512)
    mixed = compare(cast, {"w": w, "m": w}, struct(1024, 256), cluster="h100:8")
    notes = {c.name: c.note for c in mixed.candidates if c.note}
    assert set(notes) == {"ZeRO-1"} and "one decision" in notes["ZeRO-1"]
    assert "not quite" in plain_text(comparison_parts(mixed), 80)


@pytest.mark.usefixtures("published_runs")
def test_what_ties_with_the_fastest_is_marked(found: Comparison) -> None:
    chosen = found.chosen.plan
    assert chosen is not None

    def taking(name: str, step_s: float, fits: bool = True) -> Candidate:
        timed = dataclasses.replace(chosen.prediction, step_s=step_s)
        plan = dataclasses.replace(chosen, prediction=timed, strategy="FSDP over 8")
        return Candidate(name, "", plan, fits)

    rows = [taking(*row) for row in (("chosen", 1.03), ("best", 1.0), ("far", 1.2))]
    some = dataclasses.replace(found, candidates=(*rows, taking("large", 1.0, False)))
    text = plain_text(comparison_parts(some), 80)
    assert "fastest  best, tied with chosen\n" in text
    assert text.count("tied 1.00x") == 1 == text.count(" 1.17x") and text.count("tied ") == 2
    data = {c["name"]: c for c in comparison_json(some)["candidates"]}
    assert [c["tied"] for c in data.values()] == [True, False, False, False]
    best = data["best"]
    assert (best["low_s"], best["high_s"]) == pytest.approx((0.96, 1.21))


@pytest.mark.long
def test_without_published_runs_there_is_no_range() -> None:
    (one, *_) = comparison_json(compare(step, *ARGS, cluster="cpu:1"))["candidates"]
    assert one["low_s"] is None and one["high_s"] is None


@pytest.mark.long
def test_a_batch_that_does_not_divide_is_refused() -> None:
    found = compare(step, *example(batch=4), cluster="h100:8")
    by_name = {c.name: c for c in found.candidates}
    for name in ("data parallel", "ZeRO-1", "FSDP"):
        assert by_name[name].plan is None and "8 devices divide" in by_name[name].refused
    assert by_name["tensor 2"].plan is not None


# ---- text and command --------------------------------------------------------------------


def test_text_fits_80_columns_and_json_is_plain(found: Comparison) -> None:
    text = plain_text(comparison_parts(found), 80)
    assert max(map(len, text.splitlines())) <= 80 and text.isascii()
    for c in found.candidates:
        assert text.count(f"\n  {c.name} ") >= 2  # times, and collectives
    data = json.loads(json.dumps(comparison_json(found)))
    assert [c["name"] for c in data["candidates"]] == [c.name for c in found.candidates]
    first = data["candidates"][0]
    assert found.chosen.plan is not None and first["plan"] == found.chosen.plan.digest
    assert first["step_s"] == found.chosen.plan.prediction.step_s
    total = sum(x["time_s"] for x in first["collectives"])
    assert total == pytest.approx(found.chosen.plan.prediction.communication_s)


MODEL = """
import jax, jax.numpy as jnp
def train_step(w, x):
    g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), jnp.mean(x)
def example_args():
    f = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    return {"a": f(16, 32), "b": f(32, 16)}, f(64, 16)
"""


@pytest.mark.long
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "user_compare.py"
    path.write_text(MODEL)
    assert cli.main(["compare", str(path), "--cluster", "h100:4", "--no-color"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plans for h100:4\n") and "tensor 4" in out
    assert cli.main(["compare", str(path), "--cluster", "h100:4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == "h100:4"
    plans = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for saved, mesh in zip(plans, ("data=8", "data=4,model=2"), strict=True):
        assert cli.main(["inspect", str(path), "--mesh", mesh, "--save", saved]) == 0
    capsys.readouterr()
    assert cli.main(["compare", "--plan", *plans]) == 0
    assert "mesh" in capsys.readouterr().out
    assert cli.main(["compare", "--plan", *plans, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same_step"] is True
    for wrong in ([], [str(path), "--plan", *plans], ["--plan", plans[0], str(tmp_path / "c")]):
        assert cli.main(["compare", *wrong]) == 2
        assert capsys.readouterr().err.startswith("planner: error: ")


@pytest.mark.long
def test_stages_have_rows_on_two_nodes() -> None:
    found = compare(step, *example(), cluster="h100:8x2")
    rows = {row.name: row for row in found.candidates if " stages" in row.name}
    assert "2 stages x tensor 1 x data 8" in rows and "2 stages x tensor 8 x data 1" in rows
    plan = rows["2 stages x tensor 1 x data 8"].plan
    assert plan is not None and plan.schedule == "1f1b" and plan.mesh.sizes == (2, 8, 1)
    assert plan.prediction.limit_bytes == found.limit_bytes
    assert all(r.plan is not None or r.refused for r in rows.values())
    none = compare(step, *example(), cluster="h100:8")
    assert not any(" stages" in row.name for row in none.candidates)


@pytest.mark.long
def test_a_chosen_plan_with_a_schedule_is_on_its_devices() -> None:
    options: Any = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "remat": "none"}
    found = compare(step, *example(), cluster="h100:8", **options)
    chosen = found.candidates[0].plan
    plan = make_plan(step, *example(), cluster="h100:8", **options)
    assert chosen is not None and chosen.mesh == plan.mesh
    assert chosen.prediction == plan.prediction
    data = next(row for row in found.candidates if row.name == "FSDP")
    assert data.plan is not None and data.plan.mesh.sizes == (8,) and not data.plan.schedule
