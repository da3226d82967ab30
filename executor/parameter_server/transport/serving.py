"""A server as a Ray actor: it answers as ``Shard`` does, has snapshots and a copy, and comes back.

When its process is lost, Ray starts it again, and it takes what it held from its copy, another
actor that repeated every change before the change was acknowledged, so that nothing is missing; or
from its last snapshot, so that what came after it is. Workers then send their last push again, and
its number tells whether it is in already.
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
    """Whether this actor's process is not its first."""
    import ray

    with warnings.catch_warnings():  # of names that Ray itself uses within
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class Copy:
    """Repeats every change of a server, in their order. One call at a time.

    Args:
        shard_args: arguments of the server's ``Shard``.
    """

    def __init__(self, shard_args: tuple[Any, ...]) -> None:
        self.made = shard_args
        self.shard = None if _came_back() else Shard(*shard_args)
        self.number = -1

    def load(self, number: int, dump: tuple[dict[str, Any], dict[str, Array]]) -> bool:
        """Begin with what the server holds after its change of this number."""
        self.shard, self.number = Shard(*self.made), number
        self.shard.load(*dump)
        return True

    def repeat(self, number: int, change: Change) -> bool:
        """Repeat a change; False if one before it is missing."""
        if number != self.number + 1:
            self.shard = None
        if self.shard is None:
            return False
        self.number = number
        method, args = change
        getattr(self.shard, method)(*args)
        return True

    def dump(self) -> tuple[int, Any] | None:
        """The number of the last change, and what the server held after it; None: nothing."""
        return None if self.shard is None else (self.number, self.shard.dump())


class Serving(Shard):
    """A ``Shard`` in an actor.

    Args:
        shard_args: arguments of ``Shard``.
        index: of this server.
        places: of snapshots; None makes none.
        twin: the actor of its ``Copy``; None has none.
        begin: updates of the snapshot that the job goes on from; None begins anew.
        again: what ``Shard.again`` is told then.
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
        except Exception as error:  # raised here it would be told as the loss of an actor
            LOG.exception("server %d cannot begin", index)
            self.gone = f"server {index} cannot begin: {type(error).__name__}: {error}"
        if twin is not None:
            self.on_change = self._forward
            if self.number >= 0 or self.store.values is not None:
                self._catch_up()
        self.writer = None if places is None else Writer(self, places, index)

    def _recover(self, places: Places | None, begin: int) -> bool:
        """Take up what this server held before its process was lost; False: what it began with
        stands."""
        import ray

        try:
            twin_dump = self.twin and ray.get(self.twin.dump.remote(), timeout=self.wait_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            LOG.warning("server %d: its copy does not answer: %s", self.index, error)
            twin_dump = None
        copied = begin
        if twin_dump is not None and twin_dump[0] >= 0:
            copied = twin_dump[1][0]["version"]
        if places is not None:  # of newer ones it went on without its copy, or has none
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
        """Take memory that a worker on this host shares from now on; False if it is elsewhere."""
        import ray

        slot = attach(key, room, ray.get_runtime_context().get_node_id())
        if slot is not None:
            self.slots[worker] = slot
        return slot is not None

    def answer(self, worker: int, method: str, letter: Letter) -> Any:
        """Call a method with what a letter in a worker's slot says; None without that slot.

        Arrays are read where they lie only by ``push_pull``, which has done so when it returns.
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
        """See ``Shard``; the copy has it too when this returns."""
        self._check()
        took = super().push(*args)
        self._settle()
        return took

    def pull(self, *args: Any) -> Any:
        """See ``Shard``."""
        self._check()
        return super().pull(*args)

    def finish(self) -> str:
        """Write the last snapshot; what is wrong with it."""
        if self.writer is None or self.store.values is None:
            return ""
        return self.writer.finish()

    def _forward(self, change: Change) -> None:
        """Have a change repeated; the lock is held, so that they go in order."""
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
        """Give the copy everything, once it is there again."""
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
            if twin is not None:  # the first to find out
                LOG.warning("server %d goes on without a copy: it is gone", self.index)
                ray.kill(twin, no_restart=True)  # what it has is of the past from now on
