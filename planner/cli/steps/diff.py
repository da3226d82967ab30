"""``planner diff old.json new.json`` and ``planner check plan.json model.py``: plans in review."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import shtab

from planner.announce import announced
from planner.cli.commands import (
    Command,
    add_model_options,
    print_parts,
    requested_call,
    stay_on_cpu,
)
from planner.compare.difference import Difference, difference
from planner.compare.markdown import difference_markdown
from planner.compare.text import difference_json, difference_parts
from planner.frontend.loading import Target, parse_target, user_environment
from planner.plan.plan import Plan, load_plan
from planner.planning import make_plan

SAME, DIFFERENT = 0, 1

_DIFF = """\
Files, line numbers and details of the search (the meshes tried, notes) make no
difference: a comment added to the model leaves its plan the same.

examples:
  planner diff plan.json new.json
  planner diff plan.json new.json --exit-code --markdown > comment.md

exit codes: 0 printed (with --exit-code: the same), 1 different, with --exit-code, 2 a plan can't
be read
"""

_CHECK = """\
The step is planned for the cluster of the plan, or --cluster, with the options given, and compared
as by planner diff. Give the options that the plan was made with.

examples:
  planner check plan.json model.py
  planner check plan.json train.py --mesh data=4,model=2 --markdown

exit codes: 0 the same plan, 1 another one, 2 the request can't be met, 3 the model itself failed
"""


def add_diff(commands: Any, text: str) -> None:
    """Add ``diff`` to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "diff",
        help=text,
        description="Say in words what differs between two saved plans.",
        epilog=_DIFF,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("old", "new"):
        plan: Any = parser.add_argument(name, metavar=name.upper(), type=Path, help="a saved plan")
        plan.complete = shtab.FILE
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 where they differ")
    _add_forms(parser)


def add_check(commands: Any, text: str) -> None:
    """Add ``check`` to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "check",
        help=text,
        description="Plan a step again, and compare the plan with a saved one.",
        epilog=_CHECK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan: Any = parser.add_argument("plan", metavar="PLAN", type=Path, help="the saved plan")
    plan.complete = shtab.FILE
    add_model_options(parser)
    _add_forms(parser)


def _add_forms(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown, for a comment")
    form.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--no-color", action="store_true", help="plain text")


def run_diff(options: argparse.Namespace) -> int:
    """Compare two files and print; raises RequestError."""
    diff = difference(load_plan(options.old), load_plan(options.new))
    _print(diff, options, options.old.name, options.new.name)
    return SAME if diff.same or not options.exit_code else DIFFERENT


def run_check(options: argparse.Namespace) -> int:
    """Plan, compare and print; raises RequestError and ModelError."""
    old = load_plan(options.plan)
    if options.cluster is None and options.profile is None:
        options.cluster = old.cluster
    stay_on_cpu(options.cluster)
    new = _planned(parse_target(options.model, options.arguments), options)
    diff = difference(old, new)
    _print(diff, options, options.plan.name, "the step as it is now")
    return SAME if diff.same else DIFFERENT


def _planned(target: Target, options: argparse.Namespace) -> Plan:
    with user_environment(target):
        call, merged = requested_call(target, options)
        with announced(f"planning {target} for {merged['cluster']} ..."):
            return make_plan(call.function, *call.args, **merged)


def _print(diff: Difference, options: argparse.Namespace, before: str, after: str) -> None:
    if options.json:
        print(json.dumps(difference_json(diff)))
    elif options.markdown:
        print(difference_markdown(diff, before, after), end="")
    else:
        print_parts(difference_parts(diff, before, after), options.no_color)
    sys.stdout.flush()


DIFF = Command("diff", add_diff, run_diff)
CHECK = Command("check", add_check, run_check, takes_arguments=True)
