"""What a step returns besides arrays: updates of the caller's objects, NNX objects and static
leaves in its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from planner.arguments import nnx_graph
from planner.arguments.nnx_graph import GraphTree

RESULT = "result"
KEPT, FRESH, FIXED = "kept", "fresh", "fixed"


@dataclass(frozen=True)
class Rebuild:
    """How to build the caller's result from a step's arrays.

    Attributes:
        tree: structure of (arguments' NNX objects, result), all leaves.
        leaves: per leaf ``(KEPT, position among the arguments' arrays)``, ``(FRESH, -1)`` for the
            next array that the step returned, or ``(FIXED, Static)``.
        graph: the NNX objects among them.
    """

    tree: Any
    leaves: tuple[tuple[str, Any], ...]
    graph: GraphTree | None

    def build(self, given: Sequence[Any], fresh: Sequence[Any], objects: Any) -> Any:
        """The caller's result; updates ``objects`` in place."""
        rest = iter(fresh)
        full = [
            given[what] if how == KEPT else next(rest) if how == FRESH else what.value
            for how, what in self.leaves
        ]
        out = jax.tree_util.tree_unflatten(self.tree, full)
        if self.graph is not None:
            out, _ = nnx_graph.merge(out, self.graph, objects)
        return out[1]


@dataclass(frozen=True)
class StepOutcome:
    """What a pure step returns if its result is more than arrays: the new arrays of arguments that
    it updates in place, the arrays of its result, and how to put them together."""

    updates: tuple[Any, ...]
    result: Any
    rebuild: Rebuild


def _outcome_keys(x: StepOutcome) -> tuple[Any, Rebuild]:
    keys: list[Any] = [jax.tree_util.SequenceKey(k) for k in range(len(x.updates))]
    pairs = [*zip(keys, x.updates, strict=True), (jax.tree_util.GetAttrKey(RESULT), x.result)]
    return pairs, x.rebuild


def unwrapped(outcome: Any, args: Sequence[Any], objects: Any = None) -> Any:
    """The caller's result of a step; ``objects`` are updated in place."""
    if not isinstance(outcome, StepOutcome):
        return outcome
    fresh = jax.tree_util.tree_leaves((outcome.updates, outcome.result))
    return outcome.rebuild.build(jax.tree_util.tree_leaves(tuple(args)), fresh, objects)


def kept_leaves(outcome: Any) -> tuple[int, ...]:
    """Positions of the arguments' arrays that a step leaves unchanged in the caller's objects."""
    if not isinstance(outcome, StepOutcome):
        return ()
    return tuple(sorted({what for how, what in outcome.rebuild.leaves if how == KEPT}))


def _outcome_of(rebuild: Rebuild, children: tuple[Any, ...]) -> StepOutcome:
    return StepOutcome(children[:-1], children[-1], rebuild)


jax.tree_util.register_pytree_with_keys(
    StepOutcome,
    _outcome_keys,
    lambda rebuild, children: _outcome_of(rebuild, tuple(children)),
    lambda x: ((*x.updates, x.result), x.rebuild),
)
