"""The ``planner`` command: ``planner inspect model.py --cluster h100:8x4``.

``planner search`` stands in `cli_search`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from planner.cli_search import INTERRUPTED, add_search, run_search
from planner.errors import ModelError, RequestError
from planner.loading import Target, parse_target, resolve, user_environment
from planner.modes import MODES
from planner.pipeline import make_plan
from planner.plan import Plan
from planner.report.failure import failure_text
from planner.report.table import plan_text, render

DEFAULT_CLUSTER = "cpu:8"
PLANNED, REFUSED, MODEL_FAILED = 0, 2, 3
SPINNER_AFTER_S = 1.0

_EXAMPLES = """\
examples:
  planner inspect train.py                          plan the step that the script parallelizes
  planner inspect train.py --cluster h100:8x4       the same for four nodes of eight H100
  planner inspect model.py:train_step --mesh data=4,model=2
  planner inspect model.py --memory 16GB --save plan.json
  planner inspect model.py --cluster v5p:4x4x8 --json > plan.json
  planner search problem.json.gz --out choice.json  run a search on a bare problem

MODEL is a Python file that is one of
  a script that calls a function wrapped in executor.parallelize; it is run up to that call
  a file with train_step (or FUNCTION) and example_args(), the tuple of its arguments
  a file with a Flax model (model, or make_model()) and example_inputs(); a loss(outputs,
  inputs) is optional

exit codes: 0 planned, 2 the request can't be met, 3 the model itself failed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments after the program's name; None takes ``sys.argv``.

    Returns:
        0 planned or found, 2 the request can't be met, 3 the user's model failed, 4 a search found
        nothing feasible, 130 interrupted.
    """
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else PLANNED
    if options.command is None:
        parser.print_help(sys.stderr)
        return REFUSED
    try:
        if options.command == "search":
            return run_search(options)
        _stay_on_cpu()
        return _inspect(options)
    except RequestError as error:
        return _refuse(error)
    except ModelError as error:
        if isinstance(error.__cause__, RequestError):  # ours, raised inside the model
            return _refuse(error.__cause__)
        _report_failure(error, options.model)
        return MODEL_FAILED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PLANNED
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return INTERRUPTED


def version() -> str:
    """The installed version, or ``0+unknown`` when running from a checkout."""
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="planner",
        description="Plan how a JAX train step runs on a cluster.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"planner {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="plan a step and print the plan; runs nothing on devices",
        description="Plan a step and print the plan.",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    add = inspect.add_argument
    add("model", metavar="MODEL[:FUNCTION]", help="a Python file, or a function in it")
    add(
        "--cluster",
        help=f"such as h100:8x4, v5p:4x4x8, cpu:8 or a .toml file (default: what the "
        f"script asks for, else {DEFAULT_CLUSTER})",
    )
    add("--mesh", help="a fixed logical mesh, such as data=4,model=2 (default: try them all)")
    add("--mode", choices=MODES, type=str.upper, metavar="MODE", help=", ".join(MODES))
    add("--search", help="search algorithm (default: auto)")
    add("--memory", help="memory per device that the plan may use, such as 80GB")
    add(
        "--time-limit",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="for the search, per mesh (default: 60)",
    )
    add("--json", action="store_true", help="print the plan as JSON, nothing else")
    add("--save", metavar="FILE", type=Path, help="write the plan as JSON to FILE as well")
    add(
        "--dump-problem",
        metavar="FILE",
        type=Path,
        help="write the chosen mesh's problem to FILE (.json or .json.gz), for planner search",
    )
    add("--no-color", action="store_true", help="plain text")
    add_search(commands)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def _stay_on_cpu() -> None:
    """Keep jax from looking for accelerators: planning needs none."""
    if os.environ.setdefault("JAX_PLATFORMS", "cpu") != "cpu":
        return
    import jax

    if not getattr(jax.config, "jax_platforms", None):  # read before it was set here
        jax.config.update("jax_platforms", "cpu")


def _inspect(options: argparse.Namespace) -> int:
    target = parse_target(options.model)
    for path in (options.save, options.dump_problem):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"cannot write {path}: its directory does not exist")
    plan = _planned(target, options)
    if options.save is not None:
        try:
            plan.save(options.save)
        except OSError as error:
            raise RequestError(f"cannot write {options.save}: {error.strerror}") from error
    if options.json:
        sys.stdout.write(plan.to_json())
    elif sys.stdout.isatty():
        render(plan, Console(no_color=options.no_color or None))
    else:
        print(plan_text(plan))
    sys.stdout.flush()
    return PLANNED


def _planned(target: Target, options: argparse.Namespace) -> Plan:
    """Find the step and plan it; the command line's options win over the script's."""
    with user_environment(target):
        call = resolve(target)
        merged: dict[str, Any] = dict(call.options)
        for name in ("cluster", "mesh", "mode", "search", "memory"):
            value = getattr(options, name)
            if value is not None:
                merged[name] = value
        if options.dump_problem is not None:
            merged["dump_problem"] = options.dump_problem
        merged["cluster"] = merged.get("cluster") or DEFAULT_CLUSTER
        with _spinner(f"planning {target} for {merged['cluster']} ..."):
            return make_plan(call.function, *call.args, time_limit_s=options.time_limit, **merged)


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    """A spinner on stderr once planning takes longer than a second, if people watch."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    live = Live(
        Spinner("line", text),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    timer = threading.Timer(SPINNER_AFTER_S, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()


def _refuse(error: RequestError) -> int:
    print(f"planner: error: {error}", file=sys.stderr)
    return REFUSED


def _report_failure(error: ModelError, model: str) -> None:
    cause = error.__cause__
    print(f"planner: {error}", file=sys.stderr)
    if cause is not None:
        print(failure_text(cause, str(parse_target(model).path)), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
