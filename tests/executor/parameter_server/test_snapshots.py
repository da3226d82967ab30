"""Snapshots: whole or not at all, read by any number of servers; jobs that go on."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.parameter_server import Counts, ParameterServer, Rule, layout_of, train
from executor.parameter_server.placement.layout import layout_from
from executor.parameter_server.placement.reshard import reshard, respread
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.snapshots import (
    Places,
    Writer,
    chosen,
    earlier,
    listed,
    read,
    replace_all,
    write,
)
from executor.parameter_server.server.store import Pushed
from executor.parameter_server.transport.links import LocalLinks
from planner.errors import RequestError

OPTIMIZER = optax.adam(0.05)
SHAPES = {"w": (5, 7), "b": (3,), "h": (4, 4)}
DRAW = np.random.default_rng(0)


def tree(draw: np.random.Generator) -> Any:
    made = {k: draw.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    return made | {"h": made["h"].astype(ml_dtypes.bfloat16)}


def trained(servers: int, split: int, steps: int = 4) -> tuple[Any, list[Shard]]:
    """Servers of a synchronous job of one worker, after some steps, always the same."""
    draw = np.random.default_rng(3)
    params = tree(draw)
    layout = layout_of(params, servers, split_bytes=split)
    shards = [Shard(Rule(), 1, OPTIMIZER, 1.0) for _ in range(servers)]
    for shard, flat in zip(shards, layout.scatter(params), strict=True):
        shard.init(flat, None, layout.about)
    for k in range(steps):
        for shard, flat in zip(shards, layout.scatter(tree(draw)), strict=True):
            shard.push(0, k + 1, Pushed(flat))
    return layout, shards


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([16, 64, 10**6]))
def test_another_number_of_servers_holds_the_same(old: int, new: int, split: int) -> None:
    """Dumped by some servers, spread over others: what those hold had they been there all along."""
    before, shards = trained(old, split)
    after, expected = trained(new, 40)
    found = reshard(before, after, [shard.dump() for shard in shards], OPTIMIZER)
    for (facts, arrays), shard in zip(found, expected, strict=True):
        _, wanted = shard.dump()
        if not any(shard.store.read()):
            continue  # a server without any elements has not counted updates
        assert facts["version"] == 4 and facts["last"] == {"0": [4, True]}
        assert set(arrays) == set(wanted)
        for name, x in wanted.items():
            assert arrays[name].dtype == x.dtype
            np.testing.assert_array_equal(arrays[name], x)
    back = reshard(after, before, found, OPTIMIZER)
    for (_, arrays), shard in zip(back, shards, strict=True):
        if any(shard.store.read()):
            jax.tree.map(np.testing.assert_array_equal, arrays, shard.dump()[1])


def test_a_server_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    _, (shard,) = trained(1, 10**6)
    shard.push(0, 5, Pushed(shard.store.read()))
    write(tmp_path, shard.dump())
    other = Shard(Rule(), 1, OPTIMIZER, 1.0)
    other.load(*read(tmp_path, 5))
    for one in (shard, other):
        assert one.push(0, 5, Pushed(one.store.read())) is True  # once more: not applied again
        one.push(0, 6, Pushed(one.store.read()))
        assert one.counts.duplicates == 1 and one.version == 6
    assert shard.counts == other.counts
    jax.tree.map(np.testing.assert_array_equal, shard.dump()[1], other.dump()[1])


def test_laid_aside_pushes_are_kept(tmp_path: Path) -> None:
    made = (Rule(), 2, None, 0.05)
    shard = Shard(*made)
    shard.init({"float32": np.zeros(3, np.float32)})
    shard.push(1, 1, Pushed({"float32": np.ones(3, np.float32)}))
    write(tmp_path, shard.dump())
    other = Shard(*made)
    other.load(*read(tmp_path, 0))
    other.push(0, 1, Pushed({"float32": np.full(3, 3, np.float32)}))
    assert float(other.pull(0).values["float32"][0]) == 2.0


def test_what_was_lost_with_a_server_is_counted() -> None:
    made = (Rule("ssp", 1), 2, None, 0.05)
    shard = Shard(*made)
    shard.init({"float32": np.zeros(3, np.float32)})
    one = Pushed({"float32": np.ones(3, np.float32)})
    shard.push(0, 1, one)
    dump = shard.dump()
    shard.push(0, 2, one), shard.push(0, 3, one), shard.push(1, 1, one)
    other = Shard(*made)
    other.load(*dump)
    other.push(0, 4, one)
    assert other.counts.lost == {0: 2} and other.clocks.at == {0: 4, 1: 0}


def test_a_snapshot_is_whole_or_not_there(tmp_path: Path) -> None:
    _, (shard,) = trained(1, 10**6)
    path = write(tmp_path, shard.dump())
    whole = path.read_bytes()
    (tmp_path / ".000000000009.npz.77").write_bytes(whole[: len(whole) // 2])  # killed in a write
    assert listed(tmp_path) == [4]
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=r"000000000004.npz can't be read .* remove it"):
        read(tmp_path, 4)


def test_synchronous_servers_go_on_from_a_common_update(tmp_path: Path) -> None:
    places = Places(tmp_path, 2, 1)
    about = layout_of(np.zeros(4, np.float32), 2, split_bytes=8).about
    for server, versions in ((0, (3, 4, 5)), (1, (2, 3, 4))):
        for version in versions:
            write(places.of(server), ({"version": version, "about": about}, {}))
    assert listed(places.of(0)) == [4, 5]  # the last two
    assert chosen(places, "sync") == (4, 4) and chosen(places, "async") == (5, 4)
    assert earlier(Places(tmp_path, 3, 1), "sync") == (places, (4, 4))
    assert chosen(Places(tmp_path, 3, 1), "sync") is None


def test_a_server_that_holds_nothing_does_not_hold_back_the_others(tmp_path: Path) -> None:
    places = Places(tmp_path, 2, 1)
    about = layout_of(np.zeros(4, np.float32), 2).about
    for server, versions in ((0, (4, 5)), (1, (0,))):
        for version in versions:
            write(places.of(server), ({"version": version, "about": about}, {}))
    assert chosen(places, "sync") == chosen(places, "async") == (5, 0)
    (places.of(0) / "000000000005.npz").unlink()
    assert chosen(places, "sync") == (4, 0)
    (places.of(1) / "000000000000.npz").unlink()
    assert chosen(places, "sync") is None  # it was never begun


X = DRAW.normal(size=(96, 12)).astype(np.float32)
Y = (X @ DRAW.normal(size=(12, 3)) + 0.5).astype(np.float32)


@jax.jit
def gradient(params: Any, x: Any, y: Any) -> Any:
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)


def loop(until: int) -> Any:
    def run(server: ParameterServer) -> int:
        params = server.init({"w": jnp.zeros((12, 3)), "b": jnp.zeros(3)})
        begun = server.clock
        for k in range(begun, until):
            rows = slice(k % 8 * 12, k % 8 * 12 + 12)  # all workers the same: W does not matter
            params = server.push_pull(gradient(params, X[rows], Y[rows]))
        return begun

    return run


@pytest.mark.parametrize(("servers", "workers"), [(2, 2), (1, 2), (3, 2), (2, 1)])
def test_a_job_goes_on_with_others(tmp_path: Path, servers: int, workers: int) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "backend": "local", "split_bytes": 40}
    kept = options | {"snapshots": tmp_path, "snapshot_every": 5}
    first = train(loop(20), workers=2, servers=2, **kept)
    assert first.returned == (0, 0)
    rest = train(loop(50), workers=workers, servers=servers, **kept)
    assert rest.returned == (20,) * workers
    whole = train(loop(50), workers=2, servers=2, **options)
    jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)
    assert [p.name for p in tmp_path.iterdir()] == [f"of-{servers}"]


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_a_stale_job_goes_on_too(tmp_path: Path, mode: str) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "backend": "local", "mode": mode}
    kept = options | {"snapshots": tmp_path, "snapshot_every": 3}
    train(loop(20), workers=3, servers=2, **kept)
    rest = train(loop(40), workers=2, servers=1, **kept)
    assert rest.returned == (30, 30)  # 60 pushes were in
    assert rest.counts[0].applied == 80


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "snapshot_every": 1}
    train(loop(2), workers=1, **kept)

    def other(server: ParameterServer) -> None:
        server.init({"w": jnp.zeros((12, 4)), "b": jnp.zeros(3)})

    with pytest.raises(RequestError, match=r"\['w'\]: got \('float32', \[12, 4\]\), they have"):
        train(other, workers=1, **kept)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """At the beginning it ends the job; later, what was trained is there all the same."""
    kept: dict[str, Any] = {"snapshots": tmp_path, "snapshot_every": 1}
    (tmp_path / "of-1").write_text("in the way")
    with pytest.raises(
        RequestError, match=r"server 0: no snapshot.*a folder that every server can"
    ):
        train(loop(2), workers=1, backend="local", **kept)
    (tmp_path / "of-1").unlink()

    def late(server: ParameterServer) -> None:
        whole = server.init(tree(DRAW))
        shutil.rmtree(tmp_path / "of-1")
        (tmp_path / "of-1").write_text("in the way")
        for _ in range(2):
            server.push_pull(whole)

    done = train(late, workers=1, backend="local", **kept)
    assert [text.split(" was written: ")[0] for text in done.unsaved] == ["server 0: no snapshot"]
    assert done.counts[0].updates == 2


@pytest.mark.parametrize(("first", "then"), [("sync", "async"), ("ssp", "sync")])
def test_another_mode_is_refused(tmp_path: Path, first: str, then: str) -> None:
    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "optimizer": OPTIMIZER}
    train(loop(2), workers=1, mode=first, **kept)
    with pytest.raises(RequestError, match=f"are of mode '{first}'.*got mode '{then}'"):
        train(loop(3), workers=1, mode=then, **kept)
    if first == "ssp":
        assert train(loop(3), workers=1, mode="async", **kept).counts[0].updates == 3


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1, 0.9), None])
def test_integers_go_on_too(tmp_path: Path, optimizer: Any) -> None:
    """Their momentum is floating from the first update on."""

    def counting(steps: int) -> Any:
        def run(server: ParameterServer) -> int:
            params = server.init({"w": np.zeros(3, np.float32), "steps": np.zeros((), np.int32)})
            begun = server.clock
            for _ in range(begun, steps):
                params = server.push_pull(jax.tree.map(np.ones_like, params))
            return begun

        return run

    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "optimizer": optimizer}
    for servers in (1, 2):  # the second time spread anew
        more = {"servers": servers, "split_bytes": 4, "mode": "async"}
        begun = train(counting(3 * servers), workers=1, **more, **kept).returned
        assert begun == (3 * (servers - 1),)


def test_a_server_ahead_of_its_snapshots_writes_the_last(tmp_path: Path) -> None:
    """One that took up what its copy had: what is on the disk counts, not what it holds."""
    places = Places(tmp_path, 1, 10)
    shard = Shard(Rule("async"), 1, None, 1.0)
    first = Writer(shard, places, 0)
    shard.init({"float32": np.zeros(2, np.float32)})
    for k in range(1, 18):
        shard.push(0, k, Pushed({"float32": np.ones(2, np.float32)}))
        if first.thread is not None:
            first.thread.join()
    again = Shard(Rule("async"), 1, None, 1.0)
    again.load(*shard.dump())
    assert Writer(again, places, 0).finish() == ""
    assert listed(places.of(0)) == [10, 17]


def test_what_another_end_left_is_in_nobodys_way(tmp_path: Path) -> None:
    places = Places(tmp_path, 1, 10)
    shard = Shard(Rule(), 1, None, 1.0)
    shard.init({"float32": np.zeros(2, np.float32)})
    write(places.of(0), shard.dump())
    before = tmp_path / "before-of-1" / "server-0"  # ended between the renames and the removal
    before.mkdir(parents=True)
    (before / "000000000000.npz").write_bytes(b"x")
    replace_all(places, [shard.dump()])
    assert [p.name for p in tmp_path.iterdir()] == ["of-1"]


def test_a_layout_comes_back_from_its_description() -> None:
    layout = layout_of(tree(DRAW), 3, split_bytes=16)
    again = layout_from(layout.about)
    assert (again.pieces, again.shapes, again.dtypes) == (
        layout.pieces,
        layout.shapes,
        layout.dtypes,
    )


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("other", [None, optax.sgd(0.1), optax.sgd(0.1, 0.9)])
def test_another_optimizer_is_refused(tmp_path: Path, servers: int, other: Any) -> None:
    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "snapshot_every": 1}
    train(loop(2), workers=1, servers=2, optimizer=OPTIMIZER, split_bytes=40, **kept)
    with pytest.raises(RequestError, match="of another optimizer"):
        train(loop(4), workers=1, servers=servers, optimizer=other, split_bytes=40, **kept)


def test_a_slow_snapshot_does_not_shift_the_next(tmp_path: Path) -> None:
    made = Shard(Rule("async"), 1, None, 1.0)
    writer = Writer(made, Places(tmp_path, 1, 5), 0)
    begun: list[int] = []
    writer.begin = lambda: (begun.append(made.version), setattr(writer, "written", made.version))[0]  # type: ignore[method-assign]
    made.init({"float32": np.zeros(3, np.float32)})
    for k in range(1, 24):
        late = k in (5, 6)  # the one before is still being written
        writer.thread = (
            threading.Thread(target=time.sleep, args=(60,), daemon=True) if late else None
        )
        if writer.thread is not None:
            writer.thread.start()
        made.push(0, k, Pushed({"float32": np.ones(3, np.float32)}))
    assert begun == [0, 7, 10, 15, 20]


def test_what_was_seen_may_be_lost_since() -> None:
    made = Shard(Rule("async", lag_scaled=True), 1, None, 1.0)
    made.init({"float32": np.zeros(3, np.float32)})
    made.push(0, 1, Pushed({"float32": np.ones(3, np.float32)}, seen=7))
    assert made.counts.lags == {0: 1} and made.store.read()["float32"][0] == 1.0


def test_snapshots_of_an_abandoned_run_are_not_taken_up(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"backend": "local", "snapshots": tmp_path, "snapshot_every": 5}
    train(loop(10), workers=1, servers=2, optimizer=OPTIMIZER, split_bytes=40, **kept)
    places = Places(tmp_path, 2, 5)
    facts, arrays = read(places.of(0), 10)
    write(places.of(0), (dict(facts) | {"version": 12}, arrays))  # server 1 did not come so far
    train(loop(10), workers=1, servers=2, optimizer=OPTIMIZER, split_bytes=40, **kept)
    assert listed(places.of(0))[-1] == 10


def test_a_job_that_ended_within_a_move_is_found(tmp_path: Path) -> None:
    places = Places(tmp_path, 1, 1)
    about = layout_of(np.zeros(4, np.float32), 1).about
    write(places.of(0), ({"version": 3, "about": about}, {}))
    (tmp_path / "of-1").rename(tmp_path / "before-of-1")
    assert earlier(places, "sync") == (places, (3,))


def test_a_restarted_worker_is_at_most_one_push_behind_where_all_wait() -> None:
    """One server came back from a snapshot at push 3, the other is at 8."""
    shards = [Shard(Rule(), 1, None, 1.0) for _ in range(2)]
    for shard, last in zip(shards, (3, 8), strict=True):
        shard.last = {0: (last, True)}
    server = ParameterServer(LocalLinks(shards, 1), 0, 1, split_bytes=4)
    server.init(np.zeros(2, np.float32))
    assert server.clock == 7


def test_an_empty_server_does_not_give_the_count_of_updates() -> None:
    before, shards = trained(4, 10**6)
    dumps = [shard.dump() for shard in shards]
    held = [any(k not in ("second",) for k in shard.store.read()) for shard in shards]
    assert not all(held)
    empty = held.index(False)
    dumps[empty] = ({**dumps[empty][0], "version": 5}, dumps[empty][1])
    after, _ = trained(1, 10**6)
    ((_, arrays),) = reshard(before, after, dumps, OPTIMIZER)
    assert 4 in [int(x) for n, x in arrays.items() if n.startswith("state/") and x.shape == ()]


@pytest.mark.parametrize("tables", [False, True])
def test_a_server_that_is_new_and_idle_has_done_nothing(tmp_path: Path, tables: bool) -> None:
    """One server's values stay on one of three; rows of tables are on all."""

    def run(server: ParameterServer) -> None:
        rows = {"t": np.zeros((6, 2), np.float32)} if tables else None
        params = server.init({"w": np.zeros(4, np.float32)}, rows)
        for _ in range(server.clock, 5):
            params = server.push_pull(params)

    kept: dict[str, Any] = {"snapshots": tmp_path, "snapshot_every": 1, "split_bytes": 2**20}
    (done,) = train(run, workers=1, servers=1, backend="local", **kept).counts
    rest = train(run, workers=1, servers=3, backend="local", **kept).counts
    assert done == Counts(applied=5, updates=5, lags={0: 5})
    assert sorted(c.applied for c in rest) == ([5, 5, 5] if tables else [0, 0, 5])
    assert all(c in (done, Counts()) for c in rest)


def pushes(until: int) -> Any:
    def run(server: ParameterServer) -> None:
        params = {"w": jnp.zeros((6, 4)), "h": jnp.zeros((6, 4), jnp.bfloat16)}
        params = server.init(params)
        for k in range(server.clock, until):
            draw = np.random.default_rng(k)
            pushed = {n: draw.normal(size=(6, 4)).astype(x.dtype) for n, x in params.items()}
            params = server.push_pull(pushed)

    return run


@pytest.mark.parametrize(
    ("first", "then"),
    [(1, 3), (3, 1), *(pytest.param(*both, marks=pytest.mark.slow) for both in ((1, 1), (2, 3)))],
)
@pytest.mark.parametrize(
    ("mode", "split"),
    [
        ("sync", 32),
        ("async", 2**20),
        pytest.param("sync", 2**20, marks=pytest.mark.slow),
        pytest.param("async", 32, marks=pytest.mark.slow),
    ],
)
def test_optimizers_whose_state_changes_dtype_go_on(
    tmp_path: Path, mode: str, first: int, then: int, split: int
) -> None:
    """``inject_hyperparams`` takes the dtype of what a server holds, and widens momentum."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.3, momentum=0.9)
    options: dict[str, Any] = {"workers": 1, "backend": "local", "mode": mode}
    options |= {"optimizer": optimizer, "split_bytes": split}
    kept = options | {"snapshots": tmp_path, "snapshot_every": 1}
    train(pushes(4), servers=first, **kept)
    rest = train(pushes(9), servers=then, **kept)
    whole = train(pushes(9), servers=then, **options)
    for name, exact in (("w", True), ("h", mode == "sync")):
        x, y = (np.asarray(done.params[name], np.float32) for done in (rest, whole))
        # not exact: which servers have rounded hyperparameters differs with what they hold
        np.testing.assert_allclose(x, y, rtol=1e-6 if exact else 0.02, atol=0 if exact else 0.02)


@pytest.mark.parametrize("wide", [0, 1])
def test_the_widest_dtype_that_a_server_has_is_kept(wide: int) -> None:
    old, new = (layout_of(np.zeros(8, ml_dtypes.bfloat16), n, split_bytes=8) for n in (2, 1))
    kinds: list[Any] = [ml_dtypes.bfloat16] * 2
    kinds[wide] = np.float32
    flats = [{"bfloat16": np.full(4, 1 / 3, kind)} for kind in kinds]
    (made,) = respread(old, new, flats)
    assert made["bfloat16"].dtype == np.float32
    assert set(made["bfloat16"]) == {x["bfloat16"][0].astype(np.float32) for x in flats}


def test_a_hyperparameter_comes_from_a_server_that_has_it_as_wide() -> None:
    """The server of bfloat16, which has rounded 0.3, is further."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.3)
    params = {"w": np.zeros(4, np.float32), "h": np.zeros(8, ml_dtypes.bfloat16)}
    old, new = (layout_of(params, n, split_bytes=16) for n in (2, 3))
    dumps = []
    for flat in old.scatter(params):
        assert len(flat) == 1
        shard = Shard(Rule("async"), 1, optimizer, 1.0)
        shard.init(flat, None, old.about)
        for k in range(2 if "bfloat16" in flat else 1):
            shard.push(0, k + 1, Pushed(flat))
        dumps.append(shard.dump())
    rates = {}
    for _, arrays in reshard(old, new, dumps, optimizer):
        other = Shard(Rule("async"), 1, optimizer, 1.0).store
        other.load(arrays)
        rates[tuple(other.values or ())] = other.state.hyperparams["learning_rate"]
    exact = np.float32(0.3)
    assert rates == {
        ("bfloat16",): exact.astype(ml_dtypes.bfloat16),
        ("float32",): exact,
        (): exact,
    }
