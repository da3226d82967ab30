"""Dimensions of examples: arguments that have none, and those where it is not the first dimension.

A step of low-rank adapters, distillation or preference optimization takes a second model as a
separate argument. The arguments alone do not distinguish it from a batch, but the forward pass
does: nearly all that is computed from a frozen model has a dimension of *examples*, and the model
does not. Factor rules follow a dimension through the step. A dimension that a loop scans does not
hold examples if the array has another dimension that may: then time comes first, or parts of the
batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.graph.ir import SCALAR, Graph, Phase, Role
from planner.graph.labels.dims import INDICES, Dims, argument_of, first_dim, forward_results
from planner.rules.factor import FactorRule

OWN = 0.3
"""Frozen weights are below this ratio: results that have one of their first dimensions, over
results that have the dimension of examples."""

MOST = 0.5
"""Minimum share of the forward pass's results that have the dimension of examples, in a step
without a batch."""


def is_ambiguous(graph: Graph) -> bool:
    """Whether arguments of the batch differ in their first dimension, so that some of them may hold
    no examples. A single argument, or ones of equal first dimensions, all hold examples."""
    sizes = {graph.values[v].shape[0] for v in graph.batch if graph.values[v].shape}
    return len(sizes) > 1 and len({argument_of(graph, v) for v in graph.batch}) > 1


def frozen_inputs(graph: Graph, rules: Sequence[FactorRule]) -> frozenset[int]:
    """The inputs of the batch that are frozen weights.

    Candidates for examples are first dimensions of the batch's arrays that no product sums over and
    no trained array of the state has. An argument holds frozen weights if a candidate of another
    argument is in most of what the forward pass computes from it, none of its arrays has that
    dimension, and few results have its first dimensions. An argument whose arrays only meet arrays
    of the state with the same dimensions holds frozen weights, too: the reference of a penalty.

    Args:
        graph: a step with phases and roles.
        rules: per operation.
    """
    dims = Dims(graph, rules)
    arguments: dict[str, list[int]] = {}
    for v in graph.batch:
        if graph.values[v].shape:
            arguments.setdefault(argument_of(graph, v), []).append(v)
    first = {v: dims.of(v, first_dim(graph, v)) for arrays in arguments.values() for v in arrays}
    state = set(graph.state).difference(maybe_examples(graph))
    state_dims = set[int]().union(*map(dims.all_of, state))
    others = set[int]().union(*map(dims.all_of, first)) - state_dims
    eligible = set(first.values()) - state_dims - dims.contracted(others)
    counts = _counts(graph, list(arguments.values()), dims, eligible)
    out: set[int] = set()
    for number, arrays in enumerate(arguments.values()):
        total: Counter[int] = Counter()
        for mask, dim_counts in counts.items():
            if mask >> number & 1:
                total.update(dim_counts)
        if not total:
            if eligible and _beside_state(dims, graph, arrays):
                out.update(arrays)
            continue
        (examples, many), *_ = total.most_common(1)
        sizes = {graph.values[v].shape[0] for v, d in first.items() if d == examples}
        if any(examples in dims.all_of(v) for v in arrays):
            continue
        if all(graph.values[v].shape[0] == 1 for v in arrays):  # one example
            continue
        if all(graph.values[v].dtype in INDICES for v in arrays):  # edges of a graph
            continue
        if all(graph.values[v].shape[0] in sizes for v in arrays):  # an operation without a rule
            continue
        if max(total[first[v]] for v in arrays) < OWN * many:
            out.update(arrays)
    return frozenset(out)


def _beside_state(dims: Dims, graph: Graph, values: Sequence[int]) -> bool:
    """Whether all arrays have the dimensions of arrays of the state, and some are matrices."""

    def all_dims(value: int) -> tuple[int, ...]:
        return tuple(dims.of(value, d) for d in range(len(graph.values[value].shape)))

    known = set(map(all_dims, graph.state))
    matrices = any(len(graph.values[v].shape) > 1 for v in values)
    return matrices and known.issuperset(map(all_dims, values))


def example_dims(graph: Graph, rules: Sequence[FactorRule]) -> dict[int, int]:
    """Per array of the batch, and of the state that has a row per example, its dimension of
    examples if that is not the first.

    Args:
        graph: a step with phases and roles.
        rules: per operation.
    """
    out = _fed_dims(graph, rules)
    if any(graph.values[v].role is Role.EXAMPLES for v in graph.state):
        out.update((v, d) for v, d in state_examples(graph, rules).items() if d)
    return out


def _fed_dims(graph: Graph, rules: Sequence[FactorRule]) -> dict[int, int]:
    """``example_dims`` of the batch alone."""
    fed = [v for v in graph.inputs if graph.values[v].fed and len(graph.values[v].shape) > 1]
    loops, members = _loops_over(graph, fed), _members(graph, fed)
    if not loops and not members:
        return {}
    dims = Dims(graph, rules)
    walked = {dims.of(v, 0) for v in loops}
    if members and (apart := set.intersection(*(dims.all_of(v) for v in members))):
        walked |= apart
    if not any(dims.of(v, 0) in walked for v in fed):
        return {}
    others = set(graph.state).difference(maybe_examples(graph))
    no_examples = walked.union(dims.contracted(), *map(dims.all_of, others))
    many: Counter[int] = Counter()
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            for o in op.outputs:
                many.update(dims.all_of(o) - no_examples)
    out: dict[int, int] = {}
    for v in fed:
        if dims.of(v, 0) not in walked:
            continue
        shape = graph.values[v].shape
        rest = [d for d in range(1, len(shape)) if shape[d] > 1 and many[dims.of(v, d)]]
        if rest:
            out[v] = max(rest, key=lambda d: many[dims.of(v, d)])
    return out


def _members(graph: Graph, fed: Sequence[int]) -> list[int]:
    """The parameters, if all of them have the first size of an array of the batch: several models
    side by side, each with a batch. Otherwise empty."""
    parameters = [v for v in graph.state if graph.values[v].role is Role.PARAMETER]
    firsts = {graph.values[v].shape[:1] for v in parameters}
    alike = any(graph.values[v].shape[:1] in firsts for v in fed)
    return parameters if len(firsts) == 1 and firsts != {()} and alike else []


def _loops_over(graph: Graph, fed: Sequence[int]) -> list[int]:
    """Values that loops of the forward pass scan, of those that depend on ``fed``."""
    reached = [False] * len(graph.values)
    for v in fed:
        reached[v] = True
    out = []
    for op in graph.ops:
        if op.phase is Phase.FORWARD and any(i != SCALAR and reached[i] for i in op.inputs):
            for o in op.outputs:
                reached[o] = True
            if op.kind == "loop_xs" and reached[op.inputs[0]]:
                out.append(op.inputs[0])
    return out


def may_be_fed(graph: Graph) -> list[int]:
    """The arrays beside state in one argument that may still be fed: if a result has the same name
    as an array of the batch, that array counts as state, and those beside it count as frozen."""
    loose = [v for v in graph.inputs if graph.values[v].role is Role.FROZEN]
    sizes = {graph.values[v].shape[0] for v in graph.batch if graph.values[v].shape}
    shapes = {v: graph.values[v].shape for v in loose}
    return [v for v in loose if shapes[v] and (not sizes or shapes[v][0] in sizes)]


def fed_beside_state(graph: Graph, rules: Sequence[FactorRule]) -> list[int]:
    """The arrays beside state in one argument that have a row per example, so that they are fed.

    Args:
        graph: a step with phases and roles.
        rules: per operation.
    """
    maybe = may_be_fed(graph)
    if not maybe or Role.PARAMETER not in {graph.values[v].role for v in graph.inputs}:
        return []
    dims = Dims(graph, rules)
    trained = (v for v in graph.state if graph.values[v].role in (Role.PARAMETER, Role.MOMENT))
    none = set[int]().union(*map(dims.all_of, trained))
    fed = [v for v in graph.batch if graph.values[v].shape]
    if fed:
        rows = {dims.of(v, 0) for v in fed} - none
    else:
        others = set[int]().union(*map(dims.all_of, maybe)) - none
        first = {dims.of(v, 0) for v in maybe} - none - dims.contracted(others)
        results = [o for op in graph.ops if op.phase is Phase.FORWARD for o in op.outputs]
        results = [o for o in results if graph.values[o].shape]
        many = Counter(d for o in results for d in dims.all_of(o) & first)
        rows = {d for d, n in many.most_common(1) if n >= MOST * len(results)}
    return [v for v in maybe if dims.of(v, 0) in rows]


BY_DIMENSIONS = frozenset({Role.FROZEN, Role.EXAMPLES, Role.BATCH})
"""Roles that follow from dimensions, not from what comes back or is differentiated."""


def maybe_examples(graph: Graph) -> list[int]:
    """The state that is not trained and may have a row per example, in a step that trains or is
    fed: some dimension has a size of the batch's, or there is no batch."""
    roles = {graph.values[v].role for v in graph.inputs}
    sizes = {n for v in graph.batch for n in graph.values[v].shape if n > 1}
    if not sizes and Role.PARAMETER not in roles:
        return []
    return [
        v
        for v in graph.state
        if (
            graph.values[v].role in (Role.STATISTIC, Role.EXAMPLES)
            or (graph.values[v].role is Role.MOMENT and graph.values[v].of < 0)
        )
        and any(n > 1 and (n in sizes or not sizes) for n in graph.values[v].shape)
    ]


def state_examples(graph: Graph, rules: Sequence[FactorRule]) -> dict[int, int]:
    """The state with a row per example, and which dimension that is: hidden states of truncated
    backpropagation, caches, environments.

    The dimension is that of the batch's examples. Without a batch it is the most frequent dimension
    in the forward pass, of those that no product sums over and no weights have.

    Args:
        graph: a step with phases and roles.
        rules: per operation.
    """
    maybe = maybe_examples(graph)
    if not maybe:
        return {}
    written = any(graph.values[v].role is not Role.STATISTIC for v in maybe)
    dims = Dims(graph, rules, behind=written)
    others = (v for v in graph.inputs if graph.values[v].role in (Role.PARAMETER, Role.FROZEN))
    none = dims.contracted().union(*map(dims.all_of, others))
    fed = [v for v in graph.batch if graph.values[v].shape]
    first = _fed_dims(graph, rules) if fed else {}
    rows = {dims.of(v, first.get(v, 0)) for v in fed} - none
    sizes = {graph.values[v].shape[first.get(v, 0)] for v in fed}
    if not fed:
        many: Counter[int] = Counter()
        eligible = set[int]().union(*map(dims.all_of, maybe)) - none
        for op in graph.ops:
            if op.phase is Phase.FORWARD:
                for o in op.outputs:
                    many.update(dims.all_of(o) & eligible)
        rows = {d for d, _ in many.most_common(1)}
    shapes = {v: graph.values[v].shape for v in maybe}
    candidates = [(v, d, n) for v in maybe for d, n in enumerate(shapes[v]) if n > 1]
    candidates = [
        (v, d, n) for v, d, n in candidates if dims.of(v, d) in rows and (n in sizes or not fed)
    ]
    return {v: d for v, d, _ in reversed(candidates)}


def with_roles(graph: Graph, roles: Mapping[int, Role]) -> Graph:
    """The graph with other roles for some inputs."""
    values = [replace(v, role=roles.get(v.index, v.role)) for v in graph.values]
    return replace(graph, values=tuple(values)) if roles else graph


def _counts(
    graph: Graph, arguments: Sequence[Sequence[int]], dims: Dims, eligible: set[int]
) -> dict[int, Counter[int]]:
    """Per set of arguments (a mask), how many results that depend on exactly these have each of the
    ``eligible`` dimensions."""
    out: dict[int, Counter[int]] = {}
    for o, mask in forward_results(graph, arguments):
        out.setdefault(mask, Counter()).update(dims.all_of(o) & eligible)
    return out
