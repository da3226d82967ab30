"""Saves what is needed to read a trace without the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from executor.run.compile import CompiledStep
from executor.run.parallelize import Parallelized

PROGRAM, PLAN = "program.txt", "plan.json"


def record(step: Any, folder: Path) -> None:
    """Write the plan and the compiled program of a step into the folder of its trace, in process 0.
    Does nothing for steps that have no plan or whose stages are separate programs."""
    if isinstance(step, Parallelized):
        step = step.compiled if step.is_planned else None
    compiled = getattr(step, "compiled", step)  # of ``compile_plan``
    if jax.process_index() or not isinstance(compiled, CompiledStep) or not compiled.text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    compiled.plan.save(folder / PLAN)
    (folder / PROGRAM).write_text(compiled.text, encoding="utf-8")
