"""Which inputs of a step come back as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner import compat


def _pair(
    in_paths: Sequence[tuple[Any, ...]],
    out_paths: Sequence[tuple[Any, ...]],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
) -> tuple[tuple[int, int], ...]:
    """Inputs that come back as outputs: same place in the pytree, same shape and dtype."""

    def key(path: tuple[Any, ...], aval: Any) -> tuple[Any, ...]:
        return (tuple(map(str, path)), *_kind(aval))

    exact = {key(p, a): k for k, (p, a) in enumerate(zip(out_paths, out_avals, strict=True))}
    tail: dict[Any, list[int]] = {}
    for k, (p, a) in enumerate(zip(out_paths, out_avals, strict=True)):
        tail.setdefault(key(p[1:], a), []).append(k)
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for i, (path, aval) in enumerate(zip(in_paths, in_avals, strict=True)):
        options = [exact.get(key(path, aval)), exact.get(key(path[1:], aval))]
        if len(path) > 1:
            options += tail.get(key(path[1:], aval), [])
        for out in options:
            if out is not None and out not in used:
                used.add(out)
                pairs.append((i, out))
                break
    return tuple(pairs)


def ties(
    in_paths: Sequence[tuple[Any, ...]],
    out_paths: Sequence[tuple[Any, ...]],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    updated: int,
) -> tuple[tuple[int, int], ...]:
    """Inputs that come back as outputs: first those updated in place, by path, then ``_pair``'s."""
    known = {(p, *_kind(in_avals[k])): k for k, p in enumerate(in_paths)}
    out = {
        known[key]: k
        for k, p in enumerate(out_paths[:updated])
        if (key := (p, *_kind(out_avals[k]))) in known
    }
    others = [k for k in range(len(in_paths)) if k not in out]
    pairs = _pair(
        [in_paths[k] for k in others],
        [p[1:] if updated else p for p in out_paths[updated:]],
        [in_avals[k] for k in others],
        out_avals[updated:],
    )
    out |= {others[i]: updated + o for i, o in pairs}
    return tuple(sorted(out.items()))


def _kind(aval: Any) -> tuple[Any, ...]:
    return compat.aval_shape(aval), compat.dtype_name(aval)
