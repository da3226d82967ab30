"""A line while something takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

AFTER_S = 1.5
"""What is over by then is not announced."""


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Say on stderr that something takes long, while it does: on a terminal or in a notebook.

    Args:
        text: what it is.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield
        return
    from rich.live import Live
    from rich.spinner import Spinner

    live = Live(
        Spinner("line", text=text),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    timer = threading.Timer(AFTER_S, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()
