"""Predicted compute seconds of single operations, for reports.

A group is priced as a whole: its elementwise operations share kernels, and of all their flop and
bytes the slower counts. An operation gets the part of its group's seconds that it would take of
them alone.
"""

from __future__ import annotations

import numpy as np

from planner.cost.apart import Chosen
from planner.cost.pricing import Pricer
from planner.step.analysis import does_nothing, empty_workload
from planner.step.kernels.costs import Work


def op_seconds(plan: Chosen) -> tuple[float, ...]:
    """Per operation, the compute seconds on one device of all its runs in a step.

    Their sum is the plan's predicted compute, less the start of the step.
    """
    priced, graph = plan.priced, plan.graph
    analysis = priced.analysis
    groups = analysis.groups
    pricer = Pricer(analysis, priced.mesh, priced.model)
    workload, live = (
        empty_workload(graph, analysis.rules, groups, analysis.scheduled.device),
        graph.live_ops(),
    )
    known: dict[tuple[Work, tuple[int, ...]], float] = {}
    seconds, home = [0.0] * len(graph.ops), [-1] * len(graph.ops)
    alone = [0.0] * len(groups.groups)
    for op in graph.ops:
        found = None
        if live[op.index] and not does_nothing(op):
            found = workload.part(op, analysis.rules[op.index])
        if found is None:
            continue
        group, work = found
        assign = priced.sets[group].use[plan.choice[group]]
        key = (work, tuple(assign.tolist()))
        if key not in known:
            known[key] = float(pricer.rates.compute_s(work, np.asarray([assign]))[0, 0])
        seconds[op.index], home[op.index] = known[key], group
        alone[group] += known[key]
    share = [
        pricer.parts_of(group, chosen, row)[0] / own if own else 0.0
        for group, chosen, row, own in zip(
            groups.groups, priced.sets, plan.choice, alone, strict=True
        )
    ]
    return tuple(s * share[g] if g >= 0 else 0.0 for s, g in zip(seconds, home, strict=True))
