"""Items for workers: fixed shares, and a queue that loses none."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.parameter_server import (
    FixedShardsPartitioner,
    ParameterServer,
    Rule,
    WaitError,
    train,
)
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.transport.links import LocalLinks
from executor.parameter_server.worker.queue import ItemRequest, Queue
from executor.parameter_server.worker.shares import fixed, index_at
from planner.errors import RequestError

COUNTS, WORKERS = st.integers(1, 12), st.integers(1, 5)
SEEDS = st.none() | st.integers(0, 3)


def alone(workers: int = 1, wait_s: float = 5.0, servers: int = 1) -> list[ParameterServer]:
    shards = [Shard(Rule(), workers, None, wait_s) for _ in range(servers)]
    links = LocalLinks(shards, workers)
    return [ParameterServer(links, k, workers, wait_s=wait_s) for k in range(workers)]


@given(COUNTS, WORKERS, st.sampled_from(["leave", "pad", "drop"]), st.integers(1, 3), SEEDS)
def test_fixed_shares(count: int, workers: int, policy: str, epochs: int, seed: Any) -> None:
    shares = [
        list(fixed(count, k, workers, policy=policy, epochs=epochs, seed=seed))
        for k in range(workers)
    ]
    given_out = Counter(k for share in shares for k in share)
    sizes = {len(share) for share in shares}
    if policy == "leave":
        assert given_out == dict.fromkeys(range(count), epochs)
        assert max(sizes) - min(sizes) <= epochs
        if seed is None:
            assert shares == [list(range(k, count, workers)) * epochs for k in range(workers)]
    elif policy == "pad":
        assert sizes == {epochs * -(-count // workers)} and set(given_out) == set(range(count))
    else:
        assert (
            sizes == {epochs * (count // workers)} and max(given_out.values(), default=0) <= epochs
        )


def test_an_order_by_epoch() -> None:
    orders = [[index_at(p, 20, 3) for p in range(e * 20, e * 20 + 20)] for e in range(2)]
    assert orders[0] != orders[1] != list(range(20))
    assert all(sorted(order) == list(range(20)) for order in orders)
    expected = np.concatenate([np.random.default_rng((3, e)).permutation(20) for e in range(2)])
    assert [x for order in orders for x in order] == expected.tolist()
    shares = [list(fixed(20, k, 3, policy="leave", epochs=2, seed=3)) for k in range(3)]
    assert shares[1] == [int(x) for e in (expected[:20], expected[20:]) for x in e[1::3]]
    assert {type(x) for own in [*orders, *shares] for x in own} == {int}


def test_an_order_is_made_once_by_workers_in_different_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Counter[Any]()
    generator = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda s: made.update([s]) or generator(s))
    shares = [fixed(50, k, 4, policy="drop", epochs=4, seed=8) for k in range(4)]
    for rank, share in enumerate(shares):
        for _ in range(rank * 12):  # each in another epoch
            next(share)
    made.clear()
    seen = [[next(share) for share in shares] for _ in range(12)]
    assert all(len(set(own)) == 12 for own in zip(*seen, strict=True))
    assert max(made.values()) == 1


class Model:
    """Workers that take from server 0 of a job, which may be lost and dumped between any two
    calls; what they finished."""

    def __init__(self, workers: int, wanted: ItemRequest) -> None:
        self.made = (Rule(), workers, None, 1.0)
        self.workers, self.wanted = workers, wanted
        self.shard, self.copy = Shard(*self.made), Shard(*self.made)
        self.shard.on_change = self.changed
        self.finished: Counter[int] = Counter()
        self.has: dict[int, int] = {}
        self.ended: set[int] = set()

    def changed(self, change: Any) -> None:
        method, args = change  # as serving.Copy does
        getattr(self.copy, method)(*args)

    def take(self, worker: int, *, twice: bool) -> None:
        """A worker finishes what it has and takes the next, maybe asking again for the answer."""
        if worker in self.ended:
            return
        done = self.has.pop(worker, None)
        if done is not None:
            self.finished[done] += 1
        taken = self.shard.take(worker, self.wanted, done)
        if twice:
            taken = self.shard.take(worker, self.wanted, done)
        if taken.place is not None:
            self.has[worker] = taken.place
        elif not taken.held:
            self.ended.add(worker)
        else:
            assert set(taken.held) <= set(self.has)  # it waits for somebody who is there

    def lose(self, worker: int) -> None:
        self.has.pop(worker, None)
        self.shard.leave(worker)
        self.shard.join(worker)  # started again

    def restart(self, worker: int) -> None:
        """A worker for whom the others wait begins anew: it has its own item again."""
        if worker in self.has:
            assert self.shard.take(worker, self.wanted, None).place == self.has[worker]

    def dump(self) -> None:
        facts, arrays = self.shard.dump()
        assert self.copy.dump()[0]["queues"] == facts["queues"]
        other = Shard(*self.made)
        other.on_change = self.shard.on_change
        other.load(json.loads(json.dumps(facts)), arrays)
        assert other.queues == self.shard.queues
        self.shard = other


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "take twice", "lose", "restart", "dump"]), WORKERS),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(STEPS, COUNTS, WORKERS, st.integers(1, 2))
def test_every_item_is_done(steps: list[Any], count: int, workers: int, epochs: int) -> None:
    """Whatever happens, once to its end, and no worker waits for nobody."""
    model = Model(workers, ItemRequest(1, count, epochs, None))
    for what, who in steps:
        worker = who % workers
        if what.startswith("take"):
            model.take(worker, twice=what == "take twice")
        elif what == "dump":
            model.dump()
        else:
            getattr(model, what)(worker)
    for _ in range(count * epochs + 2):
        for worker in range(workers):
            model.take(worker, twice=False)
    assert model.ended == set(range(workers)) and not model.has
    # what a lost worker had was not counted as finished: its next holder finishes it
    assert model.finished == dict.fromkeys(range(count * epochs), 1)


def test_who_was_taken_for_lost_may_finish() -> None:
    queue = Queue(2, 1, None)
    taken, queue = queue.take(0, None)
    queue = queue.leave(0)
    assert queue.back == (0,) and queue.leave(0) is queue
    taken, queue = queue.take(0, 0)
    assert taken.place == 1 and queue.back == ()


def test_others_get_the_item_of_a_lost_worker() -> None:
    queue = Queue(2, 1, None)
    _, queue = queue.take(0, None)
    _, queue = queue.take(1, None)
    taken, queue = queue.take(1, 1)
    assert taken.place is None and taken.held == {0: 0}
    taken, queue = queue.leave(0).take(1, 1)
    assert taken.place == 0
    taken, queue = queue.take(1, 0)
    assert taken.place is None and not taken.held


def test_an_item_comes_back_from_who_is_not_there_any_more() -> None:
    """A call of a lost worker that arrives late, or one that was away when it was lost."""
    shard = Shard(Rule(), 2, None, 1.0)
    shard.leave(0)
    assert shard.take(0, ItemRequest(1, 1, 1, None)).place == 0
    assert shard.take(1, ItemRequest(1, 1, 1, None)).held == {0: 0}
    shard.leave(0)
    assert shard.take(1, ItemRequest(1, 1, 1, None)).place == 0


def test_other_items_are_refused() -> None:
    one, two = alone(2)
    assert next(one.shares("abc", how="queue")) == "a"
    with pytest.raises(RequestError, match=r"queue 1 of this job has 3 items .* got 2"):
        next(two.shares("ab", how="queue"))
    with pytest.raises(RequestError, match="seed None, got 3 and 1"):
        next(alone_again(two).shares("abc", how="queue", seed=1))


def alone_again(server: ParameterServer) -> ParameterServer:
    """The same worker, started again."""
    return ParameterServer(server._links, server.rank, server.num_workers)


@pytest.mark.parametrize(
    ("items", "options", "said"),
    [
        ("abc", {"how": "fifo"}, "how='fifo'"),
        ("abc", {"policy": "cut"}, "policy='cut'"),
        ("abc", {"how": "queue", "policy": "pad"}, "policy='pad' with how='queue'"),
        ("", {}, "0 items"),
        ("abc", {"epochs": 0}, "epochs=0"),
        ("abc", {"seed": -1}, "seed=-1"),
        ("abc", {"seed": 0.5}, "seed=0.5: got float, expected a whole number"),
        ("abc", {"epochs": "2"}, "epochs='2': got str, expected a whole number"),
        ("a", {"policy": "drop"}, "1 items for 2 workers"),
    ],
)
def test_what_makes_no_sense(items: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        alone(2)[0].shares(items, **options)


def test_a_queue_needs_the_optimizer_on_servers() -> None:
    links = LocalLinks([Shard(Rule(), 1, None, 1.0)], 1)
    server = ParameterServer(links, 0, 1, optimizer=optax.sgd(1.0), update_on="worker")
    with pytest.raises(RequestError, match="would miss means"):
        server.shares("abc", how="queue")


def test_a_wait_says_who_has_what() -> None:
    one, two = alone(2, wait_s=0.3)
    first, last = one.shares("ab", how="queue", seed=0), two.shares("ab", how="queue", seed=0)
    assert {next(first), next(last)} == {"a", "b"}
    item = index_at(0, 2, 0)
    with pytest.raises(WaitError, match=rf"worker 0 has item {item}; an item may take"):
        next(last)


def test_a_worker_that_comes_back_has_its_item_again() -> None:
    (server,) = alone()
    items = server.shares("abc", how="queue", epochs=2)
    assert [next(items), next(items)] == ["a", "b"]
    again = alone_again(server).shares("abc", how="queue", epochs=2)
    assert list(again) == ["b", "c", "a", "b", "c"]


def test_queues_follow_each_other() -> None:
    """A loop that asks anew in each epoch skips what is finished when it is started again."""
    (server,) = alone()
    assert [list(server.shares("ab", how="queue")) for _ in range(2)] == [["a", "b"]] * 2
    again = alone_again(server)
    assert [list(again.shares("ab", how="queue")) for _ in range(3)] == [[], [], ["a", "b"]]


def each(how: str, policy: str = "leave", epochs: int = 1) -> Any:
    """Two steps on each item; what this worker had."""

    def loop(server: ParameterServer) -> list[int]:
        server.init({"w": jnp.zeros(3), "b": jnp.zeros((2, 2))})
        mine = []
        for item in server.shares(range(7), how=how, policy=policy, epochs=epochs):
            server.pull()
            for _ in range(2 + 3 * (item == 6)):  # the last is longer: others wait for it
                server.push_pull({"w": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)})
            mine.append(item)
        return mine

    return loop


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "rule", [{"mode": "sync"}, {"mode": "ssp", "staleness": 1}, {"mode": "async"}], ids=str
)
def test_threads_share_a_queue(rule: dict[str, Any], servers: int) -> None:
    """Uneven: who waits for the last items, or has ended, holds up nobody, in any mode."""
    done = train(
        each("queue", epochs=2), workers=3, servers=servers, backend="local", wait_s=30, **rule
    )
    assert Counter(k for mine in done.returned for k in mine) == dict.fromkeys(range(7), 2)
    for counts in done.counts:
        assert counts.applied + sum(counts.discarded.values()) == 2 * (7 * 2 + 3)
        assert not counts.lost


@pytest.mark.parametrize("policy", ["leave", "pad", "drop"])
def test_threads_have_fixed_shares(policy: str) -> None:
    done = train(each("fixed", policy), workers=3, servers=2, backend="local", wait_s=30)
    expected = {"leave": ([0, 3, 6], [1, 4], [2, 5]), "drop": ([0, 3], [1, 4], [2, 5])}
    expected["pad"] = ([0, 3, 6], [1, 4, 0], [2, 5, 1])
    assert done.returned == expected[policy]


@pytest.mark.parametrize(("servers", "workers"), [(2, 2), (1, 3)])
def test_a_job_goes_on_with_its_queue(tmp_path: Path, servers: int, workers: int) -> None:
    """Also with other numbers: what is finished is not done again, more epochs are."""
    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "mode": "async"}
    kept |= {"snapshot_every": 1, "wait_s": 30}

    def stops(server: ParameterServer) -> list[int]:
        server.init({"w": jnp.zeros(3)})
        mine = []
        for item in server.shares(range(7), how="queue"):
            if len(mine) == 2:
                break  # with a third item in hand, which comes back
            server.push_pull({"w": np.ones(3, np.float32)})
            mine.append(item)
        return mine

    first = train(stops, workers=2, servers=2, **kept)
    rest = train(each_of_w, workers=workers, servers=servers, **kept)
    had = Counter(k for done in (first, rest) for mine in done.returned for k in mine)
    # the snapshot is of the last update: who asked for the next item after it asked in vain
    assert set(had) == set(range(7)) and sum(had.values()) <= 14 + 2
    assert all(n >= 2 for n in had.values())


def test_items_that_were_finished_after_the_last_snapshot_are_in_it(tmp_path: Path) -> None:
    def loop(server: ParameterServer) -> list[int]:
        server.init({"w": jnp.zeros(3)})
        found = []
        for item in server.shares(range(3), how="queue"):
            server.push({"w": np.ones(3, np.float32)})
            time.sleep(0.3)  # the snapshot is written
            found.append(item)
        return found

    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "snapshot_every": 1}
    kept |= {"workers": 1, "wait_s": 30}
    assert train(loop, **kept).returned == ([0, 1, 2],)
    assert train(loop, **kept).returned == ([],)


def test_numpys_numbers_are_written_with_a_job(tmp_path: Path) -> None:
    def loop(server: ParameterServer) -> list[int]:
        server.init({"w": jnp.zeros(3)})
        found = []
        for item in server.shares(range(3), how="queue", epochs=np.int64(2), seed=np.int64(5)):
            server.push_pull({"w": np.ones(3, np.float32)})
            found.append(item)
        return found

    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "snapshot_every": 1}
    kept |= {"mode": "async", "partition": FixedShardsPartitioner(np.int64(2)), "wait_s": 30}
    done = train(loop, workers=np.int64(2), servers=np.int64(2), **kept)
    assert Counter(k for mine in done.returned for k in mine) == {0: 2, 1: 2, 2: 2}
    assert train(loop, workers=2, servers=2, **kept).returned == ([], [])  # all were done


def each_of_w(server: ParameterServer) -> list[int]:
    server.init({"w": jnp.zeros(3)})
    mine = []
    for item in server.shares(range(7), how="queue", epochs=2):
        server.push_pull({"w": np.ones(3, np.float32)})
        mine.append(item)
    return mine


@pytest.mark.slow
@pytest.mark.parametrize("on_lost", ["leave", "wait"])
def test_the_items_of_a_killed_worker_on_ray(tmp_path: Path, on_lost: str) -> None:
    pytest.importorskip("ray")

    def dies(server: ParameterServer) -> None:
        server.init({"w": jnp.zeros(3)})
        for item in server.shares(range(9), how="queue"):
            server.pull()
            with (tmp_path / f"begun-{item}").open("a") as file:
                file.write(f"{server.rank}\n")
            if server.rank == 1 and not (tmp_path / "dead").exists():
                (tmp_path / "dead").touch()
                os._exit(9)
            for _ in range(3):
                server.push_pull({"w": np.ones(3, np.float32)})
            (tmp_path / f"done-{item}").touch()

    restarts = int(on_lost == "wait")
    done = train(
        dies, workers=3, servers=2, wait_s=60, replicas=True, restarts=restarts, on_lost=on_lost
    )
    assert len(list(tmp_path.glob("done-*"))) == 9
    begun = [(tmp_path / f"begun-{k}").read_text().split() for k in range(9)]
    (twice,) = (b for b in begun if len(b) > 1)
    assert len(twice) == 2 and twice[0] == "1"
    if restarts:
        assert done.restarts == {1: 1} and twice == ["1", "1"]
    else:
        assert done.lost == (1,)
