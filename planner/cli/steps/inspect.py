"""``planner inspect model.py --cluster h100:8x4``."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from costmodels import ClusterError, parse_cluster
from planner.announce import announced
from planner.cli.commands import (
    Command,
    add_model_options,
    plain_width,
    requested_call,
    stay_on_cpu,
)
from planner.cli.steps.placement import PlacedTarget, place_target
from planner.cli.table import EXAMPLES
from planner.compare.manual_plans import Comparison, compare
from planner.errors import RequestError
from planner.frontend.loading import Target, parse_target, user_environment
from planner.placement.text import placement_json, placement_parts, without_placement
from planner.plan.plan import Plan
from planner.planning import Planned, plan_step, write_problem
from planner.report.layout import pairs, plain_text, section, show
from planner.report.table import plan_text, render_plan

PLANNED = 0
WIDTH = 100
"""Columns of plain text."""


def add_inspect(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "inspect",
        help=text,
        description="Plan a step and print the plan.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    add = parser.add_argument
    add(
        "--placement",
        metavar="RULES",
        help="say which parameters lie on parameter servers, and plan the rest: auto (tables by "
        "price), or REGEX=PLACE,... over parameter paths, the first that matches; PLACE is ps (by "
        "rows), ps_whole, spmd or auto",
    )
    add("--json", action="store_true", help="print the plan as JSON, nothing else")
    add("--save", metavar="FILE", type=Path, help="write the plan as JSON to FILE as well")
    add(
        "--dump-problem",
        metavar="FILE",
        type=Path,
        help="write the chosen mesh's problem to FILE (.json or .json.gz), for planner search",
    )
    add("--html", metavar="FILE", type=Path, help="write a report with pictures to FILE as well")
    add(
        "--compare",
        action="store_true",
        help="add manual plans to that report; plans about twelve times",
    )
    add("--no-color", action="store_true", help="plain text")


def run_inspect(options: argparse.Namespace) -> int:
    """Plan and print; raises RequestError and ModelError."""
    stay_on_cpu(options.cluster)
    target = parse_target(options.model, options.arguments)
    for path in (options.save, options.dump_problem, options.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"cannot write {path}: its directory does not exist")
    if options.compare and options.html is None:
        raise RequestError("--compare adds to a report: give --html FILE, or run planner compare")
    placed, planned, comparison = _planned(target, options)
    if options.html is not None:
        from planner.html.page import write_report

        write_report(planned, options.html, _title(target), comparison)
    if options.save is not None:
        try:
            planned.plan.save(options.save)
        except OSError as error:
            raise RequestError(f"cannot write {options.save}: {error.strerror}") from error
    _print(placed, planned.plan, options)
    sys.stdout.flush()
    return PLANNED


def _print(placed: PlacedTarget | None, plan: Plan, options: argparse.Namespace) -> None:
    """The plan, after the placement if there is one."""
    if options.json:
        text = plan.to_json() if placed is None else placement_json(placed.placement, plan)
        sys.stdout.write(text)
        return
    parts: list[RenderableType] = []
    if placed is not None:
        parts = [*placement_parts(placed.placement, placed.others), ""]
        plan = without_placement(plan, placed.placement)
    if sys.stdout.isatty():
        console = Console(no_color=options.no_color or None)
        show(parts, console)
        render_plan(plan, console)
        show(_next(plan, options), console)
    else:
        if parts:
            print(plain_text(parts, plain_width(WIDTH)))
        print(plan_text(plan, plain_width(WIDTH)))
        print(plain_text(_next(plan, options), plain_width(WIDTH)))


def _next(plan: Plan, options: argparse.Namespace) -> Iterable[RenderableType]:
    """Next steps for a plan: options, calls and commands."""
    rows = []
    if options.save is None:
        rows.append(("keep it", "--save plan.json"))
    file = "plan.json" if options.save is None else str(options.save)
    rows.append(("run it", f'mw.compile_plan(step, mw.load_plan("{file}"))'))
    if plan.confirmed is None and plan.device != "cpu" and not plan.schedule:
        how = f"--confirm {_compiler(plan)}: compiles the best plans, needs no devices"
        rows.append(("check it", how))
    given = shlex.join(["--", *options.arguments]) if options.arguments else ""
    text = f"planner compare {options.model} --cluster {plan.cluster} {given}"
    rows.append(("compare it", text.rstrip()))
    return section("next", pairs(rows))


def _compiler(plan: Plan) -> str:
    """The argument of ``--confirm`` for a plan's cluster."""
    with contextlib.suppress(ClusterError):
        return "tpu" if parse_cluster(plan.cluster).kind == "torus" else "gpu"
    return "tpu or gpu"


def _planned(
    target: Target, options: argparse.Namespace
) -> tuple[PlacedTarget | None, Planned, Comparison | None]:
    """Find the step, place its parameters if requested, plan it, and compare it if requested."""
    with user_environment(target):
        if options.placement is not None:
            placed = place_target(target, options)
            call, merged, planned = placed.call, placed.options, placed.planned
            if options.dump_problem is not None:
                write_problem(planned.extraction.priced, options.dump_problem)
        else:
            placed = None
            call, merged = requested_call(target, options)
            with announced(f"planning {target} for {merged['cluster']} ..."):
                planned = plan_step(
                    call.function, *call.args, **merged, dump_problem=options.dump_problem
                )
        if not options.compare:
            return placed, planned, None
        with announced(f"comparing {target} on {merged['cluster']} ..."):
            return placed, planned, compare(call.function, *call.args, **merged)


def _title(target: Target) -> str:
    """A report's title: the file and the function, without the directories."""
    return target.path.name + (f":{target.function}" if target.function else "")


INSPECT = Command("inspect", add_inspect, run_inspect, takes_arguments=True)
