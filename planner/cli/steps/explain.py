"""``planner explain model.py PARAM|LINE|VALUE``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from planner.announce import announced
from planner.cli.commands import (
    Command,
    add_model_options,
    print_parts,
    requested_call,
    stay_on_cpu,
)
from planner.explain import Explanation, explain
from planner.explain.text import explanation_json, explanation_parts
from planner.frontend.loading import Target, parse_target, user_environment

EXPLAINED = 0

_MORE = """\
WHAT is
  an argument's path, the end of one, or a regular expression that is searched in the paths
  a line of the model, 49 or gpt.py:49: the results of its operations
  an operation's kind, such as dot_general: its results
  %12, value 12 of the step's graph

Every alternative has two prices, both differences to the plan: alone, with everything else as it
is, and with others, when the rest is planned again around it. What changes elsewhere is listed.

examples:
  planner explain train.py "['up']['kernel']"
  planner explain train.py gpt.py:49 --cluster h100:8x4
  planner explain train.py "mu.*kernel" --mesh data=4,model=2 --json

exit codes: 0 explained, 2 the request can't be met, 3 the model itself failed
"""


def add_explain(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "explain",
        help=text,
        description="Plan a step, and say why a value is sharded as it is.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add = parser.add_argument
    add("what", metavar="WHAT", help="a path, a line, an operation or a value, see below")
    add("--json", action="store_true", help="print one JSON object, nothing else")
    add("--no-color", action="store_true", help="plain text")


def run_explain(options: argparse.Namespace) -> int:
    """Plan, explain and print; raises RequestError and ModelError."""
    stay_on_cpu(options.cluster)
    explanation = _explained(parse_target(options.model, options.arguments), options)
    if options.json:
        print(json.dumps(explanation_json(explanation)))
    else:
        print_parts(explanation_parts(explanation), options.no_color)
    sys.stdout.flush()
    return EXPLAINED


def _explained(target: Target, options: argparse.Namespace) -> Explanation:
    with user_environment(target):
        call, merged = requested_call(target, options)
        with announced(f"planning {target} for {merged['cluster']} ..."):
            return explain(call.function, *call.args, target=options.what, **merged)


EXPLAIN = Command("explain", add_explain, run_explain, takes_arguments=True)
