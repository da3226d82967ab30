"""Decisions other than shardings: one file and one row here for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from planner.graph.ir import Graph
from planner.space.decisions.base import Decision
from planner.space.decisions.host_memory import HostMemory
from planner.space.groups import Groups

DECISIONS: dict[str, Decision] = {one.name: one for one in (HostMemory(),)}
"""All kinds of decisions by name. Strategies are multiplied in this order."""

Chosen = Mapping[str, frozenset[int]]
"""Per decision, the values whose groups have the choice."""


def parsed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The parsed option of each decision; raises RequestError."""
    return {name: one.parse(options.get(name)) for name, one in DECISIONS.items()}


def chosen_values(graph: Graph, wanted: Mapping[str, Any]) -> Chosen:
    """Per decision, the values that have a choice under its parsed option; raises RequestError."""
    values_by_name = {
        name: DECISIONS[name].values(graph, parsed_option) for name, parsed_option in wanted.items()
    }
    return {name: values for name, values in values_by_name.items() if values}


def with_decisions(groups: Groups, chosen: Chosen) -> Groups:
    """The groups, with the choices added to the groups of the values."""
    of: dict[int, list[tuple[str, int]]] = {}
    for name, values in chosen.items():
        for group in {home[0] for v in values if (home := groups.home[v]) is not None}:
            of.setdefault(group, []).append((name, len(DECISIONS[name].options)))
    if not of:
        return groups
    new_groups = tuple(
        dataclasses.replace(g, decisions=tuple(of[g.index])) if g.index in of else g
        for g in groups.groups
    )
    return dataclasses.replace(groups, groups=new_groups)
