"""Why a mesh was chosen or rejected, in words."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels import ClusterError, origins
from planner.plan.contents.interval import step_range, ties
from planner.plan.contents.rows import MeshRow, MeshVerdict
from planner.plan.plan import Plan
from planner.report.units import bytes_text, range_text, time_text

WITHOUT_PLAN = (MeshVerdict.UNFIT, MeshVerdict.UNSEARCHED)
"""Verdicts of meshes whose seconds are those of a choice that does not fit."""
SAME = 0.01
"""Relative difference up to which two figures of the chosen plan are shown as one."""


def mesh_text(row: MeshRow, plan: Plan) -> str:
    """The outcome for a mesh of a plan, in words."""
    best_s = plan.search.cost_s
    match row.verdict:
        case MeshVerdict.UNFIT:
            has = bytes_text(plan.prediction.limit_bytes)
            return f"does not fit: needs {bytes_text(row.peak_bytes)}, has {has}"
        case MeshVerdict.UNSEARCHED:
            return _unsearched_text(row.lower_bound_s, best_s)
        case MeshVerdict.PRUNED:
            return _pruned_text(row.lower_bound_s, best_s)
        case MeshVerdict.SLOWER:
            ratio = f"{row.cost_s / max(best_s, 1e-300):.2f}x"
            if ties(plan, row.cost_s, best_s):
                return f"tied with the chosen one ({ratio})"
            return f"{ratio} the chosen one's time"
        case MeshVerdict.CHOSEN:
            return _chosen_text(row, plan)


def meshes_text(rows: Sequence[MeshRow], plan: Plan) -> str:
    """The outcome for meshes with the same verdict, in words."""
    if rows[0].verdict is MeshVerdict.UNFIT:
        least = min((row.peak_bytes for row in rows if row.peak_bytes >= 0), default=-1)
        return f"does not fit: needs {bytes_text(least)} or more" if least >= 0 else "does not fit"
    text = _pruned_text if rows[0].verdict is MeshVerdict.PRUNED else _unsearched_text
    return text(min(row.lower_bound_s for row in rows), plan.search.cost_s)


def _chosen_text(row: MeshRow, plan: Plan) -> str:
    """The search counts memory in the order of the trace and leaves out the start of a step. The
    text says if the plan, as it runs, has another time or peak."""
    ran = plan.prediction
    pairs = ((row.cost_s, ran.step_s, time_text), (row.peak_bytes, ran.peak_bytes, bytes_text))
    other = [text(b) for a, b, text in pairs if abs(a - b) > SAME * b]
    return "chosen" + (f"; as it runs: {', '.join(other)}" if other else "")


def _pruned_text(bound_s: float, best_s: float) -> str:
    """The bound is not below the best plan's time, or so little below it that the best plan's mesh,
    which has fewer axes, would be chosen anyway."""
    if bound_s >= best_s:
        return f"pruned: lower bound {time_text(bound_s)} exceeds {time_text(best_s)}"
    gain = 100.0 * (1.0 - bound_s / best_s)
    return f"pruned: saves at most {gain:.2g} %, too little for one more axis"


def _unsearched_text(bound_s: float, best_s: float) -> str:
    gain = 100.0 * max(1.0 - bound_s / best_s, 0.0)
    return f"not searched further: its first choice does not fit; one may save up to {gain:.2g} %"


def likely_text(plan: Plan) -> str:
    """The likely range of the step time, and the runs it is derived from; empty without any."""
    likely = step_range(plan)
    if likely is None:
        return ""
    by = likely.interval
    return (
        f"{range_text(likely.low_s, likely.high_s)}: 80 % of {by.of} took {by.low:.2f}x to "
        f"{by.high:.2f}x as long as predicted"
    )


def constants_text(plan: Plan) -> str:
    """The source of the constants that the prediction uses."""
    try:
        return str(origins(plan.cluster))
    except ClusterError:
        return f"those of {plan.cluster}, which can't be read here"


def proof_text(plan: Plan) -> str:
    """What the lower bounds of the chosen mesh and of the others prove."""
    s = plan.search
    least = min((m.lower_bound_s for m in plan.meshes), default=s.lower_bound_s)
    if least >= s.cost_s * (1.0 - 1e-9):
        return "optimal over all meshes searched"
    here = (
        "optimal on this mesh"
        if s.gap <= 1e-9
        else (f"lower bound on this mesh {time_text(s.lower_bound_s)}")
    )
    if s.lower_bound_s > plan.prediction.step_s * (1.0 + 1e-9):
        here += " as the search counts; as it runs, the plan takes less"
    if least >= s.lower_bound_s * (1.0 - 1e-9):
        return here
    return f"{here}; lower bound over all meshes {time_text(least)}"


def devices_text(count: int) -> str:
    """``8`` -> ``"8 devices"``."""
    return "1 device" if count == 1 else f"{count} devices"


def choice_text(plan: Plan) -> str:
    """Why the chosen mesh was chosen."""
    meshes, confirmed = plan.meshes, plan.confirmed
    if confirmed is not None and confirmed.chosen is not None and len(confirmed.rows) > 1:
        return f"best of {len(confirmed.rows)} compiled candidates; {len(meshes)} meshes searched"
    if len(meshes) < 2:
        return "the only mesh searched"
    unfit = sum(row.verdict is MeshVerdict.UNFIT for row in meshes)
    unsearched = sum(row.verdict is MeshVerdict.UNSEARCHED for row in meshes)
    pruned = sum(row.verdict is MeshVerdict.PRUNED for row in meshes)
    chosen = next(m for m in meshes if m.verdict is MeshVerdict.CHOSEN)
    fitting = [m.cost_s for m in meshes if m.cost_s >= 0 and m.verdict not in WITHOUT_PLAN]
    fastest = min(fitting, default=chosen.cost_s)
    text = f"fastest of {len(meshes)} meshes"
    close = sum(
        row.verdict is MeshVerdict.SLOWER and ties(plan, row.cost_s, plan.search.cost_s)
        for row in meshes
    )
    if close:
        text += f", {close} {'other' if close == 1 else 'others'} tied"
    if chosen.cost_s > fastest * (1.0 + 1e-6):
        extra = 100.0 * (chosen.cost_s / fastest - 1.0)
        text = (
            f"simplest of {len(meshes)} meshes; {extra:.2g} % slower than the fastest, a "
            "difference below the resolution of the cost model"
        )
    if pruned:
        text += f"; {pruned} pruned by lower bounds"
    if unfit:
        text += f"; {unfit} above the memory limit"
    return f"{text}; {unsearched} not searched further" if unsearched else text
