"""Manual hybrid sharding: marks inside the model, path rules, Flax metadata -> pins.

A *pin* is a sharding that a plan must honour or refuse by name.
"""

from __future__ import annotations

import re
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


@dataclass(frozen=True)
class Pin:
    """``value`` (graph value index) must be sharded as ``entries``; ``origin`` says who asked."""

    value: int
    entries: tuple[Entry, ...]
    origin: str


def shard(x: jax.Array, *entries: Entry) -> jax.Array:
    """Mark ``x`` inside a model: ``shard(x, "data", None, "model")``.

    The numbers do not change. Entries name mesh axes per dimension as a PartitionSpec
    does; missing ones mean replicated. The gradient of ``x`` is marked alike.

    Raises:
        PinError: more entries than dimensions.
    """
    if len(entries) > x.ndim:
        raise PinError(
            f"planner.shard: got {len(entries)} entries {entries} for a value of shape {x.shape}; "
            f"expected at most {x.ndim}"
        )
    return _mark.bind(x, entries=tuple(entries))  # type: ignore[no-any-return]


def mark_entries(primitive: str, params: Mapping[str, Any]) -> tuple[Entry, ...] | None:
    """Entries of a mark or of ``jax.lax.with_sharding_constraint``; None for anything else."""
    if primitive == MARK:
        return tuple(params["entries"])
    if primitive == "sharding_constraint":
        spec = getattr(params.get("sharding"), "spec", None)
        if spec is None or any(e is jax.sharding.PartitionSpec.UNCONSTRAINED for e in spec):
            return None
        return tuple(spec)
    return None


def rule_pins(
    rules: Mapping[str, Any], paths: Sequence[str], inputs: Sequence[int]
) -> tuple[Pin, ...]:
    """Pins of ``{"regex over path": PartitionSpec(...)}``; the first matching rule wins.

    Raises:
        PinError: a rule that matches no input (with the first paths), is no regular expression,
            or leaves a dimension unconstrained.
    """
    pins: dict[int, Pin] = {}
    for pattern, spec in rules.items():
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise PinError(f"shardings: {pattern!r} is no regular expression: {error}") from error
        if any(e is jax.sharding.PartitionSpec.UNCONSTRAINED for e in spec):
            raise PinError(f"shardings: {pattern!r}: UNCONSTRAINED dimensions can't be pinned")
        hits = [(p, v) for p, v in zip(paths, inputs, strict=True) if wanted.search(p)]
        if not hits:
            raise PinError(
                f"shardings: no argument path matches {pattern!r}; paths look like "
                + ", ".join(repr(p) for p in paths[:3])
            )
        for path, value in hits:
            pins.setdefault(value, Pin(value, tuple(spec), f"shardings[{pattern!r}] at {path}"))
    return tuple(pins.values())


def _is_boxed(x: Any) -> bool:
    """A Flax box that carries partitioning metadata (Linen Partitioned, NNX Variable)."""
    if hasattr(x, "names") and hasattr(x, "get_partition_spec"):
        return True
    return hasattr(x, "get_metadata") and hasattr(x, "get_value")


def _box_entries(box: Any) -> tuple[Entry, ...] | None:
    names = getattr(box, "names", None)
    if names is None:
        meta = box.get_metadata()
        names = meta.get("out_sharding", meta.get("sharding_names", meta.get("sharding")))
    if names is None or not isinstance(names, tuple) or not any(names):
        return None
    return tuple(names)


def metadata_pins(
    args: Sequence[Any], inputs: Sequence[int], paths: Sequence[str]
) -> tuple[Pin, ...]:
    """Pins from Flax's own partitioning metadata found in the arguments."""
    pins: list[Pin] = []
    position = 0
    for node in jax.tree_util.tree_leaves(tuple(args), is_leaf=_is_boxed):
        count = len(jax.tree_util.tree_leaves(node)) if _is_boxed(node) else 1
        entries = _box_entries(node) if _is_boxed(node) and count == 1 else None
        if entries is not None:
            pins.append(Pin(inputs[position], entries, f"Flax metadata at {paths[position]}"))
        position += count
    return tuple(pins)
