"""Manual hybrid sharding: the mark that stands inside a model, and what a mark asks for.

A *pin* is a sharding that a plan must honour or refuse by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from planner.errors import PinError
from planner.spec import Entry

MARK = "planner_shard"

_mark = jex_core.Primitive(MARK)
_mark.def_impl(lambda x, *, entries: x)
_mark.def_abstract_eval(lambda x, *, entries: x)
mlir.register_lowering(_mark, lambda ctx, x, *, entries: [x])
ad.deflinear2(_mark, lambda ct, x, *, entries: [_mark.bind(ct, entries=entries)])


def _batch_mark(args: Sequence[Any], dims: Sequence[int], *, entries: tuple[Entry, ...]) -> Any:
    (x,), (d,) = args, dims
    full = list(entries) + [None] * (x.ndim - 1 - len(entries))
    full.insert(d, None)
    return _mark.bind(x, entries=tuple(full)), d


batching.primitive_batchers[_mark] = _batch_mark


FREE = jax.sharding.PartitionSpec.UNCONSTRAINED
"""In the entries of a mark: the planner may split this dimension as it likes."""


@dataclass(frozen=True)
class Pin:
    """``value`` (graph value index) must be sharded as ``entries``; ``origin`` says who asked.

    A dimension whose entry is ``FREE`` is left to the planner: it may split it over the axes
    that the other entries do not use.
    """

    value: int
    entries: tuple[Any, ...]
    origin: str

    @property
    def fixed(self) -> tuple[Entry, ...]:
        """The entries, None where the planner is free."""
        return tuple(None if e is FREE else e for e in self.entries)

    @property
    def free(self) -> tuple[int, ...]:
        """The dimensions left to the planner."""
        return tuple(d for d, e in enumerate(self.entries) if e is FREE)

    @property
    def text(self) -> str:
        """The entries for people."""
        return told(self.entries)


def told(entries: Sequence[Any]) -> str:
    """Entries as a PartitionSpec is written."""
    parts = ["UNCONSTRAINED" if e is FREE else repr(e) for e in entries]
    return f"P({', '.join(parts)})"


def shard(x: jax.Array, *entries: Any) -> jax.Array:
    """Mark ``x`` inside a model: ``shard(x, "data", None, "model")``.

    The numbers do not change. Entries name mesh axes per dimension as a PartitionSpec
    does; missing ones mean replicated, ``PartitionSpec.UNCONSTRAINED`` leaves a dimension to the
    planner. The gradient of ``x`` is marked alike.

    Raises:
        PinError: more entries than dimensions.

    >>> import jax.numpy as jnp
    >>> float(shard(jnp.ones((4, 2)), "data").sum())
    8.0
    """
    if len(entries) > x.ndim:
        raise PinError(
            f"planner.shard: got {len(entries)} entries {told(entries)} for a value of shape "
            f"{x.shape}; expected at most {x.ndim}"
        )
    return _mark.bind(x, entries=tuple(entries))  # type: ignore[no-any-return]


def mark_entries(primitive: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Entries of a mark or of ``jax.lax.with_sharding_constraint``; None for anything else."""
    if primitive == MARK:
        return tuple(params["entries"])
    if primitive == "sharding_constraint":
        spec = getattr(params.get("sharding"), "spec", None)
        return None if spec is None else tuple(spec)
    return None
