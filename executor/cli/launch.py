"""``planner launch -n 4 train.py``: the same script in several processes, on one host or many; with
``--workers 4 --servers 2``, a script that trains with parameter servers."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from executor.cli.launch_options import (
    LAUNCHERS,
    REFUSED,
    checked,
    for_kubernetes,
    job_of,
    launcher_of,
)
from executor.launch.job import AGAIN, Outcome
from executor.launch.start import launch, stopping
from executor.parameter_server.launch.options import servers_of
from planner.cli.commands import Command

EXAMPLES = """\
examples:
  planner launch -n 2 --devices-per-process 4 train.py --steps 100
  planner launch -n 8 --logs runs/7 --max-restarts 3 train.py
  planner launch --launcher ssh --hosts hosts.txt -n 8 --sync-dir . train.py
  planner launch --launcher ray --workers 4 --servers 2 train.py

With -n, the script calls executor.initialize() before anything else of JAX. Every process reads
its role from MESHWRIGHT_PROCESSES, MESHWRIGHT_PROCESS and MESHWRIGHT_COORDINATOR, or from its
launcher's own variables, and from MESHWRIGHT_RESTART how often the job was started again. With
--workers the script runs once and calls executor.parameter_server.train(), which takes these
numbers; without either, numbers are taken from the variables of older parameter-server systems
(DMLC_*, MS_*, PADDLE_*, TF_CONFIG).

exit codes: 0 all ended well, 2 the request can't be met, 75 stopped by SIGTERM, 130 by Ctrl-C, else
that of the first process that failed (128 + the signal, if a signal ended it)
"""


def add_launch(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "launch",
        help=text,
        description="Run a script in several processes, on this host or on many.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", "--processes", type=int, metavar="N", help="how many processes")
    add(
        "--launcher",
        choices=(*LAUNCHERS, *REFUSED),
        default="local",
        metavar="NAME",
        help=f"{', '.join(LAUNCHERS)} (default: local)",
    )
    add("--hosts", type=Path, metavar="FILE", help="lines of: HOST [slots=K] [port=P] [user=NAME]")
    add(
        "--devices-per-process",
        type=int,
        metavar="K",
        help="virtual CPU devices of each process (default: what JAX finds)",
    )
    add(
        "--gpus", type=int, metavar="K", help="accelerators of each process, to ask a scheduler for"
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
    add(
        "--min-processes",
        type=int,
        metavar="M",
        help="leave out hosts that do not answer as long as M processes remain (default: none)",
    )
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="for all to save and end after SIGTERM or Ctrl-C (default: 30)",
    )
    add("--python", metavar="PATH", help="the interpreter (default: this; k8s: the image's python)")
    add(
        "--sync-dir",
        metavar="DIR[:REMOTE]",
        help="copy a folder to every host first (default there: the same path)",
    )
    add(
        "--launcher-options",
        default="",
        metavar="WORDS",
        help="more options for the program that launches, such as '-i key' for ssh",
    )
    add("--ray-address", metavar="ADDRESS", help="a Ray cluster (default: one on this host)")
    served = parser.add_argument_group("parameter servers, instead of -n (local, ray, k8s)")
    add = served.add_argument
    add("--workers", type=int, metavar="W", help="that run the loop")
    add("--servers", type=int, metavar="S", help="that hold the parameters (default: 1)")
    kubernetes = parser.add_argument_group(
        "with --launcher k8s, which writes a JobSet (with --workers, a RayJob)"
    )
    add = kubernetes.add_argument
    add("--image", help="of the container, with the script and Python in it")
    add("--pod-cpu", metavar="CPUS", help="of every pod, such as 8 or 500m")
    add("--pod-memory", metavar="BYTES", help="of every pod, such as 32Gi")
    add("--name", help="of the job (default: the script's)")
    add("--out", type=Path, metavar="FILE", help="where to write it (default: standard output)")
    add("--schema", type=Path, metavar="FILE", help="the cluster's own CRD, to check it against")
    add("--apply", action="store_true", help="hand it to kubectl")
    add = parser.add_argument
    add("script", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run_launch(options: argparse.Namespace) -> int:
    """Start the job, watch it, and report failures; returns the exit code. Raises RequestError."""
    servers = servers_of(options, os.environ, _say)
    if servers is not None:
        options.processes = 1
    checked(options)
    if options.launcher == "k8s":
        text = for_kubernetes(options, servers)
        print(text) if text else None
        return 0
    job = job_of(options)
    with stopping() as stop:
        outcome = launch(
            job,
            servers or launcher_of(options, _say),
            _show if servers is None else _show_bare,
            max_restarts=options.max_restarts,
            stop=stop,
            tell=lambda outcome, left: _tell(outcome, options.logs, left),
        )
    if outcome.stopped:
        name = signal.Signals(outcome.stopped).name
        codes = ", ".join(map(str, outcome.codes)) or "none, nothing ran"
        _say(f"stopped by {name}; exit codes {codes}")
    return outcome.code


def _show(process: int | None, line: str) -> None:
    print(line if process is None else f"[{process}] {line}", flush=True)


def _show_bare(process: int | None, line: str) -> None:
    print(line, flush=True)


def _say(text: str) -> None:
    print(f"planner launch: {text}", file=sys.stderr, flush=True)


def _tell(outcome: Outcome, logs: Path, left: int) -> None:
    """Print which process failed first, its last lines of output, and whether the job restarts."""
    code = outcome.code
    how = f"ended by signal {code - 128}" if 128 < code < 255 else f"exited with {code}"
    if code == AGAIN:
        how += " (start it again)"
    how = f"failed first, {how}"
    if outcome.lost:
        how = f"was lost: {outcome.lost}; the others exited with {code} (start it again)"
    if code == 255 and outcome.host:
        how += " (that is ssh's own code: no connection, or it was lost)"
    who = "the launching program" if outcome.process is None else f"process {outcome.process}"
    where = f" on {outcome.host}" if outcome.host else ""
    _say(f"{who}{where} {how}:")
    for line in outcome.tail:
        print(f"  {line}", file=sys.stderr)
    if outcome.process is not None:
        print(f"all of it: {logs / f'worker-{outcome.process}.out'}", file=sys.stderr)
    if left:
        _say(f"starting again, {left - 1} restarts left")


LAUNCH = Command("launch", add_launch, run_launch)
