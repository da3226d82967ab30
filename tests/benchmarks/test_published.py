"""Published runs: the models that are built, the arithmetic around the plans, a few rows."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import published  # noqa: E402
import published_choose as choosing  # noqa: E402
import published_clusters as clusters  # noqa: E402
import published_predict as predicting  # noqa: E402
import published_tables as tables  # noqa: E402
from published_case import Case, Decoder, Degrees, Kernels, count_parameters  # noqa: E402
from published_models import microbatch  # noqa: E402

from costmodels import parse_cluster  # noqa: E402
from costmodels.schedule import bubble_share  # noqa: E402
from planner.graph.trace import trace  # noqa: E402
from planner.planning import graph_rules  # noqa: E402
from planner.space.groups import build_groups  # noqa: E402
from planner.step.analysis import analyse  # noqa: E402

GPT = Decoder(24, 1024, 4096, 16, 16, 64, 50257, 1024, gated=False, bias=True)
LLAMA = Decoder(32, 4096, 14336, 32, 8, 128, 128256, 8192, gated=True, positions=False, tied=False)


def data() -> Path:
    if not published.FOLDER.is_dir():
        pytest.skip(f"the published tables are not at {published.FOLDER}")
    return published.FOLDER


def runs(name: str) -> list[tables.Run]:
    return [r for r in tables.read(data(), [name]) if isinstance(r, tables.Run)]


@pytest.mark.parametrize(("model", "params"), [(GPT, 353772544), (LLAMA, 8030261248)])
def test_parameters_of_known_models(model: Decoder, params: int) -> None:
    assert count_parameters(model) == pytest.approx(params, rel=0.005)


def test_parameters_of_every_table_row() -> None:
    """Within 2 % of the table's figure, where it is one: not rounded to a name."""
    seen = 0
    for name in tables.TABLES:
        for run in runs(name):
            if run.params and run.params % 1_000_000:
                seen += 1
                assert count_parameters(run.model) == pytest.approx(run.params, rel=0.02), run.row
    assert seen > 1000


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4), ("whole", 4)])
@pytest.mark.parametrize("model", [GPT, dataclasses.replace(LLAMA, seq=1024)])
def test_flops_are_those_of_the_formula(model: Decoder, recompute: str, passes: int) -> None:
    """6 N per token and attention. Recomputed layers, not the head, count once more; the last
    product of a layer only where the whole layer is run again."""
    small = dataclasses.replace(model, layers=2)
    case = Case(small, Degrees(), Kernels(), recompute, 2)
    function, args, _ = microbatch(case)
    traced = trace(function, args)
    rules = graph_rules(traced)
    groups = build_groups(traced.graph, rules)
    analysis = analyse(traced.graph, rules, groups, (False,) * len(traced.graph.inputs))
    flops = sum(w.flops for facts in analysis.facts for w in facts.work if w.kind == "matmul")
    whole = predicting.model_flops(small, 2)
    head = 6.0 * model.vocab * model.hidden * 2 * model.seq
    expected = head + (whole - head) * passes / 3
    if recompute == "full":
        expected -= 2.0 * small.layers * model.hidden * model.ffn * 2 * model.seq
    assert flops == pytest.approx(expected, rel=0.02)


def test_parts_are_linear_in_layers() -> None:
    """Three layers from none and one; an empty model fuses a little more around its border."""
    model = dataclasses.replace(GPT, vocab=50304)
    half = {"matmul": "float16", "reduced": "float16", "stored": "float16"}
    kernels = Kernels(False, rows=True, dropout=True, joined=True, **half)
    case = Case(model, Degrees(model=2), kernels, "none", 8)
    cluster = parse_cluster("a100:2")
    none, one, three = (
        predicting.planned(predicting.with_layers(case, n), cluster) for n in (0, 1, 3)
    )
    for field in dataclasses.fields(predicting.Parts):
        first = getattr(none, field.name)
        expected = first + 3 * (getattr(one, field.name) - first)
        assert getattr(three, field.name) == pytest.approx(expected, rel=0.01), field.name


def test_bubble_is_the_formulas() -> None:
    """Idle share (pp - 1) / (vpp * microbatches), and none without a pipeline."""
    layer = predicting.Parts(compute_s=1.0)
    for pp, vpp, micro in ((4, 1, 8), (4, 2, 8), (2, 1, 2), (1, 1, 4)):
        step = predicting.assemble(
            predicting.Schedule(8, pp, vpp, micro), layer, predicting.Parts(), predicting.Parts()
        )
        assert step.compute_s == pytest.approx(micro * 8 / pp)
        share = bubble_share(pp, micro, vpp)
        assert step.bubble_s == pytest.approx(share * step.compute_s)
    with pytest.raises(ZeroDivisionError):
        bubble_share(2, 0)


def test_hidden_communication_never_exceeds_compute() -> None:
    """Gathers and reductions share the second of compute that they can hide under."""
    layer = predicting.Parts(compute_s=1.0, gather_s=10.0, sync_s=10.0)
    schedule = predicting.Schedule(1, 1, 1, 1, hidden=0.5, overlapped=0.7)
    step = predicting.assemble(schedule, layer, predicting.Parts(), predicting.Parts())
    assert step.gather_s == pytest.approx(9.5)
    assert step.sync_s == pytest.approx(9.5)
    assert step.total_s == pytest.approx(1.0 + 19.0)


def test_slow_hosts_hold_up_small_kernels() -> None:
    """A host that runs ahead hides behind the whole microbatch; alone, behind its own layer."""
    layer = predicting.Parts(compute_s=1.0, host_s=2.0)
    rest = predicting.Parts(compute_s=1.5)
    schedule = predicting.Schedule(2, 1, 1, 3)
    step = predicting.assemble(schedule, layer, rest, predicting.Parts())
    assert step.host_s == pytest.approx(3 * (2 * 2.0 - 2 * 1.0 - 1.5))
    alone = dataclasses.replace(schedule, alone=True)
    step = predicting.assemble(alone, layer, rest, predicting.Parts())
    assert step.host_s == pytest.approx(3 * 2 * (2.0 - 1.0))


def test_kernels_of_a_megatron_layer() -> None:
    """Six products forward and twelve backward; four hand-written kernels and a bias forward."""
    half = {"matmul": "float16", "reduced": "float16", "stored": "float16"}
    kernels = Kernels(False, rows=True, dropout=True, joined=True, **half)
    case = Case(GPT, Degrees(), kernels, "none", 1)
    one, none = (dict(predicting.kernels_of(predicting.with_layers(case, n))) for n in (1, 0))
    assert one["matmul"] - none["matmul"] == 18
    assert 30 <= one["vector"] - none["vector"] <= 60
    again = dataclasses.replace(case, recompute="whole")
    more = dict(predicting.kernels_of(predicting.with_layers(again, 1)))
    assert more["matmul"] - one["matmul"] == 6


def test_power_slows_by_the_cube_root() -> None:
    full = clusters.cluster_of("H100-SXM-80GB", "", 8, 8).device
    half = clusters.at_power(full, 0.125)
    assert half.matmul_efficiency == pytest.approx(full.matmul_efficiency / 2)
    assert half.memory_bytes_per_s == full.memory_bytes_per_s


def test_odd_vocabularies_cost_more() -> None:
    case = Case(dataclasses.replace(GPT, vocab=50304), Degrees(), Kernels(False), "none", 1)
    cluster = parse_cluster("a100:1")
    odd = dataclasses.replace(case, model=GPT)
    assert predicting.unaligned_s(case, cluster) == 0.0
    assert predicting.unaligned_s(odd, cluster) > 1e-3
    assert predicting.unaligned_s(dataclasses.replace(odd, kernels=Kernels()), cluster) == 0.0


def test_kendall_and_regret() -> None:
    pairs = [(1.0, 10.0), (2.0, 20.0), (4.0, 15.0)]
    assert published.kendall(pairs) == pytest.approx(1 / 3)
    assert published.kendall(pairs[:2]) == 1.0
    assert published.regret(pairs) == 0.0
    assert published.regret([(3.0, 1.0), (2.0, 5.0)]) == pytest.approx(0.5)


def run_of(plan: Degrees, step_s: float) -> tables.Run:
    """A run of GPT on 2 devices."""
    framework = tables.FRAMEWORKS["vtrain"]
    return tables.Run(
        *("vtrain", "row#1", "A100-SXM-80GB", 8, "", 2, GPT, plan, 1, 1, 1, 1, "none"),
        *(Kernels(), framework, step_s, "group", 2, 0),
    )


def step_of(total_s: float) -> predicting.Step:
    return predicting.Step(total_s, *[0.0] * 6)


def test_figures_count_a_plan_once() -> None:
    """Two measurements of one plan are one plan; groups of one plan have no regret."""
    data, model = Degrees(data=2), Degrees(model=2)
    found = [
        (run_of(data, 1.0), step_of(2.0)),
        (run_of(data, 3.0), step_of(2.0)),
        (run_of(model, 4.0), step_of(1.0)),
    ]
    assert published.grouped(found[:2]) == []
    assert published.grouped(found) == [[(1.0, 1.0), (2.0, 0.5)]]
    figures = published.judge(found)
    assert (figures.rows, figures.groups) == (3, 1)
    assert figures.error == pytest.approx((1.0 + 1 / 3 + 3 / 4) / 3)
    assert figures.regret == pytest.approx(1.0)
    assert figures.tau_in_groups == -1.0


def test_choice_is_no_worse_than_the_published_plan() -> None:
    """Tensor parallelism on 2 devices is no plan to choose for a small model with a full batch."""
    small = dataclasses.replace(GPT, layers=1, vocab=1024)
    run = dataclasses.replace(run_of(Degrees(model=2), 1.0), model=small, micro=16)
    choice = choosing.choose(run)
    assert choice.chosen is not None
    assert choice.chosen.prediction.step_s < 0.95 * choice.published.prediction.step_s
    assert "choice" in choosing.line(choice)


def test_missing_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no table .*vtrain.*give the folder"):
        tables.read(tmp_path, ["vtrain"])


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("internevo", "internevo_7b_a100#4"),
        ("megatron", "megatron_2020_v100_a100#7"),
        ("vtrain", "vtrain_single_node_a100#342"),
        ("llm_foundry", "llm_foundry_mpt_a100_h100#62"),
        ("maxtext", "maxtext_tpu_v4_v5e_v5p_tables#42"),
    ],
)
def test_rows_within_a_quarter(table: str, row: str) -> None:
    run = next(r for r in runs(table) if r.row == row)
    assert predicting.predict(run).total_s == pytest.approx(run.step_s, rel=0.25)
