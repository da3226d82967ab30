"""Run the probes on the devices present, to get the samples for `costmodels.calibrate.fit`.

Every program runs on all devices at once, as a train step does, so devices that share cores, memory
or power are timed at the share that each gets. Programs run in a different order every round, so a
slow moment of the machine affects all alike; a program's time is the median of its rounds.
On an accelerator, a round runs a short program many times back to back, like the steps of a
training run: the host starts the next run while one executes. Programs that run about as long as
the host takes to start one would measure the host, so they are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from costmodels import Cluster, Device
from costmodels.calibrate import CopyCount, KernelCount, Sample
from executor.calibrate.collective_probes import NAMES, collective_probes
from executor.calibrate.probes import fused_attention, launches, probes
from executor.calibrate.resume import Rounds
from executor.run.mesh import build_mesh
from planner.errors import ModelError, RequestError
from planner.graph.trace import trace
from planner.space.groups import build_groups
from planner.spec import MeshSpec
from planner.step.analysis import analyse

WARMUP = 2
ROUND_S, MOST_RUNS = 0.02, 50
"""On an accelerator, a round repeats a program for about this long, at most this many times."""
HOSTS = 1.5
"""On an accelerator, programs below this multiple of the fastest program's time are left out."""
TOO_SHORT = "runs no longer than its host takes to start it"
COPIES_S = (1e-4, 1e-3, 1e-2)
"""Intended times of copies to the host and back, by the catalog's rate."""
Progress = Callable[[str, float], None]
"""Called with the current activity and the share of it that is done, 0 to 1."""


@dataclass(frozen=True)
class Sampled:
    """Samples, and how they were taken.

    ``noise``: the interquartile range of a program's rounds relative to their median; the median
    over programs. ``left_out``: programs that are too short, or that the devices or their compiler
    refused, each with the first line of the reason. ``follow``: whether programs ran back to back,
    so that the start of a step is not measured.
    """

    samples: tuple[Sample, ...]
    noise: float
    left_out: tuple[str, ...] = ()
    follow: bool = False


@dataclass(frozen=True)
class _Program:
    """A sample without its time, its compiled program, and arguments."""

    sample: Sample
    compiled: Any
    args: tuple[jax.Array, ...]

    def seconds(self, runs: int, clock: Callable[[], float]) -> float:
        """Seconds of one run: the mean of ``runs`` runs back to back."""
        begun = clock()
        for _ in range(runs - 1):
            self.compiled(*self.args)
        jax.block_until_ready(self.compiled(*self.args))
        return (clock() - begun) / runs


def run_probes(
    cluster: Cluster,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    *,
    rounds: int = 15,
    scale: float = 1.0,
    devices: Sequence[jax.Device] | None = None,
    progress: Progress = lambda doing, share: None,
    clock: Callable[[], float] = time.perf_counter,
    folder: Path | None = None,
) -> Sampled:
    """Compile and time the probes on the first ``cluster.num_devices`` devices.

    Args:
        cluster: its catalog constants size the programs.
        dtypes: dtypes of the products.
        rounds: timed rounds of every program, at least 2.
        scale: factor on the programs' intended times; below 1 for a quick run.
        devices: None takes ``jax.devices()``.
        progress: called with the current activity and the share that is done.
        clock: returns the time in seconds.
        folder: where finished rounds are stored and read again (`executor.calibrate.resume`).

    Raises:
        RequestError: fewer devices are present than the cluster has, or no program runs on them.
    """
    programs, left_out = _programs(_requests(cluster, dtypes, scale, devices), progress)
    if not any(not p.sample.collectives and not p.sample.copies for p in programs):
        raise RequestError(f"no program ran on these devices: {left_out[0]}; mend that first")
    names = [p.sample.name for p in programs]
    request = {"cluster": cluster.text, "device": str(jax.devices()[0].device_kind)}
    saved_rounds = Rounds(
        folder, {**request, "jax": jax.__version__, "scale": scale, "programs": names}
    )
    follow = next(iter(programs[0].args[0].devices())).platform != "cpu"
    runs = [_runs(p, clock) if follow else 1 for p in programs]
    order = random.Random(len(saved_rounds.done))
    for turn in range(len(saved_rounds.done) - WARMUP, rounds):
        progress("measuring", max(0, turn) / rounds)
        times = [0.0] * len(programs)
        for k in order.sample(range(len(programs)), len(programs)):
            times[k] = programs[k].seconds(runs[k], clock)
        if turn >= len(saved_rounds.done):
            saved_rounds.add(times)
    samples, spreads = [], []
    for program, program_times in zip(programs, zip(*saved_rounds.done, strict=True), strict=True):
        low, middle, high = statistics.quantiles(program_times, n=4)
        spreads.append((high - low) / middle)
        samples.append(dataclasses.replace(program.sample, seconds=middle))
    if follow:
        samples, short = long_enough(samples)
        left_out += short
    return Sampled(tuple(samples), statistics.median(spreads), tuple(left_out), follow)


def long_enough(samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Samples of programs that run longer than the host takes to start them, and the names of the
    other programs."""
    least = HOSTS * min(s.seconds for s in samples)
    short = [f"{s.kind} {s.name}: {TOO_SHORT}" for s in samples if s.seconds < least]
    return [s for s in samples if s.seconds >= least], short


def _runs(program: _Program, clock: Callable[[], float]) -> int:
    """Number of runs of a program in a round."""
    program.seconds(1, clock)
    return max(1, min(MOST_RUNS, round(ROUND_S / max(program.seconds(3, clock), 1e-9))))


def kernel_counts(
    function: Callable[..., Any], shapes: Sequence[Any], device: Device
) -> tuple[KernelCount, ...]:
    """The kernels on one device that the planner counts in a function of local arrays."""
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


class _Request(NamedTuple):
    """A program to compile: its sample without a time, a function that compiles it, and one that
    counts its kernels."""

    sample: Sample
    ready: Callable[[], tuple[Any, tuple[jax.Array, ...]]]
    counts: Callable[[], tuple[KernelCount, ...]] = tuple


def _requests(
    cluster: Cluster,
    dtypes: Sequence[str],
    scale: float,
    devices: Sequence[jax.Device] | None,
) -> list[_Request]:
    """The programs for the devices present."""
    device, flat = cluster.device, build_mesh(MeshSpec(NAMES[1:], (cluster.num_devices,)), devices)
    platform = flat.devices.flat[0].platform
    alone = probes(device, dtypes, scale)
    if platform == "gpu":  # a chain of reductions becomes one kernel there
        others = [p for p in alone if p.kind != "start"]
        alone = (*others, launches(128), launches(512), *fused_attention(device, scale))
    out = []
    for probe in alone:
        sample = Sample(probe.kind, probe.name, 0.0)
        counts = functools.partial(kernel_counts, probe.function, probe.shapes, device)
        ready = functools.partial(_compiled, probe.function, probe.shapes, flat)
        out.append(_Request(sample, ready, counts))
    for link in collective_probes(cluster, scale):
        sample = Sample(link.collectives[0].kind, link.name, 0.0, link.kernels, link.collectives)
        mesh = build_mesh(MeshSpec(NAMES, link.mesh_shape), devices)
        shapes = [jax.ShapeDtypeStruct((length,), "float32") for length in link.lengths]
        out.append(_Request(sample, functools.partial(_compiled, link.function, shapes, mesh)))
    for seconds in COPIES_S if platform != "cpu" and cluster.host is not None else ():
        assert cluster.host is not None
        length = round(scale * seconds * cluster.host.bytes_per_s / 4)
        for there in (True, False):
            name = f"{4 * length} B {'to' if there else 'from'} the host"
            sample = Sample("host", name, 0.0, copies=(CopyCount(4.0 * length),))
            out.append(_Request(sample, functools.partial(_copied, length, there, flat)))
    return out


def _programs(requests: Sequence[_Request], progress: Progress) -> tuple[list[_Program], list[str]]:
    """The programs, compiled and run once, and the names of those for which that failed."""
    programs: list[_Program] = []
    left_out: list[str] = []
    for k, (sample, ready, counts) in enumerate(requests):
        progress(f"compiling {sample.kind}", k / len(requests))
        try:
            if not sample.collectives and not sample.copies:
                sample = dataclasses.replace(sample, kernels=counts())
            program = _Program(sample, *ready())
            jax.block_until_ready(program.compiled(*program.args))
            programs.append(program)
        except (RuntimeError, ValueError, NotImplementedError, ModelError) as error:
            why = str(error).strip().partition("\n")[0]
            left_out.append(f"{sample.kind} {sample.name}: {why[:200]}")
    return programs, left_out


def _copied(length: int, there: bool, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[jax.Array, ...]]:
    """A compiled copy from every device to its host's memory or back, and its argument."""
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    device = jax.sharding.NamedSharding(mesh, spec)
    host = jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")
    here, to = (device, host) if there else (host, device)
    x = jax.device_put(jnp.ones(length * mesh.devices.size, "float32"), device)
    x = jax.block_until_ready(jax.device_put(x, here))
    copy = jax.jit(lambda x: jax.device_put(x, to), out_shardings=to)
    return copy.lower(x).compile(), (x,)


def _compiled(
    function: Callable[..., Any], shapes: Sequence[Any], mesh: jax.sharding.Mesh
) -> tuple[Any, tuple[jax.Array, ...]]:
    """The function, compiled to run on every device of a mesh, and random arguments."""
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    count = mesh.devices.size

    def fill() -> list[jax.Array]:
        out = []
        for k, shape in enumerate(shapes):
            full, key = (count * shape.shape[0], *shape.shape[1:]), jax.random.key(k)
            if jnp.issubdtype(shape.dtype, jnp.integer):
                out.append(jax.random.randint(key, full, 0, 256, shape.dtype))
            else:  # with this scale, products of matrices neither grow nor vanish
                scale = shape.shape[0] ** -0.5
                out.append((scale * jax.random.normal(key, full)).astype(shape.dtype))
        return out

    args = tuple(jax.jit(fill, out_shardings=[sharding] * len(shapes))())
    local = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(local).lower(*args).compile(), args
