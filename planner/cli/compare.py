"""``planner compare model.py``, and ``planner compare --plan a.json b.json``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import shtab

from planner.cli.commands import (
    Command,
    add_model_options,
    print_parts,
    requested_call,
    spinner,
    stay_on_cpu,
)
from planner.compare.difference import difference
from planner.compare.manual_plans import Comparison, compare
from planner.compare.text import (
    comparison_json,
    comparison_parts,
    difference_json,
    difference_parts,
)
from planner.errors import RequestError
from planner.frontend.loading import Target, parse_target, user_environment
from planner.plan.plan import load_plan

COMPARED = 0

_MORE = """\
With a model: the chosen plan beside data parallel, ZeRO-1, FSDP, tensor parallel over every degree
that divides the devices, FSDP with tensor parallel, and the batch's second dimension split. All
are planned and priced alike; the options of planning but --cluster, --profile, --memory and
--time-limit are for the chosen plan alone.

With --plan: what differs between two saved plans, in words.

examples:
  planner compare train.py --cluster h100:8x4
  planner compare model.py --cluster v5p:2x2x2 --memory 16GB --json
  planner compare --plan before.json after.json

exit codes: 0 compared, 2 the request can't be met, 3 the model itself failed
"""


def add_compare(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "compare",
        help=text,
        description="Compare ways to run a step, or two saved plans.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser, needed=False)
    add = parser.add_argument
    plans: Any = add(
        "--plan", nargs=2, metavar="FILE", type=Path, help="two saved plans, the older one first"
    )
    plans.complete = shtab.FILE
    add("--json", action="store_true", help="print one JSON object, nothing else")
    add("--no-color", action="store_true", help="plain text")


def run_compare(options: argparse.Namespace) -> int:
    """Compare and print; raises RequestError and ModelError."""
    if (options.model is None) == (options.plan is None):
        raise RequestError("compare wants a MODEL, or --plan with two files: one of them")
    if options.plan is not None:
        before, after = options.plan
        changed = difference(load_plan(before), load_plan(after))
        data = difference_json(changed) if options.json else {}
        parts = difference_parts(changed, before.name, after.name)
    else:
        stay_on_cpu()
        found = _compared(parse_target(options.model, options.arguments), options)
        data = comparison_json(found) if options.json else {}
        parts = comparison_parts(found)
    if options.json:
        print(json.dumps(data))
    else:
        print_parts(parts, options.no_color)
    sys.stdout.flush()
    return COMPARED


def _compared(target: Target, options: argparse.Namespace) -> Comparison:
    with user_environment(target):
        call, merged = requested_call(target, options)
        with spinner(f"planning {target} for {merged['cluster']} ...") as say:

            def progress(name: str) -> None:
                say(f"planning {target} for {merged['cluster']}: {name} ...")

            return compare(call.function, *call.args, progress=progress, **merged)


COMPARE = Command("compare", add_compare, run_compare, takes_arguments=True)
