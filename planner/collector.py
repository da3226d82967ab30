"""The garbage collector, paused while many small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, if it is on.

    Planning makes many tuples that live until the plan is there, and hardly a cycle: collections
    in between would walk them and all of the caller's objects again and again (a third of the
    time on large steps). Reference counting goes on as ever.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
