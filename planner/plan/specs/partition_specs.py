"""A plan's shardings as ``jax.sharding.PartitionSpec``s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from planner.errors import PlanMismatchError
from planner.plan.specs.logical_rules import Argument


def partition_specs(leaves: Iterable[Argument]) -> dict[str, PartitionSpec]:
    """The spec of every argument, by path."""
    return {leaf.path: PartitionSpec(*leaf.spec.entries) for leaf in leaves}


def specs_like(specs: Mapping[str, PartitionSpec], args: Sequence[Any]) -> tuple[Any, ...]:
    """The specs in a pytree like ``args``.

    Args:
        specs: specs by argument path.
        args: the step's arguments, arrays or ShapeDtypeStructs.

    Raises:
        PlanMismatchError: the arguments have a leaf that the plan lacks, or lack one of its leaves.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    unlike = [*(set(paths) - set(specs)), *(set(specs) - set(paths))]
    if unlike:
        raise PlanMismatchError(
            f"this plan is for other arguments: {min(unlike)} is "
            f"{'not in the plan' if min(unlike) in paths else 'missing'}; got {len(paths)} arrays, "
            f"expected {len(specs)}"
        )
    return tuple(jax.tree_util.tree_unflatten(tree, [specs[path] for path in paths]))
