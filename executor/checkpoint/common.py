"""Names of leaves: paths of keys, joined and split without loss.

The path of a leaf is the sequence of keys that lead to it, as text: keys of dicts, names of
attributes and indices of sequences. As one text, keys are joined by "/"; in a key, "~" is written
"~0" and "/" is written "~1" (RFC 6901). Orbax joins keys by ".". In keys for Orbax, "." is also
written "~2", so that no two leaves get the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from planner.errors import RequestError

Path = tuple[str, ...]
MAX_HOLES = 1_000_000
"""Maximum number of list items without a leaf in a state; it bounds the memory that a file can
claim."""


class CheckpointError(RequestError):
    """A checkpoint is missing, damaged or of another state; the message names the leaf."""


def brief(error: BaseException) -> str:
    """An error's text as one line, without TensorStore's options; a long one without its middle."""
    text = re.sub(r" \[tensorstore_spec=.*", "", " ".join(str(error).split()))
    text = text or type(error).__name__
    return text if len(text) <= 1000 else f"{text[:500]} ... {text[-495:]}"


def key_text(entry: Any) -> str:
    """The text of one entry of a JAX key path."""
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def leaves_of(tree: Any) -> list[tuple[Path, Any]]:
    """Leaves by path, in JAX's order. Dicts, sequences and named tuples of the same form have the
    same paths.

    Raises:
        CheckpointError: two leaves have the same path, such as those at keys 1 and "1".
    """
    leaves = [
        (tuple(key_text(k) for k in path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    seen: set[Path] = set()
    for path, _ in leaves:
        if path in seen:
            raise CheckpointError(f"two leaves are called {path_text(path)}; give them other keys")
        seen.add(path)
    return leaves


def sequences_of(tree: Any) -> tuple[Path, ...]:
    """The paths of lists and tuples in a tree."""
    paths = {
        tuple(key_text(k) for k in path[:i])
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        for i, entry in enumerate(path)
        if isinstance(entry, jax.tree_util.SequenceKey)
    }
    return tuple(sorted(paths))


def path_text(path: Path, separator: str = "/") -> str:
    """A path as one text; ``taken`` is the inverse."""
    return separator.join(k.replace("~", "~0").replace(separator, "~1") for k in path)


def taken(name: str, separator: str = "/") -> Path:
    """The path in a text; the inverse of ``path_text``."""
    return tuple(k.replace("~1", separator).replace("~0", "~") for k in name.split(separator))


def stored(key: str) -> str:
    """A key, escaped for Orbax; ``unstored`` is the inverse."""
    return key.replace("~", "~0").replace("/", "~1").replace(".", "~2")


def unstored(key: str) -> str:
    """A key from one of Orbax; the inverse of ``stored``."""
    return key.replace("~2", ".").replace("~1", "/").replace("~0", "~")


def nested(leaves: Mapping[Path, Any], sequences: Iterable[Path] = ()) -> Any:
    """Nested dicts from leaves by path, with lists at the paths of ``sequences``. List items that
    have no leaf are None.

    Raises:
        CheckpointError: a leaf is where other leaves need a container.
    """
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        at = root
        for k, key in enumerate(path[:-1]):
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise CheckpointError(
                    f"{path_text(path[: k + 1])} is a leaf, so {path_text(path)} can't be in it"
                )
        if path[-1] in at:
            raise CheckpointError(f"{path_text(path)} is a leaf, and has leaves in it")
        at[path[-1]] = leaf
    return _with_lists(root, sequences)


def _with_lists(root: dict[str, Any], sequences: Iterable[Path]) -> Any:
    above: dict[str, Any] = {"": root}
    room = MAX_HOLES
    for path in sorted(set(sequences), key=len, reverse=True):  # inner lists first
        at: Any = above
        for key in ("", *path[:-1]) if path else ():
            at = at.get(key) if isinstance(at, dict) else None
        last = path[-1] if path else ""
        items = at.get(last) if isinstance(at, dict) else None
        if not isinstance(items, dict) or not all(_is_number(key) for key in items):
            continue
        length = max(map(int, items), default=-1) + 1
        room -= length - len(items)
        if room < 0:
            raise CheckpointError(
                f"the list {path_text(path)} has {length} places for {len(items)} leaves; the "
                f"lists of a state may have {MAX_HOLES} empty places"
            )
        at[last] = [items.get(str(k)) for k in range(length)]
    return above[""]


def _is_number(key: str) -> bool:
    """Whether a key is written as an index of a sequence: "4", not "04"."""
    return key.isascii() and key.isdecimal() and len(key) < 16 and str(int(key)) == key
