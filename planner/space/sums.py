"""Partial sums that are added up before they are reduced.

``dq @ Wq + dk @ Wk + dv @ Wv`` with each product split along its contraction needs one reduction:
each device adds its three partial sums, and the partial totals are reduced. XLA does so on GPU and
TPU (its passes all-reduce and reduce-scatter reassociation) if all addends have the same reduction
and no other change of layout. So each addend is priced at its share of one reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.graph.ir import PRODUCTS, SCALAR, Graph
from planner.space.groups import GroupLink

ADDITIONS = frozenset({"add", "add_any"})
TABLES = frozenset({"scatter-add"})
TURNS = frozenset({"transpose", "reshape"})
"""Operations, besides additions, that a reduction can be postponed after."""


def with_joined_sums(
    graph: Graph, links: Sequence[GroupLink], live: Sequence[bool], tables: bool = False
) -> tuple[GroupLink, ...]:
    """The links; those of one sum get its index and their share of one reduction.

    The addends of a sum are results of products that only additions with each other read, directly
    or transposed, and that flow into the same group the same number of times. ``tables``: gradients
    of lookups count, too; XLA:TPU reduces these separately. Linear in operations.
    """
    kinds = PRODUCTS | TABLES if tables else PRODUCTS
    partial = {
        x.value: k
        for k, x in enumerate(links)
        if x.partial and x.operand <= -2 and graph.ops[x.op].kind in kinds
    }
    readers = [0] * len(graph.values)
    for op in graph.ops:
        if live[op.index]:
            for i in op.inputs:
                if i != SCALAR:
                    readers[i] += 1
    for o in graph.outputs:
        if o != SCALAR:
            readers[o] += 2
    addends: dict[int, tuple[int, ...]] = {v: (k,) for v, k in partial.items()}
    for op in graph.ops:
        inner = [addends.get(i, ()) if i != SCALAR and readers[i] == 1 else () for i in op.inputs]
        if not live[op.index] or not inner or not all(inner):
            continue
        members = tuple(k for ks in inner for k in ks)
        first = links[members[0]]
        alike = all((links[k].b, links[k].weight) == (first.b, first.weight) for k in members)
        if (op.kind in ADDITIONS and alike) or op.kind in TURNS:
            addends[op.outputs[0]] = members
    last: dict[int, tuple[int, ...]] = {}
    for members in addends.values():  # a later addition includes the addends of earlier ones
        last.update(dict.fromkeys(members, members))
    out = list(links)
    for number, members in enumerate(dict.fromkeys(last.values())):
        if len(members) > 1:
            for k in members:
                out[k] = dataclasses.replace(links[k], share=1 / len(members), sum=number)
    return tuple(out)
