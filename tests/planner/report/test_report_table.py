"""The report: golden text, folding, units."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from planner.plan.contents.compute import ComputeRow
from planner.plan.contents.rows import (
    Activation,
    CollectiveRow,
    Leaf,
    MeshRow,
    MeshVerdict,
    Prediction,
    SearchReport,
)
from planner.plan.plan import Plan, plan_from_json
from planner.report.fold import (
    common_path,
    common_start,
    fold_collectives,
    fold_leaves,
    is_optimizer_state,
)
from planner.report.table import plan_text, render_plan
from planner.report.units import (
    array_text,
    bytes_text,
    count_text,
    listed,
    percent_text,
    range_text,
    time_text,
)
from planner.spec import MeshSpec, Sharding

GOLDEN = Path(__file__).with_name("golden_plan.txt")
MESH = MeshSpec(("data", "model"), (4, 2))


def leaf(
    path: str,
    shape: tuple[int, ...],
    *entries: object,
    used: Sharding | None = None,
    tied: bool = True,
) -> Leaf:
    spec = Sharding.of(entries, len(shape))  # type: ignore[arg-type]
    size = 4
    for n in shape:
        size *= n
    return Leaf(path, shape, "float32", spec, size // spec.shards(MESH), used, tied)


def collective(count: float, line: int, cause: str = "dot_general") -> CollectiveRow:
    return CollectiveRow(
        "all_reduce", ("model",), count, 2e6, 1.5e-4, "float32[8,16]", f"model.py:{line}", cause
    )


def small_plan() -> Plan:
    inputs = []
    for start in ("[0]['opt'][0].mu", "[0]['params']"):
        for layer in range(12):
            inputs += [
                leaf(
                    f"{start}['blocks'][{layer}]['up']['kernel']",
                    (1024, 4096),
                    "data",
                    "model",
                    used=Sharding.of([None, "model"]),
                ),
                leaf(f"{start}['blocks'][{layer}]['norm']['scale']", (1024,)),
            ]
    inputs += [
        leaf("[0]['opt'][0].count", ()),
        leaf("[1]['tokens']", (64, 128), "data", tied=False),
    ]
    return Plan(
        mode="AUTO_PARALLEL",
        cluster="h100:8",
        mesh=MESH,
        inputs=tuple(inputs),
        outputs=(),
        constraints=(),
        collectives=(
            *(collective(1.0, 12) for _ in range(12)),
            *(
                collective(1.0, 30, f"use of [0]['params']['blocks'][{k}]['up']['kernel']")
                for k in range(12)
            ),
            collective(2.5, 40, "update"),
        ),
        activations=(
            Activation(
                "dot_general",
                (64, 128, 4096),
                "bfloat16",
                Sharding.of(["data", None, "model"]),
                8388608,
                "model.py:12",
            ),
        ),
        compute=(ComputeRow("model.py:12", 0.0075), ComputeRow("", 0.001)),
        fallbacks=("fft (model.py:33): no rule, replicated x2",),
        notes=("region 1 (while): trip count unknown, priced as one",),
        meshes=(
            MeshRow("data=8", 0.0151, 0.0151, 9e10, MeshVerdict.UNFIT),
            MeshRow("data=4,model=2", 0.0123, 0.0121, 3.1e10, MeshVerdict.CHOSEN),
            MeshRow("data=2,model=4", 0.0150, 0.0150, 2.9e10, MeshVerdict.SLOWER),
        ),
        prediction=Prediction(
            0.0100,
            0.0041,
            0.0018,
            0.0123,
            3.1e10,
            8e10,
            (
                "[0]['params']['blocks'][0]['up']['kernel']: 1.68e+07 bytes",
                "mul float32[64,128,4096] (model.py:12): 2.5e+09 bytes",
            ),
        ),
        search=SearchReport("auto:ilp", 0.0123, 0.0121, 0.01626, "time limit"),
        op_table=(),
        op_index=(),
        op_inputs=(),
        planning_s=1.25,
    )


@pytest.mark.usefixtures("published_runs")
def test_golden_text() -> None:
    text = plan_text(small_plan()) + "\n"
    if os.environ.get("MESHWRIGHT_REGENERATE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_text_is_plain_ascii_within_its_width(width: int) -> None:
    text = plan_text(small_plan(), width)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width


def test_str_is_the_report_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert str(small_plan()) == plan_text(small_plan())


@pytest.mark.usefixtures("published_runs")
def test_summary_comes_first() -> None:
    head = plan_text(small_plan()).splitlines()[:9]
    for part in ("data=4,model=2", "12.3 ms", "31.0 GB", "38.8 % of 80.0 GB", "1.6 %"):
        assert any(part in line for line in head), part


@pytest.mark.usefixtures("published_runs")
def test_the_step_time_has_a_likely_range() -> None:
    plan = dataclasses.replace(small_plan(), strategy="FSDP over 8; batch split 8 ways")
    lines = plan_text(plan, 80).splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("  likely "))
    assert lines[at].split(None, 1)[1] == (
        "11.8 to 14.9 ms: 80 % of 59 published data parallel runs on h100"
    )
    assert lines[at + 1].strip() == "took 0.96x to 1.21x as long as predicted"
    assert "  likely " not in plan_text(dataclasses.replace(plan, cluster="cpu:8"))


@pytest.mark.usefixtures("published_runs")
def test_meshes_that_tie_are_said_to() -> None:
    rows = (
        MeshRow("data=4,model=2", 0.0123, 0.0121, 3.1e10, MeshVerdict.CHOSEN),
        MeshRow("2x4", 0.0127, 0.0127, 2.9e10, MeshVerdict.SLOWER),
        MeshRow("8", 0.0150, 0.0150, 2.9e10, MeshVerdict.SLOWER),
        MeshRow("2x2x2", 0.0124, 0.0124, 9e10, MeshVerdict.UNFIT),
    )
    text = plan_text(dataclasses.replace(small_plan(), meshes=rows), 160)
    assert "fastest of 4 meshes, 1 other tied; 1 above the memory limit" in text
    assert "tied with the chosen one (1.03x)" in text
    assert "1.22x the chosen one's time" in text
    assert "tied" not in plan_text(dataclasses.replace(small_plan(), meshes=rows[:1] + rows[2:]))
    unknown = dataclasses.replace(small_plan(), meshes=rows, cluster="cpu:8")
    assert "tied" not in plan_text(unknown)  # no published run says how close is close


@pytest.mark.parametrize(
    ("time", "peak", "said"),
    [
        (1.0, 1.0, "chosen"),
        (1.005, 0.995, "chosen"),
        (1.0, 0.9, "chosen; as it runs: 30.0 GB"),
        (0.9, 1.0, "chosen; as it runs: 10.0 ms"),
        (0.9, 0.9, "chosen; as it runs: 10.0 ms, 30.0 GB"),
    ],
)
def test_a_search_that_counts_otherwise_is_said_to(time: float, peak: float, said: str) -> None:
    """In the chosen mesh's row, where the search's count is more than 1 % from the plan's."""
    plan = small_plan()
    ran = dataclasses.replace(plan.prediction, step_s=0.010, peak_bytes=3.0e10)
    row = MeshRow("data=4,model=2", time * 0.010, 0.009, peak * 3.0e10, MeshVerdict.CHOSEN)
    text = plan_text(dataclasses.replace(plan, meshes=(row,), prediction=ran), 160)
    line = next(line for line in text.splitlines() if line.startswith("  data=4,model=2 "))
    assert line.endswith(f"GB  {said}")


def test_meshes_that_do_not_fit_are_counted_after_the_third() -> None:
    """Four have a row each; of more, the rest share one that holds their least bound."""

    def report(unfit: int) -> str:
        rows = [MeshRow("data=4,model=2", 0.0123, 0.0121, 3.1e10, MeshVerdict.CHOSEN)]
        rows += [
            MeshRow(f"2x{k}", -1.0, 0.020 + k / 1000, 9e10 - k * 1e9, MeshVerdict.UNFIT)
            for k in range(unfit)
        ]
        return plan_text(dataclasses.replace(small_plan(), meshes=tuple(rows)), 160)

    assert "2x3 " in report(4)
    assert " more " not in report(4).split("meshes tried")[1].split("parameters")[0]
    text = report(7)
    assert "2x2 " in text
    assert "2x3 " not in text
    line = next(line for line in text.splitlines() if line.strip().startswith("4 more"))
    assert "23.0 ms or more" in line
    assert "needs 84.0 GB or more" in line


def test_meshes_that_were_not_searched_say_so_and_are_counted() -> None:
    rows = [
        MeshRow("data=4,model=2", 0.0100, 0.0099, 3.1e10, MeshVerdict.CHOSEN),
        MeshRow("8", 0.0090, 0.0090, 9e10, MeshVerdict.UNFIT),
        *(MeshRow(f"2x{k}", 0.0098, 0.0095, 9e10, MeshVerdict.UNSEARCHED) for k in range(6)),
    ]
    plan = dataclasses.replace(small_plan(), meshes=tuple(rows))
    text = plan_text(plan_from_json(plan.to_json()), 200)
    best_s = plan.search.cost_s
    assert "fastest of 8 meshes; 1 above the memory limit; 6 not searched further" in text
    save = f"{100 * max(1 - 0.0095 / best_s, 0.0):.2g}"
    line = next(line for line in text.splitlines() if line.startswith("  2x0 "))
    said = f"not searched further: its first choice does not fit; one may save up to {save} %"
    assert line.endswith(said)
    more = next(line for line in text.splitlines() if line.strip().startswith("3 more"))
    assert said in more


def test_one_device_says_nothing_of_replication() -> None:
    inputs = (Leaf("[0]['w']", (4,), "float32", Sharding(((),)), 16, None, True),)
    plan = dataclasses.replace(
        small_plan(),
        mesh=MeshSpec(("data",), (1,)),
        inputs=inputs,
        collectives=(),
        fallbacks=(),
        notes=(),
        planning_s=0.0,
    )
    text = plan_text(plan)
    assert "replicated parameters" not in text
    assert "the devices never talk" in text
    assert "fallbacks    none" in text
    assert "planning took" not in text


def test_unknown_cost_and_gap() -> None:
    search = SearchReport("ilp", float("inf"), 0.0, float("inf"), "stopped")
    text = plan_text(dataclasses.replace(small_plan(), search=search))
    assert "unknown" in text


def test_render_in_colour_keeps_brackets() -> None:
    out = io.StringIO()
    render_plan(
        small_plan(), Console(file=out, width=140, force_terminal=True, color_system="standard")
    )
    assert "\x1b[" in out.getvalue()
    assert "['blocks'][*]['up']['kernel']" in out.getvalue()


def test_layers_fold_only_when_shape_and_sharding_agree() -> None:
    rows = fold_leaves(
        [
            leaf("[0]['blocks'][0]['w']", (8, 8), "data"),
            leaf("[0]['blocks'][1]['w']", (8, 8), "data"),
            leaf("[0]['blocks'][2]['w']", (8, 8), None, "data"),
            leaf("[0]['blocks'][3]['w']", (8, 16), "data"),
            leaf("[1]['blocks'][4]['w']", (8, 8), "data"),
        ]
    )
    assert [(r.path, r.count) for r in rows] == [
        ("[0]['blocks'][*]['w']", 2),
        ("[0]['blocks'][2]['w']", 1),
        ("[0]['blocks'][3]['w']", 1),
        ("[1]['blocks'][4]['w']", 1),
    ]
    assert rows[0].nbytes == 2 * 64


def test_numbers_that_agree_stay() -> None:
    paths = [f"[0]['opt'][0].mu['Dense_{k}']['kernel']" for k in (0, 10)]
    assert common_path(paths) == "[0]['opt'][0].mu['Dense_*']['kernel']"
    assert common_path(paths[:1]) == paths[0]


def test_common_start() -> None:
    assert common_start(["[0]['params']['a']", "[0]['params']['b']"]) == "[0]['params']"
    assert common_start(["[0]['params']['a']"]) == ""
    assert common_start(["[1]['a']", "[1]['b']"]) == ""
    assert common_start(["[0]['params']['a']", "x"]) == ""


def test_collectives_add_up() -> None:
    sums = fold_collectives(small_plan().collectives)
    assert [(s.count, s.source) for s in sums] == [
        (12.0, "model.py:12"),
        (12.0, "model.py:30"),
        (2.5, "model.py:40"),
    ]
    assert sums[0].time_s == pytest.approx(12 * 1.5e-4)
    assert sums[1].cause == "use of [0]['params']['blocks'][*]['up']['kernel']"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("[0]['opt'][0].mu['a']", True),
        ("[0].opt_state[0].trace['a']", True),
        ("[1][0].count", True),
        ("[0]['params']['a'].value", False),
        ("[0]['counts']", False),
        ("[0].params['mu']", False),
    ],
)
def test_is_optimizer_state(path: str, expected: bool) -> None:
    assert is_optimizer_state(path) is expected


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 999_999, 31e9, 80e9, -1)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "31.0 GB",
        "80.0 GB",
        "-",
    ]
    times = (0, 1e-9, 4.5e-5, 0.0123, 0.9999, 12, 5000, -1, float("inf"))
    assert [time_text(s) for s in times] == [
        "0 s",
        "1.00 ns",
        "45.0 us",
        "12.3 ms",
        "1.00 s",
        "12.0 s",
        "5000 s",
        "-",
        "-",
    ]
    assert range_text(0.395, 0.498) == "395 to 498 ms"
    assert range_text(9.5e-4, 1.2e-3) == "950 us to 1.20 ms"
    assert [listed("abcde"[:n]) for n in range(6)] == [
        "",
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 1 more",
        "a, b, c and 2 more",
    ]
    assert [count_text(c) for c in (12.0, 2.5)] == ["12", "2.5"]
    assert [percent_text(f) for f in (0, 1e-5, 0.394, 1.5, float("inf"))] == [
        "0 %",
        "<0.1 %",
        "39.4 %",
        "150.0 %",
        "unknown",
    ]
    assert array_text((8, 16), "bfloat16") == "bf16[8,16]"
    assert array_text((), "uint32") == "u32[]"
    assert array_text((2,), "bool") == "bool[2]"
