"""Predicted compute seconds of single operations, for reports.

A group is priced as a whole: its elementwise operations share kernels, and the slower of all their
flop and all their bytes counts. The group's seconds are divided among its operations in proportion
to the seconds that each would take alone.
"""

from __future__ import annotations

import numpy as np

from planner.cost.apart import Chosen
from planner.cost.pricing import Pricer
from planner.step.kernels.costs import Work


def op_seconds(plan: Chosen) -> tuple[float, ...]:
    """Per operation, the compute seconds on one device of all its runs in a step.

    Their sum is the plan's predicted compute without the start of the step.
    """
    priced, graph = plan.priced, plan.graph
    analysis = priced.analysis
    groups = analysis.groups
    pricer = Pricer(analysis, priced.mesh, priced.model)
    known: dict[tuple[Work, tuple[int, ...]], float] = {}
    seconds, home = [0.0] * len(graph.ops), [-1] * len(graph.ops)
    alone = [0.0] * len(groups.groups)
    assigned = [
        tuple(chosen.use[row].tolist())
        for chosen, row in zip(priced.sets, plan.choice, strict=True)
    ]
    for index, works in enumerate(analysis.parts):
        entry = groups.op_layouts[index]
        if entry is None:
            continue
        group = home[index] = entry[0]
        for work in works:
            key = (work, assigned[group])
            if key not in known:
                assign = np.asarray([assigned[group]])
                known[key] = float(pricer.rates.compute_s(work, assign)[0, 0])
            seconds[index] += known[key]
        alone[group] += seconds[index]
    share = [
        pricer.parts_of(group, chosen, row)[0] / alone_s if alone_s else 0.0
        for group, chosen, row, alone_s in zip(
            groups.groups, priced.sets, plan.choice, alone, strict=True
        )
    ]
    return tuple(s * share[g] if g >= 0 else 0.0 for s, g in zip(seconds, home, strict=True))
