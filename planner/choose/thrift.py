"""The last step of a search: replaces dominated choices (see ``search.local.ties``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.choose.attempts import SPREAD
from planner.choose.simplest import Tried
from planner.cost.pricing import Priced, Pricer
from planner.request.parsed import Request
from planner.search.local.ties import less_memory
from planner.search.problem import evaluate
from planner.space.buffer import Buffer, Port
from planner.step.analysis import ideal_s
from planner.step.classes import Quotient

Array = NDArray[np.float64]
SLOWER = 1.1
"""Cost, relative to the searched plan's, above which less memory is not worth it in a mode: modes
price changes of layout above their real cost."""


def thrifty(quotient: Quotient, tried: Tried, request: Request) -> Tried:
    """The plan of a mesh with every dominated choice replaced by one that takes no more time and
    less memory, either for arrays stored between steps or within the step."""
    priced, solution = tried
    if not solution.feasible or not solution.choice or priced.mesh.num_devices == 1:
        return tried
    searched = priced
    if request.spreads:
        surcharge = SPREAD * ideal_s(quotient.part, request.model, 1) + 1e-9
        searched = dataclasses.replace(priced, change_s=surcharge)
    stored = stored_bytes(quotient, priced)
    choice = tuple(less_memory(searched.problem, solution.choice, stored).tolist())
    if choice == solution.choice:
        return tried
    cost, peak, moment = evaluate(priced.problem, choice)
    if request.spreads and cost > SLOWER * solution.cost_s:
        return tried  # the search used a smaller surcharge: see ``attempt``
    return priced, dataclasses.replace(
        solution,
        choice=choice,
        cost_s=cost,
        peak_bytes=peak,
        peak_moment=moment,
        lower_bound_s=min(solution.lower_bound_s, cost),
    )


def stored_bytes(quotient: Quotient, priced: Priced) -> Sequence[Array]:
    """Per decision, the bytes per device of the step's arguments and results under every
    strategy. A result that is tied to an argument counts once, as the argument."""
    whole = quotient.whole
    graph, homes = whole.graph, whole.groups.home
    part = priced.analysis is not whole
    pricer = Pricer(priced.analysis, priced.mesh, priced.model)
    out = [np.zeros(chosen.count) for chosen in priced.sets]
    for value in dict.fromkeys((*graph.inputs, *graph.reports)):
        home = homes[value]
        if home is None:
            continue
        group, layout = home
        node = quotient.color[group] if part else group
        stored = Buffer(node, 0, 1, float(graph.values[value].nbytes), layout, Port.STORE)
        out[node] += pricer.buffer_bytes(priced.sets[node], stored)
    return out
