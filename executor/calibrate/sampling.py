"""Run the probes on the devices present: what `costmodels.calibrate.fit` is given.

Every program runs on all devices at once, as a train step does, so devices that share cores, memory
or power are timed at the share that each gets. Programs take turns, in another order every round,
so that a slow moment of the machine hits all alike; a program's time is the median of its rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from costmodels import Cluster, Device
from costmodels.calibrate import KernelCount, Sample
from executor.calibrate.collective_probes import NAMES, collective_probes
from executor.calibrate.probes import probes
from executor.run.mesh import build_mesh
from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.spec import MeshSpec
from planner.step.analysis import analyse

WARMUP = 2
Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""


@dataclass(frozen=True)
class Sampled:
    """Samples, and ``noise``: the median over programs of how far the middle half of a program's
    rounds is spread, relative to their median."""

    samples: tuple[Sample, ...]
    noise: float


def run_probes(
    cluster: Cluster,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    *,
    rounds: int = 15,
    scale: float = 1.0,
    devices: Sequence[jax.Device] | None = None,
    progress: Progress = lambda doing, share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sampled:
    """Compile and time the probes on the first ``cluster.num_devices`` devices.

    Args:
        cluster: its catalog constants size the programs.
        dtypes: of products.
        rounds: timed runs of every program, at least 2.
        scale: times the programs' sizes in time; below 1 for a quick look.
        devices: None takes ``jax.devices()``.
        progress: told how far it is.
        clock: seconds.

    Raises:
        RequestError: fewer devices are present than the cluster has.
    """
    programs = _programs(cluster, dtypes, scale, devices, progress)
    times: list[list[float]] = [[] for _ in programs]
    order = random.Random(0)
    for turn in range(WARMUP + rounds):
        progress("measuring", turn / (WARMUP + rounds))
        for k in order.sample(range(len(programs)), len(programs)):
            _, compiled, args = programs[k]
            begun = clock()
            jax.block_until_ready(compiled(*args))
            if turn >= WARMUP:
                times[k].append(clock() - begun)
    samples, spreads = [], []
    for (made, _, _), found in zip(programs, times, strict=True):
        low, middle, high = statistics.quantiles(found, n=4)
        spreads.append((high - low) / middle)
        samples.append(Sample(made.kind, made.name, middle, made.kernels, made.collectives))
    return Sampled(tuple(samples), statistics.median(spreads))


def kernel_counts(
    function: Callable[..., Any], shapes: Sequence[Any], device: Device
) -> tuple[KernelCount, ...]:
    """What the planner counts in a function of local arrays: its kernels on one device."""
    traced = trace(function, tuple(shapes))
    rules = traced.rules
    groups = build_groups(traced.graph, rules)
    donated = [False] * len(traced.graph.inputs)
    facts = analyse(traced.graph, rules, groups, donated, device).facts
    return tuple(
        KernelCount(w.kind, w.dtype, w.flops, w.nbytes, w.result_bytes, w.kernels)
        for group in facts
        for w in group.work
    )


def _programs(
    cluster: Cluster,
    dtypes: Sequence[str],
    scale: float,
    devices: Sequence[jax.Device] | None,
    progress: Progress,
) -> list[tuple[Sample, Any, tuple[jax.Array, ...]]]:
    """Each program as a sample without its time, compiled, with its arguments."""
    count = cluster.num_devices
    out: list[tuple[Sample, Any, tuple[jax.Array, ...]]] = []
    alone, joined = probes(cluster.device, dtypes, scale), collective_probes(cluster, scale)
    flat = build_mesh(MeshSpec(NAMES[1:], (count,)), devices)
    for probe in alone:
        progress(f"compiling {probe.kind}", len(out) / (len(alone) + len(joined)))
        counts = kernel_counts(probe.function, probe.shapes, cluster.device)
        made = Sample(probe.kind, probe.name, 0.0, counts)
        out.append((made, *_compiled(probe.function, probe.shapes, flat)))
    for link in joined:
        progress("compiling collectives", len(out) / (len(alone) + len(joined)))
        kind = link.collectives[0].kind
        made = Sample(kind, link.name, 0.0, link.kernels, link.collectives)
        mesh = build_mesh(MeshSpec(NAMES, link.mesh_shape), devices)
        shapes = [jax.ShapeDtypeStruct((length,), "float32") for length in link.lengths]
        out.append((made, *_compiled(link.function, shapes, mesh)))
    return out


def _compiled(
    function: Callable[..., Any], shapes: Sequence[Any], mesh: jax.sharding.Mesh
) -> tuple[Any, tuple[jax.Array, ...]]:
    """The function on every device of a mesh, and random arguments."""
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    count = mesh.devices.size

    def fill() -> list[jax.Array]:
        out = []
        for k, shape in enumerate(shapes):
            full, key = (count * shape.shape[0], *shape.shape[1:]), jax.random.key(k)
            if jnp.issubdtype(shape.dtype, jnp.integer):
                out.append(jax.random.randint(key, full, 0, 256, shape.dtype))
            else:  # products of such matrices neither grow nor vanish
                scale = shape.shape[0] ** -0.5
                out.append((scale * jax.random.normal(key, full)).astype(shape.dtype))
        return out

    args = tuple(jax.jit(fill, out_shardings=[sharding] * len(shapes))())
    local = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(local).lower(*args).compile(), args
