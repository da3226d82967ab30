"""Checks of the classes of equal groups: the data of a class hold for all of its members."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.debug.check.analysis import check_buffer, check_facts
from planner.debug.check.groups import check_group, check_link
from planner.debug.check.layouts import Layouts, demand, within
from planner.space.buffer import Buffer, Memory, Port, When
from planner.space.factors import Layout
from planner.step.analysis import Analysis
from planner.step.classes import Quotient


def check_classes(quotient: Quotient) -> None:
    """Demand the invariants of a quotient: its classes are equal groups, and its links, edges and
    buffers add up to those of the whole.

    Raises:
        InternalError: the group, class, link or moment at fault.
    """
    whole, part = quotient.whole, quotient.part
    check_facts(part)
    _members(quotient)
    layouts = Layouts(part.groups.groups)
    for position, group in enumerate(part.groups.groups):
        check_group(group, position, len(part.graph.ops))
    for link in part.groups.links:
        check_link(link, part.groups.groups, part.graph, layouts)
    _flows(quotient)
    end = len(quotient.moments)
    for buffer in part.buffers:
        check_buffer(buffer, part.graph, layouts, end)
    within("moments", "operation", quotient.moments, len(whole.graph.ops) + 1)
    demand(list(quotient.moments) == sorted(set(quotient.moments)), "moments", "are not in order")
    _memory(quotient)


def _members(quotient: Quotient) -> None:
    """Demand that every group has a class that counts it and has the same facts."""
    whole, part, color = quotient.whole, quotient.part, quotient.color
    count = len(whole.groups.groups)
    demand(len(color) == count, "classes", f"{len(color)} colors for {count} groups")
    within("classes", "color", color, len(part.groups.groups))
    held = Counter(color)
    for c, stated in enumerate(part.counts):
        demand(held[c] == stated, f"class {c}", f"counts {stated} groups, has {held[c]}")
    for g, c in enumerate(color):
        demand(
            whole.facts[g] == part.facts[c],
            f"class {c} {part.groups.groups[c].name}",
            f"group {g} {whole.groups.groups[g].name} has other facts",
        )


def _flows(quotient: Quotient) -> None:
    """Demand that links between two classes have the total weight of those of their members."""
    same = range(len(quotient.part.groups.groups))
    expected = _weights(quotient.whole, quotient.color)
    got = _weights(quotient.part, same)
    for key in expected.keys() | got.keys():
        a, b = key[0], key[1]
        class_weight, member_weight = got.get(key, 0.0), expected.get(key, 0.0)
        demand(
            math.isclose(class_weight, member_weight, rel_tol=1e-9),
            f"links from class {a} to class {b}",
            f"have weight {class_weight:g}, those of the members {member_weight:g}",
        )


def _weights(analysis: Analysis, color: Sequence[int]) -> dict[tuple[Any, ...], float]:
    """The weights of links, summed over links with equal ends, layouts and sizes."""
    out: dict[tuple[Any, ...], list[float]] = {}
    for x in analysis.groups.links:
        marks = (x.partial, x.a_use, x.gradient, x.off_path, x.nbytes)
        out.setdefault((color[x.a], color[x.b], x.src, x.dst, *marks), []).append(x.weight)
    return {key: math.fsum(weights) for key, weights in out.items()}


def _memory(quotient: Quotient) -> None:
    """Demand that classes hold the bytes of their members, by kind, at every quotient moment."""
    moments = np.asarray(quotient.moments, np.int64)
    class_buffers, member_buffers = quotient.part.buffers, quotient.whole.buffers
    same = range(len(quotient.part.groups.groups))
    numbers: dict[_Kind, int] = {}
    for buffers, color in ((class_buffers, same), (member_buffers, quotient.color)):
        for b in buffers:
            numbers.setdefault(_kind(b, color), len(numbers))
    got = _held(class_buffers, same, np.arange(len(moments)), numbers)
    expected = _held(member_buffers, quotient.color, moments, numbers)
    for kind, at in np.argwhere(~np.isclose(got, expected, rtol=1e-9, atol=0.5))[:1].tolist():
        color, layout, *_ = list(numbers)[kind]
        demand(
            False,
            f"class {color} at operation {quotient.moments[at]}",
            f"holds {got[kind, at]:g} bytes in layout {list(layout)}, its members "
            f"{expected[kind, at]:g}",
        )


_Kind = tuple[int, Layout, Port, When | None, Memory]
"""The class of a buffer, and the other fields that determine its bytes on a device."""


def _kind(buffer: Buffer, color: Sequence[int]) -> _Kind:
    return color[buffer.group], buffer.layout, buffer.port, buffer.when, buffer.pool


def _held(
    buffers: Sequence[Buffer],
    color: Sequence[int],
    moments: NDArray[np.int64],
    numbers: Mapping[_Kind, int],
) -> NDArray[np.float64]:
    """[kinds, moments] bytes that are alive."""
    change = np.zeros((len(numbers), len(moments) + 1))
    kinds = np.array([numbers[_kind(b, color)] for b in buffers], np.intp)
    nbytes = np.array([b.nbytes for b in buffers])
    first = np.searchsorted(moments, np.array([b.start for b in buffers], np.int64))
    last = np.searchsorted(moments, np.array([b.end for b in buffers], np.int64))
    np.add.at(change, (kinds, first), nbytes)
    np.subtract.at(change, (kinds, last), nbytes)
    held: NDArray[np.float64] = np.cumsum(change, axis=1)[:, :-1]
    return held
