"""A plan that follows another: an evaluation step beside the train step whose state it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from executor.run.compile import CompiledStep
from planner.errors import RequestError


def follow(
    leader: CompiledStep,
    options: Mapping[str, Any],
    args: Sequence[Any],
    overrides: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to plan a step with so that it fits a step that is planned already.

    Args:
        leader: that step, built.
        options: what that step was planned with.
        args: the arguments of the step to plan, arrays or ShapeDtypeStructs.
        overrides: what is asked for the step to plan; what is not there is taken from ``options``.

    Returns:
        The arguments as ShapeDtypeStructs: those that are on the leader's devices with the sharding
        that they have, those that only have the name and shape of one of its arguments with the
        one that the plan gives it. And the options, with the leader's mesh and without what is kept
        in host memory: that is of a state which comes back.
    """
    if leader.plan.schedule:
        raise RequestError(
            "like=: the step to follow has stages that are programs of their own "
            f"(schedule={leader.plan.schedule!r}), each with its part of the state; no other step "
            "can be planned on these devices"
        )
    known: dict[tuple[str, tuple[int, ...]], set[jax.sharding.NamedSharding]] = {}
    placed = jax.tree_util.tree_leaves_with_path(leader.in_shardings)
    for (path, sharding), leaf in zip(placed, leader.plan.inputs, strict=True):
        for begin in range(1, len(path)):
            name = jax.tree_util.keystr(path[begin:])
            known.setdefault((name, tuple(leaf.shape)), set()).add(sharding)

    def marked(path: Any, x: Any) -> Any:
        shape = tuple(np.shape(x))
        dtype = x.dtype if hasattr(x, "dtype") else np.result_type(x)
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh != leader.mesh:
            same = known.get((jax.tree_util.keystr(path[1:]), shape), set()) if path[1:] else set()
            sharding = next(iter(same)) if len(same) == 1 else None
        weak = bool(getattr(x, "weak_type", False))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)

    taken = {name: value for name, value in options.items() if name != "offload"} | dict(overrides)
    taken["mesh"] = leader.plan.mesh
    return tuple(jax.tree_util.tree_map_with_path(marked, tuple(args))), taken
