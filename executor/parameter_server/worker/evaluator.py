"""An evaluator: reads the values now and then, and nobody waits for it."""

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
        links: to the servers.
        evaluate: told the parameters, NumPy arrays, read-only; and where there are tables of rows,
            these by name.
        wait_s: deadline of each call to the servers, in seconds.
        cut: ``split_bytes`` and ``partition``, as for ``layout_of``.
    """

    def __init__(self, links: Links, evaluate: Evaluate, wait_s: float, **cut: Any) -> None:
        self.links, self.evaluate, self.wait_s, self.cut = links, evaluate, wait_s, cut
        self.shapes: Any = None
        self.busy: tuple[int, ...] | None = None

    def once(self, seen: int) -> Evaluation | None:
        """Evaluate the values as they are, if they are newer than version ``seen``.

        Returns:
            How many updates were in the values (of the server that has the fewest: servers are not
            stopped for this), and the result, or the exception that ``evaluate`` raised; None where
            there are no values yet, or none that are newer.
        """
        if self.shapes is None:  # a server that was restarted may not know them any more
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
    """Reads in a thread, again and again, and once more at the end; nothing if never started.

    Args:
        every_s: seconds from one reading to the next.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.found: list[Evaluation] = []
        self.ended = threading.Event()
        self.failed = False
        self.once: Callable[[int], Evaluation | None] = lambda seen: None
        self.thread: threading.Thread | None = None

    def start(self, once: Callable[[int], Evaluation | None]) -> None:
        """Begin with ``ValueReader.once``; the first reading is after ``every_s``."""
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
        except Exception:  # a server that is gone is the workers' to tell
            if not self.failed:
                log.exception("an evaluation did not come about")
            return
        if got is not None:
            self.found.append(got)

    def finish(self) -> tuple[Evaluation, ...]:
        """The workers are done: evaluate the last values too; everything that was found."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()
            self._read()
        return tuple(self.found)

    def stop(self) -> None:
        """The run is over, or has failed: read no more."""
        self.failed = not self.ended.is_set()
        self.ended.set()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
