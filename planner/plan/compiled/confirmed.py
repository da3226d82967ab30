"""Results of compiling candidate plans before one is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.plan.plan import Plan


@dataclass(frozen=True)
class CompiledRow:
    """One compiled candidate; bytes and seconds per device and step.

    Attributes:
        mesh: its mesh.
        lowering: its lowering, as text.
        predicted_s: step time that the plan predicts.
        step_s: compute and exposed collectives.
        compute_s: the compiler's estimate of everything but collectives (TPU), or the plan's.
        wire_s: time of collectives, without the part that the schedule overlaps.
        sent_bytes: bytes that a device sends.
        peak_bytes: arguments, results and temporaries at the peak.
        verdict: ``"chosen"``, ``"slower"``, ``"does not fit"``, or the compiler's error.
    """

    mesh: str
    lowering: str
    predicted_s: float
    step_s: float
    compute_s: float
    wire_s: float
    sent_bytes: float
    peak_bytes: float
    verdict: str


@dataclass(frozen=True)
class Confirmation:
    """All compiled candidates of a plan.

    Attributes:
        compiler: its package and version; empty if it is not installed.
        rows: candidates in the order of compilation.
        note: why the plan is not confirmed, or which candidates were skipped.
    """

    compiler: str
    rows: tuple[CompiledRow, ...] = ()
    note: str = ""

    @property
    def chosen(self) -> CompiledRow | None:
        """The row of the chosen plan; None if the plan is not confirmed."""
        return next((row for row in self.rows if row.verdict == "chosen"), None)


Confirm = Callable[..., tuple[int, "Plan"]]


def confirmer() -> Confirm:
    """Load ``executor.verify.confirm.confirm``; the planner does not import the executor."""
    return importlib.import_module("executor.verify.confirm").confirm  # type: ignore[no-any-return]
