"""The planner's own choice beside a published plan: same model, devices, batch and kernels.

Both are plans of one train step with the run's microbatches. The published plan is pinned and its
memory is not limited. The choice is free, without a pipeline, and gets the memory
of the device, or what the published plan would take where that is more. Both are priced by the
planner, so their ratio says what it expects to gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from published_case import Case, Degrees
from published_models import train_step
from published_predict import case_of, stack_cluster
from published_tables import Run

from costmodels import Cluster
from planner import MeshwrightError, Plan, make_plan


@dataclasses.dataclass(frozen=True)
class Choice:
    """A published run, the prediction of its plan, and the planner's plan (or why none)."""

    run: Run
    published: Plan
    chosen: Plan | None
    refused: str = ""


def choose(run: Run) -> Choice:
    """Plan a run as published, and freely.

    Raises:
        MeshwrightError: the published plan itself can't be planned.
    """
    cluster = stack_cluster(run)
    case = case_of(run)
    published = _plan(case, cluster, run, mesh=case.degrees.mesh, memory=1e15)
    free = dataclasses.replace(case, degrees=Degrees(free=True))
    memory = max(published.prediction.peak_bytes, float(cluster.device.memory_bytes))
    try:
        return Choice(run, published, _plan(free, cluster, run, memory=memory))
    except MeshwrightError as error:
        return Choice(run, published, None, str(error).splitlines()[0])


def _plan(c: Case, cluster: Cluster, run: Run, **how: Any) -> Plan:
    step, args, pins = train_step(c)
    how |= {"microbatches": run.grad_accum, "remat": "none", "chunks": 1}
    return make_plan(step, *args, cluster=cluster, mode="AUTO_PARALLEL", shardings=pins, **how)


def fastest(runs: Iterable[Run]) -> list[Run]:
    """The fastest run without a pipeline, for every model, sequence length and device count."""
    best: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = (run.table, run.model, run.hardware, run.devices, run.kernels.matmul)
        if run.pp == 1 and (key not in best or _rate(run) > _rate(best[key])):
            best[key] = run
    return list(best.values())


def _rate(run: Run) -> float:
    return run.sequences / run.step_s


def line(c: Choice) -> str:
    """One row: the run, milliseconds of a step as published, and of the choice."""
    d, run, p = c.run.degrees, c.run, c.published.prediction
    text = (
        f"  {run.row.split('#')[1]:>5} {run.hardware[:9]} L{run.model.layers} h{run.model.hidden} "
        f"s{run.model.seq} x{run.devices} b{run.sequences}: published "
        f"d{d.data} z{d.zero} f{d.fsdp} c{d.context} t{d.model}, measured "
        f"{1e3 * run.step_s:.1f} ms, priced {1e3 * p.step_s:.1f} ms, "
        f"{p.peak_bytes / 1e9:.0f} GB; "
    )
    if c.chosen is None:
        return f"{text}no choice: {c.refused}"
    q = c.chosen.prediction
    mesh = str(c.chosen.mesh)
    specs = c.chosen.as_partition_specs()
    tokens, weight = list(specs)[-1], next(path for path in specs if "['q']" in path)
    return (
        f"{text}choice {mesh}: tokens {_shown(specs[tokens])}, q {_shown(specs[weight])}, "
        f"{1e3 * q.step_s:.1f} ms, {q.peak_bytes / 1e9:.0f} GB, x{q.step_s / p.step_s:.2f}"
    )


def _shown(entries: tuple[Any, ...]) -> str:
    """Entries of a PartitionSpec, short."""
    names = ("+".join(e) if isinstance(e, tuple) else e or "." for e in entries)
    return "(" + " ".join(names) + ")"
