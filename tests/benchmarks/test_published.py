"""Published runs: the models that are built, the arithmetic around the plans, a few rows."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
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
from published_models import gradients  # noqa: E402
from published_residuals import residuals_text  # noqa: E402
from published_stacks import OTHER, stack_of  # noqa: E402

from planner.graph.trace import trace  # noqa: E402
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
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("model", [GPT, dataclasses.replace(LLAMA, seq=1024)])
def test_flops_are_those_of_the_formula(
    model: Decoder, unrolled: bool, recompute: str, passes: int
) -> None:
    """6 N per token and attention. Recomputed layers, not the head, count once more; the last
    product of a layer only where the whole layer is run again."""
    small = dataclasses.replace(model, layers=2)
    case = Case(small, Degrees(), Kernels(), recompute, 2, unrolled)
    traced = trace(*gradients(case))
    rules = traced.rules
    groups = build_groups(traced.graph, rules)
    analysis = analyse(traced.graph, rules, groups, (False,) * len(traced.graph.inputs))
    flops = sum(w.flops for facts in analysis.facts for w in facts.work if w.kind == "matmul")
    whole = predicting.model_flops(small, 2)
    head = 6.0 * model.vocab * model.hidden * 2 * model.seq
    expected = head + (whole - head) * passes / 3
    if recompute == "full":
        expected -= 2.0 * small.layers * model.hidden * model.ffn * 2 * model.seq
    assert flops == pytest.approx(expected, rel=0.02)


HALF = {"matmul": "float16", "reduced": "float16", "stored": "float16"}
MEGATRON = Kernels(False, rows=True, dropout=True, joined=True, **HALF)


def test_the_plan_is_the_published_one() -> None:
    """No part of it is replaced: the collectives are those of the published degrees alone."""
    run = run_of(Degrees(data=2, model=4), 1.0)
    small = dataclasses.replace(GPT, layers=2, vocab=50304)
    run = dataclasses.replace(
        run, devices=8, model=small, grad_accum=4, sequences=64, micro=8, kernels=MEGATRON
    )
    found = predicting.planned(run).plan
    assert dict(zip(found.mesh.names, found.mesh.sizes, strict=True)) == {"data": 2, "model": 4}
    assert (found.microbatches, found.replicas) == (4, 2)
    inside = [c for c in found.collectives if c.count > 1]
    assert all(c.axes == ("model",) for c in inside)
    # Megatron: two all-reduces forward and two backward, each a reduce-scatter and an all-gather
    whole = 2.0 * 8 * small.seq * small.hidden
    turns = 4 * small.layers
    sent = sum((1 + (c.kind == "all_reduce")) * c.count * c.payload_bytes for c in inside)
    assert sent == pytest.approx(8 * turns * whole, rel=0.25)
    behind = [c for c in found.collectives if "data" in c.axes]
    assert behind and all(c.count == 1 for c in behind)


def test_stages_take_the_bubble_longer() -> None:
    """Four stages and four microbatches take 7 / 4 of the work of one stage."""
    small = dataclasses.replace(GPT, layers=8, vocab=1024)
    run = dataclasses.replace(
        run_of(Degrees(), 1.0), devices=4, pp=4, model=small, grad_accum=4, sequences=32, micro=8
    )
    plan = predicting.planned(run).plan
    assert plan.stages == 4 and plan.schedule == "1f1b"
    p = plan.prediction
    assert p.step_s == pytest.approx(7 / 4 * (p.compute_s + p.communication_s), rel=0.05)


def test_slow_hosts_hold_up_small_kernels() -> None:
    """A host that runs ahead hides behind the whole microbatch; alone, behind its own layer."""
    run = dataclasses.replace(run_of(Degrees(), 1.0), devices=1, kernels=MEGATRON)
    ahead = dataclasses.replace(run, framework=dataclasses.replace(run.framework, alone=False))
    waits = []
    for one in (run, ahead):
        found = predicting.planned(one)
        waits.append(predicting.late_s(one, found))
    assert 0.0 < waits[1] <= waits[0] < 0.2
    large = dataclasses.replace(ahead, sequences=64, micro=64)
    assert predicting.late_s(large, predicting.planned(large)) == 0.0
    fused = dataclasses.replace(run, kernels=dataclasses.replace(MEGATRON, fused=True))
    assert predicting.late_s(fused, predicting.planned(fused)) == 0.0


def test_reductions_hide_where_the_framework_overlaps() -> None:
    """Under the last microbatch's backward pass, in the dtype that the framework reduces."""
    small = dataclasses.replace(GPT, layers=2, vocab=50304)
    run = dataclasses.replace(
        run_of(Degrees(data=8), 1.0), devices=8, model=small, grad_accum=4, sequences=256, micro=8,
        kernels=MEGATRON,
    )  # fmt: skip
    found = predicting.planned(run)
    sent = sum(c.count * c.time_s for c in found.plan.collectives if c.count == 1)
    behind = predicting.hidden_s(run, found)
    assert behind == pytest.approx(0.5 * sent, rel=0.05)  # 16 bits in place of 32, no overlap
    overlaps = dataclasses.replace(run, framework=dataclasses.replace(run.framework, overlaps=True))
    share = predicting.stack_cluster(overlaps).device.overlap_behind
    behind = predicting.hidden_s(overlaps, predicting.planned(overlaps))
    assert behind == pytest.approx((0.5 + 0.5 * share) * sent, rel=0.05)


def test_kernels_of_a_megatron_layer() -> None:
    """Six products forward and twelve backward; four hand-written kernels and a bias forward."""
    case = Case(GPT, Degrees(), MEGATRON, "none", 1)
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
    run = dataclasses.replace(run_of(Degrees(), 1.0), devices=1, kernels=MEGATRON)
    even = dataclasses.replace(run, model=dataclasses.replace(GPT, vocab=50304))
    assert predicting.unaligned_s(even) == 0.0
    assert predicting.unaligned_s(run) > 1e-3
    assert predicting.unaligned_s(dataclasses.replace(run, kernels=Kernels())) == 0.0


def test_kendall_and_regret() -> None:
    pairs = [(1.0, 10.0), (2.0, 20.0), (4.0, 15.0)]
    assert published.kendall(pairs) == pytest.approx(1 / 3)
    assert published.kendall(pairs[:2]) == 1.0
    assert published.regret(pairs) == 0.0
    assert published.regret([(3.0, 1.0), (2.0, 5.0)]) == pytest.approx(0.5)


def run_of(plan: Degrees, step_s: float) -> tables.Run:
    """A run of GPT on 2 devices."""
    framework = stack_of("Megatron-DeepSpeed").framework
    return tables.Run(
        *("vtrain", "row#1", "A100-SXM-80GB", 8, "", 2, GPT, plan, 1, 1, 1, 1, "none"),
        *(Kernels(), framework, step_s, "group", 2, 0),
    )


def step_of(total_s: float) -> predicting.Step:
    return predicting.Step(total_s)


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


def test_residuals_are_measured_over_predicted() -> None:
    found = [(run_of(Degrees(data=2), 1.0 + k / 10), step_of(1.0)) for k in range(11)]
    found.append((run_of(Degrees(model=2), 3.0), step_of(2.0)))
    content = tomllib.loads(residuals_text(found, [[(1.0, 1.0), (2.0, 1.0)]]))
    assert content["a100"]["data"] == content["gpu"]["data"] == content["all"]["data"]
    assert content["a100"]["data"] == {"rows": 11, "low": 1.1, "high": 1.9}
    assert content["a100"]["model"] == {"rows": 1, "low": 1.5, "high": 1.5}
    assert content["order"] == {"pairs": 1, "within": 1.0}


def test_tables_of_any_name_are_read(tmp_path: Path) -> None:
    """A row says what ran; an unknown framework counts as PyTorch run eagerly."""
    columns = "row_id,framework,hardware,num_devices,model,layers,hidden,ffn_hidden,heads,vocab"
    columns += ",seq_len,precision,tp,pp,dp,fsdp,zero_stage,global_batch_seqs,grad_accum,recompute"
    columns += ",gated_mlp,step_time_seconds"
    row = "x#1,Somebody's,H100 SXM,16,GPT,24,1024,4096,16,50304,1024,bf16,2,1,1,8,3,64,2,none,,1.5"
    (tmp_path / "some.csv").write_text(f"{columns}\n{row}\n")
    (tmp_path / "other.csv").write_text("hardware,time\nH100,1\n")
    assert tables.names(tmp_path) == ["some"]
    (run,) = tables.read(tmp_path, ["some"])
    assert isinstance(run, tables.Run)
    assert run.degrees == Degrees(fsdp=8, model=2) and run.framework == OTHER.framework
    assert (run.micro, run.grad_accum, run.devices, run.table) == (4, 2, 16, "some")
    assert clusters.cluster_of(run.hardware, "", 8, 16).text == "h100:8x2"


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
