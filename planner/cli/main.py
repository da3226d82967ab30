"""The ``planner`` command: subcommands that need no devices, and others that are added to it.

Each subcommand is a `planner.cli.commands.Command`, imported only when needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import shtab

from planner.cli.config import (
    config_text,
    dests,
    environment,
    find_config,
    given,
    overlaid,
    settings,
    unknown_variables,
)
from planner.cli.parser import Parser
from planner.cli.table import EXAMPLES, PLANNER, Entry
from planner.errors import ModelError, RequestError

if TYPE_CHECKING:
    from planner.cli.commands import Command

SHOW = "--show-config"
DONE, REFUSED, MODEL_FAILED, INTERRUPTED = 0, 2, 3, 130


def main(argv: Sequence[str] | None = None, extra: Sequence[Entry] = ()) -> int:
    """Run the command.

    Args:
        argv: the arguments after the program's name; None takes ``sys.argv``.
        extra: further subcommands.

    Returns:
        0 done, 2 the request can't be met, 3 the user's model failed, 130 interrupted; others as
        the subcommand says.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    shown = words[:1] == [SHOW]
    words = words[1:] if shown else words
    entries = (*PLANNER, *extra)
    every = any(word.startswith("--print-completion") for word in words[:1])
    commands = {e.name: e.load() for e in entries if every or words[:1] == [e.name]}
    parser = _parser(entries, commands)
    arguments: list[str] = []
    if "--" in words and words[0] in commands and commands[words[0]].takes_arguments:
        at = words.index("--")
        words, arguments = words[:at], words[at + 1 :]
    try:
        options = parser.parse_args(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else DONE
    options.arguments = getattr(options, "arguments", arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return REFUSED
    try:
        subparser = _subparsers(parser)[options.command]
        named = list(given(words[1:], subparser))
        config = find_config(Path.cwd())
        presets = settings(
            subparser, options.command, lambda: _options_of(entries), config, environment()
        )
        options = overlaid(options, presets, named)
        for line in unknown_variables(environment(), lambda: _options_of(entries)):
            print(f"planner: {line}", file=sys.stderr)
        if shown:
            print(config_text(options, subparser, presets, named))
            return DONE
        last = {s.dest: s for s in presets if s.dest not in named}
        for source in dict.fromkeys(s.source for s in last.values()):
            set_there = [
                s.dest.removesuffix("_s").replace("_", "-")
                for s in last.values()
                if s.source == source
            ]
            print(f"planner: from {source}: {', '.join(set_there)}", file=sys.stderr)
        return commands[options.command].run(options)
    except RequestError as error:
        return _refuse(error)
    except ModelError as error:
        if isinstance(error.__cause__, RequestError):  # ours, raised inside the model
            return _refuse(error.__cause__)
        _report_failure(error, options.model)
        return MODEL_FAILED
    except BrokenPipeError:  # the reader of our output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return INTERRUPTED


def _options_of(entries: Sequence[Entry]) -> Mapping[str, Sequence[str]]:
    """The options of all subcommands."""
    whole = _parser(entries, {entry.name: entry.load() for entry in entries})
    return {name: dests(parser) for name, parser in _subparsers(whole).items()}


def _subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parsers: Mapping[str, argparse.ArgumentParser] = action.choices
    return parsers


def version() -> str:
    """The installed version, or ``0+unknown`` when running from a checkout."""
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _parser(entries: Sequence[Entry], loaded: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser. Commands that are not loaded have only their name and a line of help."""
    parser = Parser(
        prog="planner",
        description="Plan how a JAX train step runs on a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"planner {version()}")
    parser.add_argument(
        SHOW,
        action="store_true",
        help="first of all: print the options of the subcommand that follows, with what "
        "meshwright.toml and the environment set, and do nothing",
    )
    shtab.add_argument_to(
        parser,
        "--print-completion",
        help="print the completion script of a shell; in bash: "
        'eval "$(planner --print-completion bash)"',
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for entry in entries:
        if entry.name in loaded:
            loaded[entry.name].add(subparsers, entry.help)
        else:
            subparsers.add_parser(entry.name, help=entry.help)
    return parser


def _refuse(error: RequestError) -> int:
    print(f"planner: error: {error}", file=sys.stderr)
    return REFUSED


def _report_failure(error: ModelError, model: str) -> None:
    from planner.frontend.failure import failure_text
    from planner.frontend.loading import parse_target

    cause = error.__cause__
    print(f"planner: {error}", file=sys.stderr)
    if cause is not None:
        print(failure_text(cause, str(parse_target(model).path)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
