"""How every value of a step depends on the examples of a batch: the proof that it may be cut.

=====  ==========================================================================================
FREE   independent of the examples, or from the batch alone (the sum of a mask): computed once
MAP    its example i depends on example i and on FREE values: computed per microbatch
SUM    a sum over examples of such terms: added up over microbatches
POST   any function of sums: computed once, when they are complete
=====  ==========================================================================================

A value with a dimension of examples that reads a SUM or POST couples them (batch statistics), and
so does an operation that mixes examples other than by a sum. Factor rules map the dimensions of
operands to those of results.

Where couplings are allowed (``planner.microbatch.statistics.own``), each is recorded, and its
results count as MAP if they have a dimension of examples, else as SUM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner import compat
from planner.graph.jaxpr.walk import (
    BARRIER,
    LOOPS,
    branches_of,
    called,
    is_fused,
    loop_of,
    stays_whole,
)
from planner.microbatch.algebra import (
    FREE,
    GAMMA,
    MAP,
    POST,
    SUM,
    Class,
    algebra,
    are_zeros,
    carried_class,
    draws,
    example_factor,
    is_zero,
)
from planner.microbatch.bodies.figures import Figures
from planner.microbatch.errors import CoupledError
from planner.microbatch.pairs import Node, Number, Pair, equations, equations_in, pair
from planner.microbatch.refusals import by_number, coupled, of_some, refused
from planner.rules.factor import FactorRule
from planner.rules.key import EqnKey
from planner.rules.registry import rules_for

ADDS = frozenset(
    "reduce_sum dot_general conv_general_dilated scatter-add scatter-sub add_any psum".split()
)
"""Operations that reduce by adding, or by adding what is negated."""
PARTS = frozenset("reshape slice dynamic_slice split gather reduce_window_sum".split())
"""Operations that can join neighboring examples, or take every other one."""
MOST_READ = 1 << 16
"""Maximum number of elements of a constant to inspect."""
ZEROS = frozenset("broadcast_in_dim copy reshape transpose squeeze convert_element_type".split())


@dataclass(eq=False)
class Classes:
    """The classes of the values of a pair.

    Attributes:
        of: the class of each value.
        drawn: values that are computed for the whole batch and sliced.
        alike: values that are the same for all examples, and computed again in each microbatch.
        alone: values that depend on the batch and constants alone, not on state; those that are
            FREE are computed from the whole batch.
        inside: equations (of the whole trace, by ``id``) in loops and rematerialized blocks that
            compute a value for the whole batch, which a microbatch slices there.
        coupled: lines of the user's code where examples depend on each other, if that is allowed.
        zeros: values that are zeros.
        figures: values that depend on all examples at once, with the error of the operation that
            mixes them; computed after the loop.
    """

    of: dict[int, Class]
    drawn: set[int]
    alone: set[int]
    alike: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    coupled: tuple[str, ...] = ()
    zeros: set[int] = field(default_factory=set)
    figures: Mapping[int, CoupledError] = field(default_factory=dict)


def classify(
    step: Pair, batch: Sequence[int], whole: Any, *, exact: bool = True, figures: bool = False
) -> Classes:
    """Classes of all values of a step.

    Args:
        step: the step, for the whole batch and a microbatch.
        batch: the inputs that hold examples, by position.
        whole: the jaxpr for the whole batch.
        exact: whether examples must not be coupled.
        figures: whether results that train nothing may be computed after the loop, from examples
            (``planner.microbatch.bodies.figures``).

    Raises:
        CoupledError: they are; the text says by which operation, where, and what would help.
        NotExactError: an operation can't be computed for a microbatch alone.
    """
    keys = list(equations(whole))
    rules = rules_for([EqnKey.of(eqn) for eqn in keys])
    examples, fewer = step.counts(step.inputs[batch[0]])
    known = {id(eqn): rule for eqn, rule in zip(keys, rules, strict=True)}
    added = [n.whole for n in step.nodes if id(n.whole) not in known]
    keyed = rules_for([EqnKey.of(eqn) for eqn in added])
    known.update((id(eqn), rule) for eqn, rule in zip(added, keyed, strict=True))
    classifier = _Classifier(known, examples, exact, examples // fewer)
    if figures:
        classifier.figures = Figures.of(step, batch)
    ins = [MAP if k in set(batch) else FREE for k in range(len(step.inputs))]
    alone = [k in set(batch) for k in range(len(step.inputs))]
    out = classifier.walk(step, ins, alone, [False] * len(ins))
    out = replace(out, inside=classifier.draws, coupled=tuple(dict.fromkeys(classifier.coupled)))
    return replace(out, figures=classifier.figures.errors) if classifier.figures else out


class _Classifier:
    """``classify`` in progress."""

    def __init__(
        self, rules: Mapping[int, FactorRule], examples: int, exact: bool, parts: int
    ) -> None:
        self.rules, self.examples, self.exact, self.parts = rules, examples, exact, parts
        self.inside = 0  # how many loops and rematerialized blocks are around
        self.draws: set[int] = set()
        self.coupled: list[str] = []
        self.figures: Figures | None = None

    def walk(
        self, pair: Pair, ins: Sequence[Class], alone: Sequence[bool], zero: Sequence[bool]
    ) -> Classes:
        out = Classes(dict(zip(pair.inputs, ins, strict=True)), set(), set())
        places: set[int] = set()  # values made from positions and constants alone
        fed = {v for v, c in zip(pair.inputs, ins, strict=True) if c is MAP}
        out.alone.update(v for v, x in zip(pair.inputs, alone, strict=True) if x)
        zeros = {v for v, x in zip(pair.inputs, zero, strict=True) if x}
        for value, content in pair.consts.items():
            out.of[value] = FREE
            out.alone.add(value)
            places.add(value)
            if np.size(content) <= MOST_READ and are_zeros(content):
                zeros.add(value)
        for node, live in zip(pair.nodes, pair.live(), strict=True):
            if not live:
                out.of.update(dict.fromkeys(node.outs, FREE))
                continue
            is_alone = all(v in out.alone for v in node.values)
            placed = places.issuperset(node.values) and not node.whole.effects
            placed = placed and not draws(node.name)
            if placed:
                places.update(node.outs)
            before = len(self.coupled)
            if not fed.isdisjoint(node.values):
                fed.update(node.outs)
            classes = self.any_node(pair, node, out, is_alone, zeros, placed)
            if len(self.coupled) > before and by_number(pair, node, fed):
                raise refused(node, "reads or writes examples by their numbers in the batch")
            is_alone = is_alone and len(self.coupled) == before  # statistics: per microbatch
            for o, c in zip(node.outs, classes, strict=True):
                out.of[o] = c
                if is_alone:
                    out.alone.add(o)
            if node.name in ZEROS and is_zero(node.ins[0], zeros):
                zeros.update(node.outs)
        out.zeros = zeros
        return out

    def any_node(
        self, pair: Pair, node: Node, known: Classes, is_alone: bool, zeros: set[int], placed: bool
    ) -> list[Class]:
        """The classes of the results of an equation; MAP and SUM if it couples examples and that is
        allowed. ``placed``: whether it depends on positions and constants alone."""
        if not self.exact:
            scaled = [bool(pair.scaled(o)) for o in node.outs]
            free = {known.of[v] for v in node.values} <= {FREE}
            if free and any(scaled) and (placed or node.changed) and not node.whole.effects:
                # positions, and numbers that follow from the batch's size, are those of the
                # microbatch, not a part of those of the whole batch
                return [MAP if x else FREE for x in scaled]
            if free and any(scaled):
                self.check_share(pair, node)
        figures = None if self.inside else self.figures
        if figures is not None and figures.follows(pair, node, known.of):
            return [POST] * len(node.outs)
        try:
            return self.node(pair, node, known, is_alone, zeros)
        except CoupledError as error:
            if figures is not None and figures.takes(pair, node, known.of, error):
                return [POST] * len(node.outs)
            if self.exact:
                raise
            self.coupled.append(error.place)
            return [MAP if pair.scaled(o) else SUM for o in node.outs]

    def check_share(self, pair: Pair, node: Node) -> None:
        """Raise NotExactError if a value that is made for the whole batch can't be sliced."""
        for o in node.outs:
            whole, small = (compat.aval_shape(a) for a in pair.avals[o])
            if any(whole[d] != self.parts * small[d] for d in pair.scaled(o)):
                raise refused(node, "takes the rows that the number of examples leaves")

    def node(
        self, pair: Pair, node: Node, known: Classes, is_alone: bool, zeros: set[int]
    ) -> list[Class]:
        """The classes of the results of an equation."""
        ins = [FREE if isinstance(i, Number) else known.of[i] for i in node.ins]
        grows = any(pair.scaled(v) for v in (*node.values, *node.outs))
        for o in node.outs:
            shape = compat.aval_shape(pair.avals[o][0])
            for d in pair.scaled(o):
                if shape[d] % self.examples and (self.exact or node.name in PARTS):
                    raise refused(node, of_some(node, shape[d], self.examples))
        if node.name == BARRIER and len(set(ins)) == 1 and len(ins) == len(node.outs):
            return ins  # each operand is a result
        structured = node.name in LOOPS | {"cond"} or stays_whole(node.whole)
        if node.whole.effects and (grows or (structured and set(ins) - {FREE})):
            raise refused(node, "prints or calls out once for the whole batch")
        if structured:
            return self.structured(pair, node, ins, zeros)
        if not grows:
            zero = [is_zero(i, zeros) for i in node.ins]
            return [algebra(node, ins, zero, self.inside > 0)] * len(node.outs)
        if node.name == GAMMA and FREE is ins[0]:  # its key is split by the number of elements
            alike = [i for i, c in zip(node.ins, ins, strict=True) if c is not FREE]
            if not known.alike.issuperset(alike):
                raise refused(
                    node,
                    "draws from one key by parameters of each example; give each example its key",
                )
            known.drawn.update(i for i in alike if isinstance(i, int))
            ins = [FREE] * len(ins)
        elif node.name == GAMMA and pair.scaled(node.values[0]) == pair.scaled(node.outs[0]):
            return [MAP]  # a key for each example
        if set(ins) <= {FREE}:
            # what is equal for all examples is computed again in each microbatch; random numbers,
            # positions, rows of a table are computed for the whole batch, and sliced
            if node.name != "broadcast_in_dim":
                if any(len(pair.scaled(o)) > 1 for o in node.outs):
                    raise refused(node, "draws or counts along the batch in several dimensions")
                known.drawn.update(o for o in node.outs if pair.scaled(o))
            else:
                known.alike.update(node.outs)
            return [MAP if pair.scaled(o) else FREE for o in node.outs]
        if {SUM, POST} & set(ins):
            raise coupled(
                node,
                "reads a value that is summed over the batch, such as a batch's statistics or "
                "parameters that the step has updated already",
            )
        return self.mapped(pair, node, is_alone, zeros)

    def mapped(self, pair: Pair, node: Node, is_alone: bool, zeros: set[int]) -> list[Class]:
        """The classes of the results of an operation on examples."""
        rule = self.rules.get(id(node.whole))
        factor = None if rule is None else example_factor(pair, node, rule)
        if rule is None or factor is None or factor in rule.replicated:
            raise coupled(node, "mixes examples")
        if rule.sizes[factor] % self.examples:  # it splits groups of examples
            raise coupled(node, "may mix examples")
        changes = node.changed
        if changes:
            raise coupled(node, f"computes with the batch's size: {changes}")
        if all(pair.scaled(o) for o in node.outs):
            return [MAP] * len(node.outs)
        into_zeros = not node.name.startswith("scatter") or is_zero(node.ins[0], zeros)
        adds = node.name in ADDS or node.name == "reduce_window_sum"
        if any(pair.scaled(o) for o in node.outs) or not (adds and into_zeros):
            raise coupled(node, "reduces over examples and is not a sum of terms")
        return [FREE if is_alone else SUM] * len(node.outs)

    def structured(self, outer: Pair, node: Node, ins: list[Class], zeros: set[int]) -> list[Class]:
        """The classes of the results of a loop, a conditional or a rematerialized block."""
        if MAP not in ins and not any(outer.scaled(o) for o in node.outs):
            return [FREE if set(ins) <= {FREE} else POST] * len(node.outs)
        zero = [is_zero(i, zeros) for i in node.ins]
        if stays_whole(node.whole):
            body, twin = called(node.whole), called(node.small)
            assert body is not None and twin is not None
            return self.within(pair(body.jaxpr, twin.jaxpr), ins, zero, node)
        if node.name == "cond" and ins[0] is FREE:
            return self.branches(outer, node, ins, zero)
        if node.name != "scan":
            if not self.exact and any(draws(e.primitive.name) for e in equations_in(node.whole)):
                raise refused(node, "draws random numbers in a loop that depends on examples")
            raise coupled(node, f"runs a {node.name} whose course depends on examples")
        loop, twin_loop = loop_of(node.whole), loop_of(node.small)
        if loop.trips != twin_loop.trips:
            raise refused(node, "goes over the examples one after the other")
        (whole,), (small,) = loop.bodies, twin_loop.bodies
        inner = pair(whole.jaxpr, small.jaxpr)
        begin, carries = loop.consts, loop.carries
        now = zero  # carries are zeros in the first iteration only
        later = [z and not begin <= k < begin + carries for k, z in enumerate(zero)]
        for _ in range(2 * carries + 3):
            outs = self.within(inner, ins, now, node)
            new = list(ins)
            for k in range(carries):
                counts = bool(inner.scaled(inner.inputs[begin + k]))
                new[begin + k] = self.carried(
                    node, ins[begin + k], outs[k], zero[begin + k], counts
                )
            if new == ins and now == later:
                return [*new[begin : begin + carries], *outs[carries:]]
            ins, now = new, later
        raise coupled(
            node, "carries examples from turn to turn in a way that could not be followed"
        )

    def branches(
        self, outer: Pair, node: Node, ins: Sequence[Class], zero: Sequence[bool]
    ) -> list[Class]:
        """The classes of the results of a conditional that takes one branch for all examples."""
        each = []
        for a, b in zip(branches_of(node.whole), branches_of(node.small), strict=True):
            inner, zeros, before = pair(a.jaxpr, b.jaxpr), set[int](), len(self.draws)
            classes = self.within(inner, ins[1:], zero[1:], node, zeros)
            if len(self.draws) > before:
                raise refused(node, "draws random numbers or counts positions in a branch")
            each.append(
                [(c, is_zero(o, zeros)) for c, o in zip(classes, inner.outputs, strict=True)]
            )
        out = []
        for o, by_branch in zip(node.outs, zip(*each, strict=True), strict=True):
            kinds = {c for c, _ in by_branch}
            if outer.scaled(o):
                out.append(MAP)
            elif SUM in kinds and not all(c is SUM or nothing for c, nothing in by_branch):
                raise coupled(node, "adds examples up in some of its branches")
            else:
                out.append(max(kinds))
        return out

    def within(
        self,
        inner: Pair,
        ins: Sequence[Class],
        zero: Sequence[bool],
        node: Node,
        zeros: set[int] | None = None,
    ) -> list[Class]:
        """The classes of the results of a body, which must not need complete sums. ``zeros``
        collects the values that are zeros."""
        self.inside += 1
        known = self.walk(inner, ins, [False] * len(ins), zero)
        self.inside -= 1
        if zeros is not None:
            zeros.update(known.zeros)
        for n in inner.nodes:
            if known.drawn.intersection(n.outs):
                if is_fused(node.whole):
                    raise refused(node, "draws random numbers for the batch inside one kernel")
                self.draws.add(id(n.whole))
        out = [FREE if isinstance(o, Number) else known.of[o] for o in inner.outputs]
        if POST in out:
            late = {v for v, c in known.of.items() if c is POST}
            first = next((n for n in inner.nodes if late.intersection(n.outs)), node)
            error = coupled(
                first, f"uses a sum over the batch before that is complete, inside a {node.name}"
            )
            if self.exact:
                raise error
            self.coupled.append(error.place)
            out = [SUM if c is POST else c for c in out]
        return out

    def carried(self, node: Node, before: Class, after: Class, zero: bool, counts: bool) -> Class:
        """``carried_class``; if that couples examples and may, MAP if the carry ``counts`` them."""
        try:
            return carried_class(node, before, after, zero)
        except CoupledError as error:
            if self.exact:
                raise
            self.coupled.append(error.place)
            return MAP if counts else SUM
