"""Manual hybrid sharding: marks inside a model, and the shardings that they request.

A *pin* is a sharding that a plan must honor; otherwise planning fails and names the pin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from planner.errors import PinError
from planner.spec import Entry, Sharding

MARK = "planner_shard"
SHIFT = "planner_shift"
"""Shifts rows to their neighbors (``planner.stages.arrays``)."""
EDGE = "region_edge"
"""A value that enters or leaves a ``shard_map`` (``planner.rules.kernels.regions``)."""
MARKS = frozenset({MARK, EDGE, "sharding_constraint"})
"""Operations that mark a value: identities at which its sharding may change."""

EDGE_MARK = jex_core.Primitive(EDGE)
"""Only for records: it is never bound."""

_mark = jex_core.Primitive(MARK)
_mark.def_impl(lambda x, *, entries: x)
_mark.def_abstract_eval(lambda x, *, entries: x)
mlir.register_lowering(_mark, lambda ctx, x, *, entries: [x])
ad.deflinear2(_mark, lambda ct, x, *, entries: [_mark.bind(ct, entries=entries)])


def _batch_mark(args: Sequence[Any], dims: Sequence[int], *, entries: tuple[Entry, ...]) -> Any:
    (x,), (d,) = args, dims
    full: list[Any] = list(entries) + [None] * (x.ndim - 1 - len(entries))
    full.insert(d, FREE)
    return _mark.bind(x, entries=tuple(full)), d


batching.primitive_batchers[_mark] = _batch_mark


@dataclass(frozen=True)
class StoredAs:
    """A value of ``shardings=`` for storage only: ``{"kernel": StoredAs(PartitionSpec("model"))}``.

    Between steps the argument has this sharding; operations may gather it. A bare ``PartitionSpec``
    applies to the use as well.

    >>> tuple(StoredAs(jax.sharding.PartitionSpec("model")).spec)
    ('model',)
    """

    spec: Any


FREE = jax.sharding.PartitionSpec.UNCONSTRAINED
"""In the entries of a mark: the planner may split this dimension freely."""


@dataclass(frozen=True)
class Pin:
    """``value`` (graph value index) must be sharded as ``entries``, as ``origin`` requests.

    A dimension whose entry is ``FREE`` is left to the planner: it may split it over the axes that
    the other entries do not use.
    """

    value: int
    entries: tuple[Any, ...]
    origin: str
    storage: bool = False
    """Whether it says only how an argument is stored (``StoredAs``), not how it is used."""
    rule: str = ""
    """The rule that it comes from, without the argument's path: one rule may pin many arguments."""

    @property
    def fixed(self) -> tuple[Entry, ...]:
        """The entries; None where the planner is free."""
        return tuple(None if e is FREE else e for e in self.entries)

    @property
    def free(self) -> tuple[int, ...]:
        """The dimensions left to the planner."""
        return tuple(d for d, e in enumerate(self.entries) if e is FREE)

    @property
    def axes(self) -> tuple[frozenset[str] | None, ...]:
        """Per entry, the mesh axes that it requests; None where the planner is free."""
        return tuple(
            None if e is FREE else frozenset(d)
            for e, d in zip(self.entries, Sharding.of(self.fixed).dims, strict=True)
        )

    @property
    def text(self) -> str:
        """The entries as text."""
        return entries_text(self.entries)


def entries_text(entries: Sequence[Any]) -> str:
    """Entries as a PartitionSpec is written."""
    parts = ["UNCONSTRAINED" if e is FREE else repr(e) for e in entries]
    return f"P({', '.join(parts)})"


def shard(x: jax.Array, *entries: Any) -> jax.Array:
    """Mark ``x`` inside a model: ``shard(x, "data", None, "model")``.

    The values do not change. Entries name mesh axes per dimension as a PartitionSpec does; missing
    ones mean replicated, ``PartitionSpec.UNCONSTRAINED`` leaves a dimension to the planner. The
    gradient of ``x`` gets the same mark.

    Raises:
        PinError: more entries than dimensions.

    >>> import jax.numpy as jnp
    >>> float(shard(jnp.ones((4, 2)), "data").sum())
    8.0
    """
    if len(entries) > x.ndim:
        raise PinError(
            f"planner.shard: got {len(entries)} entries {entries_text(entries)} for a value of "
            f"shape {x.shape}; expected at most {x.ndim}"
        )
    return _mark.bind(x, entries=tuple(entries))  # type: ignore[no-any-return]


LOGICAL = "planner_logical"
"""A mesh axis that marks the mesh of logical axis rules: its sizes have no meaning."""
FLAX = "Flax metadata"
"""The rule of pins that come from partitioning metadata."""


def mark_entries(primitive: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Entries of a mark or of ``jax.lax.with_sharding_constraint``; None for anything else, and for
    a constraint that requests nothing."""
    if primitive in (MARK, EDGE):
        return tuple(params["entries"])
    if primitive == "sharding_constraint":
        sharding: Any = params.get("sharding")
        named = isinstance(sharding, jax.sharding.NamedSharding)
        return placed_entries(sharding) if named else None
    return None


def placed_entries(sharding: jax.sharding.NamedSharding) -> tuple[Any, ...] | None:
    """What a sharding on the user's mesh requests: an axis of size 1 leaves its dimension free.
    None if it requests nothing: on a mesh of one device, or if it names axes of size 1 only."""
    sizes, spec = dict(sharding.mesh.shape), tuple(sharding.spec)
    if LOGICAL in sizes:
        return spec
    if math.prod(sizes.values()) == 1:
        return None
    dims = Sharding.of([None if e is FREE else e for e in spec]).dims
    real = [tuple(a for a in dim if sizes.get(a) != 1) for dim in dims]
    if any(dims) and not any(real):
        return None
    return tuple(
        e if len(now) == len(dim) else (now if len(now) > 1 else now[0]) if now else FREE
        for e, dim, now in zip(spec, dims, real, strict=True)
    )
