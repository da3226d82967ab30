"""A status line during long operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER_S = 1.0
"""Seconds; operations that finish sooner are not announced."""


@contextmanager
def announced(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status line on stderr while an operation takes long, on a terminal or in a notebook.

    Args:
        text: what the line says.

    Yields:
        A function that changes the text.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda text: None
        return
    from rich.live import Live
    from rich.spinner import Spinner

    turning = Spinner("line", text)
    live = Live(
        turning,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    timer = threading.Timer(AFTER_S, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: turning.update(text=text)
    finally:
        timer.cancel()
        timer.join()
        live.stop()
