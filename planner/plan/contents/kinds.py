"""Standard terms for the roles of mesh axes, and the kind of a plan derived from them. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from costmodels.residuals import PlanKind
from planner.spec import STAGE

if TYPE_CHECKING:
    from planner.plan.plan import Plan

DATA, FSDP, MODEL, EXPERT, SEQ, IDLE = "data", "fsdp", "model", "expert", "seq", "idle"
ENSEMBLE = "ensemble"
WORDS: Mapping[str, str] = {
    DATA: "data parallel",
    FSDP: "FSDP",
    MODEL: "tensor parallel",
    EXPERT: "expert parallel",
    ENSEMBLE: "ensemble parallel",
    STAGE: "pipeline parallel",
    SEQ: "sequence parallel",
}
_SPLIT = (MODEL, EXPERT, ENSEMBLE, SEQ)
"""Roles of axes that split parameters in use, or activations besides their batch dimension."""


def plan_kind(plan: Plan) -> PlanKind:
    """The kind of published runs that a plan is compared with. It depends on the stages and on the
    roles of the mesh axes, which the strategy names. In plans without a strategy (older versions),
    the axes are named by role.
    """
    axes = zip(plan.mesh.names, plan.mesh.sizes, strict=True)
    names = {name.rstrip("0123456789") for name, size in axes if size > 1}
    if plan.stages > 1 or STAGE in names:
        return "stages"
    if plan.strategy:
        return "model" if any(WORDS[role] in plan.strategy for role in _SPLIT) else "data"
    return "model" if names.intersection(_SPLIT) else "data"
