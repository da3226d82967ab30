"""More devices, or another mode: planned with the fast search in a few seconds at most."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

from costmodels import AnalyticCostModel, Cluster
from planner.annotate import Pin
from planner.choose.floors import perfect_floor
from planner.choose.meshes import lead_meshes, search_meshes
from planner.choose.simplest import Tried, choose
from planner.errors import PinError
from planner.report.shortage import Relief
from planner.request.parsed import Request
from planner.search.registry import FAST
from planner.space.decisions.host_memory import OFFLOAD, Offload
from planner.step.analysis import Analysis
from planner.step.classes import Quotient

AT_LEAST = "at least, were every array split over all devices"
TRIAL_S = 3.0
"""Seconds for one search of a trial."""
DEVICES_S = 10.0
"""Seconds after which no larger cluster is tried."""
MOST_DEVICES = 1 << 14


def tried_out(quotient: Quotient, pins: Sequence[Pin], request: Request) -> Tried | None:
    """The best plan of the fast search, or None if the pins can't be honored."""
    fast = dataclasses.replace(request, search=FAST, time_limit_s=TRIAL_S)
    try:
        led = lead_meshes(quotient, pins, fast, quick=True)
        return choose(search_meshes(quotient, pins, fast, led))
    except PinError:
        return None


def relief(what: str, analysis: Analysis, tried: Tried, note: str = "") -> Relief:
    """A plan of a trial, as a relief."""
    priced, solution = tried
    note = f"mesh {priced.mesh}" + (f"; {note}" if note else "")
    peak = solution.peak_bytes + analysis.scalar_bytes
    return Relief(what, peak, solution.cost_s, solution.feasible, note)


def more_devices(quotient: Quotient, pins: Sequence[Pin], request: Request) -> Relief | None:
    """The smallest power-of-two multiple of the nodes on which a plan fits."""
    if request.mode == "STAND_ALONE":
        return None
    deadline = time.monotonic() + DEVICES_S
    times, last = 2, None
    while (cluster := grown(request.cluster, times)).num_devices <= MOST_DEVICES:
        times *= 2
        if perfect_floor(quotient.whole, cluster.num_devices).peak_bytes > request.limit_bytes:
            continue  # no plan can fit
        wider = dataclasses.replace(
            request, cluster=cluster, model=AnalyticCostModel(cluster), mesh=None
        )
        tried = tried_out(quotient, pins, wider)
        if tried is not None:
            last = relief(f"{cluster.num_devices} devices, {cluster.text}", quotient.whole, tried)
            if last.fits:
                return last
        if time.monotonic() >= deadline:
            break
    return last


def other_mode(quotient: Quotient, pins: Sequence[Pin], request: Request) -> Relief | None:
    """AUTO_PARALLEL on the same devices, if another mode (not STAND_ALONE) was requested."""
    if request.mode in ("AUTO_PARALLEL", "STAND_ALONE"):
        return None
    tried = tried_out(quotient, pins, dataclasses.replace(request, mode="AUTO_PARALLEL"))
    return None if tried is None else relief("mode AUTO_PARALLEL", quotient.whole, tried)


def host_memory(
    offloaded: Callable[[Request], Quotient], pins: Sequence[Pin], request: Request
) -> Relief | None:
    """State in host memory, as the search chooses, unless that was requested."""
    if request.decided[OFFLOAD].auto:
        return None
    auto = dataclasses.replace(request, decided={**request.decided, OFFLOAD: Offload(auto=True)})
    quotient = offloaded(auto)
    if not any(name == OFFLOAD for g in quotient.part.groups.groups for name, _ in g.decisions):
        return None
    what = 'offload="auto" (state in host memory)'
    least = perfect_floor(quotient.whole, request.cluster.num_devices).peak_bytes
    if least > request.limit_bytes:
        return Relief(what, least, math.inf, False, AT_LEAST)
    tried = tried_out(quotient, pins, auto)
    return None if tried is None else relief(what, quotient.whole, tried)


def grown(cluster: Cluster, times: int) -> Cluster:
    """The cluster with ``times`` times its nodes or slices (a single slice: its shortest sides
    doubled)."""
    shape, slices = list(cluster.shape), cluster.slices
    if cluster.kind == "hierarchy":
        shape[1] *= times
    elif slices > 1:
        slices *= times
    else:
        for _ in range(times.bit_length() - 1):
            shape[shape.index(min(shape))] *= 2
    name = cluster.text if cluster.text.endswith(".toml") else cluster.text.partition(":")[0]
    text = f"{name}:{'x'.join(map(str, shape))}" + (f"+{slices}" if slices > 1 else "")
    return dataclasses.replace(cluster, shape=tuple(shape), slices=slices, text=text)
