"""The planner's own choice beside a published plan: same model, devices, batch and kernels.

Both are plans of one train step on one microbatch: gradients and AdamW. The published plan is
pinned and its memory is not limited. The choice is free, without a pipeline, and gets the memory
of the device, or what the published plan would take where that is more. Both are priced by the
planner, so their ratio says what it expects to gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec
from published_case import Case, Degrees
from published_clusters import cluster_of, with_attention
from published_models import microbatch, update
from published_predict import case_of
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


def train_step(c: Case) -> tuple[Any, tuple[Any, ...], dict[str, PartitionSpec]]:
    """(function, arguments, pins) of gradients and AdamW on one microbatch."""
    c = dataclasses.replace(c, accumulate=False)
    gradients, (params, _, tokens, targets), pins = microbatch(c)
    step, (state, _), more = update(c)
    root = r"^\[0\]"
    if c.kernels.stored == "float32":  # the optimizer's parameters are the model's

        def whole(state: Any, tokens: Any, targets: Any) -> Any:
            return step(state, gradients(state["p"], None, tokens, targets))

        inputs = [v for k, v in pins.items() if k in (r"^\[2\]", r"^\[3\]")]
        kept = {k: v for k, v in more.items() if k.startswith(root)}
        return (
            whole,
            (state, tokens, targets),
            kept | dict(zip((r"^\[1\]", r"^\[2\]"), inputs, strict=False)),
        )

    def mixed(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        return step(state, gradients(params, None, tokens, targets))

    moved = {k.replace(root, r"^\[1\]"): v for k, v in more.items() if k.startswith(root)}
    return mixed, (params, state, tokens, targets), pins | moved


def choose(run: Run) -> Choice:
    """Plan a run as published, and freely.

    Raises:
        MeshwrightError: the published plan itself can't be planned.
    """
    cluster = cluster_of(run.hardware, run.inter_node, run.node_size, run.devices)
    cluster = with_attention(cluster, run.kernels)
    case = case_of(run)
    published = _plan(case, cluster, mesh=case.degrees.mesh, memory=1e18)
    free = dataclasses.replace(case, degrees=Degrees(free=True))
    memory = max(published.prediction.peak_bytes, float(cluster.device.memory_bytes))
    try:
        return Choice(run, published, _plan(free, cluster, memory=memory))
    except MeshwrightError as error:
        return Choice(run, published, None, str(error).splitlines()[0])


def _plan(c: Case, cluster: Cluster, **how: Any) -> Plan:
    function, args, pins = train_step(c)
    return make_plan(function, *args, cluster=cluster, mode="AUTO_PARALLEL", shardings=pins, **how)


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
    """One row: the run, milliseconds of one microbatch as published, and of the choice."""
    d, run, p = c.run.degrees, c.run, c.published.prediction
    text = (
        f"  {run.row.split('#')[1]:>5} {run.hardware[:9]} L{run.model.layers} h{run.model.hidden} "
        f"s{run.model.seq} x{run.devices} b{run.sequences // run.grad_accum}: published "
        f"d{d.data} z{d.zero} f{d.fsdp} c{d.context} t{d.model}, measured "
        f"{1e3 * run.step_s / run.grad_accum:.1f} ms, priced {1e3 * p.step_s:.1f} ms, "
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
