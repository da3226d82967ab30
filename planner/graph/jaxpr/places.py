"""The origin of an equation: lines of the user's code, and names from the top of the program."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback as tracebacks
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from planner import compat
from planner.graph.jaxpr.walk import V, Walk

_HERE = Path(__file__).absolute().parents[3]
_OURS = tuple(f"{_HERE / room}{os.sep}" for room in ("meshwright", "planner", "executor"))


FRAMEWORKS = frozenset(
    "jax jaxlib flax optax orbax haiku equinox chex numpy scipy einops jaxtyping beartype qwix aqt "
    "drjax distrax haliax eformer pytest _pytest pluggy xdist hypothesis IPython ipykernel absl "
    "fire".split()
)
"""Installed packages whose lines are no part of a model. All others may contain a model."""


@functools.cache
def _installed() -> tuple[str, ...]:
    """The directories of installed packages."""
    paths = sysconfig.get_paths()  # a tenth of a second the first time
    places = {paths["purelib"], paths["platlib"]}
    places.add(os.path.dirname(os.path.dirname(jax.__file__)))  # elsewhere in some environments
    return tuple(os.path.realpath(place) + os.sep for place in sorted(places))


@functools.cache
def _standard() -> str:
    """The directory of Python's standard library."""
    return os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep


def _is_library(file: str) -> bool:
    """Whether a file is Python's or a framework's, and not a model's."""
    for place in _installed():
        if file.startswith(place):
            package = file[len(place) :].split(os.sep, 1)[0]
            return package.removesuffix(".py") in FRAMEWORKS
    return file.startswith(_standard())


_user_code: dict[Any, bool] = {}


def user_line(eqn: Any) -> str:
    """``file.py:line`` of the innermost frame of the user's own code or an installed model's, or
    ``""``."""
    traceback = getattr(eqn.source_info, "traceback", None)
    return "" if traceback is None else _innermost(traceback)


def user_lines(eqn: Any) -> list[str]:
    """``file.py:line`` of all frames of the user's own code, outermost first."""
    traceback = getattr(eqn.source_info, "traceback", None)
    return [] if traceback is None else list(_user_frames(traceback))[::-1]


def raised(error: BaseException) -> str:
    """The message of an exception, after the ``file.py:line`` of the innermost frame of the user's
    own code that it passed."""
    location = ""
    for frame, line in tracebacks.walk_tb(error.__traceback__):
        if _is_users(frame.f_code):
            location = f"{os.path.basename(frame.f_code.co_filename)}:{line}: "
    return f"{location}{error}"


@functools.lru_cache(maxsize=1 << 16)
def _innermost(traceback: Any) -> str:
    return next(_user_frames(traceback), "")


def _user_frames(traceback: Any) -> Iterator[str]:
    """Frames of the user's own code and of installed models, innermost first."""
    codes, offsets = traceback.raw_frames()
    for code, offset in zip(codes, offsets, strict=True):
        if _is_users(code):
            line = type(traceback).code_addr2line(code, offset)
            yield f"{os.path.basename(code.co_filename)}:{line}"


def _is_users(code: Any) -> bool:
    """Whether code is the user's own or an installed model's."""
    known = _user_code.get(code)
    if known is None:
        name = code.co_filename
        real = os.path.realpath(name)
        library = _is_library(real) or name.startswith("<")
        known = _user_code[code] = not library and not real.startswith(_OURS)
    return known


def origin_of(eqn: Any, around: Sequence[Any]) -> compat.Origin:
    """The origin of an equation; ``around``: the equations that enclose it, outermost first."""
    line = next((e for e in (eqn, *reversed(around)) if user_line(e)), eqn)
    return compat.Origin(line, (*around, eqn))


class Place:
    """The place of an equation: the equation, and the place of the one whose body contains it.

    Without arguments, it is the top, outside of all equations.
    """

    __slots__ = ("_line", "_names", "_texts", "eqn", "outer")

    def __init__(self, eqn: Any = None, outer: Place | None = None) -> None:
        self.eqn, self.outer = eqn, outer
        self._texts: dict[int, tuple[Any, str]] = {} if outer is None else outer._texts
        self._line = self._names = "" if outer is None else None

    @property
    def line(self) -> str:
        """``user_line``, or the line of the equations around it if there is none."""
        if self._line is None and self.outer is not None:
            self._line = user_line(self.eqn) or self.outer.line
        return self._line or ""

    @property
    def origin(self) -> compat.Origin:
        """The origin that rewritten operations carry."""
        chain, place = [], self
        while place.outer is not None:
            chain.append(place.eqn)
            place = place.outer
        return origin_of(chain[0], chain[:0:-1])

    @property
    def names(self) -> str:
        """The name stack from the top of the program, such as ``transpose(jvp(block))/norm``.

        JAX stores it relative to the enclosing equation; here, all parts are joined by ``/``.
        """
        if self._names is None and self.outer is not None:
            stack, above = self.eqn.source_info.name_stack, self.outer.names
            known = self._texts.get(id(stack))
            if known is None:
                known = self._texts[id(stack)] = (stack, str(stack))
            self._names = "/".join(filter(None, (above, known[1])))
        return self._names or ""

    @property
    def backward(self) -> bool:
        """Whether it belongs to a backward pass, which JAX makes by transposition."""
        return "transpose(" in self.names


@dataclass(eq=False)
class PlacedWalk(Walk[V]):
    """A walk with a ``place``, which is that of the current equation."""

    place: Place = field(default_factory=Place)

    def equation(self, eqn: Any, ins: list[V]) -> Sequence[V]:
        """The results of any equation."""
        outer = self.place
        self.place = Place(eqn, outer)
        outs = super().equation(eqn, ins)
        self.place = outer
        return outs
