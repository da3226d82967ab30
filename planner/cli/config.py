"""Options of the ``planner`` command from a file and from the environment.

The file is the nearest ``meshwright.toml``, or ``pyproject.toml`` with a table
``[tool.meshwright]``, in the current directory or above it. Options at the top are for every
subcommand that has them, those in a table such as ``[inspect]`` for that subcommand. Environment
variables such as ``MESHWRIGHT_CLUSTER`` override the file, and the command line overrides both. An
empty variable sets nothing.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import RequestError
from planner.modes import MODES, nearest_mode

FILE, PROJECT, TABLE = "meshwright.toml", "pyproject.toml", "meshwright"
PREFIX = "MESHWRIGHT_"
MOST_BYTES = 1 << 20
TRAIN = "train"
"""A table that belongs to no subcommand: options of ``executor.train``."""
SKIPPED = frozenset({"help", "version"})
TAKEN = frozenset(
    "PROCESSES PROCESS COORDINATOR LOCAL RESTART RAY_JOB SECRET SECRET_FILE SECRET_ONCE CACHE "
    "VERIFY".split()
)
"""Variables with other meanings, without the prefix."""
TAKEN_BY = ("PS_", "TRAIN_")
"""Prefixes of such variables."""


@dataclass(frozen=True)
class Setting:
    """A value of an option (``dest`` in argparse), and where it was set."""

    dest: str
    value: Any
    source: str


def find_config(start: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The configuration file for a directory, and its settings; None if there is no file.

    Raises:
        RequestError: the file can't be read.
    """
    for folder in (start, *start.parents):
        file = folder / FILE
        if file.is_file():
            return file, _read(file)
        project = folder / PROJECT
        if project.is_file():
            table = _read(project).get("tool", {}).get(TABLE)
            if isinstance(table, dict):
                return project, table
    return None


def settings(
    parser: argparse.ArgumentParser,
    command: str,
    others: Callable[[], Mapping[str, Sequence[str]]],
    config: tuple[Path, Mapping[str, Any]] | None,
    environ: Mapping[str, str],
) -> list[Setting]:
    """Settings of a subcommand from a file and the environment, in order of rising precedence.

    Args:
        parser: of the subcommand.
        command: its name.
        others: returns the options of all subcommands, by subcommand.
        config: from ``find_config``.
        environ: of the process.

    Raises:
        RequestError: an option is unknown, or a value has the wrong type.
    """
    known = {a.dest: a for a in parser._actions if a.option_strings and a.dest not in SKIPPED}
    presets: list[Setting] = []
    if config is not None:
        path, table = config
        section = table.get(command, {})
        if not isinstance(section, dict):
            raise RequestError(f"{path}: {command}: expected a table of options, got {section!r}")
        for key, value in table.items():
            if not isinstance(value, dict) and _dest(key) in known:
                presets.append(_setting(known[_dest(key)], value, str(path)))
            elif key != command:
                _check_other(key, value, path, others())
        for key, value in section.items():
            if _dest(key) not in known:
                near = _near(_dest(key), list(known))
                raise RequestError(f"{path}: [{command}] has no option {key!r}{near}")
            presets.append(_setting(known[_dest(key)], value, str(path)))
    for dest, action in known.items():
        name = variable(dest)
        if environ.get(name) and name.removeprefix(PREFIX) not in TAKEN:
            presets.append(_setting(action, environ[name], name))
    return presets


def variable(dest: str) -> str:
    """The name of an option's environment variable."""
    return PREFIX + dest.removesuffix("_s").upper()


def unknown_variables(
    environ: Mapping[str, str], others: Callable[[], Mapping[str, Sequence[str]]]
) -> list[str]:
    """One line for each variable with our prefix that no option uses.

    Args:
        environ, others: as for ``settings``; ``others`` is called only if a name is in doubt.
    """
    names = [name.removeprefix(PREFIX) for name in environ]
    doubtful = [n for n in names if n not in TAKEN and not n.startswith(TAKEN_BY)]
    if not doubtful:
        return []
    known = {variable(d).removeprefix(PREFIX) for options in others().values() for d in options}
    out = []
    for name in sorted(set(doubtful) - known):
        near = difflib.get_close_matches(name, sorted(known | TAKEN), 1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        out.append(f"{PREFIX}{name} is set, and nothing reads it{hint}")
    return out


def _check_other(key: str, value: Any, path: Path, others: Mapping[str, Sequence[str]]) -> None:
    """Reject a key that is no option or table of any subcommand."""
    if isinstance(value, dict):
        check_table(key, path, list(others))
        return
    known = [dest for options in others.values() for dest in options]
    if _dest(key) not in known:
        raise RequestError(f"{path}: no subcommand has an option {key!r}{_near(_dest(key), known)}")


def check_table(key: str, path: Path, commands: Sequence[str]) -> None:
    """Reject a table that is neither ``train``'s nor a subcommand's; raises RequestError."""
    if key not in commands and key != TRAIN:
        raise RequestError(f"{path}: [{key}] is no subcommand{_near(key, [*commands, TRAIN])}")


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0].removesuffix('_s').replace('_', '-')}?" if near else ""


def nearest(word: str, choices: Sequence[str]) -> str:
    """A hint that names the choice closest to a wrong one; empty if none is close."""
    if MODES[0] in choices:
        near = nearest_mode(word)
    else:
        near = (difflib.get_close_matches(word, choices, 1) or [""])[0]
    return f"; did you mean {near}?" if near else ""


def dests(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a subcommand."""
    return [a.dest for a in parser._actions if a.option_strings and a.dest not in SKIPPED]


def _dest(key: str) -> str:
    return {"time_limit": "time_limit_s", "confirm_limit": "confirm_limit_s"}.get(
        plain := key.replace("-", "_"), plain
    )


def _setting(action: argparse.Action, value: Any, source: str) -> Setting:
    name = action.option_strings[-1]
    if action.nargs == 0:
        if isinstance(value, str) and value.lower() in ("0", "1", "true", "false"):
            value = value.lower() in ("1", "true")
        if not isinstance(value, bool):
            raise RequestError(f"{source}: {name}: expected true or false, got {value!r}")
        return Setting(action.dest, value, source)
    many = (
        isinstance(action, argparse._AppendAction)
        or action.nargs in ("*", "+")
        or (isinstance(action.nargs, int))
    )
    values = value if isinstance(value, list) else [value]
    if not many and len(values) != 1:
        raise RequestError(f"{source}: {name}: expected one value, got {value!r}")
    converted = [_converted(action, name, one, source) for one in values]
    return Setting(action.dest, converted if many else converted[0], source)


def _converted(action: argparse.Action, name: str, value: Any, source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RequestError(f"{source}: {name}: expected a text or a number, got {value!r}")
    convert: Any = action.type or str
    try:
        converted = convert(str(value))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise RequestError(f"{source}: {name}: {value!r}: {error}") from error
    if action.choices is not None and converted not in action.choices:
        listed = ", ".join(map(str, action.choices))
        near = nearest(str(converted), list(map(str, action.choices)))
        raise RequestError(f"{source}: {name}: got {value!r}, expected one of {listed}{near}")
    return converted


def given(words: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """The ``dest`` of every option that the command line names."""
    by_flag = {flag: a.dest for a in parser._actions for flag in a.option_strings}
    for word in words:
        flag = word.split("=", 1)[0]
        if flag in by_flag:
            yield by_flag[flag]
        elif flag.startswith("--"):
            longer = {dest for name, dest in by_flag.items() if name.startswith(flag)}
            yield from longer if len(longer) == 1 else ()


def config_text(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    presets: Sequence[Setting],
    named: Sequence[str],
) -> str:
    """Every option with its value and its source, one per line."""
    sources = {s.dest: s.source for s in presets}
    rows = []
    for action in parser._actions:
        if not action.option_strings or action.dest in SKIPPED:
            continue
        value = getattr(options, action.dest, None)
        source = "command line" if action.dest in named else sources.get(action.dest, "default")
        rows.append((action.option_strings[-1].removeprefix("--"), _shown(value), source))
    widths = [max(len(row[k]) for row in rows) for k in (0, 1)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RequestError(f"{path}: larger than {MOST_BYTES} bytes")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{path}: {error}") from error


def overlaid(
    options: argparse.Namespace, presets: Sequence[Setting], named: Sequence[str]
) -> argparse.Namespace:
    """Options of the command line, with settings for those that it does not name."""
    for setting in presets:
        if setting.dest not in named:
            setattr(options, setting.dest, setting.value)
    return options


def environment() -> Mapping[str, str]:
    """The variables with our prefix."""
    return {k: v for k, v in os.environ.items() if k.startswith(PREFIX)}
