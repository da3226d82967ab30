"""``planner debug model.py --stage NAME``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from planner.announce import announced
from planner.cli.commands import (
    Command,
    add_model_options,
    requested_call,
    stay_on_cpu,
)
from planner.debug.stage import Stage
from planner.debug.stages import reached
from planner.debug.text import stage_text
from planner.frontend.loading import Target, parse_target, user_environment
from planner.planning import plan_step
from planner.report.table import render_plan

PRINTED = 0

_MORE = """\
NAME is the last stage that runs
  graph      operations and values of the traced step, with phases, roles and repeated blocks
  groups     values that share a sharding, and links where a value may change it
  analysis   work, reductions and buffers of every group
  classes    equal groups as one, and the moments that can be the memory peak
  problem    nodes, edges and memory usages on the chosen mesh
  solution   the strategy and the seconds of every node
  plan       the plan, as planner inspect prints it

Repeated blocks are printed once, and the problem is that of the classes; --whole prints all.
Every value is checked too if the environment has MESHWRIGHT_VERIFY=1.

examples:
  planner debug train.py --stage graph
  planner debug model.py:train_step --stage solution --mesh data=4,model=2
  planner debug model.py --cluster h100:8x4 --stage problem --whole

exit codes: 0 printed, 2 the request can't be met, 3 the model itself failed
"""


def add_debug(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "debug",
        help=text,
        description="Plan a step up to a stage, and print the value that this stage makes.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add = parser.add_argument
    add(
        "--stage",
        metavar="NAME",
        required=True,
        choices=[str(stage) for stage in Stage],
        help=f"one of {', '.join(Stage)}",
    )
    add("--whole", action="store_true", help="print every copy of repeated blocks")
    add("--no-color", action="store_true", help="plain text")


def run_debug(options: argparse.Namespace) -> int:
    """Plan up to the stage and print; raises RequestError and ModelError."""
    stay_on_cpu(options.cluster)
    stage = Stage(options.stage)
    values = _values(parse_target(options.model, options.arguments), stage, options)
    if stage is Stage.PLAN and sys.stdout.isatty():
        render_plan(values[0], Console(no_color=options.no_color or None))
    else:
        print(stage_text(stage, values, whole=options.whole))
    sys.stdout.flush()
    return PRINTED


def _values(target: Target, stage: Stage, options: argparse.Namespace) -> tuple[Any, ...]:
    with user_environment(target):
        call, merged = requested_call(target, options)
        with announced(f"planning {target} for {merged['cluster']} ..."):
            return reached(stage, lambda: plan_step(call.function, *call.args, **merged))


DEBUG = Command("debug", add_debug, run_debug, takes_arguments=True)
