"""Attributes of static objects that a step reads, such as those of the ``self`` of a trainer's
method. A trace takes their values as constants, so they are compared when the step is called
again."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax

DEPTH = 3
"""How many levels of objects within objects are followed."""
_PLAIN = (bool, int, float, complex, str, bytes)
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    type,
)


def names_read(function: Any, kind: type) -> frozenset[str]:
    """Names of the attributes that may be read by a function, by the methods of a class that it
    calls, and by the functions of its module that it calls."""
    function = getattr(function, "__func__", function)
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, types.FunctionType):
        return frozenset()
    return _names_read(function, kind)


@functools.lru_cache(maxsize=1024)
def _names_read(function: types.FunctionType, kind: type) -> frozenset[str]:
    names: set[str] = set()
    todo = [function]
    seen = set(todo)
    while todo:
        current = todo.pop()
        fresh = set(_names(current.__code__)) - names
        names |= fresh
        for name in fresh:
            method = getattr(kind, name, None)
            called = current.__globals__.get(name)
            for other in (method, called):
                if not isinstance(other, types.FunctionType) or other in seen:
                    continue
                if other is method or other.__module__ == function.__module__:
                    seen.add(other)
                    todo.append(other)
    return frozenset(names)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _names(x)


def attributes(
    value: Any, names: frozenset[str] = frozenset(), depth: int = DEPTH
) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of all attributes of an object; of objects among these, only the attributes with
    these names."""
    if isinstance(value, _FUNCTIONS):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(getattr(value, "__dict__", {})):
        root = str(getattr(path[0], "key", path[0]))
        name = f".{root}{jax.tree_util.keystr(path[1:])}"
        yield name, x
        if root in names and depth > 1 and hasattr(x, "__dict__"):
            for inner, y in attributes(x, names, depth - 1):
                if root_of(inner) in names:
                    yield name + inner, y


def root_of(path: str) -> str:
    """The attribute of the outermost object that a path begins with."""
    return path[1:].partition("[")[0].partition(".")[0]


def numbers(value: Any, names: frozenset[str]) -> tuple[tuple[str, type, Any], ...]:
    """(path, type, value) of the numbers and strings among the attributes with these names."""
    return tuple(
        (path, type(x), x)
        for path, x in attributes(value, names)
        if isinstance(x, _PLAIN) and root_of(path) in names
    )
