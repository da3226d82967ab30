"""The saved part of a training state: its arrays, in the form in which a step is planned.

Flax NNX objects are saved as their States. Functions and other static leaves, as Equinox modules
have them, are not saved: they come from the script.
"""

from __future__ import annotations

from typing import Any

import jax

from planner.arguments.leaves import parted
from planner.arguments.nnx_graph import split, updated


def arrays_of(state: Any) -> Any:
    """A state with States for its NNX objects, and None for static leaves.

    Args:
        state: a pytree, which may have NNX objects.
    """
    return parted(split(state)[0])[0]


def with_arrays(state: Any, arrays: Any) -> Any:
    """A state with other arrays.

    Args:
        state: determines the structure; its NNX objects are updated in place.
        arrays: arrays with the structure of ``arrays_of(state)``.

    Returns:
        The state, with the same NNX objects and with the static leaves of ``state``.
    """
    pure, graph, _ = split(state)
    _, partition = parted(pure)
    if partition.statics:
        arrays = partition.join(jax.tree_util.tree_leaves(arrays))
    return arrays if graph is None else updated(state, arrays)
