"""meshwright's planner: a train step in, a plan out.

``make_plan`` traces a step, prices every legal sharding on a cluster and searches for the
cheapest that fits; ``Plan`` is plain data; ``shard`` marks values inside a model.
"""

from typing import TYPE_CHECKING, Any

from planner.annotate import StoredAs, shard
from planner.arguments.metadata import with_logical_axis_rules
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
from planner.modes import MODES, ParallelMode, get_parallel_mode, set_parallel_mode
from planner.plan.plan import Plan, load_plan
from planner.rules.kernels.registered import register_rule
from planner.spec import MeshSpec, Sharding

if TYPE_CHECKING:
    from planner.placement.choice import Placed, Placement, make_placement
    from planner.planning import Planned, make_plan, plan_step

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
    "register_rule",
    "set_parallel_mode",
    "shard",
    "with_logical_axis_rules",
]


_PLANNING = frozenset({"Planned", "make_plan", "plan_step"})
_PLACEMENT = frozenset({"Placed", "Placement", "make_placement"})


def __getattr__(name: str) -> Any:
    """The names of the door when one is asked for: the searches are most of an import."""
    if name in _PLANNING:
        from planner import planning

        return getattr(planning, name)
    if name in _PLACEMENT:
        from planner.placement import choice

        return getattr(choice, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
