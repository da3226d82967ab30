"""Predicted step time of a published run, from plans of its model with one and two layers.

Every layer of a decoder is alike, so all parts of a prediction are linear in the number of
layers; two plans give the slope and the rest (``tests/benchmarks`` proves it on a whole model).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from published_case import Case, Decoder, Degrees
from published_models import microbatch, update
from published_tables import Run

from costmodels import Cluster, parse_cluster
from costmodels.collectives import collective_coefficients
from planner import make_plan

HOST_LAUNCH_S = 0.0
"""Seconds of Python and dispatch for one kernel of an eager framework."""

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
    """Seconds of one microbatch on one device (``launches``: kernels). Sums and multiples.

    ``tensor_s``: collectives that the next operation waits for. ``gather_s``: of parameters and
    gradients under ZeRO-3, every microbatch. ``sync_s``: of gradients over replicas, once a step.
    """

    compute_s: float = 0.0
    tensor_s: float = 0.0
    gather_s: float = 0.0
    sync_s: float = 0.0

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
        cluster = dataclasses.replace(cluster, device=device)
    for text, bytes_per_s in NIC_BYTES_PER_S:
        if text in inter_node and cluster.network is not None:
            network = dataclasses.replace(cluster.network, bytes_per_s=0.9 * bytes_per_s)
            cluster = dataclasses.replace(cluster, network=network)
    return cluster


def _plan(built: tuple[Any, tuple[Any, ...], Mapping[str, Any]], c: Case, cluster: Cluster) -> Any:
    function, args, pins = built
    return make_plan(
        function,
        *args,
        cluster=cluster,
        mesh=c.degrees.mesh,
        mode="AUTO_PARALLEL",
        search="dynamic_programming",
        shardings=pins,
        memory=1e18,  # what the run fits into is not asked here
    )


@functools.lru_cache(maxsize=4096)
def planned(c: Case, cluster: Cluster) -> Parts:
    """Parts of one microbatch, from its plan."""
    plan = _plan(microbatch(c), c, cluster)
    parts = {"tensor_s": 0.0, "gather_s": 0.0, "sync_s": 0.0}
    for row in plan.collectives:
        axes = set(row.axes)
        if axes <= {"data", "zero"}:
            cause = "sync_s"
        elif axes <= {"data", "zero", "fsdp"} or (
            axes <= {"data", "zero", "fsdp", "context"} and row.value.count(",") < 3
        ):
            cause = "gather_s"
        else:
            cause = "tensor_s"
        parts[cause] += row.count * row.time_s
    return Parts(plan.prediction.compute_s, **parts)


@functools.lru_cache(maxsize=1024)
def planned_update(c: Case, cluster: Cluster) -> Parts:
    """Parts of the optimizer's step, from its plan."""
    prediction = _plan(update(c), c, cluster).prediction
    return Parts(compute_s=prediction.compute_s, tensor_s=prediction.communication_s)


def _with_layers(c: Case, layers: int) -> Case:
    return dataclasses.replace(c, model=dataclasses.replace(c.model, layers=layers))


def by_layers(c: Case, cluster: Cluster) -> tuple[Parts, Parts, Parts, Parts]:
    """(one layer, the rest) of a microbatch and of the optimizer's step."""
    out: list[Parts] = []
    for plan, case in ((planned, c), (planned_update, dataclasses.replace(c, batch=1))):
        one, two = (plan(_with_layers(case, n), cluster) for n in (1, 2))
        layer = two + -1.0 * one
        out += [layer, one + -1.0 * layer]
    return out[0], out[1], out[2], out[3]


def case_of(run: Run) -> Case:
    """What is traced of a run."""
    d = run.degrees
    accumulate = run.grad_accum > 1
    recompute = "full" if run.recompute.startswith("selective-every") else run.recompute
    batch = run.micro * d.data * d.zero * d.fsdp
    return Case(run.model, d, run.kernels, recompute, batch, accumulate)


def predict(run: Run) -> Step:
    """Seconds of one step of a run."""
    cluster = cluster_of(run.hardware, run.inter_node, run.node_size, run.devices)
    stage = cluster
    if run.pp > 1:  # the devices of one stage
        stage = _part(cluster, run.devices // run.pp)
    case = case_of(run)
    layer, rest, update_layer, update_rest = by_layers(case, stage)
    if run.recompute == "selective-every-2nd-layer":
        kept = by_layers(dataclasses.replace(case, recompute="none"), stage)[0]
        layer = 0.5 * (layer + kept)
    layers = run.model.layers
    device = cluster.device
    on, off = device.overlap, device.overlap_off_path
    if run.framework.eager:
        on = 0.0  # a tensor-parallel collective is waited for
    if not run.framework.overlaps:
        on = off = 0.0

    def exposed(part: Parts) -> Parts:
        gather = max((1 - off) * part.gather_s, part.gather_s - part.compute_s)
        return dataclasses.replace(part, tensor_s=(1 - on) * part.tensor_s, gather_s=gather)

    # The last stage has the head; the embedding's own work is small.
    first, last = exposed(layers / run.pp * layer), exposed(rest)
    slowest = first + last
    whole = run.grad_accum * slowest
    bubble = (run.pp - 1) / run.vpp * _busy(first)
    if run.pp > 1:
        bubble += _transfers(run, cluster)
    sync = (layers / run.pp * layer + rest).sync_s
    hidden = min(off * sync, slowest.compute_s)
    update_parts = layers / run.pp * update_layer + update_rest
    return Step(
        whole.compute_s,
        whole.tensor_s,
        whole.gather_s,
        sync - hidden,
        update_parts.compute_s + update_parts.tensor_s,
        bubble,
    )


def _busy(part: Parts) -> float:
    return part.compute_s + part.tensor_s + part.gather_s


def _part(cluster: Cluster, devices: int) -> Cluster:
    """A part of a cluster of nodes: one pipeline stage's devices."""
    per_node = min(cluster.devices_per_node, devices)
    return dataclasses.replace(
        cluster, shape=(per_node, devices // per_node), text=f"{cluster.text}/{devices}"
    )


def _transfers(run: Run, cluster: Cluster) -> float:
    """Seconds of sending activations forward and gradients back, on the critical path.

    Each microbatch's pair of transfers delays the first and the last stage once per border while
    the pipeline fills and drains.
    """
    mesh = (run.pp, run.devices // run.pp)
    alpha, beta = collective_coefficients(cluster, "permute", mesh, (0,))
    nbytes = 2.0 * run.micro * run.model.seq * run.model.hidden
    return 2.0 * (run.pp - 1 + run.grad_accum) * (alpha + beta * nbytes)


def bubble_share(pp: int, microbatches: int, vpp: int = 1) -> float:
    """Idle share of a pipelined step: (pp - 1) / vpp over microbatches (Narayanan et al. 2021)."""
    return (pp - 1) / (vpp * microbatches)


def model_flops(model: Decoder, sequences: int) -> float:
    """6 N per token and 12 layers heads head_dim seq of attention, in flop."""
    matrices = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices += (3 if model.gated else 2) * model.hidden * model.ffn
    per_token = 6.0 * (model.layers * matrices + model.vocab * model.hidden)
    attention = 12.0 * model.layers * model.heads * model.head_dim * model.seq
    return math.prod((sequences, model.seq, per_token + attention))


__all__ = ["Degrees", "Parts", "Step", "bubble_share", "model_flops", "predict"]
