"""``planner search problem.json --search ilp --time-limit 60 --out choice.json``."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from planner.cli.commands import Command
from planner.cli.search.progress import run_watched
from planner.collector import paused
from planner.errors import RequestError
from planner.modes import DEFAULT_SEARCH
from planner.report.search import (
    Searched,
    progress_text,
    render_search,
    search_json,
    search_text,
)
from planner.search import SEARCHES, Problem, Solution, read_iopddl
from planner.search.anytime.leftover import THREAD
from planner.search.progress import SearchProgress
from planner.search.registry import options_of, solve

FOUND, NOTHING_FEASIBLE, INTERRUPTED = 0, 4, 130
LEAVE_S = 1.0
"""Seconds that a solver has to stop before the process exits without it."""
LEAST_S = 0.1
"""Seconds for the search if reading took the whole time limit."""

_MORE = """\
PROBLEM is an instance in the form of the IOPDDL contest, or what planner inspect --dump-problem
wrote; a name that ends in .gz is decompressed. The choice is a JSON list: the index of the strategy
of every node.

Ctrl-C ends the search with the best choice so far, a second Ctrl-C at once.

exit codes: 0 a feasible choice, 2 the request can't be met, 4 no feasible
choice, 130 interrupted
"""


def add_search(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "search",
        help=text,
        description="Run a search on a bare problem: nodes, pairwise costs and a memory limit.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("problem", metavar="PROBLEM", type=Path, help="a .json or .json.gz file")
    names = f"{', '.join(SEARCHES)} (default: {DEFAULT_SEARCH})"
    add("--search", default=DEFAULT_SEARCH, metavar="NAME", help=names)
    add(
        "--time-limit",
        default="60",
        metavar="SECONDS",
        help="for reading the file and the search together (default: 60)",
    )
    add("--out", metavar="FILE", type=Path, help="write the choice to FILE, as JSON")
    add("--seed", metavar="N", help="of the random numbers, for a search that draws some")
    add("--threads", metavar="N", help="processors to use, for a search that can use several")
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run_search(options: argparse.Namespace) -> int:
    """Read, search, write, print.

    Args:
        options: the parsed arguments of ``add_search``'s parser.

    Returns:
        The exit code: 0 for a feasible choice, 4 for none, 130 if interrupted (the best choice so
        far is written).

    Raises:
        RequestError: the file or an option is invalid.
    """
    limit_s = _seconds(options.time_limit)
    extra = _extra(options)
    if options.out is not None:
        _check_writable(options.out)
    begun = time.monotonic()
    problem = _read(options.problem)
    read_s = time.monotonic() - begun
    solution, interrupted = _searched(options.search, problem, limit_s, read_s, extra)
    if options.out is not None:
        _write(options.out, solution)
    written = None if options.out is None else str(options.out)
    searched = Searched(str(options.problem), problem, solution, read_s, interrupted, written)
    if options.json:
        print(json.dumps(search_json(searched)))
    elif sys.stdout.isatty():
        render_search(searched, Console())
    else:
        print(search_text(searched))
    code = FOUND if solution.feasible else NOTHING_FEASIBLE
    return _left(INTERRUPTED if interrupted else code)


def _left(code: int) -> int:
    """The exit code. If a solver still runs (solvers stop late in presolve), the process exits
    here: everything is written, and a normal shutdown would wait for the solver."""
    sys.stdout.flush()
    sys.stderr.flush()
    for thread in [t for t in threading.enumerate() if t.name == THREAD]:
        thread.join(LEAVE_S)
        if thread.is_alive():
            os._exit(code)
    return code


def _searched(
    name: str, problem: Problem, limit_s: float, read_s: float, extra: dict[str, int]
) -> tuple[Solution, bool]:
    """The solution, and whether Ctrl-C cut it short. Reading time counts toward the limit."""
    left_s = max(LEAST_S, limit_s - read_s)

    def search() -> Solution:
        return solve(name, problem, left_s, extra)

    def line(last: SearchProgress | None, now: float) -> str:
        return progress_text(last, read_s + now, limit_s)

    try:
        return run_watched(search, line, left_s)
    except ValueError as error:
        raise RequestError(f"search {name}: {error}; choose another search") from error
    except KeyboardInterrupt:
        # The second Ctrl-C. The search still runs, and a normal exit would wait for it.
        for child in multiprocessing.active_children():
            child.terminate()
        print("planner: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RequestError(f"--time-limit {text}: expected a number of seconds above 0")
    return value


def _extra(options: argparse.Namespace) -> dict[str, int]:
    """The options that only some searches take."""
    if options.search not in SEARCHES:
        raise RequestError(f"unknown search {options.search!r}; one of {', '.join(SEARCHES)}")
    takes = options_of(options.search)
    extra = {}
    for name, least in (("seed", 0), ("threads", 1)):
        text = getattr(options, name)
        if text is None:
            continue
        if not text.isdecimal() or int(text) < least:
            raise RequestError(f"--{name} {text}: expected a whole number, at least {least}")
        if name not in takes:
            raise RequestError(f"--{name}: search {options.search} takes none")
        extra[name] = int(text)
    return extra


def _read(path: Path) -> Problem:
    try:
        with paused():
            return read_iopddl(path)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(str(error)) from error


def _check_writable(path: Path) -> None:
    """Check before the search that a file can be written; leaves it as it was."""
    there = path.exists()
    try:
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error


def _write(path: Path, solution: Solution) -> None:
    try:
        path.write_text(json.dumps(list(solution.choice)) + "\n")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error


SEARCH = Command("search", add_search, run_search)
