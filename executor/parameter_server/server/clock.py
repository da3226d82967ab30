"""How far apart workers may be: one rule for synchronous, bounded-stale and asynchronous training.

A worker's clock is the number of updates that it has pushed. A worker at clock c may read when no
other worker is behind c - s (Ho et al., More effective distributed ML via a stale synchronous
parallel parameter server, NIPS 2013, section 2). With s = 0 and updates applied together once all
have arrived, this is synchronous training; without a bound it is asynchronous.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field

from planner.errors import RequestError
from planner.modes import UPDATES as MODES


def is_integer(x: object) -> bool:
    """Whether ``x`` is an integer of Python or NumPy; True and False are not."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


@dataclass(frozen=True)
class Rule:
    """How far apart workers may be.

    Attributes:
        mode: "sync", "ssp" or "async".
        staleness: for "ssp", updates by which a worker may be ahead of the slowest.
        aggregate: for "sync", pushes per update; None waits for all workers. The remaining workers
            are backup workers, whose late pushes are dropped and counted (Chen et al., Revisiting
            distributed synchronous SGD, 2016).
        discard_lag: pushes with a greater lag are dropped and counted; None drops none.
        lag_scaled: an update of lag n is multiplied by 1 / (n + 1), for "ssp" and "async" (Zhang et
            al., Staleness-aware async-SGD for distributed deep learning, IJCAI 2016, section 3.2,
            which divides the learning rate by the staleness).

    Raises:
        RequestError: an unknown mode, or numbers that are invalid in it.
    """

    mode: str = "sync"
    staleness: int = 0
    aggregate: int | None = None
    discard_lag: int | None = None
    lag_scaled: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RequestError(f"mode {self.mode!r}: expected one of {', '.join(MODES)}")
        for name in ("staleness", "aggregate", "discard_lag"):
            value = getattr(self, name)
            if not is_integer(value) and (value is not None or name == "staleness"):
                raise RequestError(
                    f"{name}={value!r}: got {type(value).__name__}, expected a whole number"
                )
        if self.staleness < 0 or (self.staleness and self.mode != "ssp"):
            raise RequestError(
                f"staleness={self.staleness} in mode {self.mode!r}: expected a number from 0 on, "
                "in mode 'ssp' only"
            )
        if self.aggregate is not None and (self.aggregate < 1 or self.mode != "sync"):
            raise RequestError(
                f"aggregate={self.aggregate} in mode {self.mode!r}: expected at least 1, in mode "
                "'sync' only"
            )
        if self.discard_lag is not None and (self.discard_lag < 0 or self.mode == "sync"):
            raise RequestError(
                f"discard_lag={self.discard_lag} in mode {self.mode!r}: expected a number from 0 "
                "on, in mode 'ssp' or 'async'"
            )
        if self.lag_scaled and self.mode == "sync":
            raise RequestError("lag_scaled in mode 'sync': there are no lags; 'ssp' or 'async'")

    def check_overlap(self) -> None:
        """Check that a worker's gradients may be of values that lack its last update.

        Raises:
            RequestError: the rule does not allow a lag of 1.
        """
        if self.mode == "sync" or (self.mode == "ssp" and self.staleness < 1):
            raise RequestError(
                f"overlap=True in mode {self.mode!r} with staleness={self.staleness}: gradients "
                "would be of the values before the last update; expected 'async', or 'ssp' with "
                "staleness of at least 1"
            )

    def scale(self, lag: int) -> float:
        """The factor for an update with this lag."""
        return 1.0 / (lag + 1) if self.lag_scaled else 1.0


@dataclass
class Clocks:
    """The clocks of the workers in the job.

    Attributes:
        rule: how far apart they may be.
        at: clock of every active worker; the others do not wait for one that has left.
        aside: clock of every worker that has stepped aside: until it joins, the others wait for it
            only at barriers.
    """

    rule: Rule
    at: dict[int, int] = field(default_factory=dict)
    aside: dict[int, int] = field(default_factory=dict)

    def join(self, worker: int) -> int:
        """Add a worker, or add it again. Its clock begins at the slowest worker's, or at its clock
        when it stepped aside, if that is larger. Returns its clock."""
        if worker not in self.at:
            least = min(self.at.values(), default=0)
            self.at[worker] = max(least, self.aside.pop(worker, 0))
        return self.at[worker]

    def step_aside(self, worker: int) -> None:
        """Stop waiting for an active worker until it joins."""
        self.aside[worker] = self.at.pop(worker)

    def leave(self, worker: int) -> None:
        """Remove a worker that has finished or is lost."""
        self.at.pop(worker, None)
        self.aside.pop(worker, None)

    def tick(self, worker: int, pushes: int = 1) -> None:
        """Advance the clock of a worker that has pushed."""
        self.at[worker] += pushes

    def blockers(self, worker: int, ahead: int = 0) -> tuple[int, ...]:
        """The workers that a worker has to wait for before it reads; if empty, it may read.

        Args:
            worker: the worker that reads.
            ahead: number of further pushes before it pushes what it computes from this read.
        """
        if self.rule.mode == "async":
            return ()
        least = self.at[worker] + ahead - self.rule.staleness
        return tuple(sorted(w for w, clock in self.at.items() if clock < least))
