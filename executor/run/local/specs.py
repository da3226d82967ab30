"""Shardings over the axes of a jax mesh, as a tuple of axes per dimension."""

from __future__ import annotations

from jax.sharding import NamedSharding, PartitionSpec

Spec = tuple[tuple[str, ...], ...]
"""Per dimension, the axes of the jax mesh that split it, major first."""


def partition_spec(spec: Spec) -> PartitionSpec:
    """A sharding as a jax ``PartitionSpec``."""
    used = max((d + 1 for d, entry in enumerate(spec) if entry), default=0)
    return PartitionSpec(*[e if len(e) > 1 else e[0] if e else None for e in spec[:used]])


def spec_of(sharding: NamedSharding, rank: int) -> Spec:
    """The inverse of ``partition_spec``, for ``rank`` dimensions."""
    entries = tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in sharding.spec
    )
    return entries + ((),) * (rank - len(entries))
