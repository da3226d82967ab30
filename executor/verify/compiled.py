"""Lowers and compiles a plan's step, and compares both results with its predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from costmodels import Cluster
from executor.verify.aot import CompilerAbsentError, compile_step
from executor.verify.predictions import Rung, Tolerances, Verification, compiled_rung, shardy_rung
from executor.verify.shardy import lower_abstractly, shardy_collectives
from planner.errors import RequestError
from planner.graph.trace import Traced
from planner.plan.plan import Plan


def climb(
    traced: Traced,
    plan: Plan,
    cluster: Cluster,
    *,
    donate_argnums: int | Sequence[int] | None = None,
    tolerances: Tolerances | None = None,
    require_compiled: bool = False,
) -> Verification:
    """Lower and compile a step under a plan, and compare with the plan's predictions.

    Args:
        traced: the step, as ``planner.graph.trace.trace`` returns it.
        plan: its plan.
        cluster: the cluster whose compiler is used, with at least the plan's number of devices.
        donate_argnums: as for ``jax.jit``; None donates the arguments that the plan assumes to be
            donated, those that come back as results.
        tolerances: tolerances for what is judged; None: nothing is judged.
        require_compiled: whether a missing compiler is an error.

    Raises:
        PlanMismatchError: the plan is for another step.
        RequestError: the cluster has too few devices, the compiler refused the step, or it is
            required and missing (CompilerAbsentError).
    """
    tolerances = tolerances or Tolerances()
    if cluster.num_devices < plan.mesh.num_devices:
        raise RequestError(
            f"the plan is for {plan.mesh.num_devices} devices, {cluster.text} has "
            f"{cluster.num_devices}; name the cluster that it was made for"
        )
    donated = carried_argnums(plan) if donate_argnums is None else donate_argnums
    lowered = lower_abstractly(traced, plan, donate_argnums=donated)
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    shardy = shardy_rung(
        plan,
        [
            (x.kind, x.count, x.payload_bytes, math.prod(sizes[a] for a in x.axes if a in sizes))
            for x in shardy_collectives(lowered)
        ],
        tolerances,
    )
    try:
        compiled = compile_step(traced, plan, cluster, donate_argnums=donated)
    except CompilerAbsentError as error:
        if require_compiled:
            raise
        return Verification(plan, (shardy, Rung("compiled", absent=str(error))))
    return Verification(plan, (shardy, compiled_rung(plan, compiled, cluster, tolerances)))


def carried_argnums(plan: Plan) -> tuple[int, ...]:
    """Indices of the arguments of which at least a part comes back as a result."""
    return tuple(
        sorted({int(leaf.path[1:].partition("]")[0]) for leaf in plan.inputs if leaf.tied})
    )
