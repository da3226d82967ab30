"""The clock: from the seconds of parts to the seconds of a step.

No other module adds parts up to a step time. The parts are plain numbers: what one microbatch takes
on one device of every stage (`StageSeconds`), what happens once per step, how microbatches run
through the stages (`Pipeline`), and how much communication hides under compute (`Overlap`).

A step of one stage and one microbatch takes

    fixed + compute + communication - hidden + wait
    hidden = min(sum over places of share * communication, fixed + compute)

With m microbatches on p stages, each of whose devices holds v chunks of the model:

- the slowest stage runs its m microbatches and the work that happens once per step;
- *bubble*: it idles while the first microbatch reaches it and the last one leaves: the time of one
  chunk of every other stage (GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2019,
  "PipeDream"; with a flush each step, and interleaved: Narayanan et al. 2021, "Efficient
  Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2). With equal
  stages that is (p - 1) / v microbatches.
- *transfers*: a stage sends each microbatch to the next stage and its gradient to the previous one,
  and does nothing else meanwhile.

For equal stages, the result is exact in all three schedules, transfers aside. For unequal stages,
it is exact in GPipe if one stage is the slowest both forward and backward, and an upper bound in
the other two if all stages have the same ratio of backward to forward.
``tests/costmodels/test_schedule.py`` compares it with a simulation of the single passes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from .compute import Array
from .model import CostModel

Seconds = TypeVar("Seconds", float, Array)


class Place(enum.IntEnum):
    """Place of a collective in a step, which determines how much of it hides.

    ``WAITED``: compute waits for it. ``AHEAD``: it can run ahead of its use, such as a gather of a
    parameter. ``BEHIND``: little waits for its result, such as a reduction of a gradient.
    """

    WAITED = 0
    AHEAD = 1
    BEHIND = 2


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of communication that hide under compute, 0 to 1, by `Place`."""

    waited: float = 0.0
    ahead: float = 0.0
    behind: float = 0.0

    @staticmethod
    def of(model: CostModel) -> Overlap:
        """The shares of a cost model."""
        return Overlap(*model.overlap)

    def share(self, place: Place) -> float:
        """Share of a collective that hides if there is enough compute."""
        return (self.waited, self.ahead, self.behind)[place]

    def exposed(self, place: Place) -> float:
        """Share of a collective that compute waits for if there is enough compute."""
        return 1.0 - self.share(place)

    def hideable_s(self, work: StageSeconds) -> float:
        """Seconds of communication that hide if there is enough compute."""
        return sum(self.share(p) * s for p, s in zip(Place, work.communication, strict=True))

    def linear_s(self, compute_s: Seconds, communication_s: Sequence[Seconds]) -> Seconds:
        """Seconds of compute and communication (by `Place`) if there is enough compute to hide
        under. It is a lower bound of the step and a sum over its parts, as searches need."""
        for place, seconds in zip(Place, communication_s, strict=True):
            compute_s = compute_s + self.exposed(place) * seconds
        return compute_s


def hiding_share(hidden_s: float, hideable_s: float) -> float:
    """Share of the hideable time that is hidden, 0 to 1: below 1 where compute is too short."""
    return hidden_s / hideable_s if hideable_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """What one device does for one microbatch, or once per step, in seconds.

    Attributes:
        compute_s: kernels.
        waited_s: collectives that compute waits for (`Place`).
        ahead_s: collectives that run ahead of their use.
        behind_s: collectives that little waits for.
        wait_s: waiting of the device for its host, which nothing hides: copies between the two,
            kernels that start late.
    """

    compute_s: float = 0.0
    waited_s: float = 0.0
    ahead_s: float = 0.0
    behind_s: float = 0.0
    wait_s: float = 0.0

    @property
    def communication(self) -> tuple[float, float, float]:
        """Seconds of collectives by `Place`."""
        return self.waited_s, self.ahead_s, self.behind_s

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives."""
        return self.waited_s + (self.ahead_s + self.behind_s)

    def hidden_s(self, overlap: Overlap) -> float:
        """Seconds of communication that hide under this compute."""
        return min(overlap.hideable_s(self), self.compute_s)

    def busy_s(self, overlap: Overlap) -> float:
        """Seconds from its start to its end."""
        return self.compute_s + self.communication_s - self.hidden_s(overlap) + self.wait_s

    def late_s(self, launch_s: float, overlap: Overlap) -> float:
        """Seconds that the device waits for its host, which takes ``launch_s`` to start the kernels
        and starts them while the device runs this work."""
        return max(0.0, launch_s - self.busy_s(overlap))


NOTHING = StageSeconds()


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of forward and backward passes.

    Attributes:
        name: name in `SCHEDULES`.
        interleaves: whether a device holds several chunks of the model.
        ramp: share of a chunk's time, forward and backward together, that each other stage adds to
            the bubble. It is 1 if backward passes are not split, and less for a schedule that fills
            the ramp with gradients of weights.
        in_flight: (pipeline, stage counted from 0) -> the largest number of chunks whose forward
            pass has run on a device and whose backward pass has not.
    """

    name: str
    interleaves: bool
    ramp: float
    in_flight: Callable[[Pipeline, int], int]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the microbatches of a step run through stages.

    Attributes:
        stages: groups of devices, each of which holds 1/stages of the layers.
        microbatches: parts of the batch that run one after another.
        virtual: chunks of the model on each device (Narayanan et al. 2021 call them virtual
            stages); 1 except for interleaved schedules.
        schedule: a name in `SCHEDULES`.
        transfer_s: seconds to send one microbatch's activation, or its gradient, from chunk to
            chunk.

    Raises:
        ValueError: a count is below 1; the schedule is not known, or does not support these counts.
    """

    stages: int = 1
    microbatches: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        known = SCHEDULES.get(self.schedule)
        if known is None:
            raise ValueError(f"no schedule {self.schedule!r}: use one of {', '.join(SCHEDULES)}")
        if self.virtual > 1 and not known.interleaves:
            raise ValueError(
                f"schedule {self.schedule!r} runs one chunk per device, not {self.virtual}: "
                "use 'interleaved'"
            )
        if known.interleaves and (self.virtual < 2 or self.microbatches % self.stages):
            raise ValueError(
                f"schedule {self.schedule!r} runs at least 2 chunks per device and a multiple of "
                f"{self.stages} microbatches, not {self.virtual} and {self.microbatches}"
            )

    @property
    def transfers_s(self) -> float:
        """Seconds of transfers between stages on the longest chain of passes.

        In the forward direction, the slowest stage sends every chunk of every microbatch, and every
        other stage except the last sends one; backward likewise. This is exact in GPipe and an
        upper bound in the others, if a stage that sends does nothing else and receiving takes no
        time.
        """
        if self.stages == 1:
            return 0.0
        return 2.0 * (self.microbatches * self.virtual + self.stages - 2) * self.transfer_s

    def in_flight(self) -> tuple[float, ...]:
        """Per stage, the most microbatches whose activations it holds at once.

        One chunk of a microbatch is 1 / virtual of what a stage holds of the microbatch.
        """
        most = SCHEDULES[self.schedule].in_flight
        return tuple(most(self, stage) / self.virtual for stage in range(self.stages))


def _all(pipeline: Pipeline, stage: int) -> int:
    return pipeline.microbatches


def _depth(pipeline: Pipeline, stage: int) -> int:
    return min(pipeline.microbatches, pipeline.stages - stage)


def _chunks(pipeline: Pipeline, stage: int) -> int:
    p, v = pipeline.stages, pipeline.virtual
    return min(pipeline.microbatches * v, 2 * (p - 1 - stage) + (v - 1) * p + 1)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        one.name: one
        for one in (
            Schedule("gpipe", interleaves=False, ramp=1.0, in_flight=_all),
            Schedule("1f1b", interleaves=False, ramp=1.0, in_flight=_depth),
            Schedule("interleaved", interleaves=True, ramp=1.0, in_flight=_chunks),
        )
    }
)
"""Every schedule that the clock supports, by name. GPipe runs all forward passes first (Huang et
al. 2019). 1F1B runs one warmup forward pass per later stage, then one forward and one backward pass
in turn (PipeDream-Flush). Interleaved does the same over chunks: it runs 2 (later stages) +
(virtual - 1) stages of them ahead, with microbatches in groups of ``stages`` (both Narayanan et al.
2021)."""


def bubble_share(stages: int, microbatches: int, virtual: int = 1, schedule: str = "1f1b") -> float:
    """Idle time of a pipeline of equal stages over its busy time: (p - 1) / (v m) where backward
    passes are not split (Narayanan et al. 2021, section 2.2)."""
    return SCHEDULES[schedule].ramp * (stages - 1) / (virtual * microbatches)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Seconds of communication that compute waits for in a step, by when it happens.

    Attributes:
        waited_s: of the microbatches' collectives that compute waits for (`Place`).
        ahead_s: of the microbatches' collectives that run ahead of their use.
        behind_s: of the microbatches' collectives that little waits for.
        once_s: of all collectives that run once per step.
    """

    waited_s: float
    ahead_s: float
    behind_s: float
    once_s: float


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The parts of a step, in seconds: those of the slowest stage, and what it waits for.

    Attributes:
        fixed_s: time before the first kernel.
        compute_s: compute of all microbatches, and once per step.
        communication_s: all collectives, hidden or not.
        hidden_s: communication that hides under compute.
        wait_s: waiting for the host.
        transfer_s: transfers between stages.
        bubble_s: idle time while other stages work on the first and the last microbatch.
        exposed: what does not hide, by kind; adds up to ``exposed_s``.
    """

    fixed_s: float
    compute_s: float
    communication_s: float
    hidden_s: float
    wait_s: float
    transfer_s: float
    bubble_s: float
    exposed: Exposed

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that compute waits for."""
        return self.communication_s - self.hidden_s

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to its end."""
        busy = self.fixed_s + self.compute_s + self.communication_s - self.hidden_s + self.wait_s
        return busy + self.transfer_s + self.bubble_s


def step_seconds(
    stages: Sequence[StageSeconds],
    pipeline: Pipeline | None = None,
    overlap: Overlap | None = None,
    once: StageSeconds = NOTHING,
    fixed_s: float = 0.0,
) -> StepSeconds:
    """Seconds of a step.

    Args:
        stages: what a device of each stage does for one microbatch, with all its chunks.
        pipeline: default: one stage, one microbatch.
        overlap: default: nothing hides.
        once: what a device of the slowest stage does once per step. Collectives that run ahead or
            behind (reductions of gradients) hide under the last microbatch's compute, together with
            the collectives of that microbatch. The others, such as those around the optimizer's
            update, do not hide.
        fixed_s: seconds before the first kernel. Communication is assumed to hide under them as
            under compute, which overestimates the hidden time by at most ``fixed_s``.

    Raises:
        ValueError: ``stages`` has another length than the pipeline.
    """
    pipeline, overlap = pipeline or Pipeline(), overlap or Overlap()
    if len(stages) != pipeline.stages:
        raise ValueError(f"work of {len(stages)} stages for a pipeline of {pipeline.stages}")
    busy = [work.busy_s(overlap) for work in stages]
    at = busy.index(max(busy))
    work, m = stages[at], pipeline.microbatches
    late_s = overlap.ahead * once.ahead_s + overlap.behind * once.behind_s
    rooms = _rooms(work, m, overlap, late_s, fixed_s)
    hidden = [min(hideable, room) for _, hideable, room in rooms]
    shares = [hiding_share(h, hideable) for h, (_, hideable, _) in zip(hidden, rooms, strict=True)]
    average = sum(n * s for (n, _, _), s in zip(rooms, shares, strict=True)) / m
    others = [seconds for k, seconds in enumerate(busy) if k != at]
    ramp = SCHEDULES[pipeline.schedule].ramp
    return StepSeconds(
        fixed_s,
        m * work.compute_s + once.compute_s,
        m * work.communication_s + once.communication_s,
        sum(n * h for (n, _, _), h in zip(rooms, hidden, strict=True)),
        m * work.wait_s + once.wait_s,
        pipeline.transfers_s,
        ramp * sum(others) / pipeline.virtual,
        Exposed(
            m * work.waited_s * (1.0 - overlap.waited * average),
            m * work.ahead_s * (1.0 - overlap.ahead * average),
            m * work.behind_s * (1.0 - overlap.behind * average),
            once.communication_s - late_s * shares[-1],
        ),
    )


def _rooms(
    work: StageSeconds, m: int, overlap: Overlap, late_s: float, fixed_s: float
) -> list[tuple[int, float, float]]:
    """Groups of microbatches, in order: how many, seconds that could hide, seconds to hide under.
    In the last microbatch ``late_s`` more could hide; the first also has ``fixed_s`` to hide
    under."""
    usual = overlap.hideable_s(work)
    last = usual + late_s
    compute = work.compute_s
    if m == 1:
        return [(1, last, fixed_s + compute)]
    between = [(m - 2, usual, compute)] if m > 2 else []
    return [(1, usual, fixed_s + compute), *between, (1, last, compute)]
