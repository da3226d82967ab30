"""The HTML report as text: whole, escaped, self-contained, small, and true to the plan."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report_cases import NASTY, Page, compared, deep, small

from costmodels import parse_cluster
from planner.cli.main import main
from planner.html.data import MOST_DEVICES, ReportData, report_data
from planner.html.page import html, write_report
from planner.html.time import BINS, CATEGORIES, PIECES, reach
from planner.plan.plan import load_plan
from planner.planning import Planned, plan_step
from planner.spec import parse_mesh
from tests.planner.test_memory import perceptron
from tests.zoo.running import MODULES, load

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = load()
FIRST = {min(p.name for p in PROGRAMS.values() if p.module == m) for m in MODULES}
"""One program of each file: the others are left to ``make test-all``."""


@pytest.fixture(scope="module")
def planned() -> Planned:
    return small()


@pytest.fixture(scope="module")
def data(planned: Planned) -> ReportData:
    return report_data(planned, "<lambda> & " + NASTY)


@pytest.fixture(scope="module")
def page(data: ReportData) -> Page:
    return Page(html(data))


def test_nothing_is_asked_of_a_network(data: ReportData) -> None:
    text = html(data)
    for tag, attributes in Page(text).elements:
        assert tag not in ("img", "iframe", "object", "base"), tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(|XMLHttpRequest|import\(", text)


def test_names_never_become_markup(page: Page, planned: Planned) -> None:
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert page.title.startswith("<lambda> & " + NASTY)
    paths = [page.data["texts"][k] for k in page.data["leaves"]["columns"]["path"]]
    assert paths == [leaf.path for leaf in planned.plan.inputs]
    assert any("<img" in path for path in paths)
    assert any("</script>" in path for path in paths)
    kinds = [attributes.get("type") for tag, attributes in page.elements if tag == "script"]
    raw = page.scripts[kinds.index("application/json")]
    assert not re.search("[<>&\u2028\u2029]", raw)


@pytest.mark.usefixtures("published_runs")
def test_the_step_time_has_a_likely_range(planned: Planned) -> None:
    likely = report_data(planned).likely
    assert "80 % of 59 published data parallel runs on h100 took 0.96x to 1.21x" in likely
    assert likely in str(planned.plan).replace("\n" + " " * 15, " ")


def test_every_collective_is_there(page: Page, planned: Planned) -> None:
    texts, columns = page.data["texts"], page.data["collectives"]["columns"]
    rows = planned.plan.collectives
    assert rows
    assert [texts[k] for k in columns["kind"]] == [c.kind for c in rows]
    assert [texts[k] for k in columns["axes"]] == [",".join(c.axes) for c in rows]
    assert [texts[k] for k in columns["cause"]] == [c.cause for c in rows]
    assert columns["total"] == pytest.approx([c.time_s * c.count for c in rows], rel=1e-5)
    assert len(page.data["collectives"]["folded"]) == len(rows)


def test_the_step_over_time_adds_up(data: ReportData, planned: Planned) -> None:
    prediction, step = planned.plan.prediction, data.step
    assert step.step_s == pytest.approx(prediction.step_s, rel=1e-6)
    assert sum(step.lanes[0].busy_s) == pytest.approx(prediction.compute_s, rel=1e-6)
    sent = sum(sum(lane.busy_s) for lane in step.lanes[1:])
    assert sent == pytest.approx(prediction.communication_s, rel=1e-6)
    waits = sum(sum(lane.pause_s) for lane in step.lanes[1:])
    assert waits == pytest.approx(prediction.communication_s - prediction.overlapped_s, rel=1e-6)
    assert max(step.lanes[0].end_s) <= step.step_s * (1 + 1e-9)
    for lane in step.lanes:
        assert list(lane.start_s) == sorted(lane.start_s)


def test_memory_over_time_reaches_the_predicted_peak(data: ReportData, planned: Planned) -> None:
    memory, prediction = data.step.memory, planned.plan.prediction
    assert not memory.traced_order
    totals = [sum(column) for column in zip(*memory.bytes, strict=True)]
    assert len(totals) == BINS
    assert totals[memory.peak_bin] == pytest.approx(prediction.peak_bytes, rel=1e-6)
    moment = memory.moment[memory.peak_bin]
    held = [
        size
        for size, start, end in zip(memory.size, memory.start, memory.end, strict=True)
        if start <= moment < end
    ]
    assert sum(held) == pytest.approx(prediction.peak_bytes, rel=1e-3)
    state = sum(leaf.nbytes_per_device for leaf in planned.plan.inputs if leaf.tied)
    assert memory.bytes[CATEGORIES.index("parameters")][0] == pytest.approx(state, rel=1e-6)


def test_a_limit_that_is_just_met_draws_the_order_of_the_trace() -> None:
    args = ([jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6, jnp.zeros((4096, 256)))
    options: dict[str, Any] = {"cluster": "h100:1", "mode": "STAND_ALONE"}
    free = plan_step(perceptron, *args, **options)
    tight = plan_step(perceptron, *args, **options, memory=0.95 * free.plan.prediction.peak_bytes)
    drawn = [report_data(planned).step.memory.traced_order for planned in (free, tight)]
    assert drawn == [False, True]


def test_the_graph_holds_all_of_the_step(data: ReportData, planned: Planned) -> None:
    prediction, model = planned.plan.prediction, planned.extraction.priced.model
    compute = sum(s.compute_s for s in data.segments)
    assert compute + model.step_latency_s == pytest.approx(prediction.compute_s, rel=1e-6)
    sent = sum(s.communication_s for s in data.segments)
    assert sent == pytest.approx(prediction.communication_s, rel=1e-6)
    for segment in data.segments:
        assert segment.left_out == 0
        nodes = sum(node.compute_s for node in segment.nodes)
        assert nodes == pytest.approx(segment.compute_s, rel=1e-6, abs=1e-12)
        for k, node in enumerate(segment.nodes):
            assert all(segment.nodes[b].layer < node.layer for b in node.before), node
            assert k not in node.before
    assert any(s.region == "scan x4" for s in data.segments)
    assert any(s.updates for s in data.segments)
    products = [n for s in data.segments for n in s.nodes if n.kind == "dot_general"]
    read = {array.name for node in products for array in node.reads}
    assert {"[0]['layers'][0]['up']", "[0]['stack']"} <= read


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST else pytest.mark.slow)
        for name in sorted(PROGRAMS)
    ],
)
def test_reports_of_the_zoo_add_up(name: str) -> None:
    step, arguments = PROGRAMS[name].build()
    planned = plan_step(step, *arguments, cluster="h100:4x2", search="recursive_programming")
    found, prediction = report_data(planned, name), planned.plan.prediction
    start = planned.extraction.priced.model.step_latency_s
    compute = sum(s.compute_s for s in found.segments)
    assert compute + start == pytest.approx(prediction.compute_s, rel=1e-6)
    sent = sum(s.communication_s for s in found.segments)
    assert sent == pytest.approx(prediction.communication_s, rel=1e-6)
    assert found.step.step_s == pytest.approx(prediction.step_s, rel=1e-6)
    memory = found.step.memory
    peak = sum(column[memory.peak_bin] for column in memory.bytes)
    assert memory.traced_order or peak == pytest.approx(prediction.peak_bytes, rel=1e-6)
    for segment in found.segments:
        for node in segment.nodes:
            assert all(segment.nodes[b].layer < node.layer for b in node.before)
    assert Page(html(found)).data["title"] == name


@pytest.mark.long
@pytest.mark.parametrize("layers", [24, pytest.param(96, marks=pytest.mark.slow)])
def test_layers_are_folded_into_a_small_file(layers: int) -> None:
    planned = deep(layers)
    found = report_data(planned, f"{layers} layers")
    assert any(s.count == layers and s.alike for s in found.segments)
    assert sum(len(s.nodes) for s in found.segments) < 500
    for lane in found.step.lanes:
        assert len(lane.start_s) <= 2 * PIECES + 1
    text = html(found)
    assert len(text.encode()) < 5e6
    assert len(Page(text).data["collectives"]["folded"]) == len(planned.plan.collectives)


@pytest.mark.long
def test_plans_by_hand_stand_beside_the_chosen_one(data: ReportData) -> None:
    assert data.rivals == ()
    planned, comparison = compared()
    rivals = Page(html(report_data(planned, "", comparison))).data["rivals"]
    assert [r["name"] for r in rivals] == [c.name for c in comparison.candidates]
    assert rivals[0]["step_s"] == pytest.approx(planned.plan.prediction.step_s, rel=1e-5)
    assert [r["fits"] for r in rivals] == [c.fits for c in comparison.candidates]
    assert not rivals[1]["fits"] and rivals[1]["step_s"] > 0
    assert rivals[-1]["step_s"] is None and rivals[-1]["refused"].endswith(NASTY)
    sent = [c.time_s for c in comparison.candidates[1].collectives]
    assert [s for _, _, s, _ in rivals[1]["sends"]] == pytest.approx(sent, rel=1e-5)


def test_comparing_is_for_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(ROOT / "examples" / "mlp.py"), "--compare"]) == 2
    assert "give --html FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cluster", "mesh", "axes", "expected"),
    [
        ("h100:8x4", "data=8,model=4", (1,), "inside a node"),
        ("h100:8x4", "data=8,model=4", (0,), "2 in each of 4 nodes"),
        ("h100:8x4", "data=4,model=8", (0,), "across 4 nodes"),
        ("h100:8x4", "data=8,model=4", (0, 1), "8 in each of 4 nodes"),
        ("v5e:4x4+2", "data=2,model=16", (0,), "across 2 slices"),
        ("h100:8", "data=8,model=1", (1,), "one device"),
    ],
)
def test_where_devices_of_an_axis_stand(
    cluster: str, mesh: str, axes: tuple[int, ...], expected: str
) -> None:
    assert reach(parse_cluster(cluster), parse_mesh(mesh), axes) == expected


def test_a_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, planned: Planned
) -> None:
    model = str(ROOT / "examples" / "mlp.py")
    assert main(["inspect", model, "--html", str(tmp_path / "no" / "r.html")]) == 2
    assert "its directory does not exist" in capsys.readouterr().err
    from planner import RequestError

    with pytest.raises(RequestError, match="cannot write"):
        write_report(planned, tmp_path)


@pytest.mark.long
def test_with_json_and_save(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report, saved = tmp_path / "r.html", tmp_path / "p.json"
    model = str(ROOT / "examples" / "mlp.py")
    asked = ["inspect", model, "--html", str(report), "--json", "--save", str(saved)]
    assert main(asked) == 0
    assert capsys.readouterr().out == load_plan(saved).to_json()
    found = Page(report.read_text(encoding="utf-8")).data
    assert found["title"] == "mlp.py"
    assert found["wiring"]["drawn"] == 8 <= MOST_DEVICES["hierarchy"]
