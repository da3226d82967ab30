"""Causes of a sharding: divisibility, operations that need a dimension whole, pins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from planner.annotate import Pin
from planner.errors import PinError
from planner.explain.model import Dimension
from planner.explain.setting import op_text
from planner.plan.extract import Extraction
from planner.planning import Planned
from planner.request.pins import pin_masks
from planner.request.state import StateRequest, state_masks
from planner.space.strategies import MAX_STRATEGIES, strategies_of, usable_factors

NAMED = 3
"""Maximum number of operations to name as a reason."""


def dimensions(plan: Extraction, value: int) -> tuple[Dimension, ...]:
    """Every dimension of a value, and the mesh axes that may split it."""
    analysis, mesh = plan.priced.analysis, plan.priced.mesh
    home = analysis.groups.home[value]
    shape = plan.graph.values[value].shape
    if home is None:
        return tuple(Dimension(n, (), (), "its sharding is not decided") for n in shape)
    index, layout = home
    group = analysis.groups.groups[index]
    usable = usable_factors(group.sizes, group.shardable, mesh.sizes, group.kind)
    spec = plan.value_sharding(value)
    out = []
    for dim, (size, factor) in enumerate(zip(shape, layout, strict=True)):
        dividing = tuple(
            name
            for name, n in zip(mesh.names, mesh.sizes, strict=True)
            if n > 1 and size % n == 0 and size > 1
        )
        parts = [n for n in mesh.sizes if n > 1]
        why = ""
        if size <= 1:
            why = f"its size is {size}"
        elif factor < 0:
            dividing, why = (), "no operation says how it may be split"
        elif not group.shardable[factor]:
            blamed = _blamed(plan, index, factor)
            dividing, why = (), "needed whole by " + (blamed or "an operation that shares it")
        elif len(dividing) < len(parts):
            odd = [f"{name}={n}" for name, n in _axes(plan) if size % n]
            why = f"{size} is not divisible by {' or '.join(odd)}"
        elif factor not in usable:
            why = (
                f"left out as one of the smallest: more than {2 * MAX_STRATEGIES} ways to split "
                "otherwise"
            )
            dividing = ()
        if dividing and (readers := _whole_readers(plan, value, dim)):
            why = f"{why}; read whole by {readers}" if why else f"read whole by {readers}"
        out.append(Dimension(size, spec.dims[dim], dividing, why))
    return tuple(out)


def _axes(plan: Extraction) -> list[tuple[str, int]]:
    mesh = plan.priced.mesh
    return [(name, n) for name, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1]


def _named(texts: Sequence[str]) -> str:
    """The first few of some texts, each once."""
    once = list(dict.fromkeys(texts))
    more = f" and {len(once) - NAMED} more" if len(once) > NAMED else ""
    return ", ".join(once[:NAMED]) + more


def _blamed(plan: Extraction, group: int, factor: int) -> str:
    """The operations of a group whose rules do not allow a factor to be split."""
    analysis = plan.priced.analysis
    texts = []
    for op in analysis.groups.groups[group].ops:
        entry, rule = analysis.groups.op_layouts[op], analysis.rules[op]
        if entry is None:
            continue
        minor = {f for values in (rule.operands, rule.results) for v in values for d in v
                 for f in d[1:]}  # fmt: skip
        whole = minor | rule.replicated
        pairs = zip((*rule.operands, *rule.results), (*entry[1], *entry[2]), strict=False)
        if any(
            at == factor and dim and dim[0] in whole
            for dims, layout in pairs
            for dim, at in zip(dims, layout, strict=False)
        ):
            texts.append(op_text(plan, op))
    return _named(texts)


def _whole_readers(plan: Extraction, value: int, dim: int) -> str:
    """Operations that need this dimension of a value whole."""
    groups = plan.priced.analysis.groups
    texts = []
    for link in groups.links:
        if link.value != value or link.op < 0 or link.operand < 0:
            continue
        reader, factor = groups.groups[link.b], link.dst[dim]
        if reader.kind == "anchor" and (factor < 0 or not reader.shardable[factor]):
            texts.append(op_text(plan, link.op))
    return _named(texts)


def possible(plan: Extraction, group: int) -> int:
    """Number of strategies that a group has before pins and modes remove any."""
    g = plan.priced.analysis.groups.groups[group]
    sizes = plan.priced.mesh.sizes
    return strategies_of(g, sizes).count


def pinned_by(plan: Extraction, pins: Sequence[Pin], group: int) -> tuple[str, ...]:
    """The origins of the pins that remove strategies from a group."""
    analysis, mesh = plan.priced.analysis, plan.priced.mesh
    out = []
    for pin in pins:
        home = analysis.groups.home[pin.value]
        if home is None or home[0] != group:
            continue
        try:
            mask = pin_masks((pin,), analysis.graph, analysis.groups, mesh).get(group)
        except PinError:
            continue  # a preference of the mode that does not hold
        if mask is not None and not np.all(mask):
            out.append(pin.origin)
    return tuple(dict.fromkeys(out))


def asked_of_state(planned: Planned, group: int) -> tuple[str, ...]:
    """The requests about the training state that remove strategies from a group."""
    analysis, mesh = planned.extraction.priced.analysis, planned.extraction.priced.mesh
    request, state = planned.request.state, planned.quotient.state
    if state is None:
        return ()
    parts = {
        f"zero={request.zero}": StateRequest(zero=request.zero),
        f"whole_below={request.whole_below:g}": StateRequest(whole_below=request.whole_below),
        f"never_fsdp={list(request.never_fsdp)}": StateRequest(never_fsdp=request.never_fsdp),
    }
    pinned = frozenset(pin.value for pin in planned.pins)
    out = []
    for text, part in parts.items():
        known = state if part.never_fsdp else dataclasses.replace(state, bound=frozenset())
        masks = state_masks(known, part, pinned, analysis.graph, analysis.groups, mesh, {})
        if group in masks and not masks[group].all():
            out.append(text)
    return tuple(out)
