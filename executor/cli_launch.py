"""``planner launch -n 4 train.py``: the same script in several processes of this host."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from executor.launch import Job, Outcome, run_local
from planner.commands import Command
from planner.errors import RequestError

EXAMPLES = """\
examples:
  planner launch -n 2 --devices-per-process 4 train.py --steps 100
  planner launch -n 8 --logs runs/7 --max-restarts 3 train.py

The script calls executor.initialize() before anything else of JAX. Every process is told who it is
by MESHWRIGHT_PROCESSES, MESHWRIGHT_PROCESS and MESHWRIGHT_COORDINATOR.

exit codes: 0 all ended well, 2 the request can't be met, else that of the first process that failed
(128 + the signal, if a signal ended it)
"""


def add_launch(commands: Any) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes of this host",
        description="Run a script in several processes of this host.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    add(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="virtual CPU devices of each process (default: what JAX finds)",
    )
    add("--logs", type=Path, default=Path("logs"), metavar="DIR", help="default: logs")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for every process; may be repeated",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all again after a failure, up to N times (default: 0)",
    )
    add("script", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run_launch(options: argparse.Namespace) -> int:
    """Start, watch, tell; raises RequestError."""
    if options.processes < 1:
        raise RequestError(f"-n {options.processes}: expected at least one process")
    if options.devices_per_process is not None and options.devices_per_process < 1:
        raise RequestError(f"--devices-per-process {options.devices_per_process}: expected >= 1")
    if not Path(options.script).is_file():
        raise RequestError(f"no script at {options.script}")
    pairs = [text.partition("=") for text in options.env]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise RequestError(f"--env {name}: expected NAME=VALUE")
    job = Job(
        (sys.executable, options.script, *options.arguments),
        options.processes,
        options.devices_per_process,
        {name: value for name, _, value in pairs},
        options.logs,
    )
    for attempt in range(options.max_restarts + 1):
        outcome = run_local(job, _show)
        if outcome.process is None:
            return 0
        _tell(outcome, options.logs)
        if attempt < options.max_restarts:
            left = options.max_restarts - attempt - 1
            print(f"planner launch: starting again, {left} restarts left", file=sys.stderr)
    return outcome.code


def _show(process: int, line: str) -> None:
    print(f"[{process}] {line}", flush=True)


def _tell(outcome: Outcome, logs: Path) -> None:
    """Say which process failed first, and its last words."""
    code = outcome.code
    how = f"ended by signal {code - 128}" if code > 128 else f"exited with {code}"
    print(f"planner launch: process {outcome.process} failed first, {how}:", file=sys.stderr)
    for line in outcome.tail:
        print(f"  {line}", file=sys.stderr)
    print(f"all of it: {logs / f'worker-{outcome.process}.out'}", file=sys.stderr)


LAUNCH = Command("launch", add_launch, run_launch)
