"""Forward, backward, update: the phase of every operation of a train step.

JAX names the equations that differentiation makes: their name stack has ``jvp(...)`` in the forward
pass and ``transpose(jvp(...))`` in the backward pass, outermost transformation first. Operations
with neither name are placed by their dependences: those that depend on the backward pass are the
update, and so are those that only the update or the new state reads (a step count, a decayed
moment); all others are forward. Rematerialization in a backward pass (``jax.checkpoint``) belongs
to it. A step without a backward pass is all forward. In a loop over train steps each iteration
starts over: what it reads from the previous one is forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.ir import SCALAR, Graph, Phase

_FIRST, _BACK = "jvp(", "transpose("


def named_phase(stack: str) -> Phase | None:
    """The phase in a name stack; None if it has none.

    >>> for stack in ("transpose(jvp(Net))/blocks", "jvp(transpose(jvp()))", "Net/blocks"):
    ...     print(named_phase(stack))
    backward
    forward
    None
    """
    at = stack.find(_FIRST)
    if at < 0:
        return None
    return Phase.BACKWARD if _BACK in stack[:at] else Phase.FORWARD


def phases_of(graph: Graph, named: Sequence[Phase | None]) -> tuple[Phase, ...]:
    """The phase of every operation.

    Args:
        graph: the step.
        named: per operation, the phase in its name stack, if any.

    Complexity: O(operations), times the depth of loops that carry gradients around.
    """
    if Phase.BACKWARD not in named:
        return (Phase.FORWARD,) * len(graph.ops)
    loops = step_loops(graph, named)
    behind = _behind(graph, named, loops)
    wanted = {i for op, phase in zip(graph.ops, named, strict=True) if phase for i in op.inputs}
    producers = ((v, graph.values[v].op) for v in graph.reports)
    reports = {v for v, op in producers if op < 0 or not behind[op]}
    _, before = graph.needed_for(wanted | reports, once=loops)
    return tuple(
        phase or (Phase.UPDATE if behind[op.index] or not before[op.index] else Phase.FORWARD)
        for op, phase in zip(graph.ops, named, strict=True)
    )


def step_loops(graph: Graph, named: Sequence[Phase | None]) -> set[int]:
    """The regions of loops that hold a backward pass: over steps, or over groups of examples."""
    out: set[int] = set()
    for op, phase in zip(graph.ops, named, strict=True):
        region = op.region
        while phase is Phase.BACKWARD and region > 0 and region not in out:
            out.add(region)
            region = graph.regions[region].parent
    return out


def _behind(graph: Graph, named: Sequence[Phase | None], loops: set[int]) -> list[bool]:
    """Per operation, whether it depends on the backward pass of the same iteration."""
    after = [False] * len(graph.values)
    out = [False] * len(graph.ops)
    left: set[int] = set()  # carries that leave a loop of ``loops`` after a backward pass
    changed = True
    while changed:  # repeat where a loop carries the dependence
        changed = False
        for op, phase in zip(graph.ops, named, strict=True):
            back = phase is Phase.BACKWARD
            late = op.kind == "loop_out" and not left.isdisjoint(op.inputs)
            out[op.index] = back or late or any(i != SCALAR and after[i] for i in op.inputs)
            if not out[op.index]:
                continue
            for o in op.outputs:
                after[o] = True
            if op.kind in ("loop_back", "loop_test") and op.inputs[0] != SCALAR:
                for carry in op.inputs[1:] if after[op.inputs[0]] else ():
                    if op.region in loops:
                        changed = changed or carry not in left
                        left.add(carry)
                    elif not after[carry]:
                        after[carry] = changed = True
    return out
