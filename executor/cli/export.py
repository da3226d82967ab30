"""``planner export plan.json --as python``: a plan as code for projects without meshwright."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import shtab

from executor.run.export import python_text
from planner.cli.commands import Command
from planner.errors import RequestError
from planner.export.text import logical_rules_text, partition_specs_text
from planner.plan.plan import Plan, load_plan

EXPORTED = 0

FORMS: Mapping[str, Callable[[Plan, str], str]] = {
    "partition-specs": lambda plan, _: partition_specs_text(plan),
    "logical-rules": lambda plan, _: logical_rules_text(plan),
    "python": python_text,
}
"""For each form, a function (plan, name of the module) -> text."""

_MORE = """\
forms, each a Python module that imports jax at most:
  partition-specs  a PartitionSpec for every argument and result, by path
  logical-rules    logical axis names of every argument and the rules for them, as Flax and MaxText
                   have them
  python           shard_step(function, *args): the step as a jax.jit function with the plan's mesh,
                   shardings and everything that it says inside the step; it compiles to the same
                   collectives as the plan

examples:
  planner inspect train.py --cluster h100:8 --save plan.json
  planner export plan.json --as python --out sharded.py
  planner export plan.json --as logical-rules

exit codes: 0 written, 2 the plan can't be read or the file can't be written
"""


def add_export(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "export",
        help=text,
        description="Write a plan as code for projects that do not use meshwright.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    plan: Any = add("plan", metavar="PLAN", type=Path, help="written by planner inspect --save")
    plan.complete = shtab.FILE
    add("--as", dest="form", choices=tuple(FORMS), required=True, help="the form, see below")
    add("--out", metavar="FILE", type=Path, help="write to FILE instead of printing")


def run_export(options: argparse.Namespace) -> int:
    """Read the plan and write it in the chosen form; raises RequestError."""
    plan = load_plan(options.plan)
    text = FORMS[options.form](plan, "sharded" if options.out is None else options.out.stem)
    if options.out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return EXPORTED
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {options.out}: {error.strerror}") from error
    return EXPORTED


EXPORT = Command("export", add_export, run_export)
