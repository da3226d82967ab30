"""Shared memory of a worker and a server: nothing else is read than was written, nothing stays."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from executor.parameter_server import LostError, ParameterServer, Rule, layout_of, train
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.store import Pushed
from executor.parameter_server.transport.serving import Serving
from executor.parameter_server.transport.slots import (
    ALIGN,
    FOLDER,
    REPLY,
    SPARE,
    Slot,
    attach,
    new_slot,
)

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no memory file system")


def pair(room: int) -> tuple[Slot, Slot]:
    with new_slot("here", room) as found:
        assert found is not None
        mine, key = found
        theirs = attach(key, room, "here")
    assert theirs is not None and attach(key, room, "here") is None
    return mine, theirs


def test_what_is_written_is_read_at_the_other_end() -> None:
    mine, theirs = pair(1000)
    flats = mine.flats({"bfloat16": 7, "float32": 33})
    flats["bfloat16"][:], flats["float32"][:] = 1.5, np.arange(33)
    rows = {"t": (np.arange(3), np.ones((3, 2), np.float64))}
    pushed = Pushed(flats, rows, seen=4)
    letter = mine.write((1, 2, pushed))
    assert letter is not None
    for copy in (False, True):
        _, _, got = theirs.read(letter, copy=copy)
        assert got.dense["bfloat16"].dtype == ml_dtypes.bfloat16 and got.seen == 4
        np.testing.assert_array_equal(got.dense["float32"], np.arange(33))
        np.testing.assert_array_equal(got.rows["t"][1], np.ones((3, 2)))
        assert all(x.ctypes.data % ALIGN == 0 for x in got.dense.values()) or copy
        flats["float32"][0] = 9.0
        assert got.dense["float32"][0] == (0.0 if copy else 9.0)
        flats["float32"][0] = 0.0
        assert not np.shares_memory(got.rows["t"][1], theirs.bytes)


def test_an_answer_does_not_touch_what_is_pushed() -> None:
    mine, theirs = pair(4000)
    flats = mine.flats({"float32": 1000})
    flats["float32"][:] = 3.0
    letter = mine.write(Pushed(flats))
    answer = theirs.write({"float32": np.arange(1000.0)}, answer=True)
    assert letter is not None and answer is not None
    np.testing.assert_array_equal(mine.read(answer, copy=True)["float32"], np.arange(1000.0))
    np.testing.assert_array_equal(theirs.read(letter, copy=False).dense["float32"], 3.0)


def test_what_has_no_room_is_not_written() -> None:
    mine, theirs = pair(64)
    before = mine.bytes.copy()
    assert mine.write(np.ones(SPARE + 1, np.uint8)) is None
    assert theirs.write(np.ones(REPLY + 1, np.uint8), answer=True) is None
    np.testing.assert_array_equal(mine.bytes, before)
    whole = mine.write(np.ones(SPARE, np.uint8))
    assert whole is not None and theirs.read(whole, copy=True).sum() == SPARE
    empty = mine.write((np.empty(0), "text"))
    assert empty is not None and theirs.read(empty, copy=True)[1] == "text"


def test_another_host_has_no_part_in_it() -> None:
    with new_slot("here", 10) as found:
        assert found is not None
        _, key = found
        assert attach(key, 10, "there") is None
        assert attach(replace(key, token=b"x" * ALIGN), 10, "here") is None
        assert attach(key, 10, "here") is not None


def test_no_memory_is_no_slot() -> None:
    with new_slot("here", 2**60) as found:
        assert found is None
    with new_slot("here", 0, shutil.disk_usage(FOLDER).total) as found:
        assert found is None  # Ray's own store may need what is there


def test_a_file_has_no_name() -> None:
    before = set(os.listdir(FOLDER))
    with new_slot("here", 100) as found:
        assert found is not None and set(os.listdir(FOLDER)) <= before


class One(Serving):
    """A server that is no actor."""

    def __init__(self) -> None:
        Shard.__init__(self, Rule("async"), 1, None, 1.0)
        self.twin, self.mine, self.gone = None, threading.local(), ""
        self.slots = {}


def test_a_letter_is_read_in_its_own_slot() -> None:
    server = One()
    server.init({"float32": np.zeros(4, np.float32)})
    (old, theirs), (new, other) = pair(16), pair(16)
    server.slots[0] = theirs
    for mine in (old, new):
        mine.flats({"float32": 4})["float32"][:] = 1.0
    letter = old.write((0, 1, Pushed(old.flats({"float32": 4}))))
    assert letter is not None and server.answer(0, "push", letter) is True
    server.slots[0] = other  # the worker has given the old one up
    assert server.answer(0, "push", letter) is None and server.answer(1, "push", letter) is None
    assert server.counts.applied == 1
    server.leave(0)
    with pytest.raises(LostError, match="worker 0 has left"):
        server.answer(0, "push", letter)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_on_ray_values_stay_as_they_were_read(mode: str) -> None:
    """Small ones and large ones; a failed call in between; an array that is pushed again."""
    pytest.importorskip("ray")

    def loop(server: ParameterServer) -> list[float]:
        from planner.errors import RequestError

        params = {"small": np.zeros(5, np.float32), "large": np.zeros(2**20, np.float32)}
        push = {name: np.ones_like(x) for name, x in params.items()}
        kept = [server.init(params)]
        for k in range(6):
            if k == 3:
                with pytest.raises(RequestError):
                    server.pull_rows({"nothing": [0]})
                wrong = Pushed({"float16": params["small"]})
                with pytest.raises(RequestError, match="the server holds none"):
                    server._calls.call("push", [(server.rank, 99, wrong)] * 2)
            kept.append(server.push_pull(push))
        assert server.push(push)
        for x in push.values():
            x[...] = 77.0
        kept.append(server.pull())
        for tree in kept:
            for x in tree.values():
                assert x.min() == x.max() and not x.flags.writeable
        return [float(tree[name][0]) for tree in kept for name in tree]

    done = train(loop, workers=1, servers=2, mode=mode, split_bytes=2**20, wait_s=60)
    assert done.returned[0] == [float(k) for k in range(8) for _ in range(2)]


def test_few_bytes_go_to_one_server() -> None:
    """The others take no part, and a job of theirs is as any other."""
    params: dict[str, Any] = {"a": np.zeros(10, np.float32), "b": np.zeros(3, np.float32)}
    layout = layout_of(params, 3)
    assert layout.bytes_of_server == (52, 0, 0) and layout.busy(tables=False) == (0,)
    assert layout.busy(tables=True) == (0, 1, 2)
    assert layout_of(params, 3, split_bytes=40).busy(tables=False) == (0, 1)
    assert layout_of({}, 3).busy(tables=False) == (0,)
    many = [np.zeros(2**20, np.float32) for _ in range(6)]  # whole, and still spread
    assert layout_of(many, 3, split_bytes=2**30).bytes_of_server == (2**23,) * 3

    def loop(server: ParameterServer) -> float:
        server.init(params)
        for _ in range(4):
            server.push_pull({k: np.ones_like(x) for k, x in params.items()})
        server.barrier()
        return float(server.pull()["a"][0])

    done = train(loop, workers=2, servers=3, backend="local", split_bytes=2**20, wait_s=30)
    assert done.returned == (4.0, 4.0)
    assert [c.updates for c in done.counts] == [4, 0, 0]
    assert Rule().mode == "sync"
