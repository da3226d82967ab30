"""Places the operations and collectives of a planned step on a time axis, by the cost model.

The clock (``costmodels.schedule``) adds up the seconds of a step; this module arranges them.
Operations run one after another, in the order that the memory prediction assumes. The exposed part
of a collective pauses compute, and the hidden part overlaps with it. All copies between device and
host are at the end. The step ends at the predicted step time. All iterations of an operation in a
loop are shown as one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.schedule import Overlap, hiding_share
from planner.plan.contents.rows import Prediction
from planner.plan.extract import Extraction, Sent


@dataclass(frozen=True, slots=True)
class Bar:
    """A collective (``sent``: its index) in [start_s, end_s); compute waits for ``pause_s``."""

    sent: int
    start_s: float
    end_s: float
    pause_s: float


@dataclass(frozen=True)
class Timeline:
    """When the operations and collectives of a step run, in seconds.

    Attributes:
        starts_s, ends_s: start and end of each operation, in execution order.
        lanes: the collectives by lane; a lane is the mesh axes that they run over.
        step_s: end of the step.
        hiding: share of the hideable time that is hidden, below 1 if compute is too short.
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    lanes: tuple[tuple[tuple[int, ...], tuple[Bar, ...]], ...]
    step_s: float
    hiding: float


def timeline(
    plan: Extraction,
    prediction: Prediction,
    order: Sequence[int],
    seconds: Sequence[float],
    sent: Sequence[Sent],
) -> Timeline:
    """Lay out a step. O(operations + collectives).

    Args:
        plan: the chosen plan.
        prediction: its predicted figures.
        order: operation indices in the order in which they run.
        seconds: per operation, compute seconds of all its runs.
        sent: the collectives.

    A collective starts when its lane is free: ahead of its reader by its hidden part, or after the
    operation that makes the value. Lanes do not slow each other down, as in the cost model.
    """
    model = plan.priced.model
    overlap = Overlap.of(model)
    most = sum(overlap.share(s.place) * s.time_s for s in sent)
    hiding = hiding_share(prediction.overlapped_s, most)
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for k, s in enumerate(sent):
        (before if s.before else after).setdefault(s.op, []).append(k)
    free: dict[tuple[int, ...], float] = {}
    lanes: dict[tuple[int, ...], list[Bar]] = {}
    now = model.step_latency_s

    def place(k: int, lead: bool) -> float:
        """Put a collective on its lane and return the pause."""
        axes, length = sent[k].step.axes, sent[k].time_s
        hidden = overlap.share(sent[k].place) * hiding * length
        start = max(free.get(axes, 0.0), now - (hidden if lead else 0.0))
        free[axes] = start + length
        lanes.setdefault(axes, []).append(Bar(k, start, start + length, length - hidden))
        return length - hidden

    starts, ends = [], []
    for k in after.pop(-1, ()):  # of inputs that are returned unchanged
        now += place(k, lead=False)
    for op in order:
        for k in before.get(op, ()):
            now += place(k, lead=True)
        starts.append(now)
        now += seconds[op]
        ends.append(now)
        for k in after.get(op, ()):
            now += place(k, lead=False)
    now += prediction.host_s  # assumed to be exposed
    packed = tuple((axes, _within(bars, now)) for axes, bars in sorted(lanes.items()))
    return Timeline(tuple(starts), tuple(ends), packed, now, hiding)


def _within(bars: Sequence[Bar], stop: float) -> tuple[Bar, ...]:
    """The bars of a lane, moved to earlier times where they would pass the end of the step."""
    out = []
    for bar in reversed(bars):
        end = min(bar.end_s, stop)
        start = max(end - (bar.end_s - bar.start_s), 0.0)
        out.append(Bar(bar.sent, start, end, bar.pause_s))
        stop = start
    return tuple(reversed(out))
