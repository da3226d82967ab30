"""Why a sharding: names, causes, and prices against an independent evaluation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from planner import RequestError
from planner.cli import main as cli
from planner.explain import explain, explain_planned
from planner.explain.alternatives import ways
from planner.explain.setting import setting_of
from planner.explain.targets import find_values
from planner.explain.text import explanation_json, explanation_parts
from planner.graph.trace import trace
from planner.plan.extract import Extraction
from planner.planning import Planned, plan_step
from planner.report.layout import plain_text
from planner.search import evaluate, ilp
from planner.spec import Sharding


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = jnp.tanh(x @ w["up"])  # LINE
        return jnp.mean((hidden @ w["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


LINE = next(
    number
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
    if text.endswith("# LINE")
)
ARGS = ({"up": struct(256, 1024), "down": struct(1024, 256)}, struct(512, 256))


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_step(step, *ARGS, cluster="h100:8", mesh="data=4,model=2")


# ---- names -------------------------------------------------------------------------------


def test_every_way_to_name_values() -> None:
    graph = trace(step, ARGS).graph
    up = graph.inputs[graph.input_paths.index("[0]['up']")]
    assert find_values(graph, "[0]['up']") == (up,)
    assert find_values(graph, "['up']") == (up,)
    assert len(find_values(graph, r"\['(up|down)'\]")) == 2
    assert find_values(graph, f"%{up}") == (up,)
    of_line = find_values(graph, str(LINE))
    assert of_line == find_values(graph, f"some/where/test_explain.py:{LINE}")
    kinds = {graph.ops[graph.values[v].op].kind for v in of_line}
    assert {"tanh", "dot_general"} <= kinds
    products = find_values(graph, "dot_general")
    assert {graph.ops[graph.values[v].op].kind for v in products} == {"dot_general"}


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("['upp']", r"nearest names are.*\[0\]\['up'\]"),
        ("dot_generel", r"nearest names are dot_general"),
        ("%100000", r"values %0 to %\d+"),
        ("1", rf"nearest lines are test_explain.py:{LINE - 3}|nearest lines are test_explain"),
        ("other.py:3", "no operation of the step comes from other.py:3"),
    ],
)
def test_what_is_not_there_names_the_nearest(text: str, near: str) -> None:
    with pytest.raises(RequestError, match=near):
        find_values(trace(step, ARGS).graph, text)


def test_scalars_have_nothing_to_split(planned: Planned) -> None:
    graph = planned.extraction.graph
    scalar = next(v.index for v in graph.values if not v.shape)
    with pytest.raises(RequestError, match="scalar"):
        explain_planned(planned, f"%{scalar}")


# ---- prices ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("target", ["['up']", "tanh", "[1]"])
def test_prices_against_the_integer_program(planned: Planned, target: str) -> None:
    """Alone: one strategy exchanged. With others: no better than the proved optimum, which these
    small problems reach."""
    setting = setting_of(planned)
    problem, base = setting.problem, evaluate(setting.problem, setting.choice)
    (decision, *_) = explain_planned(planned, target).decisions
    (value, *_) = find_values(planned.extraction.graph, target)
    group, layout = planned.extraction.priced.analysis.groups.home[value]  # type: ignore[misc]
    node = setting.node[group]
    by_way = ways(setting, node, layout)
    assert len(decision.alternatives) + decision.unpriced == len(by_way) - 1 > 0
    for row in decision.alternatives:
        strategies = by_way[row.stored, row.used]
        choices = [
            [s if k == node else c for k, c in enumerate(setting.choice)] for s in strategies
        ]
        exchanged = [evaluate(problem, choice) for choice in choices]
        cost, _ = min((cost, peak) for cost, peak, _ in exchanged)
        assert row.alone.extra_s == pytest.approx(cost - base[0], rel=1e-9, abs=1e-15)
        assert any(
            row.alone.extra_bytes == pytest.approx(p - base[1])
            for c, p, _ in exchanged
            if c == cost
        )
        costs = list(problem.cost_s)
        costs[node] = np.full(costs[node].size, 1e18)
        costs[node][strategies] = problem.cost_s[node][strategies]
        held = dataclasses.replace(problem, cost_s=tuple(costs), counts=None)
        proved = ilp(held, time_limit_s=60.0)
        assert proved.proved and row.best is not None
        assert row.best.extra_s == pytest.approx(proved.cost_s - base[0], rel=1e-6, abs=1e-12)
        assert row.best.extra_s <= row.alone.extra_s + 1e-12
        assert row.best.extra_s >= -1e-9 * base[0]


def test_changes_add_up(planned: Planned) -> None:
    (decision, *_) = explain_planned(planned, "['up']").decisions
    moved = [row for row in decision.alternatives if row.changed]
    assert moved
    for row in decision.alternatives:
        assert sum(c.count for c in row.changes) <= row.changed
        assert all(c.before != c.after for c in row.changes)
        if row.best is not None and not row.changed:
            assert row.best == row.alone


# ---- causes ------------------------------------------------------------------------------


def test_a_pin_is_named_and_leaves_one_way() -> None:
    found = explain(
        step,
        *ARGS,
        target="['up']",
        cluster="h100:8",
        mesh="data=4,model=2",
        shardings={r"\['up'\]": P(None, "model")},
    )
    (decision, *_) = found.decisions
    assert decision.stored == Sharding.of([None, "model"])
    assert any(f.startswith("pin: shardings[") and "['up']" in f for f in decision.forced)
    assert all(row.stored == decision.stored for row in decision.alternatives)
    assert decision.strategies < decision.possible


def test_divisibility_and_whole_dimensions_are_told() -> None:
    def odd(x: Any) -> Any:
        return jnp.sort(jnp.sin(x), axis=1)

    found = explain(odd, struct(6, 64), target="sin", cluster="cpu:8", mesh="data=4,model=2")
    (decision, *_) = found.decisions
    rows, columns = decision.dimensions
    assert rows.open_to == ("model",) and "6 is not divisible by data=4" in rows.why
    assert re.search(r"whole by sort \(test_explain.py:\d+\)", columns.why), columns
    out = explain(odd, struct(6, 64), target="sort", cluster="cpu:8", mesh="data=4,model=2")
    assert out.decisions[0].dimensions[0].size == 6


def test_memory_is_named_where_it_decides() -> None:
    def forward(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["up"]) @ w["down"]

    big = ({"up": struct(1024, 4096), "down": struct(4096, 1024)}, struct(16384, 1024))
    options: dict[str, Any] = {"target": "['up']", "cluster": "h100:8", "mesh": "data=8"}
    free = explain(forward, *big, **options)
    limit = 0.9 * free.peak_bytes
    tight = explain(forward, *big, **options, memory=limit)
    assert free.decisions[0].stored == Sharding.of([None, None])
    assert free.decisions[0].stored != tight.decisions[0].stored
    assert tight.peak_bytes <= limit
    assert not any("memory" in f for f in free.decisions[0].forced)
    assert "memory: without the limit it would be P()" in tight.decisions[0].forced
    assert all(row.best is None or row.best.fits for row in tight.decisions[0].alternatives)
    assert any(not row.alone.fits for row in tight.decisions[0].alternatives)


def test_one_device_and_modes() -> None:
    alone = explain(step, *ARGS, target="['up']", cluster="cpu:8", mode="STAND_ALONE")
    assert any("one device" in f for f in alone.decisions[0].forced)
    assert not alone.decisions[0].alternatives
    data = explain(step, *ARGS, target="['up']", cluster="cpu:8", mode="DATA_PARALLEL")
    assert any("DATA_PARALLEL" in f for f in data.decisions[0].forced)


def test_requests_about_the_state_are_named() -> None:
    asked: dict[str, Any] = {"cluster": "h100:8", "mesh": "data=8"}
    full = explain(step, *ARGS, target="['up']", zero=3, **asked)
    assert "request: zero=3" in full.decisions[0].forced
    assert all(row.stored.axes for row in full.decisions[0].alternatives)
    never = explain(step, *ARGS, target="['up']", never_fsdp="up", **asked)
    assert "request: never_fsdp=['up']" in never.decisions[0].forced
    assert all(row.stored == row.used for row in never.decisions[0].alternatives)
    small = explain(step, *ARGS, target="['up']", whole_below="10MB", **asked)
    assert "request: whole_below=1e+07" in small.decisions[0].forced


def test_where_equal_parts_have_different_plans_each_is_a_decision() -> None:
    def branches(w: Any, x: Any) -> Any:
        return [jnp.tanh(x @ one).sum(1) for one in w]

    planned = plan_step(
        branches, [struct(256, 256)] * 3, struct(512, 256), cluster="h100:8", mesh="data=8"
    )
    quotient, choice = planned.quotient, list(planned.extraction.choice)
    graph, home = planned.extraction.graph, planned.extraction.priced.analysis.groups.home
    groups = [home[v][0] for v in graph.inputs[:3]]  # type: ignore[index]
    together = explain_planned(planned, r"^\[0\]").decisions[0]
    assert together.equal == 3 and together.what == "[0][*]"
    priced = planned.extraction.priced
    choice[groups[1]] = next(
        k for k in range(priced.sets[groups[1]].count) if k != choice[groups[1]]
    )
    assert quotient.apart(choice)
    apart = dataclasses.replace(planned, extraction=Extraction(priced, choice))
    first, second, third = explain_planned(apart, r"^\[0\]").decisions
    assert [d.what for d in (first, second, third)] == ["[0][0]", "[0][1]", "[0][2]"]
    assert [d.equal for d in (first, second, third)] == [1, 1, 1]
    assert (first.stored, first.used) != (second.stored, second.used)


# ---- text and command --------------------------------------------------------------------


@pytest.mark.long
def test_text_fits_80_columns_and_json_is_plain(planned: Planned) -> None:
    for target in ("['up']", "dot_general"):
        found = explain_planned(planned, target)
        text = plain_text(explanation_parts(found), 80)
        assert max(map(len, text.splitlines())) <= 80 and text.isascii()
        assert "with others" in text
        data = json.loads(json.dumps(explanation_json(found)))
        first = data["decisions"][0]
        assert first["together"] is not None and first["alternatives"][0]["alone"]["fits"] in (
            True,
            False,
        )
        assert len(data["decisions"]) == len(found.decisions)


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
    path = tmp_path / "user_explain.py"
    path.write_text(MODEL)
    mesh = ("--mesh", "data=4,model=2", "--no-color")
    assert cli.main(["explain", str(path), "['a']", *mesh]) == 0
    assert capsys.readouterr().out.startswith("why ['a'] is sharded as it is\n")
    assert cli.main(["explain", str(path), "user_explain.py:4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "user_explain.py:4"
    assert cli.main(["explain", str(path), "['c']", *mesh]) == 2
    assert "nearest names are" in capsys.readouterr().err
