"""What a compiler said of a plan and of others like it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.plan.plan import Plan


@dataclass(frozen=True)
class CompiledRow:
    """A candidate as the compiler left it; bytes and seconds are of one device and step.

    Attributes:
        mesh: its mesh; ``lowering``: how its shardings were said.
        step_s: compute and exposed wire; ``predicted_s`` is what the plan predicts.
        compute_s: the compiler's estimate of everything but collectives (TPU), or the plan's.
        wire_s: of collectives, past what is scheduled beside them.
        sent_bytes: what a device sends.
        peak_bytes: arguments, results and temporaries at the worst moment.
        verdict: ``"chosen"``, ``"slower"``, ``"does not fit"``, or why the compiler refused it.
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
    """What was compiled before the plan was chosen.

    Attributes:
        compiler: its package and version; empty where none was asked.
        rows: the candidates, in the order in which they were compiled.
        note: why the plan is not confirmed, or what was left out; empty for nothing.
    """

    compiler: str
    rows: tuple[CompiledRow, ...] = ()
    note: str = ""

    @property
    def chosen(self) -> CompiledRow | None:
        """The row of the plan; None where it is not confirmed."""
        return next((row for row in self.rows if row.verdict == "chosen"), None)


Confirm = Callable[..., tuple[int, "Plan"]]


def confirmer() -> Confirm:
    """``executor.verify.confirm.confirm``: the planner itself compiles nothing."""
    return importlib.import_module("executor.verify.confirm").confirm  # type: ignore[no-any-return]
