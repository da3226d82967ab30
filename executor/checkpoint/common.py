"""Names of leaves: paths of keys, joined and taken apart without loss.

A leaf's path is the keys to it: of dicts, attributes, and sequences by number, all as text. Shown,
they are joined by "/", with "~" as "~0" and "/" as "~1" in a key (RFC 6901). Orbax joins keys by
"."; keys go there with "." as "~2" besides, so that no two leaves get one name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path as File
from typing import Any

import jax

from planner.errors import RequestError

Path = tuple[str, ...]


class CheckpointError(RequestError):
    """No checkpoint, one that is damaged, or one of another state; names the leaf."""


def key_text(entry: Any) -> str:
    """One entry of a JAX key path."""
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def leaves_of(tree: Any) -> list[tuple[Path, Any]]:
    """Leaves by path, in JAX's order; dicts, sequences and named tuples of one form have the same.

    Raises:
        CheckpointError: two leaves have one path, such as those at keys 1 and "1".
    """
    found = [
        (tuple(key_text(k) for k in path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    seen: set[Path] = set()
    for path, _ in found:
        if path in seen:
            raise CheckpointError(f"two leaves are called {shown(path)}; give them other keys")
        seen.add(path)
    return found


def sequences_of(tree: Any) -> tuple[Path, ...]:
    """The paths of lists and tuples in a tree."""
    found = {
        tuple(key_text(k) for k in path[:i])
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        for i, entry in enumerate(path)
        if isinstance(entry, jax.tree_util.SequenceKey)
    }
    return tuple(sorted(found))


def shown(path: Path, separator: str = "/") -> str:
    """A path as one text; ``taken`` gives it back."""
    return separator.join(k.replace("~", "~0").replace(separator, "~1") for k in path)


def taken(name: str, separator: str = "/") -> Path:
    """The path that a text says."""
    return tuple(k.replace("~1", separator).replace("~0", "~") for k in name.split(separator))


def stored(key: str) -> str:
    """A key as Orbax is given it."""
    return key.replace("~", "~0").replace("/", "~1").replace(".", "~2")


def unstored(key: str) -> str:
    """The key that Orbax was given."""
    return key.replace("~2", ".").replace("~1", "/").replace("~0", "~")


def nested(leaves: Mapping[Path, Any], sequences: Iterable[Path] = ()) -> Any:
    """Dicts of dicts from leaves by path; at the paths of ``sequences`` lists, None where they
    have no leaf.

    Raises:
        CheckpointError: a leaf lies where others need a container.
    """
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        at = root
        for k, key in enumerate(path[:-1]):
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise CheckpointError(
                    f"{shown(path[: k + 1])} is a leaf, so {shown(path)} can't be in it"
                )
        if path[-1] in at:
            raise CheckpointError(f"{shown(path)} is a leaf, and has leaves in it")
        at[path[-1]] = leaf
    for path in sorted(sequences, key=len, reverse=True):
        root = _with_list(root, path)
    return root


def _with_list(tree: Any, path: Path) -> Any:
    if path:
        if isinstance(tree, dict) and path[0] in tree:
            tree[path[0]] = _with_list(tree[path[0]], path[1:])
        return tree
    if not isinstance(tree, dict) or not all(_is_number(key) for key in tree):
        return tree
    return [tree.get(str(k)) for k in range(max(map(int, tree), default=-1) + 1)]


def read_json(folder: File) -> dict[str, Any] | None:
    """An item that Orbax wrote as JSON; None if it is not there. Asks no other process."""
    file = folder / "metadata"
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error


def _is_number(key: str) -> bool:
    """Whether a key is what a sequence's would be: "4", not "04"."""
    return key.isascii() and key.isdecimal() and str(int(key)) == key
