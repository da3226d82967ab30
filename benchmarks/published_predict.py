"""Predicted step time of a published run, from plans of its model with no layer and with one.

Every layer of a decoder is alike, so all parts of a prediction are linear in the number of
layers; two plans give the slope and the rest, within 1 % (``tests/benchmarks``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from published_case import Case, Decoder, Degrees
from published_clusters import cluster_of, part_of, with_attention
from published_models import microbatch, update
from published_tables import Run

from costmodels import Cluster, Kernel
from costmodels.collectives import collective_coefficients
from costmodels.schedule import Overlap, Pipeline, StageSeconds, step_seconds
from planner import make_plan
from planner.graph.trace import trace
from planner.plan.plan import CollectiveRow
from planner.planning import graph_rules
from planner.space.groups import build_groups
from planner.step.analysis import analyse

HOST_S = {"matmul": 5.5e-5, "attention": 5.5e-5, "vector": 3.9e-5}
"""Host seconds of one kernel of PyTorch run eagerly, by kind. Lin et al. 2022, "Building a
Performance Model for Deep Learning Recommendation Model Training on GPUs", read from their figures
of mean overheads (between operators + before + launch + after): linear 8 + 33 + 4 + 11 us, its
backward 8 + 33 + 29 + 29 + 2 * 4 us for two kernels; relu 8 + 20 + 4 + 9, its backward
8 + 16 + 4 + 9."""
HOST_CALL_S = 1.1e-4
"""Host seconds of a collective inside a layer: an autograd function written in Python (the same
figures: 8 + 72 + 4 + 27 us for their lookup)."""
QUEUED_S = 1e-6
"""Seconds between the end of a kernel and the start of the next one that waits in a stream (the
same work's simulator)."""
UNALIGNED = 1.9
"""How much longer a 16-bit product takes in cuBLAS with a dimension that is no multiple of 8.
nanoGPT's note on its vocabulary: 50304 for 50257 words made GPT-2 124M a quarter faster on A100;
the head has 0.27 of its flop, so 1 + 0.25 / 0.27. XLA pads products itself."""
TPUS = frozenset({"v4", "v5e", "v5p", "v6e", "tpu7x"})
TUNED = (0.5, 0.8)
"""Shares of collectives that hide, waited for and not, in published runs on TPUs, whose frameworks
set many options of XLA; the catalog's are those of plans. An assumption."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Seconds of one microbatch on one device (``host_s``: on its host). Sums and multiples.

    ``tensor_s``: collectives that the next operation waits for. ``gather_s``: of parameters and
    gradients under ZeRO-3, every microbatch. ``sync_s``: of gradients over replicas, once a step.
    """

    compute_s: float = 0.0
    tensor_s: float = 0.0
    gather_s: float = 0.0
    sync_s: float = 0.0
    host_s: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __rmul__(self, factor: float) -> Parts:
        return Parts(*(factor * a for a in _values(self)))

    def seconds(self, wait_s: float = 0.0) -> StageSeconds:
        """What the clock is given of a microbatch; ``wait_s``: for the host."""
        return StageSeconds(self.compute_s, self.tensor_s, self.gather_s, wait_s=wait_s)

    def late_s(self, overlap: Overlap) -> float:
        """Seconds that the device waits for its host to start these kernels."""
        return self.seconds().late_s(self.host_s, overlap)


def _values(parts: Parts) -> tuple[float, ...]:
    return dataclasses.astuple(parts)


@dataclasses.dataclass(frozen=True)
class Step:
    """A predicted step: seconds by cause. ``total_s`` is what the clock would show."""

    compute_s: float
    tensor_s: float
    gather_s: float
    sync_s: float
    host_s: float
    update_s: float
    bubble_s: float

    @property
    def total_s(self) -> float:
        return sum(dataclasses.astuple(self))


def _plan(built: tuple[Any, tuple[Any, ...], Mapping[str, Any]], c: Case, cluster: Cluster) -> Any:
    function, args, pins = built
    return make_plan(
        function,
        *args,
        cluster=cluster,
        mesh=c.degrees.mesh,
        mode="AUTO_PARALLEL",
        search="auto",
        shardings=pins,
        memory=1e18,  # what the run fits into is not asked here
    )


@functools.lru_cache(maxsize=4096)
def planned(c: Case, cluster: Cluster) -> Parts:
    """Parts of one microbatch, from its plan."""
    plan = _plan(microbatch(c), c, cluster)
    parts = {"tensor_s": 0.0, "gather_s": 0.0, "sync_s": 0.0}
    compute_s, host_s = plan.prediction.compute_s, 0.0
    if not c.kernels.fused:
        kernels = kernels_of(dataclasses.replace(c, degrees=Degrees(), batch=1))
        host_s = sum(HOST_S[kind] * count for kind, count in kernels)
        late = cluster.device.kernel_latency_s - QUEUED_S
        compute_s -= late * sum(count for kind, count in kernels if kind == "vector")
    starts: dict[tuple[str, tuple[str, ...]], float] = {}
    for row in plan.collectives:
        axes = set(row.axes)
        time_s = row.time_s
        if axes <= {"data", "zero"}:
            cause = "sync_s"  # gradients are reduced together: one start
            starts[row.kind, row.axes], time_s = _apart(row, c, cluster)
        elif axes <= {"data", "zero", "fsdp"} or (
            axes <= {"data", "zero", "fsdp", "context"} and row.value.count(",") < 3
        ):
            cause = "gather_s"
        else:
            cause = "tensor_s"
            host_s += 0.0 if c.kernels.fused else row.count * HOST_CALL_S
        parts[cause] += row.count * time_s
    parts["sync_s"] += sum(starts.values())
    return Parts(compute_s, **parts, host_s=host_s)


def _apart(row: CollectiveRow, c: Case, cluster: Cluster) -> tuple[float, float]:
    """Seconds of starting a plan's collective, and of its bytes."""
    names, sizes = zip(*c.degrees.mesh.items(), strict=True)
    places = tuple(names.index(axis) for axis in row.axes)
    kind: Any = row.kind
    alpha, beta = collective_coefficients(cluster, kind, sizes, places)
    return alpha, beta * row.payload_bytes


@functools.lru_cache(maxsize=256)
def kernels_of(c: Case) -> tuple[tuple[Kernel, float], ...]:
    """How many kernels of each kind a microbatch launches."""
    function, args, _ = microbatch(c)
    traced = trace(function, args)
    rules = graph_rules(traced)
    groups = build_groups(traced.graph, rules)
    analysis = analyse(traced.graph, rules, groups, (False,) * len(traced.graph.inputs))
    count: Counter[Kernel] = Counter()
    for group in (facts.work for facts in analysis.facts):
        for work in group:
            count[work.kind] += work.kernels  # type: ignore[assignment]
    if c.kernels.joined:  # traced as three products; forward, both backward, and recomputed
        passes = (3 if c.recompute == "none" else 4) * c.model.layers
        count["matmul"] -= 2 * passes
        count["vector"] -= 2 * c.model.layers  # sums of the three gradients of the input
    return tuple(sorted(count.items()))


@functools.lru_cache(maxsize=1024)
def planned_update(c: Case, cluster: Cluster) -> Parts:
    """Parts of the optimizer's step, from its plan."""
    prediction = _plan(update(c), c, cluster).prediction
    return Parts(compute_s=prediction.compute_s, tensor_s=prediction.communication_s)


def with_layers(c: Case, layers: int) -> Case:
    return dataclasses.replace(c, model=dataclasses.replace(c.model, layers=layers))


def by_layers(c: Case, cluster: Cluster) -> tuple[Parts, Parts, Parts, Parts]:
    """(one layer, the rest) of a microbatch and of the optimizer's step."""
    out: list[Parts] = []
    alike = dataclasses.replace(c, batch=1, recompute="none", accumulate=False)
    for plan, case in ((planned, c), (planned_update, alike)):
        rest, one = (plan(with_layers(case, n), cluster) for n in (0, 1))
        out += [one + -1.0 * rest, rest]
    return out[0], out[1], out[2], out[3]


def case_of(run: Run) -> Case:
    """What is traced of a run."""
    d = run.degrees
    accumulate = run.grad_accum > 1
    recompute = "full" if run.recompute.startswith("selective-every") else run.recompute
    batch = run.micro * d.data * d.zero * d.fsdp
    return Case(run.model, d, run.kernels, recompute, batch, accumulate)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a run puts the parts of a step together.

    ``hidden``: share of waited-for collectives that hides, ``overlapped``: of those off the
    critical path. ``transfer_s``: of sending one microbatch's activation to the next stage.
    ``alone``: a layer's host can't run ahead while the device works on another layer.
    """

    layers: int
    pp: int
    vpp: int
    microbatches: int
    hidden: float = 0.0
    overlapped: float = 0.0
    transfer_s: float = 0.0
    alone: bool = False


def assemble(how: Schedule, layer: Parts, rest: Parts, update: Parts) -> Step:
    """A step from the parts of one layer, of embedding and head (``rest``), and of the update.

    Stages have ``layers / pp`` layers each; the slowest also has embedding and head.
    """
    overlap = Overlap(how.hidden, how.overlapped, how.overlapped)
    stage = how.layers / how.pp * layer
    micro = stage + rest
    wait_s = stage.late_s(overlap) + rest.late_s(overlap) if how.alone else micro.late_s(overlap)
    found = step_seconds(
        (micro.seconds(wait_s), *[stage.seconds(stage.late_s(overlap))] * (how.pp - 1)),
        Pipeline(
            how.pp,
            how.microbatches,
            how.vpp,
            "interleaved" if how.vpp > 1 else "1f1b",
            how.transfer_s,
        ),
        overlap,
        StageSeconds(update.compute_s, update.tensor_s, behind_s=micro.sync_s),
    )
    return Step(
        found.compute_s - update.compute_s,
        found.exposed.waited_s,
        found.exposed.ahead_s,
        found.exposed.once_s - update.tensor_s,
        found.wait_s,
        update.compute_s + update.tensor_s,
        found.bubble_s + found.transfer_s,
    )


def predict(run: Run) -> Step:
    """Seconds of one step of a run."""
    cluster = cluster_of(run.hardware, run.inter_node, run.node_size, run.devices)
    stage = part_of(cluster, run.devices // run.pp) if run.pp > 1 else cluster
    stage = with_attention(stage, run.kernels)
    case = case_of(run)
    layer, rest, update_layer, update_rest = by_layers(case, stage)
    if run.recompute == "selective-every-2nd-layer":
        kept = by_layers(dataclasses.replace(case, recompute="none"), stage)[0]
        layer = 0.5 * (layer + kept)
    rest += Parts(compute_s=unaligned_s(case, stage))
    update_all = run.model.layers / run.pp * update_layer + update_rest
    return assemble(schedule_of(run, cluster), layer, rest, update_all)


def unaligned_s(c: Case, cluster: Cluster) -> float:
    """Seconds that the three products of a head lose whose local vocabulary is no multiple of 8."""
    d, m = c.degrees, c.model
    words = m.vocab / d.model
    if c.kernels.fused or words % 8 == 0:
        return 0.0
    flops = 6.0 * c.batch / (d.data * d.zero * d.fsdp) * m.seq / d.context * words * m.hidden
    device = cluster.device
    rate = device.matmul_flops_per_s("bfloat16") * device.matmul_efficiency
    return (UNALIGNED - 1.0) * flops / rate


def schedule_of(run: Run, cluster: Cluster) -> Schedule:
    """The schedule of a run: its framework's habits, the device's constants."""
    device = cluster.device
    waited, ahead = TUNED if device.kind in TPUS else (device.overlap, device.overlap_ahead)
    return Schedule(
        run.model.layers,
        run.pp,
        run.vpp,
        run.grad_accum,
        hidden=0.0 if run.framework.eager or not run.framework.overlaps else waited,
        overlapped=ahead if run.framework.overlaps else 0.0,
        transfer_s=_transfer_s(run, cluster) if run.pp > 1 else 0.0,
        alone=run.framework.alone,
    )


def _transfer_s(run: Run, cluster: Cluster) -> float:
    """Seconds of sending one microbatch's activation to the next stage."""
    mesh = (run.pp, run.devices // run.pp)
    alpha, beta = collective_coefficients(cluster, "permute", mesh, (0,))
    return alpha + beta * 2.0 * run.micro * run.model.seq * run.model.hidden


def model_flops(model: Decoder, sequences: int) -> float:
    """Flop of a step: 6 N per token, 12 layers * heads * head_dim * seq for attention."""
    matrices = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices += (3 if model.gated else 2) * model.hidden * model.ffn
    per_token = 6.0 * (model.layers * matrices + model.vocab * model.hidden)
    attention = 12.0 * model.layers * model.heads * model.head_dim * model.seq
    return math.prod((sequences, model.seq, per_token + attention))
