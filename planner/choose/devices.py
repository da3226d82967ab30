"""How much of a mesh a choice puts to work: axes that do nothing, and devices' worth of work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.cost.pricing import Priced
from planner.graph.ir import Graph
from planner.space.buffer import Port, in_pool
from planner.step.analysis import Analysis
from planner.step.feeding import fed_inputs

LITTLE = 0.01
"""Share of the work and of the stored bytes below which an axis that splits them does nothing."""
BUSY = 0.9
"""Share of the devices from which on a plan uses them all."""


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
    done, kept = [0.0] * len(sizes), [0.0] * len(sizes)
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
                kept[k] += b.nbytes * (factor >= 0 and factor in b.layout)
    return tuple(
        k
        for k, size in enumerate(sizes)
        if size > 1 and done[k] <= LITTLE * all_done and kept[k] <= LITTLE * all_kept
    )


def devices_worth(priced: Priced, choice: Sequence[int]) -> float:
    """Devices that would be enough if none repeated another's work: the flop of the step on one
    device over the flop of each device under the choice."""
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
            f"{text}; batch {batch} does not divide by {devices} (pad_batch='auto' may help), and "
            "the search has no faster split"
        )
    return f"{text}; the search has no faster split"
