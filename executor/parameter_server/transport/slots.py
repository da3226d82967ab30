"""Memory that a worker shares with each server on its host: messages go through Ray, and their
arrays lie in this memory.

A message of half a megabyte costs Ray several times as much as an empty one, and a larger one is
copied once more than needed. A slot belongs to one worker and one server, and one call at a time
uses it. After a failed call it is never used again, so a process that still reads it sees unchanged
data. Its file has no name except that of the worker's open handle, so nothing is left behind when a
process is lost. On another host, or one without such a folder, there are no slots, and everything
goes through Ray.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from executor.parameter_server.placement.layout import Array, Flat
from executor.parameter_server.transport.wire import INLINE_BYTES

FOLDER = Path("/dev/shm")
ALIGN = 64
"""Arrays begin at multiples of this many bytes, so that XLA:CPU reads them in place."""
REPLY = INLINE_BYTES + 2**16
"""Bytes for answers; larger ones go through Ray."""
SPARE = INLINE_BYTES
"""Bytes for everything except answers and flat arrays."""


@dataclass(frozen=True)
class Letter:
    """A message whose arrays lie in a slot.

    Attributes:
        token: token of the slot.
        body: the message, pickled without its arrays.
        parts: where each array begins in the slot, and its number of bytes.
    """

    token: bytes
    body: bytes
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlotKey:
    """How a server locates a slot: only a process on the same host can read the token there."""

    path: str
    token: bytes
    node: str


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to the next place where an array may begin."""
    return -(-nbytes // ALIGN) * ALIGN


class Slot:
    """Shared memory: room for answers, then for flat arrays that are written in place, then for
    everything else.

    Args:
        memory: the mapped file; begins with the token.
        room: bytes of the flat arrays.
    """

    def __init__(self, memory: mmap.mmap, room: int) -> None:
        self.token, self.bytes = memory[:ALIGN], np.frombuffer(memory, np.uint8)
        self.begin, self.end = ALIGN + REPLY, ALIGN + REPLY + aligned(room)

    def flats(self, sizes: Mapping[str, int]) -> Flat:
        """Flat arrays in the room for them; ``sizes`` is the number of elements by dtype."""
        flat, begin = {}, self.begin
        for name, count in sizes.items():
            end = begin + count * np.dtype(name).itemsize
            flat[name] = self.bytes[begin:end].view(np.dtype(name))
            begin = aligned(end)
        return flat

    def write(self, what: Any, *, answer: bool = False) -> Letter | None:
        """Write a message here; returns None if there is no room for it."""
        begin, end = (ALIGN, self.begin) if answer else (self.end, self.bytes.size)
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(what)
        arrays = [np.frombuffer(b.raw(), np.uint8) if b.raw().nbytes else _NONE for b in buffers]
        places = [x.ctypes.data - self.bytes.ctypes.data for x in arrays]
        here = [self.begin <= at < self.end for at in places]
        rest = sum(aligned(x.size) for x, is_here in zip(arrays, here, strict=True) if not is_here)
        if begin + rest > end:
            return None
        for k, part in enumerate(arrays):
            if not here[k]:
                places[k], begin = begin, aligned(begin + part.size)
                self.bytes[places[k] : places[k] + part.size] = part
        sizes = (x.size for x in arrays)
        return Letter(self.token, file.getvalue(), tuple(zip(places, sizes, strict=True)))

    def read(self, letter: Letter, *, copy: bool) -> Any:
        """Read a letter's message. Flat arrays are views unless ``copy``; others are copied."""
        return pickle.loads(
            letter.body,
            buffers=[
                _read_only(self.bytes[at : at + size])
                if not copy and self.begin <= at < self.end
                else self.bytes[at : at + size].copy()
                for at, size in letter.parts
            ],
        )


class _Pickler(pickle.Pickler):
    """Also pickles arrays of dtypes that are not NumPy's own (bfloat16) out of band."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and obj.dtype.isbuiltin == 2 and obj.flags.c_contiguous:
            return _viewed, (obj.reshape(-1).view(np.uint8), str(obj.dtype), obj.shape)
        return NotImplemented


def _viewed(raw: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    return raw.view(np.dtype(dtype)).reshape(shape)


_NONE = np.empty(0, np.uint8)


def _read_only(x: Array) -> Array:
    x = x.view()
    x.flags.writeable = False
    return x


@contextlib.contextmanager
def new_slot(node: str, room: int, reserved: int = 0) -> Iterator[tuple[Slot, SlotKey] | None]:
    """A new slot and its key, which is valid within the context; None if there is no memory for it.

    Args:
        node: Ray node ID of this process.
        room: bytes of the flat arrays.
        reserved: bytes of the folder to leave free for others.
    """
    size = ALIGN + REPLY + aligned(room) + SPARE
    with contextlib.ExitStack() as stack:
        try:
            if shutil.disk_usage(FOLDER).free - size < reserved:
                raise OSError("too little is left")
            file = stack.enter_context(tempfile.TemporaryFile(dir=FOLDER))
            os.posix_fallocate(file.fileno(), 0, size)  # otherwise lack of memory is a fatal signal
            memory = mmap.mmap(file.fileno(), size)
        except OSError:
            yield None
            return
        memory[:ALIGN] = secrets.token_bytes(ALIGN)
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield Slot(memory, room), SlotKey(path, memory[:ALIGN], node)


def attach(key: SlotKey, room: int, node: str) -> Slot | None:
    """The other end of a slot; None on another host."""
    if key.node != node:
        return None
    try:
        with open(key.path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):  # another file has that number there
        return None
    return Slot(memory, room) if memory[:ALIGN] == key.token else None
