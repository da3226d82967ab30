"""Leaves that JAX traces, and static ones: functions, strings and other objects that a step closes
over and that are compared when it is called again."""

from __future__ import annotations

import enum
import sys
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from planner.arguments.attributes import attributes, names_read, numbers, root_of

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_SCALARS = (bool, int, float, complex)


@dataclass(frozen=True, eq=False)
class Static:
    """A static value, compared by ``==``, or by identity if its class defines no ``==``.

    The attributes that a trace would read as constants are compared as well: arrays by identity,
    numbers and strings by ``==``. The arrays in ``passed`` are not compared: they are also
    arguments of the call, and no name that the function reads leads to them.
    """

    value: Any
    arrays: tuple[tuple[str, Any], ...] = ()
    numbers: tuple[tuple[str, type, Any], ...] = ()
    passed: tuple[Any, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or len(self.arrays) != len(other.arrays):
            return False
        if any(a is not b for (_, a), (_, b) in zip(self.arrays, other.arrays, strict=True)):
            return False
        return self.numbers == other.numbers and _same(self.value, other.value)

    def __hash__(self) -> int:
        try:
            return hash((type(self.value), self.value))
        except TypeError:
            return hash(type(self.value))

    def __repr__(self) -> str:
        name = getattr(self.value, "__name__", None)
        return name if isinstance(name, str) else f"{self.value!r}"[:60]

    def news(self, before: Static) -> str:
        """A description of what differs from an earlier value."""
        if self.value is before.value:
            old = {path: x for path, _, x in before.numbers}
            for path, _, x in self.numbers:
                if path in old and old[path] != x:
                    return f"{path} was {old[path]!r}, is {x!r}"
            for (path, x), (_, y) in zip(self.arrays, before.arrays, strict=False):
                if x is not y:
                    return f"{path} is another array"
        return f" was {before!r}, is {self!r}"


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except Exception:  # such as an array among the fields of a dataclass
        return False


def static(value: Any, function: Any = None, given: Set[int] = frozenset()) -> Static:
    """The value as a `Static`, with the attributes that a function may read. ``given``: the ``id``
    of every array among the arguments."""
    names = names_read(function, type(value))
    held = attributes(value, names) if _is_by_identity(type(value)) or names else ()
    arrays = [(path, x) for path, x in held if isinstance(x, _ARRAYS)]
    passed = [
        (path, x) for path, x in arrays if id(x) in given and names and root_of(path) not in names
    ]
    others = tuple(pair for pair in arrays if pair not in passed) if passed else tuple(arrays)
    return Static(value, others, numbers(value, names), tuple(x for _, x in passed))


def _is_by_identity(kind: Any) -> bool:
    return bool(kind.__eq__ is object.__eq__)


def leaked(value: Static, function: Any = None) -> str | None:
    """The attribute of an object that holds a traced value, or None."""
    names = names_read(function, type(value.value))
    for path, x in attributes(value.value, names):
        if isinstance(x, jax.core.Tracer):
            return path[1:].partition("[")[0]
    return None


def is_traced(x: Any, scalars: bool) -> bool:
    """Whether JAX traces a leaf as an array; Python numbers only if ``scalars``."""
    if isinstance(x, _ARRAYS):
        return True
    if isinstance(x, enum.Enum | type):
        return False
    if isinstance(x, _SCALARS):
        return scalars
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _numbers_static(tree: Any, everywhere: bool) -> list[bool]:
    """Per leaf, whether a Python number is static there: in Equinox modules, as in
    ``equinox.filter_jit``, or ``everywhere``."""
    equinox = sys.modules.get("equinox")
    module = getattr(equinox, "Module", None)
    if everywhere or module is None:
        return [everywhere] * len(jax.tree_util.tree_leaves(tree))
    out: list[bool] = []
    for node in jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, module)):
        inside = isinstance(node, module)
        out += [inside] * (len(jax.tree_util.tree_leaves(node)) if inside else 1)
    return out


@dataclass(frozen=True)
class Partition:
    """What ``parted`` takes out of a pytree: its structure, and the static leaves by position."""

    tree: Any
    statics: tuple[tuple[int, Static], ...]

    def join(self, arrays: Sequence[Any]) -> Any:
        """The pytree with these arrays."""
        rest, known = iter(arrays), dict(self.statics)
        full = [known[k].value if k in known else next(rest) for k in range(self.tree.num_leaves)]
        return jax.tree_util.tree_unflatten(self.tree, full)


def parted(
    tree: Any, numbers_static: bool = False, function: Any = None, *, trusting: bool = False
) -> tuple[Any, Partition]:
    """A pytree with None for its static leaves, and what puts them back.

    Args:
        tree: any pytree.
        numbers_static: Python numbers are static everywhere, not only in Equinox modules.
        function: the function that reads the attributes of static leaves.
        trusting: do not compare arrays in these attributes that are also arguments, if the function
            reads no name that leads to them.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    fixed = _numbers_static(tree, numbers_static)
    given = frozenset(id(x) for x in leaves if trusting and isinstance(x, jax.Array))
    statics = tuple(
        (k, static(x, function, given))
        for k, (x, number) in enumerate(zip(leaves, fixed, strict=True))
        if not is_traced(x, not number)
    )
    if not statics:
        return tree, Partition(structure, ())
    for k, _ in statics:
        leaves[k] = None
    return jax.tree_util.tree_unflatten(structure, leaves), Partition(structure, statics)


def changed(before: Hashable, after: Hashable) -> str:
    """A description of the first static leaf in which two partitions of one structure differ."""
    if isinstance(before, Partition) and isinstance(after, Partition) and before.tree == after.tree:
        old = dict(before.statics)
        paths = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(
                jax.tree_util.tree_unflatten(after.tree, [0] * after.tree.num_leaves)
            )
        ]
        for k, value in after.statics:
            if k in old and old[k] != value:
                return paths[k] + value.news(old[k])
    return ""
