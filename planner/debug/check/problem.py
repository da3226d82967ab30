"""Checks that the problem of a mesh is well formed and matches the strategies of the groups."""

from __future__ import annotations

import numpy as np

from planner.cost.pricing import Priced
from planner.debug.check.layouts import demand, within
from planner.errors import InternalError
from planner.search.problem import verify
from planner.space.groups import Group
from planner.space.strategies import IntArray, StrategySet


def check_problem(*priced: Priced) -> None:
    """Demand the invariants of the problems of a mesh.

    Raises:
        InternalError: the group, node, edge or usage at fault.
    """
    for one in {id(p): p for p in priced}.values():
        _check(one)


def _check(priced: Priced) -> None:
    groups, problem = priced.analysis.groups.groups, priced.problem
    demand(
        len(priced.sets) == len(groups), "strategies", f"{len(priced.sets)} sets of {len(groups)}"
    )
    done: set[tuple[int, tuple[int, ...]]] = set()
    for group, chosen in zip(groups, priced.sets, strict=True):
        if (key := (id(chosen), group.sizes)) not in done:
            _strategies(group, chosen, priced.mesh.sizes)
            done.add(key)
    try:
        verify(problem)
    except ValueError as error:
        raise InternalError(f"problem on {priced.mesh}: {error}") from error
    demand(len(problem.names) == len(groups), "problem", f"{len(problem.names)} nodes")
    for name, cost, chosen in zip(problem.names, problem.cost_s, priced.sets, strict=True):
        demand(cost.size == chosen.count, f"node {name}", f"{cost.size} costs of {chosen.count}")
    pairs: set[tuple[int, int]] = set()
    for edge in problem.edges:
        pair = min(edge.a, edge.b), max(edge.a, edge.b)
        where = f"edge {problem.names[edge.a]} - {problem.names[edge.b]}"
        demand(pair not in pairs, where, "is there twice")
        pairs.add(pair)


def _strategies(group: Group, chosen: StrategySet, mesh: tuple[int, ...]) -> None:
    """Demand that strategies split only factors that can be split and that the mesh axes divide,
    and that the use splits no more than the store."""
    where = f"strategies of group {group.index} {group.name}"
    shape = (chosen.count, len(mesh))
    demand(chosen.count > 0, where, "there are none")
    demand(chosen.use.shape == chosen.store.shape == shape, where, f"of shape {chosen.use.shape}")
    names = tuple(name for name, _ in group.decisions)
    demand(chosen.decisions == names, where, f"decide {chosen.decisions}, the group {names}")
    options = chosen.options
    demand(options.shape == (chosen.count, len(names)), where, f"options of shape {options.shape}")
    for k, (name, count) in enumerate(group.decisions):
        within(f"{where}, {name}", "option", options[:, k].tolist(), count)
    split = chosen.store[chosen.store >= 0]
    factors = np.unique(split).tolist()
    within(where, "factor", factors, len(group.sizes))
    for f in factors:
        demand(group.shardable[f], where, f"split factor {f}, which stays whole")
        parts = _parts(chosen.store, f, mesh)
        bad = parts[group.sizes[f] % parts != 0].tolist()
        demand(not bad, where, f"cut factor {f} of size {group.sizes[f]} into {bad[:1]} parts")
    more = (chosen.use != chosen.store) & (chosen.use != -1)
    demand(not more.any(), where, "use a split that is not stored")
    demand(
        group.kind == "input" or bool((chosen.use == chosen.store).all()),
        where,
        "use and store differ in a group that is no input",
    )


def _parts(store: IntArray, factor: int, mesh: tuple[int, ...]) -> IntArray:
    """[strategies] the number of parts into which a factor is cut."""
    out: IntArray = np.prod(np.where(store == factor, np.asarray(mesh), 1), axis=1)
    return out
