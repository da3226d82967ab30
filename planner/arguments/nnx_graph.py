"""Flax NNX objects among arguments and results: split into States around a traced function, merged
inside it, and updated in place when it returns, with the graph functions of Flax that ``nnx.jit``
uses. An ``nnx.State`` is a pytree and stays as it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True, eq=False)
class GraphTree:
    """A pytree with NNX objects as leaves: its structure, and per leaf a GraphDef (None: no NNX
    object).

    A GraphDef that can't be hashed, because an attribute is a list or a dictionary, is compared by
    its text at the time of the first hash: the attribute may be changed in place later.
    """

    tree: Any
    defs: tuple[Any, ...]
    texts: list[str] = field(default_factory=list, repr=False)

    def __hash__(self) -> int:
        try:
            return hash((self.tree, self.defs))
        except TypeError:
            self.texts[:] = self.texts or [repr(self.defs)]
            return hash((self.tree, self.texts[0]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphTree) or self.tree != other.tree:
            return False
        if self.texts or other.texts:
            text, other_text = (x.texts[0] if x.texts else repr(x.defs) for x in (self, other))
            return text == other_text
        return self.defs == other.defs


def _nnx() -> Any:
    """``flax.nnx`` where it is in use, else None."""
    return sys.modules.get("flax.nnx")


def is_object(x: Any) -> bool:
    """Whether ``x`` is a Module, Optimizer, Metric, Rngs, Variable or another NNX graph node."""
    nnx = _nnx()
    return nnx is not None and bool(isinstance(x, nnx.Variable) or nnx.graph.is_node_module(x))


def _stops(x: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and (isinstance(x, nnx.State) or is_object(x))


def split(tree: Any, inner: Any = None) -> tuple[Any, GraphTree | None, Any]:
    """NNX objects in a pytree -> their States.

    Args:
        tree: any pytree.
        inner: the objects by number that ``merge`` returned, to match them with those in ``tree``.

    Returns:
        The pytree with States (a Variable stays one), what ``merge`` needs (None without NNX
        objects), and the objects by number. An object that occurs twice has its State where it
        occurs first.
    """
    nnx = _nnx()
    if nnx is None:
        return tree, None, None
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_stops)
    if not any(is_object(x) for x in leaves):
        return tree, None, None
    numbers = nnx.graph.RefMap()
    outer = None if inner is None else nnx.graph.RefMap.from_indexmap(inner)
    defs: list[Any] = []
    for k, x in enumerate(leaves):
        if not is_object(x):
            defs.append(None)
            continue
        graphdef, flat = nnx.flatten(x, ref_index=numbers, ref_outer_index=outer, graph=True)
        defs.append(graphdef)
        is_variable = len(flat) == 1 and flat[0][0] == ()
        leaves[k] = flat[0][1] if is_variable else flat.to_nested_state()
    pure = jax.tree_util.tree_unflatten(structure, leaves)
    return pure, GraphTree(structure, tuple(defs)), numbers


def merge(pure: Any, graph: GraphTree, outer: Any = None) -> tuple[Any, Any]:
    """The inverse of ``split``.

    Args:
        pure: a pytree with States.
        graph: from ``split``.
        outer: numbers of existing objects, from an earlier ``split``; those are updated in place.

    Returns:
        The pytree with NNX objects, and these by number.
    """
    nnx: Any = _nnx()
    index = nnx.graph.IndexMap()
    existing = None if outer is None else nnx.graph.IndexMap.from_refmap(outer)
    leaves = graph.tree.flatten_up_to(pure)
    for k, graphdef in enumerate(graph.defs):
        if graphdef is not None:
            state = leaves[k]
            given = [state] if isinstance(state, nnx.Variable) else state
            leaves[k] = nnx.unflatten(
                graphdef, given, index_ref=index, outer_index_outer_ref=existing
            )
    return jax.tree_util.tree_unflatten(graph.tree, leaves), index


def updated(tree: Any, pure: Any) -> Any:
    """A pytree with new arrays; its NNX objects stay the same ones and are updated in place.

    Args:
        tree: a pytree with NNX objects.
        pure: the new arrays, in the structure of the first result of ``split(tree)``.
    """
    nnx: Any = _nnx()
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_stops)
    for k, new in enumerate(structure.flatten_up_to(pure)):
        if not is_object(leaves[k]):
            leaves[k] = new
        elif isinstance(leaves[k], nnx.Variable):
            leaves[k].update_from_state(new)
        else:
            nnx.update(leaves[k], new)
    return jax.tree_util.tree_unflatten(structure, leaves)


def objects_in(tree: Any) -> list[Any]:
    """The NNX objects of a pytree."""
    return [x for x in jax.tree_util.tree_leaves(tree, is_leaf=_stops) if is_object(x)]


def only_objects(tree: Any) -> Any:
    """A pytree with None for all but its NNX objects."""
    return jax.tree_util.tree_map(lambda x: x if is_object(x) else None, tree, is_leaf=_stops)


def take_cache() -> bool:
    """Whether ``nnx.cached_partial`` makes this call; consumes its cache, as Flax requires."""
    nnx = _nnx()
    if nnx is None:
        return False
    with nnx.update_context("meshwright") as context:
        return context.static_cache is not None
