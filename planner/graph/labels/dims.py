"""Which dimensions of a step's values are the same, by the factor rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from planner.graph.ir import PRODUCTS, SCALAR, Graph, Phase
from planner.rules.factor import FactorRule


def forward_results(graph: Graph, arguments: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """The results of the forward pass that depend on some arguments, each with the set of these
    arguments (a mask: bit k for ``arguments[k]``)."""
    masks = [0] * len(graph.values)
    for number, arrays in enumerate(arguments):
        for v in arrays:
            masks[v] |= 1 << number
    for op in graph.ops:
        mask = 0
        for i in op.inputs:
            if i != SCALAR:
                mask |= masks[i]
        for o in op.outputs:
            masks[o] |= mask
            if mask and op.phase is Phase.FORWARD:
                yield o, mask


VIEWS = frozenset("slice dynamic_slice pad rev".split())
"""Operations along a dimension that may change its size, but not what it stands for."""


INDICES = frozenset({"int32", "int64", "uint32", "uint64", "bool"})
"""Dtypes that no weights have."""


def argument_of(graph: Graph, value: int) -> str:
    """The start of the name of an input, which all arrays of one argument share."""
    return graph.values[value].name.partition("]")[0]


def first_dim(graph: Graph, value: int) -> int:
    """The first dimension with more than one element; 0 if there is none."""
    return next((d for d, n in enumerate(graph.values[value].shape) if n > 1), 0)


class Dims:
    """The dimensions of all values of the forward pass. Two are the same if they share a factor of
    an operation; for a dimension of several factors, the outermost counts."""

    def __init__(self, graph: Graph, rules: Sequence[FactorRule], behind: bool = False) -> None:
        """``behind``: include the update."""
        self.graph = graph
        self.start = [0]
        for value in graph.values:
            self.start.append(self.start[-1] + len(value.shape))
        self.parent = list(range(self.start[-1]))
        self._summed: list[tuple[int, int]] = []  # (dimension that a product sums over, result)
        for op, rule in zip(graph.ops, rules, strict=True):
            forward = op.phase is Phase.FORWARD
            if not forward and not (behind and op.phase is Phase.UPDATE):
                continue
            seen: dict[int, int] = {}
            values = (*op.inputs, *op.outputs)
            for v, mapped in zip(values, (*rule.operands, *rule.results), strict=False):
                for d, factors in enumerate(mapped if v != SCALAR else ()):
                    if factors:
                        place = self.start[v] + d
                        self.join(seen.setdefault(factors[0], place), place)
            if op.kind in PRODUCTS and forward:
                result = op.outputs[0]
                self._summed += [(seen[f], result) for f in rule.reduction if f in seen]
        self._join_turns()
        self._join_views()

    def contracted(self, others: Set[int] | None = None) -> set[int]:
        """The dimensions that a product sums over, as joined so far.

        With ``others``, only products count whose result has another one of these dimensions. (A
        gradient inside of the loss sums over the examples, and its result has none.)
        """
        out = set()
        for place, result in self._summed:
            root = self._root(place)
            if others is None or not self.all_of(result).isdisjoint(others - {root}):
                out.add(root)
        return out

    def _join_views(self) -> None:
        """Join a dimension and a part of it, such as all time steps and all but the last. Arrays
        that are concatenated are parts."""
        for op in self.graph.ops:
            if op.kind == "concatenate" and op.phase is Phase.FORWARD:
                whole = self.graph.values[op.outputs[0]].shape
                for v in op.inputs:
                    for d, n in enumerate(self.graph.values[v].shape if v != SCALAR else ()):
                        if n != whole[d]:
                            self.join(self.of(v, d), self.of(op.outputs[0], d))
            if op.kind in VIEWS and op.phase is Phase.FORWARD and op.inputs[0] != SCALAR:
                for d in range(len(self.graph.values[op.outputs[0]].shape)):
                    self.join(self.of(op.inputs[0], d), self.of(op.outputs[0], d))

    def _join_turns(self) -> None:
        """Join the dimensions that a loop iterates over and along which it stacks results."""
        ops, waiting = self.graph.ops, dict[int, list[int]]()
        along: dict[int, list[int]] = {}  # per region of a loop
        for op in ops:
            if op.kind in ("loop_out", "loop_ys"):
                waiting.pop(op.region, None)
            if op.kind == "loop_xs":
                waiting.setdefault(op.region, []).append(op.inputs[0])
            elif op.kind == "loop_ys" and op.inputs[0] != SCALAR and op.phase is Phase.FORWARD:
                producer = self.graph.values[op.inputs[0]].op
                for v in along.get(ops[producer].region, ())[:1] if producer >= 0 else ():
                    self.join(self.of(v, 0), self.of(op.outputs[0], 0))
            elif op.region not in along and op.region > 0:
                walked = waiting.pop(self.graph.regions[op.region].parent, [])
                along[op.region] = [v for v in walked if v != SCALAR]
                for v in along[op.region][1:]:
                    self.join(self.of(along[op.region][0], 0), self.of(v, 0))

    def of(self, value: int, dim: int) -> int:
        """The representative of a dimension of a value and of all dimensions joined with it."""
        return self._root(self.start[value] + dim)

    def all_of(self, value: int) -> set[int]:
        """The dimensions of a value that have more than one element."""
        shape = self.graph.values[value].shape
        return {self.of(value, d) for d, n in enumerate(shape) if n > 1}

    def _root(self, place: int) -> int:
        parent = self.parent
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    def join(self, a: int, b: int) -> None:
        """Make two dimensions the same."""
        self.parent[self._root(a)] = self._root(b)
