"""``planner profile DIR``: compares a traced run with its plan."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import shtab
from rich.console import RenderableType

from executor.profile.beside import Beside, beside, check_belongs
from executor.profile.graphs import named
from executor.profile.program import read_program
from executor.profile.reading import read_events, timed, trace_file
from executor.profile.record import PLAN, PROGRAM
from planner.cli.commands import Command
from planner.errors import RequestError
from planner.files import read_text
from planner.plan.plan import load_plan
from planner.report.layout import add_row, new_table, pairs, plain_text, section
from planner.report.units import count_text, percent_text, time_text

SHOWN = 20
"""Maximum number of rows in a table."""
LARGEST = 1 << 30
_MORE = """\
DIR is the folder of train(..., directory=DIR, profile=(first, last)). It has the trace, the plan
and the compiled program. For a trace of another kind, give these as --plan and --program:
CompiledStep.text is the program.

Times are those of one device in one step: the mean over the traced steps and devices. Collectives
that run beside computing count in both. Compilers join collectives and replace one kind by another:
compare the sum of a line where its kinds differ.

examples:
  planner profile run
  planner profile run --json > profile.json

exit codes: 0 printed, 2 there is no trace, plan or program, or they do not belong together
"""


def add_profile(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "profile",
        help=text,
        description="Put the measured times of a traced run beside its plan.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    folder: Any = add("folder", metavar="DIR", type=Path, help="what the run wrote, see below")
    folder.complete = shtab.DIRECTORY
    add("--plan", metavar="FILE", type=Path, help="the plan (default: the one in DIR)")
    add("--program", metavar="FILE", type=Path, help="the compiled program as HLO text (likewise)")
    add("--json", action="store_true", help="print JSON")


def run_profile(options: argparse.Namespace) -> int:
    """Read, compare, print; raises RequestError."""
    folder: Path = options.folder
    trace = trace_file(folder)
    plan = load_plan(options.plan or _beside(folder, PLAN, "--plan"))
    path = options.program or _beside(folder, PROGRAM, "--program")
    try:
        program = read_program(read_text(path, LARGEST))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    events = named(read_events(trace), program)
    measured = timed(events, program.name, frozenset(program.parts))
    check_belongs(plan, program)
    report = beside(plan, program, measured)
    if options.json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        sys.stdout.write(profile_text(report) + "\n")
    return 0


def _beside(folder: Path, name: str, option: str) -> Path:
    matches = sorted(folder.rglob(name), key=lambda p: p.stat().st_mtime)
    if not matches:
        raise RequestError(f"{folder}: no {name}: give it by {option}")
    return matches[-1]


def profile_text(report: Beside, width: int = 100) -> str:
    """The comparison as plain text."""
    return plain_text(_parts(report), width)


def _parts(report: Beside) -> Iterable[RenderableType]:
    steps = f"{report.runs} step{'s' if report.runs > 1 else ''}"
    yield f"{report.program}: {steps} on {report.devices} device{'s' if report.devices > 1 else ''}"
    yield f"the plan: for {report.cluster}"
    yield ""
    yield pairs(
        (
            ("step", _both(report.planned_step_s, report.step_s)),
            ("compute", _both(report.planned_compute_s, report.compute_s)),
            ("collectives", _both(report.planned_collective_s, report.collective_s)),
        )
    )
    table = new_table("collective", "line", "planned", ">runs", ">measured", ">runs", "caused by")
    for row in report.collectives[:SHOWN]:
        add_row(
            table,
            row.kind,
            row.line,
            _time(row.planned_s),
            _count(row.planned_count),
            _time(row.measured_s),
            _count(row.measured_count),
            row.causes,
        )
    yield from section(_title("collectives", len(report.collectives)), table)
    table = new_table("line", ">planned", ">measured", ">share", ">runs")
    for row in report.lines[:SHOWN]:
        share = percent_text(row.measured_s / report.compute_s) if report.compute_s else "-"
        times = _time(row.planned_s), _time(row.measured_s)
        add_row(table, row.line, *times, share, _count(row.measured_count))
    yield from section(_title("compute by line", len(report.lines)), table)


def _title(name: str, count: int) -> str:
    return f"{name}: the first {SHOWN} of {count}" if count > SHOWN else name


def _both(planned_s: float, measured_s: float) -> str:
    ratio = f", {measured_s / planned_s:.2f} times the plan" if planned_s > 0 else ""
    return f"{time_text(measured_s)} measured, {time_text(planned_s)} planned{ratio}"


def _time(seconds: float) -> str:
    return time_text(seconds) if seconds else "-"


def _count(count: float) -> str:
    return count_text(count) if count else "-"


PROFILE = Command("profile", add_profile, run_profile)
