"""The quotient of an Analysis: repeated structure, computed once for all meshes.

Groups form a class if they are equal in all facts that determine prices (factors, work, reductions,
pins) and, link by link, in their neighbors. Color refinement (``search.folding.colors``) computes
the classes. For any mesh and cost model, the groups of a class have the same strategies and the
same costs, so the classes are those of ``search.folding`` on the priced problem, or finer. The
quotient is an Analysis with one group per class, and a problem made from it

* has the same cost for a choice (one strategy per class) as the whole problem if every member makes
  this choice: a node's cost is multiplied by the number of its members, a link's weight by the
  number of links that it stands for;
* has the same memory peak: see ``peak_moments``;
* shares only reparametrization bounds with the whole: see ``search.folding``.

So the size of the priced and searched problem does not depend on the number of layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from planner.annotate import Pin
from planner.graph.labels.examples import example_dims
from planner.request.axes.uses import NO_USES, Uses, find_uses
from planner.request.state import TrainingState
from planner.search.folding.colors import IntArray, numbered, stable_colors
from planner.space.buffer import Buffer
from planner.space.groups import GroupLink, Groups
from planner.step.analysis import Analysis
from planner.step.peak_moments import worst_moments

IDENTITY: dict[type, frozenset[str]] = {
    GroupLink: frozenset({"a", "b", "value", "op", "operand", "sum"}),
    Pin: frozenset({"value", "origin", "rule"}),
}
"""Fields that identify a link or a pin. All other fields are facts: links and pins that differ in
one of them are not folded."""


def facts_of(kind: type) -> Callable[[Any], Hashable]:
    """The facts of a ``GroupLink`` or a ``Pin``: all fields except its identity."""
    names = [f.name for f in dataclasses.fields(kind) if f.name not in IDENTITY[kind]]
    return attrgetter(*names)


_link, _pin = map(facts_of, (GroupLink, Pin))


@dataclass(frozen=True, eq=False)
class Quotient:
    """``part`` has one group per class of ``whole``; ``color[g]`` is the class of group g.

    ``moments[t]`` is the operation index of moment t of the part's buffers; ``state`` holds the
    arrays of the step's state, if the request constrains them; ``uses`` holds where the whole reads
    pinned arguments.
    """

    whole: Analysis
    part: Analysis
    color: tuple[int, ...]
    moments: tuple[int, ...]
    state: TrainingState | None = None
    uses: Uses = NO_USES

    @cached_property
    def example_dims(self) -> Mapping[int, int]:
        """See ``planner.graph.labels.examples``."""
        return example_dims(self.whole.graph, self.whole.rules)

    def unfold_choice(self, choice: Sequence[int]) -> tuple[int, ...]:
        """One strategy per group, from one per class."""
        return tuple(choice[c] for c in self.color)

    def apart(self, choice: Sequence[int]) -> int:
        """The number of classes whose equal groups have different strategies in this choice."""
        taken: dict[int, set[int]] = {}
        for c, strategy in zip(self.color, choice, strict=True):
            taken.setdefault(c, set()).add(strategy)
        return sum(len(strategies) > 1 for strategies in taken.values())

    def moment(self, at: int) -> int:
        """The operation index of a moment of the part."""
        return self.moments[at] if self.moments else 0


def fold_analysis(
    analysis: Analysis,
    pins: Sequence[Pin],
    *,
    inputs_differ: bool,
    state: TrainingState | None = None,
) -> Quotient:
    """Fold equal groups.

    Args:
        analysis: the step.
        pins: groups whose values are pinned differently are different.
        inputs_differ: whether the request treats some inputs differently: all modes except
            AUTO_PARALLEL do, and so do masks along an axis (``Request.tensor``, ``sequence``).
        state: the arrays of the state, if the request constrains them.
    """
    links = analysis.groups.links
    loops: dict[int, list[Hashable]] = {}
    bundled: dict[int, list[int]] = {}
    kinds = [_link_kind(x) for x in links]
    for k, (link, bundle) in enumerate(zip(links, analysis.bundles, strict=True)):
        if link.a == link.b:
            loops.setdefault(link.a, []).append(kinds[k])
        else:
            bundled.setdefault(bundle, []).append(k)
    pinned = _pinned(analysis, pins, inputs_differ, state)
    first = numbered(
        (
            analysis.facts[g.index],
            tuple(loops.get(g.index, ())),
            pinned.get(g.index, frozenset()),
        )
        for g in analysis.groups.groups
    )
    colors = first.tolist()
    edges = [_edge(links, kinds, members, colors) for members in bundled.values()]
    left, right = (np.array([e[k] for e in edges], np.int64) for k in (0, 1))
    edge_kinds = numbered(e[2] for e in edges)
    color = stable_colors(first, left, right, edge_kinds)
    quotient = _quotient(analysis, color.tolist(), list(bundled.values()), left, right, edge_kinds)
    uses = find_uses(pins, analysis.graph, analysis.groups)
    return dataclasses.replace(quotient, state=state, uses=uses)


def _link_kind(link: GroupLink) -> tuple[Hashable, ...]:
    """All properties of a link that determine its price, besides the groups at its ends."""
    return _link(link), link.off_path


def _edge(
    links: Sequence[GroupLink],
    kinds: Sequence[tuple[Hashable, ...]],
    members: Sequence[int],
    first: Sequence[int],
) -> tuple[int, int, Hashable]:
    """Ends and kind of parallel links; the end with the smaller first color is on the left."""
    a, b = links[members[0]].a, links[members[0]].b
    if (first[b], b) < (first[a], a):
        a, b = b, a
    if len(members) == 1:
        return a, b, (links[members[0]].a == a, kinds[members[0]])
    return a, b, frozenset(_tally((links[k].a == a, kinds[k]) for k in members).items())


def _tally(items: Iterable[Hashable]) -> dict[Hashable, int]:
    out: dict[Hashable, int] = {}
    for item in items:
        out[item] = out.get(item, 0) + 1
    return out


def _pinned(
    analysis: Analysis, pins: Sequence[Pin], inputs_differ: bool, state: TrainingState | None
) -> dict[int, frozenset[Hashable]]:
    """Per group, the properties of its values that pins and modes depend on."""
    graph, home = analysis.graph, analysis.groups.home
    marks: list[tuple[int, Hashable]] = [(pin.value, _pin(pin)) for pin in pins]
    if state is not None:
        marks += [(v, ("state", state.label(v))) for v in state.arrays]
    if inputs_differ:
        taken = {pin.value for pin in pins}
        marks += [
            (i, ("input", graph.values[i].carried, graph.values[i].dtype))
            for i in graph.inputs
            if i not in taken
        ]
    out: dict[int, set[Hashable]] = {}
    for value, mark in marks:
        place = home[value]
        if place is not None:
            v = graph.values[value]
            out.setdefault(place[0], set()).add((place[1], v.shape, v.nbytes, mark))
    return {group: frozenset(facts) for group, facts in out.items()}


def _quotient(
    analysis: Analysis,
    color: list[int],
    bundled: Sequence[list[int]],
    left: IntArray,
    right: IntArray,
    kinds: IntArray,
) -> Quotient:
    groups, links = analysis.groups, analysis.groups.links
    counts = np.bincount(np.asarray(color, np.int64), minlength=0).tolist()
    one = np.unique(np.asarray(color, np.int64), return_index=True)[1].tolist()
    at = np.asarray(color, np.int64)
    classes = np.stack([at[left], at[right], kinds])
    _, where, times = np.unique(classes, axis=1, return_index=True, return_counts=True)
    class_links: list[GroupLink] = []
    bundles: list[int] = []

    def add(link: GroupLink, bundle: int, times: int) -> None:
        class_links.append(
            dataclasses.replace(link, a=color[link.a], b=color[link.b], weight=link.weight * times)
        )
        bundles.append(bundle)

    for bundle, (k, n) in enumerate(sorted(zip(where.tolist(), times.tolist(), strict=True))):
        for member in bundled[k]:
            add(links[member], bundle, n)
    first = set(one)
    for link in links:
        if link.a == link.b and link.a in first:
            add(link, -1, counts[color[link.a]])
    buffers, moments = _buffers(analysis, color)
    part = dataclasses.replace(
        analysis,
        groups=Groups(
            tuple(dataclasses.replace(groups.groups[g], index=c) for c, g in enumerate(one)),
            tuple(class_links),
            tuple(
                None if h is None or h[0] not in first else (color[h[0]], h[1]) for h in groups.home
            ),
            (),
            (),
            (),
        ),
        facts=tuple(analysis.facts[g] for g in one),
        buffers=buffers,
        counts=tuple(counts),
        bundles=tuple(bundles),
    )
    return Quotient(analysis, part, tuple(color), moments)


def _buffers(
    analysis: Analysis, color: Sequence[int]
) -> tuple[tuple[Buffer, ...], tuple[int, ...]]:
    """The buffers of the classes at the moments that can be the peak of a pool."""
    known: dict[tuple[Any, ...], int] = {}
    first: list[Buffer] = []
    kinds, starts, ends = [], [], []
    for b in analysis.buffers:
        key = (color[b.group], b.nbytes, b.layout, b.port, b.when, b.pool, b.tiled)
        kind = known.setdefault(key, len(known))
        if kind == len(first):
            first.append(b)
        kinds.append(kind)
        starts.append(b.start)
        ends.append(b.end)
    worst = worst_moments(kinds, starts, ends)
    buffers = []
    for kind, begin, stop, count in worst.runs:
        b = first[kind]
        group, nbytes = color[b.group], count * b.nbytes
        buffers.append(
            dataclasses.replace(b, group=group, start=begin, end=stop, nbytes=nbytes, value=-1)
        )
    return tuple(buffers), tuple(worst.kept.tolist())
