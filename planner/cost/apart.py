"""Gradients that a plan computes outside their updates, see ``planner.step.memory.updates``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from planner.cost.pricing import Priced
from planner.cost.reshard import ReshardStep
from planner.graph.ir import Graph
from planner.space.factors import Layout
from planner.space.groups import GroupLink
from planner.spec import Sharding
from planner.step.memory.updates import gradients_in_updates


class Chosen(Protocol):
    """Interface of a chosen plan; ``planner.plan.extract.Extraction`` implements it."""

    @property
    def priced(self) -> Priced:
        """The priced mesh."""
        ...

    @property
    def choice(self) -> Sequence[int]:
        """The strategy of each group."""
        ...

    @property
    def graph(self) -> Graph:
        """The step."""
        ...

    def sharding(self, group: int, layout: Layout, port: str = "store") -> Sharding:
        """Sharding of a value with ``layout`` in ``group``."""
        ...

    def link_steps(self, link: GroupLink) -> tuple[ReshardStep, ...]:
        """The collectives of a link."""
        ...


NARROW = 2
"""Bytes of an element that a product reads (bfloat16)."""

NOTHING: frozenset[int] = frozenset()


def in_updates(plan: Chosen) -> frozenset[int]:
    """Gradients that the compiler would compute in the kernel of their update."""
    analysis = plan.priced.analysis
    if not analysis.scheduled.fused_operands:
        return NOTHING
    live = plan.graph.live_ops()
    return gradients_in_updates(
        plan.graph, analysis.groups, live, lambda link: bool(plan.link_steps(link))
    )


def kept_apart(plan: Chosen) -> tuple[int, ...]:
    """Products whose result the executor computes outside its update: neither operand, in the
    bfloat16 that products read, fits into the fast memory of a device."""
    analysis = plan.priced.analysis
    device, graph = analysis.scheduled.device, plan.graph
    if device is None or not device.fast_memory_bytes:
        return ()
    products = []
    for value in sorted(in_updates(plan)):
        op = graph.ops[graph.values[value].op]
        entry = analysis.groups.op_layouts[op.index]
        if entry is None:
            continue
        group, ins, _ = entry
        sizes = []
        for i, layout in zip(op.inputs[:2], ins, strict=False):
            known = graph.values[i]
            shards = plan.sharding(group, layout, "use").shards(plan.priced.mesh)
            sizes.append(known.nbytes * min(1.0, NARROW / known.itemsize) / shards)
        if min(sizes) > device.fast_memory_bytes:
            products.append(op.index)
    return tuple(products)
