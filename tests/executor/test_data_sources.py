"""One door to data: files, random access, iterators; every row once, on any split."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from executor import DataError
from executor.data import Batches, Streams, shard
from executor.data.batches import side_by_side
from executor.data.streams import BLOCK
from executor.launch.start import Job, run_local

pytestmark = pytest.mark.devices
ROOT = Path(__file__).resolve().parents[2]


def over(count: int, *entries: Any) -> NamedSharding:
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, P(*(entries or ("data",))))


class Table:
    """Random access: rows [start, start + n) as pytrees; notes what is read."""

    def __init__(self, n: int) -> None:
        self.n, self.read = n, list[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> Any:
        self.read.append(k)
        return {"x": np.full(2, k, np.float32), "y": np.int32(k)}


class Walk:
    """An iterable with states, as Grain's."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return WalkIterator(self.rows)


class WalkIterator:
    def __init__(self, rows: list[int]) -> None:
        self.rows, self.at = rows, 0

    def __next__(self) -> Any:
        if self.at >= len(self.rows):
            raise StopIteration
        self.at += 1
        return np.int32(self.rows[self.at - 1])

    def __iter__(self) -> Any:
        return self

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


def save_files(folder: Path, counts: list[int]) -> list[Path]:
    """Files whose rows, two numbers each, count through all of them."""
    out, start = [], 0
    for k, n in enumerate(counts):
        rows = np.arange(start, start + n, dtype=np.int32)
        np.save(folder / f"part-{k}.npy", np.stack([rows, rows], axis=1))
        out.append(folder / f"part-{k}.npy")
        start += n
    return out


def rows_of(batches: Any) -> list[list[int]]:
    """The rows of each batch, by the first number of each."""
    out = []
    for batch in batches:
        leaf = np.asarray(jax.tree_util.tree_leaves(batch)[0])
        out.append([int(r) for r in leaf.reshape(len(leaf), -1)[:, 0]])
    return out


def expect(policy: str, total: int, size: int, got: list[int]) -> None:
    """Every row once, but for what the policy says."""
    whole = total // size * size
    if policy == "leave":
        assert sorted(got) == list(range(total))
    elif policy == "drop":
        assert len(got) == len(set(got)) == whole
    else:
        assert set(got) == set(range(total))
        assert len(got) == -(-total // size) * size
        assert len(set(got[:total])) == total


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_side_by_side_is_an_order_of_all_rows(whole: int, lanes: int, per: int, rest: int) -> None:
    size = lanes * per
    total = whole * size + rest % size
    order = side_by_side(np.random.default_rng(0).permutation(total), size, lanes)
    assert sorted(order) == list(range(total))


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    ways=st.sampled_from([1, 2, 4]),
    per=st.integers(1, 3),
    policy=st.sampled_from(["drop", "pad", "leave"]),
    seed=st.sampled_from([None, 0, 5]),
    data=st.data(),
)
def test_files_give_every_row_once_and_restart_anywhere(
    tmp_path_factory: Any,
    counts: list[int],
    ways: int,
    per: int,
    policy: str,
    seed: int | None,
    data: Any,
) -> None:
    size, total = ways * per, sum(counts)
    if total == 0 or (policy == "drop" and total < size) or (policy == "leave" and total % ways):
        return
    files = save_files(tmp_path_factory.mktemp("files"), counts)

    def made(ways: int) -> Any:
        return shard(
            files, over(ways), batch_size=size, policy=policy, seed=seed, epochs=2, prefetch=0
        )

    batches = made(ways)
    whole = rows_of(batches)
    per_epoch = batches.batches_per_epoch
    assert len(whole) == 2 * per_epoch
    for epoch in (whole[:per_epoch], whole[per_epoch:]):
        expect(policy, total, size, [r for b in epoch for r in b])
    if seed is None:
        assert whole[0][: min(size, total)] == list(range(min(size, total)))
    stop = data.draw(st.integers(0, len(whole)))
    batches = made(ways)
    for _ in range(stop):
        next(batches)
    position = json.loads(json.dumps(asdict(batches.position)))
    again = made(1 if data.draw(st.booleans()) else ways)  # on one device, or as many
    again.seek(position)
    assert rows_of(again) == whole[stop:]


@settings(max_examples=30, deadline=None)
@given(
    total=st.integers(1, 50),
    ways=st.sampled_from([1, 2, 4, 8]),
    per=st.integers(1, 2),
    policy=st.sampled_from(["drop", "pad", "leave"]),
    data=st.data(),
)
def test_random_access_gives_every_row_once_and_restarts_anywhere(
    total: int, ways: int, per: int, policy: str, data: Any
) -> None:
    size = ways * per
    if (policy == "drop" and total < size) or (policy == "leave" and total % ways):
        return

    def made(ways: int) -> Any:
        return shard(Table(total), over(ways), batch_size=size, policy=policy, epochs=2, prefetch=0)

    batches = made(ways)
    whole = rows_of(batches)
    half = len(whole) // 2
    for epoch in (whole[:half], whole[half:]):
        expect(policy, total, size, [r for b in epoch for r in b])
    stop = data.draw(st.integers(0, len(whole)))
    batches = made(ways)
    for _ in range(stop):
        next(batches)
    again = made(1)
    again.seek(asdict(batches.position))
    assert rows_of(again) == whole[stop:]


def lanes_of_table(lengths: list[int]) -> Any:
    """(lane, lanes) -> an iterable with as many rows as the list says, 100 * lane + k."""

    def make(lane: int, lanes: int) -> Walk:
        return Walk([100 * lane + k for k in range(lengths[lane])])

    return make


UNEVEN = given(
    ways=st.sampled_from([1, 2, 4]),
    per=st.integers(1, 2),
    policy=st.sampled_from(["drop", "pad"]),
    prefetch=st.integers(0, 3),
    data=st.data(),
)


@settings(max_examples=12, deadline=None)
@UNEVEN
def test_iterators_of_uneven_lengths_end_together_and_restart_anywhere(
    ways: int, per: int, policy: str, prefetch: int, data: Any
) -> None:
    uneven_lengths(ways, per, policy, prefetch, data)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@UNEVEN
def test_many_iterators_of_uneven_lengths(
    ways: int, per: int, policy: str, prefetch: int, data: Any
) -> None:
    uneven_lengths(ways, per, policy, prefetch, data)


def uneven_lengths(ways: int, per: int, policy: str, prefetch: int, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(per, 50), min_size=ways, max_size=ways))
    steps = [n // per if policy == "drop" else -(-n // per) for n in lengths]
    expected = min(steps) if policy == "drop" else max(steps)

    def made(ways: int) -> Streams:
        batches = shard(
            lanes_of_table(lengths),
            over(ways),
            batch_size=len(lengths) * per,
            policy=policy,
            epochs=2,
            prefetch=prefetch,
        )
        assert isinstance(batches, Streams)
        return batches

    whole = rows_of(made(ways))
    assert len(whole) == 2 * expected
    assert whole[:expected] == whole[expected:]
    for lane in range(ways):
        got = [r for b in whole[:expected] for r in b[lane * per : (lane + 1) * per]]
        assert got == [100 * lane + k % lengths[lane] for k in range(expected * per)]
    stop = data.draw(st.integers(0, len(whole)))
    batches = made(ways)
    for _ in range(stop):
        next(batches)
    position = json.loads(json.dumps(asdict(batches.position)))
    batches.close()
    again = made(data.draw(st.sampled_from([n for n in (1, 2, 4) if ways % n == 0])))
    again.seek(position)
    assert rows_of(again) == whole[stop:]


def test_a_block_border_is_crossed() -> None:
    make = lanes_of_table([3 * BLOCK] * 2)
    for stop in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK):
        batches = shard(make, over(2), batch_size=2, epochs=1)
        for _ in range(stop):
            next(batches)
        again = shard(make, over(1), batch_size=2, epochs=1)
        again.seek(batches.position)
        assert [r[0] for r in rows_of(again)] == list(range(stop, 3 * BLOCK))
        batches.close()


def test_iterators_without_states_walk_there_again() -> None:
    def make(lane: int, lanes: int) -> Any:
        return [np.int32(k) for k in range(lane, 80, lanes)]

    whole = rows_of(shard(make, over(2), batch_size=2, epochs=1))
    batches = shard(make, over(2), batch_size=2, epochs=1)
    for _ in range(21):
        next(batches)
    assert batches.position.states == ()
    again = shard(make, over(2), batch_size=2, epochs=1)
    again.seek(batches.position)
    batches.close()
    assert rows_of(again) == whole[21:]


def test_only_wanted_rows_of_a_random_access_source_are_read_and_once() -> None:
    table = Table(40)
    batches = shard(table, over(4), batch_size=8, epochs=1, prefetch=0)
    for batch in batches:
        np.testing.assert_array_equal(np.asarray(batch["x"])[:, 0], np.asarray(batch["y"]))
    assert sorted(table.read) == sorted([0, *range(40)])  # row 0 for its form as well


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    files = save_files(tmp_path, [16] * 8)
    opened: list[Path] = []

    def read(file: Path) -> Any:
        opened.append(file)
        return np.load(file)

    batches = shard(files, over(4), batch_size=8, read=read, count=lambda _: 16, epochs=1)
    assert len(opened) == 1  # for the form
    got = [r for b in rows_of(batches) for r in b]
    assert sorted(got) == list(range(128))
    # four lanes, two files each; every file is opened once
    assert sorted(opened[1:]) == sorted(files)


def test_grain_random_access_and_iterators() -> None:
    grain = pytest.importorskip("grain", reason="Grain is not installed")
    numbers = np.arange(48, dtype=np.int32)
    mapped = grain.MapDataset.source(numbers).map(lambda x: {"x": np.stack([x, 2 * x])})
    whole = rows_of(shard(mapped, over(4), batch_size=8, epochs=1))
    assert sorted(r for b in whole for r in b) == list(range(48))

    def make(lane: int, lanes: int) -> Any:
        return mapped[lane::lanes].shuffle(seed=lane).to_iter_dataset()

    batches = shard(make, over(4), batch_size=4, epochs=1)
    whole = rows_of(batches)
    assert sorted(r for b in whole for r in b) == list(range(48))
    batches = shard(make, over(4), batch_size=4, epochs=1)
    for _ in range(7):
        next(batches)
    position = json.loads(json.dumps(asdict(batches.position)))
    assert len(position["states"]) == 4
    again = shard(make, over(2), batch_size=4, epochs=1)
    again.seek(position)
    assert rows_of(again) == whole[7:]
    batches.close()

    def loader(lane: int, lanes: int) -> Any:
        sampler = grain.samplers.IndexSampler(
            48, grain.sharding.ShardOptions(lane, lanes, drop_remainder=True), num_epochs=1
        )
        return grain.DataLoader(data_source=numbers, sampler=sampler, worker_count=0)

    batches = shard(loader, over(2), batch_size=4, epochs=1)
    whole = rows_of(batches)
    assert sorted(r for b in whole for r in b) == list(range(48))
    batches = shard(loader, over(2), batch_size=4, epochs=1)
    for _ in range(5):
        next(batches)
    again = shard(loader, over(1), batch_size=4, epochs=1)
    again.seek(asdict(batches.position))
    assert rows_of(again) == whole[5:]
    batches.close()
    endless = grain.MapDataset.source(numbers).repeat()
    with pytest.raises(DataError, match=r"expected some, and an end; leave\s+repeat\(\) out"):
        shard(endless, over(1), batch_size=4)
    filtered = grain.MapDataset.source(numbers).filter(lambda x: x % 2 == 0)
    with pytest.raises(DataError, match=r"is None, as filter\(\) leaves it"):
        rows_of(shard(filtered, over(1), batch_size=4, epochs=1))
    one = shard(mapped.to_iter_dataset(), over(4), batch_size=8, epochs=1)
    assert [r for b in rows_of(one) for r in b] == list(range(48))


@pytest.mark.parametrize("kind", ["npz", "text"])
def test_other_files(tmp_path: Path, kind: str) -> None:
    files, read = [], None
    for k in range(3):
        rows = np.arange(4 * k, 4 * k + 4)
        if kind == "npz":
            np.savez(tmp_path / f"{k}.npz", x=rows, y=-rows)
            files.append(str(tmp_path / f"{k}.npz"))
        else:
            (tmp_path / f"{k}.txt").write_text("\n".join(map(str, rows)))
            files.append(str(tmp_path / f"{k}.txt"))

            def read(file: str) -> Any:
                return {"x": np.loadtxt(file, dtype=np.int64)}

    batches = shard(files, over(2), batch_size=4, read=read, epochs=1)
    assert sorted(r for b in rows_of(batches) for r in b) == list(range(12))
    if kind == "text":
        with pytest.raises(DataError, match=r"0\.txt: only \.npy and \.npz"):
            shard(files, over(2), batch_size=4)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    files = save_files(tmp_path, [4, 4])
    np.save(tmp_path / "wide.npy", np.zeros((4, 3), np.int32))
    wrong = shard([*files, tmp_path / "wide.npy"], over(1), batch_size=4, epochs=1)
    with pytest.raises(DataError, match=r"wide\.npy holds int32\[4, 3\], expected int32\[4, 2\]"):
        list(wrong)
    with pytest.raises(DataError, match="wide"):  # and again, not a hang
        next(wrong)
    (tmp_path / "cut.npy").write_bytes(files[0].read_bytes()[:40])
    with pytest.raises(DataError, match=r"cut\.npy"):
        shard([tmp_path / "cut.npy"], over(1), batch_size=4)
    with pytest.raises(DataError, match=r"read= and count= are for a list of files"):
        shard(np.zeros(4), over(1), batch_size=4, read=np.load)
    with pytest.raises(DataError, match="no rows in them"):
        shard(save_files(tmp_path, [0]), over(1), batch_size=4)
    with pytest.raises(DataError, match="policy 'leave': iterators give whole batches"):
        shard(lanes_of_table([4]), over(1), batch_size=4, policy="leave")
    with pytest.raises(DataError, match="the iterator has no rows"):
        shard(lanes_of_table([0]), over(1), batch_size=4)
    with pytest.raises(DataError, match="lane 1 of 2 has no rows, so none to pad with"):
        next(shard(lanes_of_table([4, 0]), over(2), batch_size=4, policy="pad"))
    with pytest.raises(DataError, match="epoch 0 has no batch: some lane of 2 has fewer than 2"):
        next(shard(lanes_of_table([4, 1]), over(2), batch_size=4))
    with pytest.raises(DataError, match="a pytree of arrays with rows"):
        shard([1, 2, 3], over(1), batch_size=4)
    batches = shard(files, over(1), batch_size=4)
    assert isinstance(batches, Batches)
    with pytest.raises(DataError, match="can't be read in 3 lanes"):
        batches.seek({**asdict(batches.position), "lanes": 3})
    with pytest.raises(DataError, match="not a position"):
        batches.seek({"epoch": 1})
    batches = shard(lanes_of_table([4]), over(1), batch_size=4)
    position = asdict(batches.position)
    with pytest.raises(DataError, match="1 lanes and 2 states"):
        batches.seek({**position, "states": ["", ""]})
    batches.seek({**position, "states": ["rubbish"]})
    with pytest.raises(DataError, match="not the state of an iterator: 'rubbish'"):
        next(batches)


APART = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import grain, jax, numpy as np
from dataclasses import asdict
from executor import initialize, DataError
from executor.data import shard
role = initialize(timeout_s=60)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.executor.test_data_sources import Table, Walk
folder, position, stop = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
mesh = jax.make_mesh((3, 2), ("data", "model"), (AxisType.Auto,) * 2)
files = [f"{{folder}}/part-{{k}}.npy" for k in range(7)]
opened = []
def read(file):
    opened.append(file)
    return np.load(file)
def make(lane, lanes):
    return Walk(list(range(lane, 100 - 10 * lane, lanes)))
def grains(lane, lanes):
    return grain.MapDataset.range(90)[lane::lanes].shuffle(seed=lane).to_iter_dataset()
split = NamedSharding(mesh, P("data"))
both = NamedSharding(mesh, P(("data", "model")))
flat = NamedSharding(mesh, P("data", "model"))
def all_of(name):
    if name == "files":
        return shard(files, flat, batch_size=6, policy="pad", epochs=1, read=read)
    if name == "table":
        return shard(Table(50), split, batch_size=12, epochs=1)
    if name == "grain":
        return shard(grains, both, batch_size=6, epochs=1)
    if name == "numbers":
        return shard(grain.MapDataset.range(40), both, batch_size=6, policy="pad", epochs=1)
    return shard(make, split if name == "walk" else both, batch_size=6, epochs=1,
                 policy="pad" if name == "walk" else "drop")
whole = jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, P()))
out, at = {{}}, {{}}
for name in ("files", "table", "walk", "walk6", "grain", "numbers"):
    batches = all_of(name)
    if position:
        batches.seek(position[name])
    rows = []
    for k, batch in enumerate(batches):
        leaf = np.asarray(whole(jax.tree.leaves(batch)[0]).addressable_data(0))
        rows.append([int(r) for r in leaf.reshape(len(leaf), -1)[:, 0]])
        if k == stop:
            at[name] = asdict(batches.position)
    out[name] = rows
try:
    shard(Walk([1, 2]), split, batch_size=6)
    refused = ""
except DataError as error:
    refused = str(error)
said = [role.process, out, at, refused, len(set(opened))]
sys.stdout.write("RESULT " + json.dumps(said) + "\\n")
"""


def apart(tmp_path: Path, processes: int, devices: int, position: Any, stop: int) -> list[Any]:
    lines: list[str] = []
    command = (sys.executable, "-c", APART, str(tmp_path), json.dumps(position), str(stop))
    outcome = run_local(Job(command, processes, devices), lambda _, line: lines.append(line))
    assert outcome.code == 0, "\n".join(lines)
    return sorted(json.loads(x.split(" ", 1)[1]) for x in lines if x.startswith("RESULT"))


@pytest.mark.slow
def test_three_two_and_one_process_make_the_same_batches_and_go_on_for_each_other(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grain", reason="Grain is not installed")
    save_files(tmp_path, [5, 11, 0, 7, 3, 13, 9])
    told = {n: apart(tmp_path, n, 6 // n, None, 2) for n in (3, 2, 1)}
    one = told[1][0][1]
    for n, results in told.items():
        for process, out, at, refused, _ in results:
            assert out == one, (n, process)
            assert at == told[1][0][2]
            assert bool(refused) == (n > 1)
    expect("pad", 48, 6, [r for b in one["files"] for r in b])
    assert sorted(r for b in one["grain"] for r in b) == list(range(90))
    expect("pad", 40, 6, [r for b in one["numbers"] for r in b])
    expect("drop", 50, 12, [r for b in one["table"] for r in b])
    assert len(one["walk"]) == 17 and len(one["walk6"]) == 8  # 34 rows by two; 8 by one
    assert all(opened < 7 for *_, opened in told[3])  # nobody read all of the files
    position = told[3][0][2]
    for n in (2, 1):
        for _, out, *_ in apart(tmp_path, n, 6 // n, position, 10**9):
            assert out == {name: rows[3:] for name, rows in one.items()}


BROKEN = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import jax, numpy as np
from executor import initialize, DataError
from executor.data import shard
role = initialize(timeout_s=60)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
split = NamedSharding(jax.make_mesh((4,), ("data",), (AxisType.Auto,)), P("data"))
def make(lane, lanes):
    for k in range(40):
        if (lane, k) == (3, 20):
            raise OSError("disk gone")
        yield np.int32(k)
for what in ([f"{{sys.argv[1]}}/part-{{k}}.npy" for k in range(4)], make):
    try:
        for _ in shard(what, split, batch_size=4, epochs=1):
            pass
    except (DataError, OSError) as error:
        print("RESULT", role.process, error)
"""


@pytest.mark.slow
def test_what_one_process_cannot_read_ends_all_of_them(tmp_path: Path) -> None:
    files = save_files(tmp_path, [4, 4, 4, 4])
    files[3].write_bytes(b"rubbish")
    lines: list[str] = []
    outcome = run_local(
        Job((sys.executable, "-c", BROKEN, str(tmp_path)), 2, 2), lambda _, x: lines.append(x)
    )
    assert outcome.code == 0, "\n".join(lines)
    told = sorted(x for x in lines if x.startswith("RESULT"))
    assert len(told) == 4, told
    assert "process 1 can't read" in told[0] and "part-3.npy" in told[0]
    assert "process 1 can't read: OSError: disk gone" in told[1]
    assert any("disk gone" in x for x in told[2:]) and any("part-3.npy" in x for x in told[2:])
