"""A plan that follows another, such as an evaluation step that reads the train step's state."""

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
    """The arguments and options that make a step fit a step that is already planned.

    Args:
        leader: the planned step, built.
        options: the options that it was planned with.
        args: the arguments of the step to plan, arrays or ShapeDtypeStructs.
        overrides: options of the step to plan; the others are taken from ``options``.

    Returns:
        The arguments as ShapeDtypeStructs, and the options. Arguments on the leader's devices keep
        their sharding; those that only share name and shape with one of the leader's arguments get
        the sharding that its plan gives that one. The options have the leader's mesh, and no
        ``offload``: host memory is for a state that the step returns.
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
