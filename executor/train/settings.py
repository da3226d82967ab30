"""Options of ``train`` from a file and from the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.cli.config import PREFIX, check_table, find_config
from planner.cli.table import EXECUTOR, PLANNER
from planner.errors import RequestError

KINDS: Mapping[str, type] = {
    "steps": int,
    "directory": str,
    "save_every": int,
    "keep": int,
    "log_every": int,
    "evaluate_every": int,
    "progress": bool,
}
"""Options that a file may set, and their types; ``profile`` is a list of two numbers."""


def train_options(folder: str | Path = ".") -> dict[str, Any]:
    """Keywords for ``train``, as in ``train(step, state, batches, **train_options())``.

    They come from the table ``[train]`` of the nearest ``meshwright.toml``, or
    ``[tool.meshwright.train]`` of ``pyproject.toml``, in a folder or above it, and from the
    environment (``MESHWRIGHT_TRAIN_STEPS``), which wins.

    Args:
        folder: where to look for the file first.

    Raises:
        RequestError: the file can't be read, an option is unknown, or a value has the wrong type.
    """
    options: dict[str, Any] = {}
    config = find_config(Path(folder).absolute())
    if config is not None:
        path, table = config
        for key in (key for key, value in table.items() if isinstance(value, dict)):
            check_table(key, path, [entry.name for entry in (*PLANNER, *EXECUTOR)])
        section = table.get("train", {})
        if not isinstance(section, dict):
            raise RequestError(f"{path}: train: expected a table of options, got {section!r}")
        for key, value in section.items():
            name = key.replace("-", "_")
            options[name] = _checked(name, value, f"{path}: [train]")
    for name in (*KINDS, "profile"):
        text = os.environ.get(f"{PREFIX}TRAIN_{name.upper()}")
        if text is not None:
            source = f"{PREFIX}TRAIN_{name.upper()}"
            options[name] = _checked(name, _read(name, text), source)
    return options


def config_lines(folder: str | Path = ".") -> str:
    """Every option of ``train`` with its value from the file or environment, one per line."""
    options = train_options(folder)
    rows = [(name.replace("_", "-"), str(options.get(name, "-"))) for name in (*KINDS, "profile")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _read(name: str, text: str) -> Any:
    """A value from the environment; one that is neither a number nor a Boolean stays text."""
    if name == "profile":
        return [int(x) if x.strip().isdecimal() else x for x in text.split(",")]
    kind = KINDS[name]
    if kind is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
    return int(text) if kind is int and text.strip().lstrip("-").isdecimal() else text


def _checked(name: str, value: Any, source: str) -> Any:
    if name == "profile":
        if not (isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)):
            raise RequestError(f"{source}: profile: expected two numbers of steps, got {value!r}")
        return tuple(value)
    if name not in KINDS:
        near = difflib.get_close_matches(name, [*KINDS, "profile"], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"{source} has no option {name!r}{hint}")
    if type(value) is not KINDS[name]:
        words = {int: "a whole number", str: "a text", bool: "true or false"}[KINDS[name]]
        raise RequestError(f"{source}: {name}: expected {words}, got {value!r}")
    return value
