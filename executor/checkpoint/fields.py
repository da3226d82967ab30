"""Checks of fields in files that other programs may have written, before they are used.

A file names leaves and the step that it belongs to. It never determines where anything is written:
no path is made from its text.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from pathlib import Path as File
from typing import Any

from executor.checkpoint.common import CheckpointError, Path, brief
from planner.plan.plan import Plan, plan_from_json

MAX_STEP = 2**53 - 1
"""The largest step: JSON has no exact integers above it."""

MAX_KEYS = 256
"""Maximum number of keys in the path of a leaf; JAX traverses trees recursively."""

_NOT_NAMES = frozenset("/\\\0")


def parsed(text: str | bytes, where: object) -> Any:
    """Parse JSON text.

    Raises:
        CheckpointError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{where} is damaged: JSON nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: {brief(error)}") from error


def object_of(value: Any, where: object) -> dict[str, Any]:
    """A JSON object; CheckpointError for anything else."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: got {_short(value)}, expected a JSON object")
    return value


def step_of(value: Any, where: object) -> int:
    """The number of a step; CheckpointError unless it is an integer from 0 to `MAX_STEP`."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise CheckpointError(
            f"{where}: got step {_short(value)}, expected an integer from 0 to {MAX_STEP}"
        )
    return number


def step_name(name: str) -> int | None:
    """The step number in a folder's name; None if the name is not one."""
    plain = name.isascii() and name.isdecimal() and len(name) <= len(str(MAX_STEP))
    return int(name) if plain and str(int(name)) == name and int(name) <= MAX_STEP else None


def keys_of(value: Any, where: object) -> Path:
    """A path of keys; CheckpointError unless it is a list of at most `MAX_KEYS` texts."""
    keys = isinstance(value, list | tuple) and all(isinstance(key, str) for key in value)
    if not keys:
        raise CheckpointError(f"{where}: got {_short(value)}, expected a list of keys")
    if len(value) > MAX_KEYS:
        raise CheckpointError(f"{where}: a path of {len(value)} keys, expected at most {MAX_KEYS}")
    return tuple(value)


def paths_of(value: Any, where: object) -> tuple[Path, ...]:
    """A list of paths of keys."""
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: got {_short(value)}, expected a list of paths")
    return tuple(keys_of(path, where) for path in value)


def separator_of(value: Any, where: object) -> str:
    """The separator of keys in names; CheckpointError unless names can be split at it again."""
    if not isinstance(value, str) or not value or set(value) & set("~01"):
        raise CheckpointError(
            f"{where}: got separator {_short(value)}, expected text without '~', '0' and '1'"
        )
    return value


def file_name(value: Any, where: object) -> str:
    """The name of a file beside another; CheckpointError if it leads to another folder."""
    plain = isinstance(value, str) and value not in ("", ".", "..") and not set(value) & _NOT_NAMES
    if not plain or len(value.encode("utf-8", "surrogatepass")) > 255:
        raise CheckpointError(
            f"{where}: got {_short(value)}, expected the name of a file beside it"
        )
    return str(value)


def plan_of(value: Any, where: object) -> Plan | None:
    """The plan in JSON text; None for None.

    Raises:
        CheckpointError: the value is not text, or is nested too deeply.
        PlanFormatError: the text is not a plan.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"plan of {where}: got {_short(value)}, expected text")
    try:
        return plan_from_json(value, f"plan of {where}")
    except RecursionError as error:
        raise CheckpointError(f"plan of {where} is damaged: JSON nested too deeply") from error


def read_json(folder: File) -> dict[str, Any] | None:
    """An item that Orbax wrote as JSON; None if it is missing. Waits for no other process."""
    file = folder / "metadata"
    if not file.exists():
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {brief(error)}") from error
    return object_of(parsed(text, file), file)


def plan_in(folder: File) -> Plan | None:
    """The plan that Orbax wrote as JSON into a folder, None if there is none."""
    raw: Mapping[str, Any] | None = read_json(folder)
    return None if raw is None else plan_of(raw.get("plan", ""), folder)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
