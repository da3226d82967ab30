"""meshwright's planner: a train step in, a plan out.

``make_plan`` traces a step, prices every legal sharding on a cluster and searches for the
cheapest that fits; ``Plan`` is plain data; ``shard`` marks values inside a model.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from planner.placement.choice import Placed, Placement, make_placement
    from planner.plan.plan import Plan, load_plan
    from planner.planning import Planned, make_plan, plan_step
    from planner.rules.kernels.registered import register_rule
    from planner.spec import MeshSpec, Sharding

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

_HOMES = {
    "annotate": "StoredAs shard",
    "arguments.metadata": "with_logical_axis_rules",
    "errors": "InternalError MemoryLimitError MeshwrightError ModelError PinError "
    "PlanFormatError PlanMismatchError RequestError",
    "modes": "MODES ParallelMode get_parallel_mode set_parallel_mode",
    "placement.choice": "Placed Placement make_placement",
    "plan.plan": "Plan load_plan",
    "planning": "Planned make_plan plan_step",
    "rules.kernels.registered": "register_rule",
    "spec": "MeshSpec Sharding",
}
"""The public names, by the module of this package that defines them."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: the command's help needs none of them."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = globals()[name] = getattr(importlib.import_module(f"planner.{home}"), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
