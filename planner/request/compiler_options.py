"""Parses the XLA options of a plan: names and values as text, without access to files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.errors import RequestError

NAME = r"(?!\w*(?:file|dir|path|cache|dump|log))xla_[a-z0-9_]{1,100}"
"""Names of options that neither read nor write files: a plan may come from another machine."""
VALUE = r"[+-]?[0-9]+(?:\.[0-9]+)?|[A-Za-z][A-Za-z0-9_-]{0,60}"
"""Numbers and words."""


def parse_compiler_options(given: Mapping[str, Any] | Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Options as sorted pairs of text.

    Args:
        given: a mapping as for ``jax.jit``, or texts ``NAME=VALUE``.

    Raises:
        RequestError: malformed, given twice, or an option that a plan may not set.
    """
    if not isinstance(given, Mapping):
        if not isinstance(given, str | Sequence):
            raise RequestError(
                f"compiler_options: got {type(given).__name__}, expected a mapping or NAME=VALUE"
            )
        words = [given] if isinstance(given, str) else list(given)
        for word in words:
            if not isinstance(word, str) or not word.partition("=")[2]:
                raise RequestError(f"compiler_options: {word!r}: expected NAME=VALUE")
        pairs = [(name, value) for name, _, value in (word.partition("=") for word in words)]
        if len(dict(pairs)) < len(pairs):
            raise RequestError(f"compiler_options: an option occurs twice in {words}; remove one")
        given = dict(pairs)
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
            raise RequestError(
                f"compiler_options: {name!r}: {value!r}: expected a name and text, a number, True "
                "or False"
            )
        if not re.fullmatch(NAME, name) or not re.fullmatch(VALUE, str(value)):
            raise RequestError(
                f"compiler_options: {name}={value}: expected an option xla_... that names no file, "
                "and a number or a word; set others in XLA_FLAGS"
            )
    return tuple(sorted((name, str(value)) for name, value in given.items()))
