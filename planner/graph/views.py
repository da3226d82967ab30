"""The graph as text and as a networkx view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.graph.ir import SCALAR, Graph, Op, Phase, Role

if TYPE_CHECKING:
    import networkx as nx


def graph_text(graph: Graph, folded: bool = False) -> str:
    """The graph as lines of text, see ``Graph.text``."""
    lines = [f"graph: {len(graph.ops)} operations, {len(graph.values)} values"]
    for index, path in zip(graph.inputs, graph.input_paths, strict=True):
        lines.append(f"  {_made(graph, index, f'input {path}')}")
    given = set(graph.inputs)
    for value in graph.values:
        if value.op == -1 and value.index not in given:
            lines.append(f"  {_made(graph, value.index, 'const')}")
    place: tuple[Phase, tuple[int, int]] | None = None
    for op in graph.ops:
        if place != (op.phase, op.segment):
            place = op.phase, op.segment
            lines += _heading(graph, op, folded)
        if folded and op.segment[1] > 0:
            continue
        ins = ", ".join("lit" if i == SCALAR else f"%{i}" for i in op.inputs)
        region = f" @{graph.regions[op.region].kind}{op.region}" if op.region else ""
        outs = ", ".join(_made(graph, o) for o in op.outputs)
        lines.append(f"    {outs or '-'} = {op.kind}({ins}){region}")
    lines.append("  return " + ", ".join("lit" if o == SCALAR else f"%{o}" for o in graph.outputs))
    return "\n".join(lines)


def _made(graph: Graph, index: int, source: str = "") -> str:
    """A value with its type, and its role unless that is an activation."""
    value = graph.values[index]
    role = "" if value.role is Role.ACTIVATION else f" {value.role}"
    of = f" of %{value.of}" if value.of >= 0 else ""
    return f"%{index}{' = ' if source else ''}{source}: {value}{role}{of}"


def _heading(graph: Graph, op: Op, folded: bool) -> list[str]:
    """The line above operations of one phase and segment, the first of which is ``op``."""
    number, copy = op.segment
    if number < 0:
        return [f"  {op.phase}:"]
    block = graph.blocks[number]
    if not folded:
        return [f"  {op.phase}, block {number}, copy {copy + 1} of {block.count}:"]
    if op.index == block.start:
        last = f"operations {block.start + block.length} to {block.end - 1} are equal"
        return [f"  {op.phase}, block {number}, the first of {block.count} copies ({last}):"]
    return [] if copy else [f"  {op.phase}, block {number}:"]


def networkx_view(graph: Graph) -> nx.DiGraph:
    """A node per operation and input, an edge per value read, see ``Graph.to_networkx``."""
    import networkx as nx

    view = nx.DiGraph()
    for position in range(len(graph.inputs)):
        view.add_node(f"in{position}", kind="input", path=graph.input_paths[position])
    owner = {index: f"in{position}" for position, index in enumerate(graph.inputs)}
    for op in graph.ops:
        view.add_node(op.index, kind=op.kind, source=op.source, region=op.region)
        for i in op.inputs:
            if i == SCALAR:
                continue
            value = graph.values[i]
            start = owner.get(i, value.op)
            if start == -1:
                start = f"const{i}"
                view.add_node(start, kind="const")
            view.add_edge(
                start,
                op.index,
                value=i,
                shape=value.shape,
                dtype=value.dtype,
                nbytes=value.nbytes,
            )
    return view
