"""What another sharding of one value would cost, and what it would change elsewhere.

An alternative has two prices, both in the search's cost and relative to the plan: with everything
else as planned, and with the best completion around it. For the completion, the problem is searched
again with the decision fixed, from scratch (the fast search) and by local moves from the plan.
Changes that gain nothing are then reverted. A completion is not proved to be the best.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from planner.explain.model import Alternative, Change, Price
from planner.explain.setting import PlanSetting, shardings
from planner.report.units import sharding_text
from planner.search.local.moves import MoveState, descend, descend_pairs
from planner.search.problem import Array, Problem, evaluate, fits
from planner.search.registry import FAST, SEARCHES
from planner.spec import Sharding

PRICED = 6
"""Alternatives with a row: those that are cheapest with everything else as planned."""
CHANGES = 4
"""Changes elsewhere that are named."""
TRIAL_S = 10.0
"""Time limit of one search in seconds."""
ROUNDS = 8
"""Largest number of passes of local moves."""
SAME = 1e-9
"""Relative difference in cost below which two choices count as equal."""

Ways = dict[tuple[Sharding, Sharding], list[int]]


def ways(setting: PlanSetting, node: int, layout: Sequence[int]) -> Ways:
    """The strategies of a decision by the shardings that store and use a value of this layout."""
    out: Ways = {}
    for strategy in range(setting.priced.sets[node].count):
        out.setdefault(shardings(setting, node, strategy, layout), []).append(strategy)
    return out


def alternatives(
    setting: PlanSetting, node: int, layout: Sequence[int]
) -> tuple[tuple[Alternative, ...], int]:
    """Other shardings of a value, cheapest completion first, and the number without a row."""
    state = MoveState(setting.problem, setting.timeline, setting.choice)
    now = shardings(setting, node, setting.choice[node], layout)
    candidates: list[tuple[float, tuple[Sharding, Sharding], list[int], int]] = []
    for way, strategies in ways(setting, node, layout).items():
        row = state.row(node)[strategies]
        best = int(np.argmin(row))
        if way != now and np.isfinite(row[best]):
            candidates.append((float(row[best]), way, strategies, strategies[best]))
    candidates.sort(key=lambda f: f[0])
    shown = candidates[:PRICED]
    whole = [f for f in candidates[PRICED:] if not f[1][0].axes]
    out = [
        _alternative(setting, state, node, way, strategies, one)
        for _, way, strategies, one in shown + whole
    ]
    out.sort(key=lambda a: (a.best is None, (a.best or a.alone).extra_s))
    return tuple(out), len(candidates) - len(out)


def _alternative(
    setting: PlanSetting,
    state: MoveState,
    node: int,
    way: tuple[Sharding, Sharding],
    strategies: list[int],
    one: int,
) -> Alternative:
    cost, peak = setting.base
    problem = setting.problem
    before = int(state.choice[node])
    state.move(node, one)
    alone_cost, alone_peak, _ = evaluate(problem, state.choice.tolist())
    state.move(node, before)
    alone = Price(alone_cost - cost, alone_peak - peak, fits(alone_peak, problem.limit_bytes))
    around = completed(setting, node, strategies, one)
    if around is None:
        return Alternative(*way, alone, None, (), 0)
    best_cost, best_peak, _ = evaluate(problem, around)
    pairs = zip(around, setting.choice, strict=True)
    changed = [k for k, (then, now) in enumerate(pairs) if then != now and k != node]
    changes, count = _changes(setting, around, changed)
    return Alternative(*way, alone, Price(best_cost - cost, best_peak - peak, True), changes, count)


def completed(
    setting: PlanSetting, node: int, strategies: Sequence[int], one: int
) -> tuple[int, ...] | None:
    """The best known choice with a decision restricted to ``strategies``; None if none fits.

    Local moves from the plan start with its strategy ``one``.
    """
    held = _held(setting.searched, node, strategies)
    start = list(setting.choice)
    start[node] = one
    tried = []
    state = MoveState(held, setting.timeline, start)
    if state.feasible():
        _descend(state)
        tried.append(tuple(state.choice.tolist()))
    tried.append(SEARCHES[FAST](held, time_limit_s=TRIAL_S).choice)
    good = []
    for choice in tried:
        cost, peak, _ = evaluate(setting.problem, choice)
        if np.isfinite(cost) and fits(peak, held.limit_bytes):
            good.append((evaluate(held, choice)[0], choice))
    if not good:
        return None
    return _put_back(held, setting, min(good, key=lambda g: g[0])[1])


def _held(problem: Problem, node: int, strategies: Sequence[int]) -> Problem:
    """The problem with all but some strategies of a node forbidden."""
    costs: list[Array] = list(problem.cost_s)
    costs[node] = np.full(costs[node].size, np.inf)
    costs[node][list(strategies)] = problem.cost_s[node][list(strategies)]
    return dataclasses.replace(problem, cost_s=tuple(costs))


def _descend(state: MoveState) -> None:
    """Make local moves until none gains."""
    deadline = time.monotonic() + TRIAL_S
    for _ in range(ROUNDS):
        moved = descend(state, deadline)
        if not descend_pairs(state, deadline) and not moved:
            break


def _put_back(held: Problem, setting: PlanSetting, choice: Sequence[int]) -> tuple[int, ...]:
    """Revert changes to the plan that gain nothing: first whole pieces of connected decisions that
    differ from the plan, then single decisions."""
    state = MoveState(held, setting.timeline, choice)
    small = SAME * abs(setting.base[0])
    for piece in _pieces(held, setting.choice, choice):
        before, now = state.cost(), {k: int(state.choice[k]) for k in piece}
        for k in piece:
            state.move(k, setting.choice[k])
        if not (state.cost() <= before + small and fits(state.peak(), held.limit_bytes)):
            for k, strategy in now.items():
                state.move(k, strategy)
    for _ in range(ROUNDS):
        moved = False
        for k, plan in enumerate(setting.choice):
            current = int(state.choice[k])
            row = state.row(k)
            if current != plan and row[plan] <= row[current] + small and state.allowed(k)[plan]:
                state.move(k, plan)
                moved = True
        if not moved:
            break
    return tuple(state.choice.tolist())


def _pieces(problem: Problem, plan: Sequence[int], choice: Sequence[int]) -> list[list[int]]:
    """The connected pieces of decisions that differ from the plan, if the plan's is allowed."""
    differs = [
        a != b and bool(np.isfinite(problem.cost_s[k][a]))
        for k, (a, b) in enumerate(zip(plan, choice, strict=True))
    ]
    near: dict[int, list[int]] = {k: [] for k, other in enumerate(differs) if other}
    for edge in problem.edges:
        if edge.a in near and edge.b in near:
            near[edge.a].append(edge.b)
            near[edge.b].append(edge.a)
    pieces, seen = list[list[int]](), set[int]()
    for start in near:
        piece = [] if start in seen else [start]
        seen.add(start)
        for k in piece:  # grows during the loop
            new = dict.fromkeys(other for other in near[k] if other not in seen)
            seen.update(new)
            piece.extend(new)
        if piece:
            pieces.append(sorted(piece))
    return pieces


def _changes(
    setting: PlanSetting, around: Sequence[int], changed: Sequence[int]
) -> tuple[tuple[Change, ...], int]:
    """The largest changes, arguments first, equal texts once; and the number of all changes."""
    graph = setting.plan.graph

    def weight(node: int) -> tuple[bool, int, int]:
        value = setting.foremost(node)
        if value is None:
            return True, 0, node
        return (
            value not in setting.inputs,
            -graph.values[value].nbytes * len(setting.members[node]),
            node,
        )

    counts: dict[tuple[str, str, str], int] = {}
    total = 0
    for node in sorted(changed, key=weight):
        count = len(setting.members[node])
        total += count
        before, after = setting.spec(node, setting.choice[node]), setting.spec(node, around[node])
        if before != after:
            key = (setting.name(node), before, after)
            counts[key] = counts.get(key, 0) + count
    rows = [Change(*key, count) for key, count in counts.items()]
    return tuple(rows[:CHANGES]), total


def without_limit(setting: PlanSetting, node: int, layout: Sequence[int]) -> str:
    """The sharding without the memory limit, as text; empty if it is the same or fits the limit."""
    free = dataclasses.replace(setting.searched, limit_bytes=np.inf)
    state = MoveState(free, setting.timeline, setting.choice)
    _descend(state)
    cost = evaluate(free, state.choice.tolist())[0]
    choice = tuple(state.choice.tolist())
    other = SEARCHES[FAST](free, time_limit_s=TRIAL_S)
    if other.cost_s < cost:
        choice = other.choice
    choice = _put_back(free, setting, choice)
    now = shardings(setting, node, setting.choice[node], layout)
    then = shardings(setting, node, choice[node], layout)
    peak = evaluate(free, choice)[1]
    if then == now or fits(peak, setting.searched.limit_bytes):
        return ""
    return sharding_text(*then)
