"""Batches of iterators, which have no random access, such as Grain's iterable datasets.

A batch consists of lanes: equal runs of its rows, one for each part that the plan splits it into.
Each lane has a separate iterator from a function (lane, lanes) -> dataset; a process reads the
iterators of the lanes that its devices hold. So the content of a batch depends on the lanes alone,
and a restart may have another number of processes.

The length of an iterator is not known. Processes therefore read a block of batches ahead and agree,
once per block, how many of its batches all of them have. They also exchange the states of their
iterators at the block's start, so that any of them can write a position for all.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from executor.data.agree import everyones_bytes
from executor.data.common import (
    DataError,
    Position,
    RowLeaf,
    RowReader,
    check_divides,
    check_request,
    global_array,
    lanes_of,
    own_lanes,
    position_of,
    sharding_list,
)
from executor.data.compare import compare_data
from executor.data.sources import row_content, same_form
from executor.processes.agreement.fingerprints import Fingerprint

BLOCK = 16
"""Batches that are read before processes agree that all have them; the host holds two blocks: the
current one and the next."""

Make = Callable[[int, int], Any]
States = dict[int, str]
"""States of iterators by lane, as JSON."""

Lanes = dict[int, tuple[int, list[Any]]]
"""By lane: number of batches for which it has unrepeated rows, and its rows, lists of leaves."""


class Streams:
    """Batches of iterators, sharded as a plan specifies; an iterator itself.

    Args:
        make: (lane, lanes) -> an iterable of rows, pytrees of arrays of the same form. Every call
            with the same numbers gives the same rows, calls with other lanes give other rows. Its
            iterators have ``get_state`` and ``set_state``, like Grain's. Without them everything
            else works, but resuming at a position reads all rows of the epoch before it.
        shardings: shardings of one batch, a pytree of the same form or one for all leaves.
        batch_size: rows of a batch, over all processes.
        lanes: number of lanes; None takes one for each part that the batch is split into. `seek`
            takes the number from the position.
        policy: when some lanes end before others: "drop" what the longer ones have left, or "pad"
            the shorter ones with their first rows until the longest ends. "leave" is refused: a
            lane can't have fewer rows than another.
        epochs: number of passes over the data; None continues forever. An endless iterator never
            ends its first pass.
        prefetch: batches to put on the devices ahead.

    Raises:
        DataError: policy "leave", a batch that the devices do not divide, or no rows.
    """

    def __init__(
        self,
        make: Make,
        shardings: Any,
        *,
        batch_size: int,
        lanes: int | None = None,
        policy: str = "drop",
        epochs: int | None = None,
        prefetch: int = 2,
    ) -> None:
        check_request(batch_size, policy, prefetch)
        if policy == "leave":
            raise DataError("policy 'leave': iterators give whole batches; use 'drop' or 'pad'")
        self._make, self._size, self._policy = make, batch_size, policy
        self._epochs, self._ahead = epochs, prefetch
        first = next(iter(make(0, 1)), None)
        if first is None:
            raise DataError("the iterator has no rows")
        leaves, self._tree = jax.tree_util.tree_flatten(first)
        self._form: list[Any] = [np.asarray(x) for x in leaves]
        self._shardings = sharding_list(shardings, first)
        self._shapes = [(batch_size, *x.shape) for x in self._form]
        for sharding, shape in zip(self._shardings, self._shapes, strict=True):
            check_divides(sharding, shape)
        self._lanes = lanes or lanes_of(self._shardings, self._shapes)
        self._next = (0, 0)
        self._states: tuple[str, ...] = ()
        self._reader: RowReader | None = None
        self._at, self._over = 0, False
        self._pending: deque[Any] = deque()
        self._ready: deque[Any] = deque()
        self._compared = False

    @property
    def position(self) -> Position:
        """Position of the next batch; batches that were read ahead do not count."""
        return Position(*self._next, 0, self._size, None, self._lanes, self._states)

    def seek(self, position: Position | Mapping[str, Any]) -> None:
        """Go to a position, given as a Position or its fields.

        Raises:
            DataError: it belongs to other data or another batch size, or its lanes do not fit.
        """
        target = position_of(position, self.position)
        states = tuple(target.states)
        if target.lanes < 1 or self._size % target.lanes or len(states) not in (0, target.lanes):
            raise DataError(
                f"the position has {target.lanes} lanes and {len(states)} states of iterators for "
                f"batches of {self._size}"
            )
        self.close()
        self._next, self._lanes, self._states = (target.epoch, target.batch), target.lanes, states

    def compare(self) -> None:
        """Compare the data with that of the other processes, once; the first batch does this too.

        Raises:
            ProcessMismatchError: they differ; raised in all processes.
        """
        if not self._compared:
            self._compared = True
            options = {"policy": self._policy, "epochs": self._epochs}
            compare_data(self.position, options, self._shardings, self._content)

    def _content(self) -> tuple[Fingerprint, ...]:
        """The first row of the iterator for a single lane."""
        row = next(iter(self._make(0, 1)), None)
        return row_content(jax.tree_util.tree_leaves(row), "the first row")

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._over = False
        self._pending.clear()
        self._ready.clear()

    def __iter__(self) -> Streams:
        return self

    def __next__(self) -> Any:
        self.compare()
        while not self._ready:
            if self._epochs is not None and self._next[0] >= self._epochs:
                self.close()
                raise StopIteration
            if not self._pending:
                if self._over:
                    self._end_epoch()
                    continue
                self._block()
            self._place()
        batch = self._ready.popleft()
        self._next = (self._next[0], self._next[1] + 1)
        self._place()
        return batch

    def _place(self) -> None:
        """Put batches of this block on the devices."""
        while self._pending and len(self._ready) < max(1, self._ahead):
            self._ready.append(self._batch(self._pending.popleft()))

    def _end_epoch(self) -> None:
        epoch, number = self._next
        self.close()
        if number == 0:
            raise DataError(
                f"epoch {epoch} has no batch: some lane of {self._lanes} has fewer than "
                f"{self._size // self._lanes} rows; use a smaller batch, or policy='pad'"
            )
        self._next, self._states = (epoch + 1, 0), ()

    def _block(self) -> None:
        """Take the next block and agree on it with a collective; a block that is not full is the
        last of the epoch."""
        if self._reader is None:
            self._at = max(0, self._next[1] - 1) // BLOCK * BLOCK
            self._reader = RowReader(self._blocks(), 1)
        states, lanes, error = _taken(self._reader)
        reports = _exchange(
            states=states,
            have={k: have for k, (have, _) in lanes.items()},
            failed=error and f"{type(error).__name__}: {error}",
        )
        if error is not None:
            self.close()
            raise error
        for process, other in enumerate(reports):
            if other["failed"]:
                self.close()
                raise DataError(f"process {process} can't read: {other['failed']}")
        have = {int(k): int(n) for other in reports for k, n in other["have"].items()}
        lane_states = {int(k): s for other in reports for k, s in other["states"].items()}
        self._states = (
            tuple(lane_states[k] for k in range(self._lanes)) if all(lane_states.values()) else ()
        )
        count = (min if self._policy == "drop" else max)(have.values())
        none = [k for k in sorted(have) if have[k] < 0]
        if none and count > 0:
            self.close()
            raise DataError(f"lane {none[0]} of {self._lanes} has no rows, so none to pad with")
        size, begin = self._size // self._lanes, self._next[1] - self._at
        self._pending.extend(
            {k: rows[n * size : (n + 1) * size] for k, (_, rows) in lanes.items()}
            for n in range(begin, count)
        )
        self._at += BLOCK
        self._over = count < BLOCK

    def _blocks(self) -> Iterator[tuple[States, Lanes]]:
        """Blocks of this process's lanes from batch ``_at`` on, without end. Per lane: its state
        before the block, the number of batches for which it has unrepeated rows (0 after its end;
        -1: it has no rows and would have to pad), and its rows."""
        size, pad = self._size // self._lanes, self._policy == "pad"
        local_lanes = own_lanes(self._shardings, self._shapes, self._lanes)
        walks = {k: _Walk(self._make, k, self._lanes, _state(self._states, k)) for k in local_lanes}
        for _ in range(0 if self._states else self._at):
            for walk in walks.values():
                walk.take(size, pad)
        while True:
            states = {k: walk.state() for k, walk in walks.items()}
            lanes = {}
            for k, walk in walks.items():
                real, rows = walk.take(BLOCK * size, pad)
                have = real // size if not pad else -(-real // size) if rows else -1
                where = f"a row of lane {k}"
                lanes[k] = (have, [same_form(x, self._tree, self._form, where) for x in rows])
            yield states, lanes

    def _batch(self, lanes: Mapping[int, list[Any]]) -> Any:
        size = self._size // self._lanes
        stacked: dict[tuple[int, int], Any] = {}

        def rows(leaf: int, begin: int, end: int) -> Any:
            parts = []
            for k in range(begin // size, -(-end // size)):
                if (k, leaf) not in stacked:
                    stacked[k, leaf] = np.stack([row[leaf] for row in lanes[k]])
                parts.append(stacked[k, leaf][max(0, begin - k * size) : end - k * size])
            return np.concatenate(parts)

        def leaf(k: int) -> jax.Array:
            like: RowLeaf = self._form[k]
            return global_array(
                self._shapes[k], like.dtype, self._shardings[k], lambda i, j: rows(k, i, j)
            )

        return jax.tree_util.tree_unflatten(self._tree, [leaf(k) for k in range(len(self._form))])


def _taken(reader: RowReader) -> tuple[States, Lanes, Exception | None]:
    """The next block, or the error. It is not raised here, because the other processes need it:
    without it they would wait forever."""
    try:
        states, lanes = reader.take()
        return states, lanes, None
    except Exception as error:
        return {}, {}, error


def _exchange(**fields: Any) -> list[dict[str, Any]]:
    """The fields of all processes, exchanged as JSON."""
    return [json.loads(x) for x in everyones_bytes(json.dumps(fields).encode())]


class _Walk:
    """One lane's iterator; it restarts from its first row when it has to pad."""

    def __init__(self, make: Make, lane: int, lanes: int, state: dict[str, Any] | None) -> None:
        self._make, self._lane, self._lanes = make, lane, lanes
        self._rows = iter(make(lane, lanes))
        self._ended = bool(state and state["ended"])
        if state is not None:
            _set_state(self._rows, state["state"])

    def take(self, count: int, pad: bool) -> tuple[int, list[Any]]:
        """Take up to ``count`` rows, exactly ``count`` with ``pad`` unless the lane has no rows.
        Returns how many of them are unrepeated, and the rows."""
        rows: list[Any] = []
        real = 0
        fresh = False
        while len(rows) < count:
            row = next(self._rows, _END)
            if row is not _END:
                fresh = False
                rows.append(row)
                real += not self._ended
            elif pad and not fresh:
                self._ended = fresh = True
                self._rows = iter(self._make(self._lane, self._lanes))
            else:
                break
        return real, rows

    def state(self) -> str:
        """State of the lane as JSON; empty if its iterator has no ``get_state``."""
        if not hasattr(self._rows, "get_state"):
            return ""
        state = self._rows.get_state()
        if isinstance(state, bytes):
            state = {"base64": base64.b64encode(state).decode()}
        return json.dumps({"ended": self._ended, "state": state})


_END = object()


def _state(states: tuple[str, ...], lane: int) -> dict[str, Any] | None:
    if not states:
        return None
    try:
        content: dict[str, Any] = json.loads(states[lane])
        return {"ended": content["ended"], "state": content["state"]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"not the state of an iterator: {states[lane]!r}") from error


def _set_state(rows: Any, state: Any) -> None:
    if isinstance(state, dict) and set(state) == {"base64"}:
        state = base64.b64decode(state["base64"])
    try:
        rows.set_state(state)
    except Exception as error:
        raise DataError(f"the iterator does not take its state back: {error}") from error
