"""Predicted step time of a published run: one call of the planner, and what an eager host adds.

The run's model, mesh, shardings, microbatches, stages and recomputation are fixed; nothing is left
to the search but where small arrays lie. The step time is the plan's. A framework that launches
every kernel from Python adds the seconds that the device waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter

import jax
import jax.numpy as jnp
from published_case import Case, Decoder, Degrees, is_leaf, parameters
from published_clusters import cluster_of, with_stack
from published_models import gradients, train_step
from published_tables import Run

from costmodels import Cluster, Kernel
from costmodels.collectives import collective_coefficients
from costmodels.schedule import Overlap
from planner.cost.op_seconds import op_seconds
from planner.graph.ir import Phase
from planner.graph.trace import trace
from planner.planning import plan_step
from planner.planning.row import Planned
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
BACKWARD = 2 / 3
"""Share of a microbatch's time that is its backward pass: two products for one."""
UNALIGNED = 1.9
"""How much longer a 16-bit product takes in cuBLAS with a dimension that is no multiple of 8.
nanoGPT's note on its vocabulary: 50304 for 50257 words made GPT-2 124M a quarter faster on A100;
the head has 0.27 of its flop, so 1 + 0.25 / 0.27. XLA pads products itself."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A predicted step. ``plan_s``: the plan's seconds; ``host_s``: the device waits for an eager
    host; ``odd_s``: products whose sizes the library is slow at; ``hidden_s``: of reductions of
    gradients, under the backward pass of the last microbatch; ``starts_s``: of a broadcast from
    every device. ``peak_bytes`` of a device."""

    plan_s: float
    host_s: float = 0.0
    odd_s: float = 0.0
    hidden_s: float = 0.0
    starts_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    peak_bytes: float = 0.0
    cpu_s: float = 0.0
    """What the prediction took."""

    @property
    def total_s(self) -> float:
        """What a clock would show."""
        return self.plan_s + self.host_s + self.odd_s + self.starts_s - self.hidden_s


def case_of(run: Run) -> Case:
    """What is traced of a run."""
    recompute = "full" if run.recompute.startswith("selective-every") else run.recompute
    unrolled = run.vpp > 1
    return Case(run.model, run.degrees, run.kernels, recompute, run.sequences, unrolled)


def stack_cluster(run: Run) -> Cluster:
    """The run's machine as its software uses it."""
    cluster = cluster_of(run.hardware, run.inter_node, run.node_size, run.devices)
    return with_stack(cluster, run.kernels, run.framework)


def planned(run: Run, case: Case | None = None) -> Planned:
    """The plan of a run's step.

    Raises:
        MeshwrightError: it can't be planned as it ran.
    """
    c = case or case_of(run)
    step, args, pins = train_step(c)
    mesh = dict(c.degrees.mesh)
    how: dict[str, object] = {}
    if run.pp > 1:
        mesh = {"stage": run.pp, **mesh}
        name = f"interleaved-{run.vpp}" if run.vpp > 1 else "1f1b"
        how = {"stages": run.pp, "schedule": name}
    if run.grad_accum > 1:  # of replicas, gradients are reduced once a step
        how["replicas"] = c.degrees.data * c.degrees.zero
    return plan_step(
        step,
        *args,
        cluster=stack_cluster(run),
        mesh=mesh,
        mode="AUTO_PARALLEL",
        shardings=pins,
        memory=1e15,  # what the run fits into is not asked here
        microbatches=run.grad_accum,
        remat="none",  # said in the step
        chunks=1,
        **how,
    )


@functools.lru_cache(maxsize=256)
def kernels_of(c: Case) -> tuple[tuple[Kernel, float], ...]:
    """How many kernels of each kind the gradients of one sequence on one device launch."""
    alone = dataclasses.replace(c, degrees=Degrees(), batch=1, unrolled=True)
    traced = trace(*gradients(alone))
    rules = traced.rules
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


def with_layers(c: Case, layers: int) -> Case:
    return dataclasses.replace(c, model=dataclasses.replace(c.model, layers=layers))


def launch_s(c: Case) -> tuple[float, float]:
    """Host seconds of the kernels of one layer's gradients, and of all around the layers."""
    one, none = (
        sum(HOST_S[kind] * count for kind, count in kernels_of(with_layers(c, n))) for n in (1, 0)
    )
    return one - none, none


def late_s(run: Run, found: Planned) -> float:
    """Seconds of a step that its devices wait for an eager host.

    The host runs ahead of the device within a microbatch; where layers were timed alone, within a
    layer only.
    """
    if run.kernels.fused:
        return 0.0
    c, plan = case_of(run), found.plan
    layers, parts = c.model.layers / run.pp, run.grad_accum
    inner = [r for r in plan.collectives if {"model", "context"} & set(r.axes)]
    calls = sum(r.count for r in inner) / (c.model.layers * parts)
    layer_s, rest_s = launch_s(c)
    layer_s += HOST_CALL_S * calls
    device_layer_s, device_rest_s = device_s(run, found)
    if run.framework.alone:
        wait_s = layers * max(0.0, layer_s - device_layer_s) + max(0.0, rest_s - device_rest_s)
    else:
        wait_s = layers * (layer_s - device_layer_s) + rest_s - device_rest_s
    return max(0.0, wait_s) * (parts + (run.pp - 1) / run.vpp)


def device_s(run: Run, found: Planned) -> tuple[float, float]:
    """Seconds of a device for one layer of one microbatch, and for a microbatch's other work."""
    extraction = found.extraction
    graph, overlap = extraction.graph, Overlap.of(extraction.priced.model)
    spent = list(op_seconds(extraction))
    for s in extraction.sent():
        if s.op >= 0:
            spent[s.op] += overlap.exposed(s.place) * s.time_s
    deep, parts = (1 if run.grad_accum == 1 else 2), run.grad_accum
    inside = around = 0.0
    for op, seconds in zip(graph.ops, spent, strict=True):
        depth, region = 0, graph.regions[op.region]
        while region.parent >= 0:
            depth, region = depth + 1, graph.regions[region.parent]
        if depth >= deep:
            inside += seconds
        elif depth == deep - 1 and op.phase is not Phase.UPDATE:
            around += seconds
    return inside / run.model.layers / parts, around / parts


def hidden_s(run: Run, found: Planned) -> float:
    """Seconds of reducing gradients that the plan has and an eager framework has not.

    A plan with microbatches adds gradients up in float32 and reduces them behind the loop. A
    framework reduces them in ``run.kernels.reduced``, and those that overlap start under the
    backward pass of the last microbatch.
    """
    if not run.framework.eager or run.grad_accum == 1:
        return 0.0
    extraction = found.extraction
    graph, device = extraction.graph, extraction.priced.model.cluster.device
    # an all-reduce between replicas may be planned as a reduce-scatter and an all-gather
    replicas = {k for k, name in enumerate(extraction.priced.mesh.names) if name == "data"}
    behind_s = sum(
        s.time_s
        for s in extraction.sent()
        if s.op >= 0
        and graph.regions[graph.ops[s.op].region].parent < 0
        and (s.step.kind != "all_gather" or replicas.intersection(s.step.axes))
    )
    fewer_s = behind_s * (1.0 - jnp.dtype(run.kernels.reduced).itemsize / 4.0)
    inside_s, around_s = device_s(run, found)
    backward_s = BACKWARD * (run.model.layers / run.pp * inside_s + around_s)
    share = device.overlap_behind if run.framework.overlaps else 0.0
    return fewer_s + min(share * (behind_s - fewer_s), backward_s)


def starts_s(run: Run) -> float:
    """Seconds until the broadcasts of ZeRO-1 have gone around the ring of all devices: one from
    each device that has parameters of its own, whole tensors. Their bytes are the plan's."""
    zero = run.degrees.zero
    if not run.framework.broadcasts or zero == 1:
        return 0.0
    names, sizes = zip(*run.degrees.mesh.items(), strict=True)
    axes = (names.index("zero"),)
    start, _ = collective_coefficients(stack_cluster(run), "all_gather", sizes, axes)
    tensors = len(
        jax.tree.leaves(
            parameters(dataclasses.replace(case_of(run), unrolled=True)), is_leaf=is_leaf
        )
    )
    return min(zero, tensors) * start


def predict(run: Run) -> Step:
    """Seconds of one step of a run."""
    begun = time.process_time()
    found = planned(run)
    plan = found.plan
    step_s = plan.prediction.step_s
    if run.recompute == "selective-every-2nd-layer":
        kept = dataclasses.replace(case_of(run), recompute="none")
        step_s = 0.5 * (step_s + planned(run, kept).plan.prediction.step_s)
    p = plan.prediction
    return Step(
        step_s,
        late_s(run, found),
        unaligned_s(run),
        hidden_s(run, found),
        starts_s(run),
        p.compute_s,
        p.communication_s,
        p.peak_bytes,
        time.process_time() - begun,
    )


def unaligned_s(run: Run) -> float:
    """Seconds that the three products of a head lose whose local vocabulary is no multiple of 8."""
    d, m = run.degrees, run.model
    words = m.vocab / d.model
    if run.kernels.fused or words % 8 == 0:
        return 0.0
    split = d.data * d.zero * d.fsdp * d.context
    flops = 6.0 * run.sequences / split * m.seq * words * m.hidden
    device = stack_cluster(run).device
    rate = device.matmul_flops_per_s("bfloat16") * device.matmul_efficiency
    return (UNALIGNED - 1.0) * flops / rate * (1 + (run.pp - 1) / run.vpp / run.grad_accum)


def model_flops(model: Decoder, sequences: int) -> float:
    """Flop of a step: 6 N per token, 12 layers * heads * head_dim * seq for attention."""
    matrices = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices += (3 if model.gated else 2) * model.hidden * model.ffn
    per_token = 6.0 * (model.layers * matrices + model.vocab * model.hidden)
    attention = 12.0 * model.layers * model.heads * model.head_dim * model.seq
    return sequences * model.seq * (per_token + attention)
