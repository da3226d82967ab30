"""meshwright's planner: a train step in, a plan out.

``make_plan`` traces a step, prices every legal sharding on a cluster and searches for the
cheapest that fits; ``Plan`` is plain data; ``shard`` marks values inside a model.
"""

from typing import TYPE_CHECKING, Any

from planner.annotate import StoredAs, shard
from planner.errors import (
    InternalError,
    MemoryLimitError,
    MeshwrightError,
    ModelError,
    PinError,
    PlanFormatError,
    PlanMismatchError,
    RequestError,
)
from planner.metadata import with_logical_axis_rules
from planner.modes import MODES, ParallelMode, get_parallel_mode, set_parallel_mode
from planner.plan import Plan, load_plan
from planner.spec import MeshSpec, Sharding

if TYPE_CHECKING:
    from planner.pipeline import Planned, make_plan, plan_step
    from planner.placement import Placed, Placement, make_placement

__all__ = [
    "MODES",
    "InternalError",
    "MemoryLimitError",
    "MeshSpec",
    "MeshwrightError",
    "ModelError",
    "ParallelMode",
    "PinError",
    "Placed",
    "Placement",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "Planned",
    "RequestError",
    "Sharding",
    "StoredAs",
    "get_parallel_mode",
    "load_plan",
    "make_placement",
    "make_plan",
    "plan_step",
    "set_parallel_mode",
    "shard",
    "with_logical_axis_rules",
]


_PIPELINE = frozenset({"Planned", "make_plan", "plan_step"})
_PLACEMENT = frozenset({"Placed", "Placement", "make_placement"})


def __getattr__(name: str) -> Any:
    """The names of the pipeline when one is asked for: the searches are most of an import."""
    if name in _PIPELINE:
        from planner import pipeline

        return getattr(pipeline, name)
    if name in _PLACEMENT:
        from planner import placement

        return getattr(placement, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
