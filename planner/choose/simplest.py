"""Choice of the simplest mesh that no other clearly beats, and how much of a mesh a plan uses: its
idle axes, and its devices' worth of work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.cost.pricing import Priced
from planner.graph.ir import Graph
from planner.request.parsed import Request
from planner.search.problem import Solution
from planner.space.buffer import Port, in_pool
from planner.step.analysis import Analysis, ideal_s
from planner.step.feeding import fed_inputs

LITTLE = 0.01
"""Share of the work and of the stored bytes up to which an axis that splits them counts as idle."""
BUSY = 0.9
"""Devices' worth of work, as a share of the devices, from which on a plan counts as using all."""
SAME = 1.03
"""Cost, relative to the best mesh's, up to which a simpler mesh is taken instead: a
difference that the cost model can't resolve is no reason for another mesh axis."""
LESS = 0.9
"""Cost or memory, relative to another's, up to which it counts as clearly less."""
MATTERS = 0.01
"""Share of the memory limit that another mesh must save to count as clearly better in memory."""

Tried = tuple[Priced, Solution]


def _amounts(analysis: Analysis) -> tuple[tuple[float, ...], ...]:
    """Per group and part of its work, the flop of all groups it stands for; bytes where the whole
    step computes nothing."""
    rows = [(f.work, n) for f, n in zip(analysis.facts, analysis.counts, strict=True)]
    if any(w.flops for work, _ in rows for w in work):
        return tuple(tuple(n * w.flops for w in work) for work, n in rows)
    return tuple(tuple(n * w.nbytes for w in work) for work, n in rows)


def idle_axes(priced: Priced, choice: Sequence[int]) -> tuple[int, ...]:
    """Mesh axes along which every device repeats the work and stores the same."""
    analysis, sizes = priced.analysis, priced.mesh.sizes
    done, stored = [0.0] * len(sizes), [0.0] * len(sizes)
    all_done = all_kept = 0.0
    for facts, chosen, row, amounts in zip(
        analysis.facts, priced.sets, choice, _amounts(analysis), strict=True
    ):
        use = chosen.use[row].tolist()
        for w, amount in zip(facts.work, amounts, strict=True):
            all_done += amount
            for k, factor in enumerate(use):
                split = w.one_part or any(factor in members for members in w.classes)
                done[k] += amount * split
    for b in in_pool(analysis.buffers):
        if b.port is Port.STORE:
            all_kept += b.nbytes
            for k, factor in enumerate(priced.sets[b.group].store[choice[b.group]].tolist()):
                stored[k] += b.nbytes * (factor >= 0 and factor in b.layout)
    return tuple(
        k
        for k, size in enumerate(sizes)
        if size > 1 and done[k] <= LITTLE * all_done and stored[k] <= LITTLE * all_kept
    )


def devices_worth(priced: Priced, choice: Sequence[int]) -> float:
    """Number of devices that would be enough if none repeated another's work: the flop of the step
    on one device over the flop of each device under the choice."""
    analysis, sizes = priced.analysis, priced.mesh.sizes
    whole = local = 0.0
    for facts, chosen, row, amounts in zip(
        analysis.facts, priced.sets, choice, _amounts(analysis), strict=True
    ):
        use = chosen.use[row].tolist()
        for w, amount in zip(facts.work, amounts, strict=True):
            split = frozenset().union(*w.classes)
            whole += amount * (priced.mesh.num_devices if w.one_part else 1)
            local += amount / math.prod(n for n, f in zip(sizes, use, strict=True) if f in split)
    return whole / local if local else float(priced.mesh.num_devices)


PADDING = "(pad_batch='auto' may help)"
"""Advice in the text on idle devices."""


def idle_text(
    graph: Graph, devices: int, worth: float, examples: Mapping[int, int] = MappingProxyType({})
) -> str:
    """Says that devices repeat each other's work, and why; empty where they do not. ``examples``:
    see ``planner.graph.labels.examples.example_dims``."""
    if worth >= BUSY * devices:
        return ""
    count = f"{worth:.0f}" if abs(worth - round(worth)) < 0.05 else f"{worth:.1f}"
    text = f"uses {count} of {devices} devices' worth of work"
    leading = {graph.values[v].shape[examples.get(v, 0)] for v in fed_inputs(graph)}
    if len(leading) == 1 and (batch := leading.pop()) % devices:
        return (
            f"{text}; batch {batch} does not divide by {devices} {PADDING}, and "
            "the search has no faster split"
        )
    return f"{text}; the search has no faster split"


def rank(tried: Tried) -> tuple[bool, float, int]:
    """Feasible first, then cheapest (else least memory), then the fewest mesh axes."""
    priced, solution = tried
    value = solution.cost_s if solution.feasible else solution.peak_bytes
    return not solution.feasible, value, len(priced.mesh.sizes)


def choose(tried: Sequence[Tried]) -> Tried:
    """The best mesh, or one within ``SAME`` of it that ``preferred`` selects instead."""
    best = min(tried, key=rank)
    if not best[1].feasible:
        return best
    level = [t for t in tried if t[1].feasible and t[1].cost_s <= SAME * best[1].cost_s]
    return preferred([(t, t[1].cost_s) for t in level])


def preferred(level: Sequence[tuple[Tried, float]]) -> Tried:
    """The simplest of meshes whose costs differ by less than the cost model can resolve.

    Of the meshes that use their devices and that no other beats in time and clearly in memory, this
    is the one with the fewest axes, then with the longest first axis.

    Args:
        level: meshes with a choice, and their seconds.
    """
    if len(level) == 1:
        return level[0][0]
    idle = [bool(idle_axes(t[0], t[1].choice)) for t, _ in level]
    if all(idle):
        worth = [devices_worth(t[0], t[1].choice) for t, _ in level]
        idle = [w < BUSY * max(worth) for w in worth]
    busy = [one for one, bad in zip(level, idle, strict=True) if not bad]

    def beaten(t: Tried, cost_s: float) -> bool:
        least = min(LESS * t[1].peak_bytes, t[1].peak_bytes - MATTERS * t[0].limit_bytes)
        return any(other_s <= cost_s and other[1].peak_bytes <= least for other, other_s in busy)

    return min((t for t, cost_s in busy if not beaten(t, cost_s)), key=_simplicity)


def _simplicity(tried: Tried) -> tuple[int, list[int]]:
    """Fewest axes first, then the longest first axis."""
    sizes = tried[0].mesh.sizes
    return len(sizes), [-n for n in sizes]


def untried(analysis: Analysis, tried: Sequence[Tried], request: Request) -> tuple[str, ...]:
    """A note if other meshes were left out because none of them can be much faster."""
    ideal = ideal_s(analysis, request.model, request.cluster.num_devices)
    best = min(tried, key=rank)[1].cost_s
    if best <= 0 or (len(tried) == 1 and request.mesh is not None) or best > SAME * ideal:
        return ()
    return (
        f"other meshes can't be more than {100 * (1 - ideal / best):.2g} % faster: "
        f"a perfect split of the work would take {ideal:.4g} s",
    )
