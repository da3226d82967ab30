"""A server as a Ray actor: a ``Shard`` with snapshots and a copy, which recovers after a loss.

When its process is lost, Ray restarts it, and it restores its state from its copy or its last
snapshot. The copy is another actor that repeated every change before the change was acknowledged,
so nothing is missing; with a snapshot, what came after it is missing. Workers then send their last
push again, and its number shows whether it is already included.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from typing import Any

from executor.parameter_server.placement.layout import Array
from executor.parameter_server.server.answers import LostError, Values
from executor.parameter_server.server.members import LEFT, Change
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.snapshots import Places, Writer, listed, read
from executor.parameter_server.transport.ray_links import AGAIN_S
from executor.parameter_server.transport.slots import Letter, Slot, SlotKey, attach
from executor.parameter_server.transport.wire import is_shared
from executor.parameter_server.worker.queue import Taken
from planner.errors import RequestError

LOG = logging.getLogger(__name__)


def _came_back() -> bool:
    """Whether this actor was restarted."""
    import ray

    with warnings.catch_warnings():  # about names that Ray itself uses
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class Copy:
    """Repeats every change of a server, in order. Runs one call at a time.

    Args:
        shard_args: arguments of the server's ``Shard``.
    """

    def __init__(self, shard_args: tuple[Any, ...]) -> None:
        self.made = shard_args
        self.shard = None if _came_back() else Shard(*shard_args)
        self.number = -1

    def load(self, number: int, dump: tuple[dict[str, Any], dict[str, Array]]) -> bool:
        """Begin with the server's state after its change of this number."""
        self.shard, self.number = Shard(*self.made), number
        self.shard.load(*dump)
        return True

    def repeat(self, number: int, change: Change) -> bool:
        """Repeat a change; returns False if an earlier change is missing."""
        if number != self.number + 1:
            self.shard = None
        if self.shard is None:
            return False
        self.number = number
        method, args = change
        getattr(self.shard, method)(*args)
        return True

    def dump(self) -> tuple[int, Any] | None:
        """The number of the last change, and the server's state after it; None without a state."""
        return None if self.shard is None else (self.number, self.shard.dump())


class Serving(Shard):
    """A ``Shard`` in an actor.

    Args:
        shard_args: arguments of ``Shard``.
        index: index of this server.
        places: places of snapshots; None: no snapshots.
        twin: the actor of its ``Copy``; None: no copy.
        begin: number of updates in the snapshot that the job resumes from; None starts anew.
        again: arguments of ``Shard.again`` when the job resumes.
    """

    def __init__(
        self,
        shard_args: tuple[Any, ...],
        index: int,
        places: Places | None,
        twin: Any,
        begin: int | None,
        again: tuple[int, int | None],
    ) -> None:
        super().__init__(*shard_args)
        self.index, self.twin, self.number = index, twin, -1
        self.slots: dict[int, Slot | None] = {}
        self.mine = threading.local()
        self.mending = threading.Lock()
        self.gone = ""
        try:
            back = _came_back() and self._recover(places, -1 if begin is None else begin)
            if not back and begin is not None and places is not None:
                self.load(*read(places.of(index), begin))
                super().again(*again)
        except Exception as error:  # raised here, it would be reported as a lost actor
            LOG.exception("server %d cannot begin", index)
            self.gone = f"server {index} cannot begin: {type(error).__name__}: {error}"
        if twin is not None:
            self.on_change = self._forward
            if self.number >= 0 or self.store.values is not None:
                self._catch_up()
        self.writer = None if places is None else Writer(self, places, index)

    def _recover(self, places: Places | None, begin: int) -> bool:
        """Restore the state from before this server's process was lost; returns False if nothing
        was restored, and the state that the job began with applies."""
        import ray

        try:
            twin_dump = self.twin and ray.get(self.twin.dump.remote(), timeout=self.wait_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            LOG.warning("server %d: its copy does not answer: %s", self.index, error)
            twin_dump = None
        copied = begin
        if twin_dump is not None and twin_dump[0] >= 0:
            copied = twin_dump[1][0]["version"]
        if places is not None:  # if newer, it went on without its copy, or has none
            folder = places.of(self.index)
            for version in [v for v in reversed(listed(folder)) if v > copied]:
                try:
                    self.load(*read(folder, version))
                except RequestError as error:
                    LOG.warning("server %d: %s", self.index, error)
                else:
                    return True
        if twin_dump is None and places is None:
            self.gone = f"server {self.index} was lost, and its copy too"
        elif twin_dump is not None and twin_dump[0] >= 0:
            self.number, dump = twin_dump
            self.load(*dump)
            return True
        return False

    def share(self, worker: int, key: SlotKey, room: int) -> bool:
        """Attach memory that a worker on this host shares; False if the worker is elsewhere."""
        import ray

        slot = attach(key, room, ray.get_runtime_context().get_node_id())
        if slot is not None:
            self.slots[worker] = slot
        return slot is not None

    def answer(self, worker: int, method: str, letter: Letter) -> Any:
        """Call a method with the arguments in a letter in a worker's slot; None without that slot.

        Only ``push_pull`` reads arrays in place, and it has done so when it returns.
        """
        slot = self.slots.get(worker)
        if slot is None and worker in self.slots:
            raise LostError(LEFT.format(worker=worker))
        if slot is None or slot.token != letter.token:
            return None
        reply = getattr(self, method)(*slot.read(letter, copy=method != "push_pull"))
        if not isinstance(reply, Values) or is_shared(reply):
            return reply
        written = slot.write(reply, answer=True)
        return reply if written is None else written

    def _check(self) -> None:
        if self.gone:
            raise LostError(self.gone)

    def init(self, *args: Any) -> None:
        """See ``Shard``."""
        self._check()
        super().init(*args)
        self._settle()

    def join(self, *args: Any) -> tuple[int, int]:
        """See ``Shard``."""
        self._check()
        numbers = super().join(*args)
        self._settle()
        return numbers

    def leave(self, *args: Any) -> None:
        """See ``Shard``."""
        super().leave(*args)
        self.slots[args[0]] = None
        self._settle()

    def away(self, *args: Any) -> None:
        """See ``Shard``."""
        super().away(*args)
        self._settle()

    def take(self, *args: Any) -> Taken:
        """See ``Shard``."""
        self._check()
        taken = super().take(*args)
        self._settle()
        return taken

    def give_back(self, *args: Any) -> None:
        """See ``Shard``."""
        super().give_back(*args)
        self._settle()

    def push(self, *args: Any) -> bool:
        """See ``Shard``; the copy also has the push when this returns."""
        self._check()
        took = super().push(*args)
        self._settle()
        return took

    def pull(self, *args: Any) -> Any:
        """See ``Shard``."""
        self._check()
        return super().pull(*args)

    def finish(self) -> str:
        """Write the last snapshot; returns its error, or ""."""
        if self.writer is None or self.store.values is None:
            return ""
        return self.writer.finish()

    def _forward(self, change: Change) -> None:
        """Send a change to the copy; the lock is held, so that changes are sent in order."""
        if self.twin is not None:
            self.number += 1
            self.mine.sent = self.twin.repeat.remote(self.number, change)

    def _settle(self) -> None:
        """Wait until the copy has this thread's last change."""
        sent, self.mine.sent = getattr(self.mine, "sent", None), None
        if sent is None:
            return
        import ray

        try:
            if ray.get(sent, timeout=self.wait_s):
                return
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            LOG.warning("server %d: its copy does not answer: %s", self.index, error)
        self._catch_up()

    def _catch_up(self) -> None:
        """Send the whole state to the copy, once it is available again."""
        import ray

        with self.mending:
            until = time.monotonic() + self.wait_s
            while self.twin is not None:
                with self.changed:
                    self.number = max(self.number, 0)
                    sent = self.twin.load.remote(self.number, self.dump())
                try:
                    ray.get(sent, timeout=self.wait_s)
                    return
                except ray.exceptions.ActorDiedError:
                    break
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                    if time.monotonic() > until:
                        break
                    time.sleep(AGAIN_S)
            with self.changed:
                twin, self.twin = self.twin, None
            if twin is not None:  # the first thread to notice
                LOG.warning("server %d goes on without a copy: it is gone", self.index)
                ray.kill(twin, no_restart=True)  # its state is out of date from now on
