"""An evaluator: reads the values at intervals, without blocking the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from executor.parameter_server.placement.layout import layout_of
from executor.parameter_server.server.tables import joined
from executor.parameter_server.transport.links import Links

log = logging.getLogger("meshwright")

Evaluate = Callable[..., Any]
Evaluation = tuple[int, Any]
POLL_S = 0.05


class ValueReader:
    """Reads the values and evaluates them; an actor, or an object of this process.

    Args:
        links: links to the servers.
        evaluate: called with the parameters (read-only NumPy arrays) and, if there are tables of
            rows, with the tables by name.
        wait_s: deadline of each call to the servers, in seconds.
        cut: ``split_bytes`` and ``partition``, as for ``layout_of``.
    """

    def __init__(self, links: Links, evaluate: Evaluate, wait_s: float, **cut: Any) -> None:
        self.links, self.evaluate, self.wait_s, self.cut = links, evaluate, wait_s, cut
        self.shapes: Any = None
        self.busy: tuple[int, ...] | None = None

    def once(self, seen: int) -> Evaluation | None:
        """Evaluate the current values, if they are newer than version ``seen``.

        Returns:
            The number of updates in the values (the least of all servers, which do not stop for
            this), and the result, or the exception that ``evaluate`` raised; None if there are no
            values yet, or no newer ones.
        """
        if self.shapes is None:  # a restarted server may no longer have them
            self.shapes = next((x for x in self._call("described") if x is not None), None)
        if self.shapes is None:
            return None
        layout = layout_of(self.shapes, self.links.count, **self.cut)
        server_values = [values for values, _ in self._call("now")]
        if self.busy is None:
            self.busy = layout.busy(tables=any(self._call("tables")))
        version = min(server_values[k].version for k in self.busy)
        if version == seen:
            return None
        params = layout.gather([values.values for values in server_values])
        tables = joined(self._call("tables"))
        try:
            return version, self.evaluate(params, tables) if tables else self.evaluate(params)
        except Exception as error:  # the training goes on
            log.exception("the evaluation of version %d failed", version)
            return version, error

    def _call(self, method: str) -> list[Any]:
        return self.links.call(method, [()] * self.links.count, self.wait_s)


class Evaluator:
    """Evaluates in a thread at intervals, and once more at the end; does nothing if not started.

    Args:
        every_s: seconds between evaluations.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.found: list[Evaluation] = []
        self.ended = threading.Event()
        self.failed = False
        self.once: Callable[[int], Evaluation | None] = lambda seen: None
        self.thread: threading.Thread | None = None

    def start(self, once: Callable[[int], Evaluation | None]) -> None:
        """Start with ``ValueReader.once``; the first evaluation is after ``every_s``."""
        self.once = once
        self.thread = threading.Thread(target=self._run, name="evaluator", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        until = time.monotonic() + self.every_s
        while not self.ended.wait(max(POLL_S, until - time.monotonic())):
            until = time.monotonic() + self.every_s
            self._read()

    def _read(self) -> None:
        seen = self.found[-1][0] if self.found else -1
        try:
            got = self.once(seen)
        except Exception:  # the workers report a lost server
            if not self.failed:
                log.exception("an evaluation did not come about")
            return
        if got is not None:
            self.found.append(got)

    def finish(self) -> tuple[Evaluation, ...]:
        """Evaluate the final values, once the workers are done; returns all evaluations."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()
            self._read()
        return tuple(self.found)

    def stop(self) -> None:
        """Stop evaluating: the run is over, or has failed."""
        self.failed = not self.ended.is_set()
        self.ended.set()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
