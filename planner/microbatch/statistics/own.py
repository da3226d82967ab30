"""Per-microbatch statistics, for steps whose examples depend on each other.

BatchNorm, a load-balancing loss of experts and a contrastive loss couple examples. In microbatches,
such a step does not equal the step on the whole batch. If that is allowed
(``statistics="per-microbatch"``), the loop runs the step for each microbatch up to its loss and
gradients. These, and statistics in the state, are combined by their degree (``degrees``): sums are
added up, means are averaged. The rest of the step, such as clipping and the update, runs once.

The following values stay exact: sums of the batch alone, such as the number of unmasked tokens, of
which every microbatch gets an even share; random numbers, which are drawn for the whole batch and
sliced; and every value that depends on no statistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from planner import compat
from planner.graph.ir import Graph, Phase, Role
from planner.graph.jaxpr.walk import STRUCTURED
from planner.graph.labels.phases import named_phase
from planner.microbatch.algebra import FREE, MAP, POST, SUM, Class
from planner.microbatch.classes import Classes
from planner.microbatch.errors import NotExactError
from planner.microbatch.pairs import Node, Number, Operand, Pair
from planner.microbatch.statistics.degrees import Degree, Degrees, equal

REFUSED = "this step can't be cut into microbatches with statistics of their own"
LEAVE = "leave microbatches= out"
ADDITIONS = frozenset({"add", "sub", "add_any", "neg", "concatenate"})
TRAINED = frozenset({Role.PARAMETER, Role.MOMENT})


@dataclass(frozen=True, eq=False)
class Own:
    """A step with per-microbatch statistics.

    Attributes:
        step: the pair, with added equations that compute a microbatch's share of values that all
            microbatches have in common.
        found: the classes of its values; SUM marks all values that leave the loop to be combined.
        inside: what the loop runs in place of an equation, by its ``id``.
        degrees: degrees of values, see ``degrees``.
        count: number of microbatches.
    """

    step: Pair
    found: Classes
    inside: Mapping[int, Node]
    degrees: Mapping[int, Degree]
    count: int

    def factor(self, value: int, stacked: bool) -> float:
        """Factor by which the sum (or the stack) over all microbatches is multiplied.

        Raises:
            NotExactError: the value is neither a sum nor a mean over examples.
        """
        degree = self.degrees.get(value, 0.0)
        degree = float(not stacked) if math.isinf(degree) else degree
        power = degree - (not stacked)
        floating = jnp.issubdtype(self.step.avals[value][0].dtype, jnp.inexact)
        neither = not stacked and degree not in (0.0, 1.0)  # such as the square of a sum
        if math.isnan(power) or neither or (power and not floating):
            maker = next((n for n in self.step.nodes if value in n.outs), None)
            where = f"{maker.line}: {maker.name}" if maker is not None else "a value"
            raise NotExactError(
                f"{REFUSED}: {where} of shape {compat.aval_shape(self.step.avals[value][0])} is "
                f"neither a sum nor a mean over examples; {LEAVE}"
            )
        return float(self.count**power)


def forward(n: Node) -> bool:
    """Whether an equation is none of the backward pass."""
    return named_phase(n.names) is not Phase.BACKWARD


def own_statistics(step: Pair, classes: Classes, graph: Graph, count: int) -> Own:
    """The step with per-microbatch statistics.

    Args:
        step: the step, for the whole batch and a microbatch.
        classes: its classes, with couplings allowed.
        graph: graph of the whole step.
        count: number of microbatches.

    Raises:
        NotExactError: a microbatch would need parameters that the step has updated, or a share of a
            value that can't be divided.
    """
    return _Owner(step, classes, count).made(graph)


@dataclass(eq=False)
class _Owner:
    """``own_statistics`` in progress.

    Attributes:
        of: the classes.
        nodes: the equations, including copies.
        inside: see ``Own``.
        copies: what a microbatch reads in place of a FREE value, by the value and by whether a
            statistic reads it.
        varies: FREE values that differ in the small trace.
        sums: those of them that depend on sums of the batch alone.
        transposed: those of them that depend on such sums of the backward pass: cotangents of
            statistics.
        behind: values that depend on gradients.
        differentiates: whether the step has a backward pass.
        updates: the equations, by ``id``, that new values of the state need.
    """

    step: Pair
    found: Classes
    count: int
    of: dict[int, Class] = field(init=False)
    degrees: dict[int, Degree] = field(init=False)
    makers: dict[int, Node] = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    inside: dict[int, Node] = field(default_factory=dict)
    copies: dict[tuple[int, bool], int] = field(default_factory=dict)
    varies: set[int] = field(default_factory=set)
    sums: set[int] = field(default_factory=set)
    transposed: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)
    differentiates: bool = False
    updates: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.of = dict(self.found.of)
        ins = [0.0] * len(self.step.inputs)
        self.degrees = Degrees(self.count).of(self.step, ins, self.found.zeros)
        self.makers = {o: n for n in self.step.nodes for o in n.outs}

    def made(self, graph: Graph) -> Own:
        """Build the result."""
        live = [n for n, x in zip(self.step.nodes, self.step.live(), strict=True) if x]
        self.differentiates = any(named_phase(n.names) is Phase.BACKWARD for n in live)
        new = (self.step.outputs[o] for _, o in graph.ties)
        state = {v for v in new if not isinstance(v, Number)}
        for n in reversed(live):
            if not state.isdisjoint(n.outs):
                self.updates.add(id(n))
                state.update(n.values)
        for n in live:
            self.note(n)
        self.take_cotangents(live)
        examples = [n for n in live if self.of_examples(n)]
        statistics = self.read_by(examples)
        statistic_ids = {id(n) for n in statistics}
        self.check(graph, examples, statistics)
        for n in statistics:
            self.of.update(dict.fromkeys(n.outs, SUM))
        for_statistics = statistic_ids | self.weights_of_statistics(live, examples, statistic_ids)
        loop = statistic_ids | {id(n) for n in examples}
        for n in live:
            if self.of_losses(n):
                self.of.update(dict.fromkeys(n.outs, SUM))
            self.follow(n)
            if SUM in {self.of[o] for o in n.outs}:
                loop.add(id(n))
        for n in live:
            if id(n) in loop:
                ins = tuple(self.shared(i, id(n) in for_statistics) for i in n.ins)
                self.inside[id(n)] = replace(n, ins=ins)
            self.nodes.append(n)
        step = replace(self.step, nodes=self.nodes)
        return Own(step, replace(self.found, of=self.of), self.inside, self.degrees, self.count)

    def of_examples(self, n: Node) -> bool:
        """Whether an equation reads or computes examples."""
        classes = {self.of[o] for o in n.outs}
        if self.found.drawn.intersection(n.outs) or classes <= {FREE}:
            return False
        return MAP in classes or MAP in {self.of[v] for v in n.values}

    def of_losses(self, n: Node) -> bool:
        """Whether an equation computes a loss, a gradient or a metric from values of the loop. Each
        microbatch has its own loss, and gradients are those of the mean loss.

        Raises:
            NotExactError: it does, and the degree of its result is not known.
        """
        classes = {self.of[v] for v in n.values}
        if {self.of[o] for o in n.outs} != {POST} or POST in classes or n.whole.effects:
            return False
        named = named_phase(n.names) is not None
        if not named and not self.behind.isdisjoint(n.values):
            return False
        unknown = any(math.isnan(self.degrees[o]) for o in n.outs)
        if unknown and not named and n.name in ADDITIONS:
            return False  # its operands are combined by then
        if unknown:
            raise NotExactError(
                f"{REFUSED}: {n.line}: {n.name} is neither a sum nor a mean over examples; {LEAVE}"
            )
        return named or self.differentiates or id(n) not in self.updates

    def follow(self, n: Node) -> None:
        """Record the values that depend on gradients."""
        if named_phase(n.names) is Phase.BACKWARD or not self.behind.isdisjoint(n.values):
            self.behind.update(n.outs)

    def note(self, n: Node) -> None:
        """Record the FREE results of an equation that differ in the small trace."""
        if {self.of[o] for o in n.outs} != {FREE} or any(self.step.scaled(o) for o in n.outs):
            return
        summed = MAP in {self.of[v] for v in n.values} or not self.sums.isdisjoint(n.values)
        numbers = [i for i in n.ins if isinstance(i, Number)]
        changed = bool(n.changed) or not all(equal(i.whole, i.small) for i in numbers)
        if summed or changed or not self.varies.isdisjoint(n.values):
            self.varies.update(n.outs)
        if summed:
            self.sums.update(n.outs)
            added = MAP in {self.of[v] for v in n.values} and not forward(n)
            if added or not self.transposed.isdisjoint(n.values):
                self.transposed.update(n.outs)

    def take_cotangents(self, live: Sequence[Node]) -> None:
        """Move the cotangents of statistics into the loop, and what is made of them. In a loss that
        is linear in a statistic they are sums of the batch alone, but each microbatch has its own.

        Raises:
            NotExactError: such a cotangent meets a sum of the forward pass. Whether the loss or a
                statistic divides by that sum is not known.
        """
        wanted = {v for n in live if self.of_examples(n) for v in n.values} & self.transposed
        for n in reversed(live):
            if not wanted.isdisjoint(n.outs):
                wanted.update(self.transposed.intersection(n.values))
                if not self.transposed.issuperset(self.sums.intersection(n.values)):
                    raise NotExactError(
                        f"{REFUSED}: {n.line}: {n.name} in the gradient of a statistic reads a sum "
                        f"over the batch; {LEAVE}"
                    )
        examples: set[int] = set()  # made of such cotangents
        for n in live:
            if self.of_examples(n):
                if not (wanted | examples).isdisjoint(n.values):
                    examples.update(n.outs)
            elif {self.of[o] for o in n.outs} == {FREE}:
                looped = bool(wanted.intersection(n.outs) or examples.intersection(n.values))
                if looped or any(self.of[v] in (SUM, POST) for v in n.values):
                    self.of.update(dict.fromkeys(n.outs, SUM if looped else POST))
                    self.sums.difference_update(n.outs)
                    self.varies.difference_update(n.outs)

    def weights_of_statistics(
        self, live: Sequence[Node], examples: Sequence[Node], statistics: Set[int]
    ) -> set[int]:
        """Equations (``id``) of the forward pass that make examples of a sum of the batch alone,
        where statistics alone read these: the weights of a mean, divided by their sum.

        Raises:
            NotExactError: such weights are read by a statistic and by something else.
        """
        looped = statistics | {id(n) for n in examples}
        needed: set[int] = set()  # by examples, and by statistics
        readers: dict[int, list[Node]] = {}
        for n in live:
            if forward(n):
                needed.update(n.values if id(n) in looped else ())
                for v in n.values:
                    readers.setdefault(v, []).append(n)
        returned = {o for o in self.step.outputs if not isinstance(o, Number)}
        weights: set[int] = set()
        for n in examples:
            scales = [v for v in n.values if v in self.sums and v not in self.transposed]
            if not scales or not forward(n):
                continue
            seen, ends, left = set(n.outs), set[bool](), list(n.outs)
            while left:
                value = left.pop()
                if value in returned:
                    ends.add(False)
                for reader in readers.get(value, ()):
                    if MAP not in {self.of[o] for o in reader.outs}:
                        ends.add(not needed.isdisjoint(reader.outs))
                        continue
                    left += [o for o in reader.outs if o not in seen]
                    seen.update(reader.outs)
            if ends == {True}:
                weights.add(id(n))
            elif True in ends and any(self.degrees[v] != 0.0 for v in scales):
                raise NotExactError(
                    f"{REFUSED}: {n.line}: {n.name} divides by a sum over the batch, and both a "
                    f"statistic and the loss read the result; divide after the statistic's sum, or "
                    f"{LEAVE}"
                )
        return weights

    def read_by(self, examples: Sequence[Node]) -> list[Node]:
        """The equations that these depend on besides FREE and MAP values, in order."""
        taken = {id(n) for n in examples}
        wanted = [v for n in examples for v in n.values]
        needed: dict[int, Node] = {}
        while wanted:
            n = self.makers.get(v := wanted.pop())
            if n is None or self.of[v] in (FREE, MAP) or id(n) in taken:
                continue
            taken.add(id(n))
            needed[id(n)] = n
            wanted += n.values
        return [n for n in self.step.nodes if id(n) in needed]

    def check(self, graph: Graph, examples: Sequence[Node], statistics: Sequence[Node]) -> None:
        """Raise NotExactError if the loop would read or compute the new value of a trained
        array."""
        early = {o for n in statistics for o in n.outs}
        for i, o in graph.ties:
            known, value = graph.values[graph.inputs[i]], self.step.outputs[o]
            if isinstance(value, Number):
                continue
            looped = any(
                value in n.outs and self.step.inputs[i] in n.values
                for n in examples
                if n.name in STRUCTURED
            )
            if known.role in TRAINED and (value in early or looped):
                raise NotExactError(
                    f"{REFUSED}: the step goes on with {known.name} after its update, which needs "
                    f"the gradients of all microbatches; {LEAVE}"
                )

    def shared(self, operand: Operand, for_statistic: bool) -> Operand:
        """What a microbatch reads in place of an operand; ``for_statistic``: in a statistic."""
        if isinstance(operand, Number) or operand not in self.varies:
            return operand
        key = operand, for_statistic
        if key not in self.copies:
            n = self.makers[operand]
            if operand in self.sums and not for_statistic:
                self.share(operand)
            else:
                self.copy(n, for_statistic)
        return self.copies[key]

    def copy(self, n: Node, for_statistic: bool) -> None:
        """Add a copy of an equation with the numbers of the small trace."""
        ins = tuple(
            Number(i.small, i.small) if isinstance(i, Number) else self.shared(i, for_statistic)
            for i in n.ins
        )
        summed = not self.sums.isdisjoint(n.outs)
        outs = tuple(self.new(o, SUM if summed else FREE) for o in n.outs)
        self.copies.update(zip(((o, for_statistic) for o in n.outs), outs, strict=True))
        self.nodes.append(replace(n, whole=n.small, ins=ins, outs=outs))
        if summed:
            self.inside[id(self.nodes[-1])] = self.nodes[-1]

    def share(self, value: int) -> None:
        """Add a microbatch's even share of a value that depends on sums of the whole batch."""
        aval, degree = self.step.avals[value][0], self.degrees[value]
        if math.isnan(degree) or not jnp.issubdtype(aval.dtype, jnp.inexact):
            n = self.makers[value]
            raise NotExactError(
                f"{REFUSED}: {n.line}: {n.name} of what is summed over the whole batch has no even "
                f"share for a microbatch; {LEAVE}"
            )
        power = 0.0 if math.isinf(degree) else -degree
        factor = np.asarray(self.count**power, aval.dtype)
        struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)  # not weakly typed: one product
        closed = jax.make_jaxpr(lambda x: x * factor)(struct)
        (eqn,) = closed.jaxpr.eqns
        even_share = self.copies[value, False] = self.new(value, FREE)
        ins = tuple(Number(v.val, v.val) if compat.is_literal(v) else value for v in eqn.invars)
        self.nodes.append(Node(eqn, eqn, ins, (even_share,)))

    def new(self, like: int, kind: Class) -> int:
        """Add a value of the same type as ``like``; returns its number."""
        self.step.avals.append(self.step.avals[like])
        number = len(self.step.avals) - 1
        self.of[number], self.degrees[number] = kind, self.degrees[like]
        return number
