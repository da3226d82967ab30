"""Predicted step time of a published run, from plans of its model with no layer and with one.

Every layer of a decoder is alike, so all parts of a prediction are linear in the number of
layers; two plans give the slope and the rest (``tests/benchmarks`` proves it on deeper models).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from published_case import Case, Decoder, Degrees, Kernels
from published_models import microbatch, update
from published_tables import Run

from costmodels import Cluster, Device, Kernel, parse_cluster
from costmodels.collectives import collective_coefficients
from planner import make_plan
from planner.analysis import analyse
from planner.graph.trace import trace
from planner.groups import build_groups
from planner.pipeline import graph_rules
from planner.plan import CollectiveRow

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
FLASH_1 = 0.5
"""Rate of the first FlashAttention, and of Triton's, of that of the second (Dao 2023: the second
is about twice as fast; 1.7 to 3.0 and 1.3 to 2.5 times in section 4.1)."""
UNALIGNED = 1.9
"""How much longer a 16-bit product takes in cuBLAS with a dimension that is no multiple of 8.
nanoGPT's note on its vocabulary: 50304 for 50257 words made GPT-2 124M a quarter faster on A100;
the head has 0.27 of its flop, so 1 + 0.25 / 0.27. XLA pads products itself."""

KINDS = (  # text in the table's hardware, device kind
    ("A100-SXM-40GB", "a100-40gb"),
    ("A100", "a100"),
    ("H100", "h100"),
    ("V100-SXM2-32GB", "v100-32gb"),
    ("V100-SXM3-32GB", "v100-32gb"),
    ("V100", "v100"),
    ("v5e", "v5e"),
    ("v5p", "v5p"),
    ("v6e", "v6e"),
    ("v4", "v4"),
)
TORUS = {
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
NIC_BYTES_PER_S = (  # text in the table's inter_node, bytes/s per device one way
    ("4x100Gb RoCE per node", 4 * 12.5e9 / 8),
    ("RoCE 1600Gb/s per node", 16 * 12.5e9 / 8),
    ("4 NIC x 200Gb = 800Gb/s per node", 4 * 25e9 / 8),
    ("400Gb/s per GPU", 50e9),
    ("25 Gb/s Ethernet per node", 3.125e9 / 8),
    ("8xHDR200 InfiniBand per node", 25e9),
)


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


@functools.lru_cache(maxsize=64)
def cluster_of(hardware: str, inter_node: str, node_size: int, devices: int) -> Cluster:
    """The catalog's cluster, with what the table says of memory and network put in.

    Raises:
        ClusterError: a device kind that the catalog lacks.
    """
    kind = next(kind for text, kind in KINDS if text in hardware)
    if kind.startswith("v") and not kind.startswith("v100"):
        slices = 1
        per_slice = devices
        if "slice" in inter_node:
            found = inter_node.split()
            slices = int(found[0])
            per_slice = devices // slices
        shape = TORUS[per_slice]
        if kind in ("v4", "v5p"):
            shape = (4, 4, per_slice // 16)
        text = f"{kind}:{'x'.join(map(str, shape))}" + (f"+{slices}" if slices > 1 else "")
        return parse_cluster(text)
    per_node = min(node_size, devices)
    cluster = parse_cluster(f"{kind}:{per_node}x{-(-devices // per_node)}")
    if "HBM2e" in hardware:
        device = dataclasses.replace(cluster.device, memory_bytes_per_s=2.4e12)
        device = _at_power(device, 500.0 / 700.0) if "500W" in hardware else device
        cluster = dataclasses.replace(cluster, device=device)
    for text, bytes_per_s in NIC_BYTES_PER_S:
        if text in inter_node and cluster.network is not None:
            network = dataclasses.replace(cluster.network, bytes_per_s=0.9 * bytes_per_s)
            cluster = dataclasses.replace(cluster, network=network)
    return cluster


def _at_power(device: Device, share: float) -> Device:
    """A device that gets a share of the power that its peak is stated at.

    Power grows with the cube of the clock where voltage follows it, and dense products run at the
    limit of power.
    """
    clock = share ** (1 / 3)
    return dataclasses.replace(
        device,
        matmul_efficiency=clock * device.matmul_efficiency,
        attention_efficiency=clock * device.attention_efficiency,
        vector_flops_per_s=clock * device.vector_flops_per_s,
    )


def _with_attention(cluster: Cluster, kernels: Kernels) -> Cluster:
    """A cluster whose devices' attention runs at the rate of a run's kernel."""
    if kernels.attention != "flash-1":
        return cluster
    rate = FLASH_1 * cluster.device.attention_efficiency
    device = dataclasses.replace(cluster.device, attention_efficiency=rate)
    return dataclasses.replace(cluster, device=device)


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
            cause = "sync_s"
            start_s = _start_s(row, c, cluster)  # gradients are reduced together
            if time_s > start_s:
                time_s -= start_s
                starts[row.kind, row.axes] = start_s
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


def _start_s(row: CollectiveRow, c: Case, cluster: Cluster) -> float:
    """Seconds that starting a plan's collective takes."""
    names, sizes = zip(*c.degrees.mesh.items(), strict=True)
    places = tuple(names.index(axis) for axis in row.axes)
    return collective_coefficients(cluster, row.kind, sizes, places)[0]  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def kernels_of(c: Case) -> tuple[tuple[Kernel, float], ...]:
    """How many kernels of each kind a microbatch launches."""
    function, args, _ = microbatch(c)
    traced = trace(function, args)
    rules = graph_rules(traced)
    groups = build_groups(traced.graph, rules)
    analysis = analyse(traced.graph, rules, groups, (False,) * len(traced.graph.inputs))
    count: Counter[Kernel] = Counter()
    for group in analysis.work:
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
    """How the parts of a step follow each other.

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

    Stages are equal: ``layers / pp`` layers, the slowest also has the head. A pipeline idles
    (pp - 1) / vpp microbatches (Narayanan et al. 2021, section 2.2); transfers to the next stage
    are on the critical path once per microbatch and border each way. Communication off the
    critical path hides its share, but no more than there is compute.
    """
    stage = how.layers / how.pp * layer
    micro = stage + rest
    gather = max((1 - how.overlapped) * micro.gather_s, micro.gather_s - micro.compute_s)
    tensor = (1 - how.hidden) * micro.tensor_s
    host = max(0.0, micro.host_s - micro.compute_s - tensor - gather)
    if how.alone:
        host = sum(
            times * max(0.0, p.host_s - p.compute_s - (1 - how.hidden) * p.tensor_s)
            for times, p in ((how.layers / how.pp, layer), (1.0, rest))
        )
    share = bubble_share(how.pp, how.microbatches, how.vpp)
    inside = stage.compute_s + (1 - how.hidden) * stage.tensor_s
    inside = max(inside + (1 - how.overlapped) * stage.gather_s, stage.host_s)
    transfers = how.microbatches + how.pp - 1 if how.pp > 1 else 0
    return Step(
        how.microbatches * micro.compute_s,
        how.microbatches * tensor,
        how.microbatches * gather,
        micro.sync_s - min(how.overlapped * micro.sync_s, micro.compute_s),
        how.microbatches * host,
        update.compute_s + update.tensor_s,
        how.microbatches * share * inside + 2.0 * transfers * how.transfer_s,
    )


def predict(run: Run) -> Step:
    """Seconds of one step of a run."""
    cluster = cluster_of(run.hardware, run.inter_node, run.node_size, run.devices)
    stage = _part(cluster, run.devices // run.pp) if run.pp > 1 else cluster
    stage = _with_attention(stage, run.kernels)
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
    return Schedule(
        run.model.layers,
        run.pp,
        run.vpp,
        run.grad_accum,
        hidden=0.0 if run.framework.eager or not run.framework.overlaps else device.overlap,
        overlapped=device.overlap_off_path if run.framework.overlaps else 0.0,
        transfer_s=_transfer_s(run, cluster) if run.pp > 1 else 0.0,
        alone=run.framework.alone,
    )


def _part(cluster: Cluster, devices: int) -> Cluster:
    """A part of a cluster of nodes: one pipeline stage's devices."""
    per_node = min(cluster.devices_per_node, devices)
    shape = (per_node, devices // per_node)
    kind = cluster.text.partition(":")[0]
    return dataclasses.replace(cluster, shape=shape, text=f"{kind}:{shape[0]}x{shape[1]}")


def _transfer_s(run: Run, cluster: Cluster) -> float:
    """Seconds of sending one microbatch's activation to the next stage."""
    mesh = (run.pp, run.devices // run.pp)
    alpha, beta = collective_coefficients(cluster, "permute", mesh, (0,))
    return alpha + beta * 2.0 * run.micro * run.model.seq * run.model.hidden


def bubble_share(pp: int, microbatches: int, vpp: int = 1) -> float:
    """Idle share of a pipelined step: (pp - 1) / vpp over microbatches (Narayanan et al. 2021)."""
    return (pp - 1) / (vpp * microbatches)


def model_flops(model: Decoder, sequences: int) -> float:
    """Flop of a step: 6 N per token, 12 layers * heads * head_dim * seq for attention."""
    matrices = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices += (3 if model.gated else 2) * model.hidden * model.ffn
    per_token = 6.0 * (model.layers * matrices + model.vocab * model.hidden)
    attention = 12.0 * model.layers * model.heads * model.head_dim * model.seq
    return math.prod((sequences, model.seq, per_token + attention))
