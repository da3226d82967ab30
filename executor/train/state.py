"""What of a training state is saved: its arrays, in the form in which a step is planned.

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
        state: a pytree, of NNX objects too.
    """
    return parted(split(state)[0])[0]


def with_arrays(state: Any, arrays: Any) -> Any:
    """A state that holds other arrays.

    Args:
        state: gives its form; its NNX objects are updated in place.
        arrays: of the form of ``arrays_of(state)``.

    Returns:
        The state: the same NNX objects, static leaves of ``state``.
    """
    pure, graph, _ = split(state)
    _, partition = parted(pure)
    if partition.statics:
        arrays = partition.join(jax.tree_util.tree_leaves(arrays))
    return arrays if graph is None else updated(state, arrays)
