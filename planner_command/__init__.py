"""The entry of the ``planner`` command: Ctrl-C ends it with 130 at any moment, without a traceback.

This module imports nothing slow, so it also handles an interrupt during the other imports. During
the import of JAX there is nothing to clean up, and extensions drop exceptions or crash on them, so
the process ends at once. Later, the first Ctrl-C raises ``KeyboardInterrupt``, and the second one
ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

INTERRUPTED, REFUSED = 130, 2


def main() -> int:
    """Run the command; see ``planner.cli.main.main``."""
    signal.signal(signal.SIGINT, _end)
    sys.unraisablehook = _unraisable
    from meshwright.packages import check_packages

    try:
        check_packages()
    except ImportError as error:
        sys.stderr.write(f"planner: error: {error}\n")
        return REFUSED
    from planner.cli.main import main as run
    from planner.cli.table import EXECUTOR, PLANNER

    if sys.argv[1:] == ["--show-config", "train"]:
        return _train_config()
    for entry in (*PLANNER, *EXECUTOR):
        if sys.argv[1:2] == [entry.name]:
            entry.load()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        code = run(extra=EXECUTOR)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if signal.signal(signal.SIGINT, _end) is _end and code == INTERRUPTED:
        # Python would exit with the signal if the interrupt came out of an exec()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _train_config() -> int:
    """Print the options of ``train``, which is not a subcommand."""
    from executor.train.settings import config_lines
    from planner.errors import RequestError

    try:
        print(config_lines())
    except RequestError as error:
        sys.stderr.write(f"planner: error: {error}\n")
        return REFUSED
    return 0


def _end(signum: int, frame: FrameType | None) -> None:
    """End the process at once."""
    os.write(2, b"planner: interrupted\n")
    os._exit(INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt in the main thread; the next interrupt ends the process."""
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt


_report = sys.unraisablehook


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process on an interrupt in a destructor or a callback, which Python would drop."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end(signal.SIGINT, None)
    _report(unraisable)
