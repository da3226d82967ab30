"""The order in which compilers run a step. On GPUs, operations that only the update needs run last.

XLA's latency-hiding scheduler fills its schedule from the end: an operation is placed as late as
its readers allow. Only the update reads the gradients of parameters (in a loop, they are stacked).
So their products wait until the chain of activation gradients is done, and their operands stay in
memory until then (openxla/xla, xla/service/latency_hiding_scheduler.h). Modules of XLA:TPU have
these products inside the chain, each after the activation gradient of its layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.ir import PRODUCTS, SCALAR, Graph, Phase

GRADIENTS = frozenset("dot_general conv_general_dilated ragged_dot scatter-add scatter_add".split())
"""Operations that compute a parameter's gradient from activations."""

ENTERS = frozenset({"loop_const", "loop_carry", "loop_xs"})
"""Borders at which values enter a loop; its body reads them."""


def schedule(graph: Graph, heavy: Sequence[bool], live: Sequence[bool]) -> tuple[int, ...]:
    """Operation indices in the order in which they run; a loop's body stays in one piece.

    Args:
        graph: the step.
        heavy: per operation, whether it computes more than an elementwise result.
        live: per operation, whether its results are used.

    Complexity: O(operations).
    """
    late = _late(graph, heavy, live)
    levels = _levels(graph, live, late)
    items: dict[int, list[tuple[bool, int, int]]] = {r.index: [] for r in graph.regions}
    seen: set[int] = set()
    for op in graph.ops:
        items[op.region].append((late[op.index], op.index, -1))
        region = op.region
        while region > 0 and region not in seen:  # a body has the place of its first operation
            seen.add(region)
            items[graph.regions[region].parent].append((False, op.index, region))
            region = graph.regions[region].parent
    out: list[int] = []

    def place(region: int) -> None:
        for _, index, body in _by_level(sorted(items[region]), levels):
            if body < 0:
                out.append(index)
            else:
                place(body)

    place(0)
    return tuple(out)


def _late(graph: Graph, heavy: Sequence[bool], live: Sequence[bool]) -> list[bool]:
    """Per operation, whether it makes a gradient that no product reads, or uses such a gradient."""
    waited = [False] * len(graph.values)  # whether a heavy operation is downstream of a value
    closes = any(op.kind == "loop_back" for op in graph.ops)
    for op in (*reversed(graph.ops), *(reversed(graph.ops) if closes else ())):
        if not live[op.index]:
            continue
        stop = heavy[op.index] or any(waited[o] for o in op.outputs)
        if op.kind in ENTERS:
            stop = True
        if op.kind == "loop_back":  # the next iteration may read it
            stop = waited[op.inputs[1]]
        if op.kind == "loop_out":  # waits for the end of the last iteration
            continue
        for i in op.inputs:
            if i != SCALAR:
                home = graph.values[i].op
                at_border = op.kind == "loop_ys"  # a stack waits for the end of the loop's body
                at_border = at_border or (home >= 0 and graph.ops[home].kind in ENTERS)
                crosses = home >= 0 and graph.ops[home].region != op.region and not at_border
                waited[i] = waited[i] or stop or crosses
    late = [False] * len(graph.ops)
    for op in graph.ops:
        if not live[op.index] or any(waited[o] for o in op.outputs):
            continue
        makers = [graph.values[i].op for i in op.inputs if i != SCALAR]
        late[op.index] = op.kind in GRADIENTS or any(m >= 0 and late[m] for m in makers)
    return late


def _by_level(
    items: Sequence[tuple[bool, int, int]], levels: Sequence[float]
) -> list[tuple[bool, int, int]]:
    """Sorts each run of backward operations, between loops and other operations, by level."""
    out: list[tuple[bool, int, int]] = []
    run: list[tuple[bool, int, int]] = []
    for item in (*items, None):
        if item is not None and not item[0] and item[2] < 0 and levels[item[1]]:
            run.append(item)
            continue
        out += sorted(run, key=lambda x: (-levels[x[1]], x[1]))
        run = []
        if item is not None:
            out.append(item)
    return out


def _levels(graph: Graph, live: Sequence[bool], late: Sequence[bool]) -> list[float]:
    """Per operation of the backward pass, the number of products on the longest path from it,
    including itself, plus a half if it is not a product. 0 for other operations.

    Operations with larger levels run first. So of attention's two products with the cotangent, the
    one for the values runs after the softmax, because two more products follow on the other path.
    The probabilities stay until then.
    """
    behind = [0.0] * len(graph.values)
    levels = [0.0] * len(graph.ops)
    for op in reversed(graph.ops):
        if not live[op.index] or late[op.index]:
            continue
        level = max([behind[o] for o in op.outputs], default=0.0)
        level += op.kind in PRODUCTS
        for i in op.inputs:
            if i != SCALAR:
                behind[i] = max(behind[i], level)
        if op.phase is Phase.BACKWARD:
            levels[op.index] = level if op.kind in PRODUCTS else level + 0.5
    for op in graph.ops:  # sums for the update run with their operands
        if levels[op.index] == 0.5:
            makers = [graph.values[i].op for i in op.inputs if i != SCALAR]
            maker_levels = [levels[m] for m in makers if m >= 0 and levels[m]]
            levels[op.index] = min(maker_levels, default=0.5)
    return levels


NEAR = 12
"""Maximum distance, in operations, between two products of one layer."""


def activations_first(graph: Graph, live: Sequence[bool]) -> tuple[int, ...]:
    """The order of the trace, except that of the two products that read a gradient, the one that
    JAX traces first (the weight's gradient) runs after the other, with the operations that depend
    on it.

    XLA:TPU does so: a gathered weight is then freed before its gradient is made. Linear in
    operations.
    """
    readers: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.kind in PRODUCTS and op.phase is Phase.BACKWARD and live[op.index]:
            for i in set(op.inputs):
                if i != SCALAR and graph.values[i].op >= 0:
                    readers.setdefault(i, []).append(op.index)
    behind: dict[int, list[int]] = {}  # per operation, those that run right after it
    moved: set[int] = set()
    for pair in readers.values():
        if len(pair) != 2 or not moved.isdisjoint(pair) or pair[1] in behind:
            continue
        first, second = pair
        if second - first > NEAR or graph.ops[first].region != graph.ops[second].region:
            continue
        derived, later = set(graph.ops[first].outputs), [first]
        for index in range(first + 1, second):
            if not derived.isdisjoint(graph.ops[index].inputs):
                derived.update(graph.ops[index].outputs)
                later.append(index)
        free = moved.isdisjoint(later) and behind.keys().isdisjoint(later)
        inside = all(graph.ops[k].region == graph.ops[second].region for k in later)
        if derived.isdisjoint(graph.ops[second].inputs) and free and inside:
            behind[second] = later
            moved.update(later)
    order: list[int] = []
    for op in graph.ops:
        if op.index not in moved:
            order += [op.index, *behind.get(op.index, ())]
    return tuple(order)
