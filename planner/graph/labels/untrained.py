"""Roles of the arguments of a step that trains nothing: weights, or rows of examples.

In an evaluation, a prediction or a decoding step, no gradient shows which arrays are weights, but
the computed values do. Nearly all of them have the dimension of *examples*, which the weights do
not have. The dimensions of weights occur together with the examples, or are summed over. A batch of
another kind (documents beside queries) has a separate dimension in what is computed from it and the
weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from planner.graph.ir import SCALAR, Graph, Role
from planner.graph.labels.dims import INDICES, Dims, first_dim, forward_results
from planner.rules.factor import FactorRule

ALONE = 0.3
"""An argument is fed, too, if more than this share of what is computed from it and from another
argument has its first dimension without the examples."""


def may_be_untrained(graph: Graph) -> bool:
    """Whether weights may be an argument that does not come back: nothing is trained, or what
    counts as trained may be rows that are moved by their gradients (guided sampling)."""
    if not any(graph.values[v].role is Role.PARAMETER for v in graph.inputs):
        return True
    name = _names(graph)
    state = {name(v) for v in graph.state}
    sizes: dict[str, set[int]] = {}
    for v in graph.inputs:
        if graph.values[v].shape and name(v) not in state:
            sizes.setdefault(name(v), set()).add(graph.values[v].shape[0])
    return any(len(lengths) > 1 for lengths in sizes.values())


def untrained_roles(graph: Graph, rules: Sequence[FactorRule]) -> dict[int, Role]:
    """The roles of the inputs of a step that trains no weights, where some argument holds weights.

    Weights are frozen, arrays of the state with the dimension of examples are examples, and other
    arrays that do not come back are the batch. Empty if no argument of weights has arrays of
    different first dimensions, is a stack of layers, or has first dimensions that products with the
    examples sum over: the arguments are ambiguous then.

    Args:
        graph: a step with phases and roles.
        rules: per operation.
    """
    name = _names(graph)
    arguments = _arguments(graph, name)
    dims = Dims(graph, rules)
    computed = _Found(graph, dims, arguments)
    examples = computed.examples()
    if examples is None:
        return {}
    weights = [
        arrays
        for number, arrays in enumerate(arguments)
        if not any(graph.values[v].carried for v in arrays)
        and computed.holds_weights(number, examples)
    ]
    if not any(computed.looks_like_weights(arrays, examples) for arrays in weights):
        return {}
    names = {name(arrays[0]) for arrays in weights}
    out = {}
    for v in graph.inputs:
        value = graph.values[v]
        if value.role is Role.KEY:
            continue
        if name(v) in names:
            out[v] = Role.FROZEN
        elif not value.carried:
            out[v] = Role.BATCH
        elif examples in dims.all_of(v):
            out[v] = Role.EXAMPLES
    trained = {v for v in graph.state if graph.values[v].role is Role.PARAMETER}
    return out if trained <= out.keys() else {}


def _names(graph: Graph) -> Callable[[int], str]:
    """A function from an array to the name of its argument, or of its part of the only argument."""

    def name(value: int, parts: int) -> str:
        return "]".join(graph.values[value].name.split("]")[:parts])

    parts = 1 if len({name(v, 1) for v in graph.inputs}) > 1 else 2
    return lambda value: name(value, parts)


def _arguments(graph: Graph, name: Callable[[int], str]) -> list[list[int]]:
    """The arrays of each argument that operations read (a prediction may take labels and drop
    them), without keys and single numbers."""
    read = {v for op in graph.ops for v in op.inputs}
    out: dict[str, list[int]] = {}
    for v in graph.inputs:
        value = graph.values[v]
        if v in read and value.role is not Role.KEY and any(n > 1 for n in value.shape):
            out.setdefault(name(v), []).append(v)
    return list(out.values())


class _Found:
    """The results that depend on several arguments, and the dimensions that they have."""

    def __init__(self, graph: Graph, dims: Dims, arguments: Sequence[Sequence[int]]) -> None:
        self.graph, self.dims, self.arguments = graph, dims, arguments
        self.first = {v: dims.of(v, first_dim(graph, v)) for arrays in arguments for v in arrays}
        firsts = {d for arrays in arguments for d in self._shared(arrays)}
        self.eligible = firsts - dims.contracted() or firsts - dims.contracted(firsts)
        known = set(self.first.values())
        results = forward_results(graph, arguments)
        several = ((mask, dims.all_of(o) & known) for o, mask in results if mask & (mask - 1))
        self.made = [(mask, has) for mask, has in several if has]
        """Per result of several arguments, a mask of these, and the first dimensions in it."""

    def _shared(self, arrays: Sequence[int]) -> set[int]:
        """The first dimensions of more than half of the arrays of an argument."""
        many = Counter(self.first[v] for v in arrays)
        return {d for d, n in many.items() if 2 * n > len(arrays)}

    def examples(self) -> int | None:
        """The dimension that most results have: at a tie, that of an argument with fewer arrays,
        then that of the larger array."""
        many = Counter(d for _, has in self.made for d in has & self.eligible)

        def of(dim: int) -> tuple[int, int, int]:
            held = [(len(arrays), v) for arrays in self.arguments for v in arrays]
            held = [(n, v) for n, v in held if self.first[v] == dim]
            nbytes = max(self.graph.values[v].nbytes for _, v in held)
            return many[dim], -min(n for n, _ in held), nbytes

        return max(sorted(many), key=of, default=None)

    def looks_like_weights(self, arrays: Sequence[int], examples: int) -> bool:
        """Whether arrays have different first dimensions, or those of layers that a loop scans, or
        ones that products with the examples sum over and no result without examples has."""
        firsts = {self.first[v] for v in arrays}
        if len(firsts) > 1:
            return True
        walked = (op.inputs[0] for op in self.graph.ops if op.kind == "loop_xs")
        if len(arrays) > 1 and firsts <= {self.dims.of(v, 0) for v in walked if v != SCALAR}:
            return True
        summed = firsts <= self.dims.contracted()
        return summed and not any(has & firsts and examples not in has for _, has in self.made)

    def holds_weights(self, number: int, examples: int) -> bool:
        """Whether an argument holds weights instead of examples."""
        arrays, values = self.arguments[number], self.graph.values
        if any(examples in self.dims.all_of(v) for v in arrays):
            return False
        if all(values[v].dtype in INDICES for v in arrays):
            return False
        sizes = {values[v].shape[0] for v, d in self.first.items() if d == examples}
        if all(values[v].shape[0] in sizes for v in arrays):  # after an operation without a rule
            return False
        firsts = {self.first[v] for v in arrays} & self.eligible
        both = [has for mask, has in self.made if mask >> number & 1]
        alone = Counter(d for has in both if examples not in has for d in has & firsts)
        many = sum(examples in has or bool(has & firsts) for has in both)
        return max(alone.values(), default=0) <= ALONE * many
