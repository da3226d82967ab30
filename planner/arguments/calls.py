"""How a step is called: which parts of a call are traced, which are static, and what is written
back into the caller's objects.

``bind`` turns a call into a pure function of pytrees of arrays (`PureStep`), which is planned and
run. ``Bound.finish`` turns its result into what the caller expects. Positions are preserved: a
static argument leaves None in its place, a keyword that has a position takes it, and other keywords
follow as one dict each.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from planner.arguments import nnx_graph
from planner.arguments.leaves import Partition, Static, changed, leaked, parted, static
from planner.arguments.metadata import rules_of
from planner.arguments.nnx_graph import GraphTree
from planner.arguments.outcome import FIXED, FRESH, KEPT, Rebuild, StepOutcome, unwrapped
from planner.errors import ModelError, RequestError

RECEIVER = "self"

Indices = int | Sequence[int]
Names = str | Sequence[str]


class PureStep:
    """A step as a function of pytrees of arrays; see ``bind``."""

    def __init__(
        self,
        function: Callable[..., Any],
        form: Form,
        partition: Partition,
        graph: GraphTree | None,
    ) -> None:
        self.is_pure_step = True
        self.function, self.form, self.partition = function, form, partition
        self.graph = graph
        self.__name__ = name_of(function)
        self.logical_axis_rules = rules_of(function)

    def __call__(self, *pure: Any) -> Any:
        """The step's result: as it is, or as an `StepOutcome`."""
        given = self.partition.join(jax.tree_util.tree_leaves(pure))
        before = self._places(given)
        values, inner = given, None
        if self.graph is not None:
            values, inner = nnx_graph.merge(given, self.graph)
        result = self.form.apply(self.function, values)
        self._check_leaks()
        objects = nnx_graph.only_objects(values) if inner is not None else ()
        out: Any
        out, graph, _ = nnx_graph.split((objects, result), inner)
        _, partition = parted(out, _is_filtered(self.function))
        if graph is None and not partition.statics:
            return result
        how: list[tuple[str, Any]] = []
        fixed = dict(partition.statics)
        for k, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(out)):
            number, value = before.get(path[1:], (-1, None)) if path[0].idx == 0 else (-1, None)
            if k in fixed:
                how.append((FIXED, fixed[k]))
            else:
                how.append((KEPT, number) if number >= 0 and value is x else (FRESH, -1))
        shown = [
            x if kind == FRESH else None
            for x, (kind, _) in zip(jax.tree_util.tree_leaves(out), how, strict=True)
        ]
        updates, result = jax.tree_util.tree_unflatten(partition.tree, shown)
        return StepOutcome(tuple(updates), result, Rebuild(partition.tree, tuple(how), graph))

    def _places(self, given: tuple[Any, ...]) -> dict[Any, tuple[int, Any]]:
        """Path -> (number, array) of the arguments' arrays, to see which are updated."""
        fixed = dict(self.partition.statics)
        out, number = {}, 0
        for k, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(given)):
            if k in fixed:
                continue
            out[path] = (number, x)
            number += 1
        return out

    def _check_leaks(self) -> None:
        for path, value in (*self.form.statics, *self.partition.statics):
            name = leaked(value, self.function)
            if name is not None:
                where = path if isinstance(path, str) else f"argument leaf {path}"
                raise ModelError(
                    f"{self.__name__} assigns a traced value to {name!r} of {where}, a "
                    f"{type(value.value).__name__}, which is static: the assignment would not be "
                    "repeated by later calls; return the value, or make the object a pytree or an "
                    "nnx.Module"
                )


@dataclass(frozen=True)
class Form:
    """The part of a call that is not traced.

    Attributes:
        count: number of positional arguments.
        names: keywords that have no position, then ``RECEIVER`` for a bound method's object.
        statics: (position or keyword, value) of static arguments.
    """

    count: int
    names: tuple[str, ...]
    statics: tuple[tuple[Any, Static], ...]

    def apply(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call the function as its caller did."""
        fixed = {what: value.value for what, value in self.statics}
        args = [fixed.get(k, x) for k, x in enumerate(values[: self.count])]
        keywords = {name: values[self.count + k][name] for k, name in enumerate(self.names)}
        keywords |= {name: value for name, value in fixed.items() if isinstance(name, str)}
        if is_method(function):
            return function.__func__(keywords.pop(RECEIVER), *args, **keywords)  # type: ignore[attr-defined]
        return function(*args, **keywords)


@dataclass(frozen=True, eq=False)
class Bound:
    """A call, ready to be planned and run.

    Attributes:
        function: a function of ``args``.
        args: pytrees of arrays or ShapeDtypeStructs.
        donated: positions in ``args`` whose memory the results may reuse.
        key: equal for calls that can share a plan if their arrays have equal shapes.
        is_plain: the arguments are passed on as they are.
        objects: the caller's NNX objects by number.
        is_cached: ``nnx.cached_partial`` makes the call.
    """

    function: PureStep
    args: tuple[Any, ...]
    donated: tuple[int, ...]
    key: Hashable = None
    is_plain: bool = False
    objects: Any = field(default=None, repr=False)
    is_cached: bool = False

    def finish(self, outcome: Any, args: Sequence[Any] | None = None) -> Any:
        """The caller's result; writes in-place updates back into the caller's objects.

        Args:
            outcome: what ``function`` returned.
            args: the arguments as the run placed them; None takes ``self.args``.
        """
        return unwrapped(outcome, self.args if args is None else args, self.objects)

    def difference(self, key: Hashable) -> str:
        """What differs from the call with another key, as `` (...)`` or ``""``."""
        if isinstance(key, tuple) and isinstance(self.key, tuple):
            said = changed(key[1], self.key[1])
            return f" ({said})" if said else ""
        return ""


class Calls:
    """The calling convention of a step.

    Args:
        function: the step.
        static_argnums, static_argnames, donate_argnums, donate_argnames: as for ``jax.jit``.

    Attributes:
        trusting: see ``parted``; false once a trace has read such an array as a constant.

    Raises:
        RequestError: a name or number that the function does not have, or one that is both
            static and donated; or a ``functools.partial`` that holds NNX objects.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static_argnums: Indices = (),
        static_argnames: Names = (),
        donate_argnums: Indices = (),
        donate_argnames: Names = (),
    ) -> None:
        self.trusting = True
        self.function = function = _as_method(function)
        _check_partial(function)
        self.names, self.is_open = _positions(function)
        self.static = self._resolved("static", static_argnums, static_argnames)
        self.donated = self._resolved("donate", donate_argnums, donate_argnames)
        both = set(self.static) & set(self.donated)
        if both:
            raise RequestError(f"static and donated at once: {sorted(map(str, both))}")

    def bind(self, args: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> Bound:
        """A call of the step as a pure function; computes nothing.

        Raises:
            RequestError: a static argument can't be hashed; the message names it.
        """
        if getattr(self.function, "is_pure_step", False):
            function: Any = self.function
            return Bound(function, tuple(args), self._numbers(self.donated, (), len(args)))
        values, extra = self._placed(list(args), dict(keywords or {}))
        count = len(values)
        statics = self._statics(values, extra)
        if is_method(self.function):
            extra[RECEIVER] = self.function.__self__
        names = tuple(extra)
        given = (*values, *({name: extra[name]} for name in names))
        donated = self._numbers(self.donated, names, count)
        is_cached = nnx_graph.take_cache()
        pure, graph, objects = nnx_graph.split(given)
        arrays, partition = parted(
            pure, _is_filtered(self.function), self.function, trusting=self.trusting
        )
        form = Form(count, names, statics)
        step = PureStep(self.function, form, partition, graph)
        plain = graph is None and not partition.statics and not statics and not names
        key = None if plain else (form, partition, graph)
        return Bound(step, tuple(arrays), donated, key, plain, objects, is_cached)

    def check_cached(self, bound: Bound, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Raise ModelError if a call by ``nnx.cached_partial`` changed the structure of its
        objects: they are copies, so the caller's objects would not change."""
        if bound.is_cached and self.bind(args, keywords).key != bound.key:
            raise ModelError(
                f"{name_of(self.function)} adds, removes or changes attributes of an object that "
                "nnx.cached_partial holds a copy of; call the step without nnx.cached_partial, or "
                "undo the change in the step, as nnx.pop does"
            )

    def _placed(self, values: list[Any], extra: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Append keywords that have the next position to the values; sort the others by name."""
        while len(values) < len(self.names) and self.names[len(values)] in extra:
            values.append(extra.pop(self.names[len(values)]))
        return values, dict(sorted(extra.items()))

    def _statics(
        self, values: list[Any], extra: dict[str, Any]
    ) -> tuple[tuple[int | str, Static], ...]:
        """Take static arguments out of a call."""
        statics: list[tuple[int | str, Static]] = []
        for what in self.static:
            at = what + len(values) if isinstance(what, int) and what < 0 else what
            if isinstance(at, int) and at < len(values):
                value, values[at] = values[at], None
            elif isinstance(at, str) and at in extra:
                value = extra.pop(at)
            else:
                continue
            try:
                hash(value)
            except TypeError as error:
                raise RequestError(
                    f"{name_of(self.function)}: static argument {at!r} is a "
                    f"{type(value).__name__}, which can't be hashed; expected a hashable value, "
                    "such as a tuple or a frozen dataclass"
                ) from error
            statics.append((at, static(value, self.function)))
        return tuple(statics)

    def _numbers(
        self, chosen: Sequence[int | str], names: Sequence[str], count: int
    ) -> tuple[int, ...]:
        """The positions that argument numbers and names have among the pure arguments."""
        positions = {n + count if n < 0 else n for n in chosen if isinstance(n, int)}
        positions = {n for n in positions if n < count}
        positions |= {count + k for k, name in enumerate(names) if name in chosen}
        return tuple(sorted(positions))

    def _resolved(self, what: str, numbers: Indices, names: Names) -> tuple[int | str, ...]:
        """Numbers and names of the same arguments, as ``jax.jit`` infers one from the other."""
        argnums = (numbers,) if isinstance(numbers, int) else tuple(numbers or ())
        argnames = (names,) if isinstance(names, str) else tuple(names or ())
        size, is_open = len(self.names), self.is_open
        argnums = tuple(n + size if n < 0 and not is_open else n for n in argnums)
        for name in argnames:
            if name not in self.names and not self.is_open and name not in _keywords(self.function):
                raise RequestError(
                    f"{what}_argnames: {name_of(self.function)} has no argument {name!r}; it has "
                    f"{', '.join(self.names) or 'none'}"
                )
        out: dict[int | str, None] = {}
        for n in argnums:
            if not is_open and not 0 <= n < size:
                raise RequestError(
                    f"{what}_argnums: {name_of(self.function)} has {size} positional arguments, "
                    f"got {n}"
                )
            out[n] = None
            if 0 <= n < size:
                out[self.names[n]] = None
        for name in argnames:
            out[name] = None
            if name in self.names:
                out[self.names.index(name)] = None
        return tuple(out)


def bind(function: Callable[..., Any], args: Sequence[Any], **options: Any) -> Bound:
    """A call as a pure function; options as for `Calls`. A `PureStep` stays as it is."""
    return Calls(function, **options).bind(args)


def name_of(function: Any) -> str:
    """A function's name; for a ``functools.partial``, the name of the function that it wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if name == "__call__" and is_method(function):
        return type(function.__self__).__name__
    return name if isinstance(name, str) else type(function).__name__


def _as_method(function: Any) -> Any:
    """A callable object's bound ``__call__``, which makes the object an argument."""
    kind = type(function)
    is_object = isinstance(getattr(kind, "__call__", None), types.FunctionType)  # noqa: B004
    is_wrapper = hasattr(function, "__wrapped__") or hasattr(function, "is_pure_step")
    return (
        function.__call__ if is_object and not is_wrapper and not is_method(function) else function
    )


def _check_partial(function: Any) -> None:
    """Refuse a partial that holds NNX objects: its arguments would be constants."""
    while isinstance(function, functools.partial):
        for x in nnx_graph.objects_in((function.args, function.keywords)):
            raise RequestError(
                f"{name_of(function)}: the functools.partial holds the NNX object "
                f"{type(x).__name__}, whose arrays would be constants; pass it as an argument"
            )
        function = function.func


def captured_objects(function: Any) -> tuple[str, ...]:
    """Names of NNX objects that a function captures; their arrays are constants."""
    inner = function.function if isinstance(function, PureStep) else function
    inner = inspect.unwrap(getattr(inner, "__func__", inner))
    if not inspect.isfunction(inner):
        return ()
    around = inspect.getclosurevars(inner)
    values = {**around.globals, **around.nonlocals}
    return tuple(sorted(name for name, x in values.items() if nnx_graph.is_object(x)))


def is_method(function: Any) -> bool:
    """Whether ``function`` is a bound method, whose object is an argument, too."""
    return hasattr(function, "__func__") and hasattr(function, "__self__")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # such as a built-in function
        return None


def _positions(function: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """Names of positional arguments, and whether there may be others."""
    parameters = _parameters(function)
    if parameters is None:
        return (), True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in parameters if p.kind in kinds)
    wild = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return names, any(p.kind in wild for p in parameters)


def _keywords(function: Callable[..., Any]) -> set[str]:
    parameters = _parameters(function) or []
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _is_filtered(function: Any) -> bool:
    """Whether ``equinox.filter_jit``, which treats Python numbers as static, wraps ``function``."""
    kind = type(function)
    return kind.__module__.startswith("equinox.") and kind.__name__ == "_JitWrapper"
