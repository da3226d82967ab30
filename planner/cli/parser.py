"""The parser of the command: its errors take one line and suggest the nearest name."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from planner.cli.config import nearest

REFUSED = 2

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")
_UNKNOWN = re.compile(r"unrecognized arguments: .*?(--[\w-]+)")


class Parser(argparse.ArgumentParser):
    """``argparse``'s parser, without the usage text before an error."""

    def error(self, message: str) -> NoReturn:
        """Print the error, the nearest name and how to get help, and exit with 2."""
        choice, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
        hint = ""
        if choice is not None:
            hint = nearest(choice[1], choice[2].replace("'", "").split(", "))
        elif unknown is not None:
            near = difflib.get_close_matches(unknown[1], sorted(_flags(self)), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"planner: error: {message}{hint}\nsee {self.prog} --help\n")
        sys.exit(REFUSED)


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of its subcommands."""
    out = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices: dict[str, Any] = action.choices
            for inner in choices.values():
                out |= _flags(inner)
    return out
