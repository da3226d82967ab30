"""Batches for a plan: the right rows, only the needed ones, and exact positions."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from executor import Batches, DataError, agreed_steps, own_files, parallelize
from executor.launch.start import Job, run_local

pytestmark = pytest.mark.devices
ROOT = Path(__file__).resolve().parents[2]


class Counted:
    """An array that notes which rows are read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.read = array, list[int]()
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows: Any) -> Any:
        self.read += list(np.atleast_1d(rows))
        return self.array[rows]


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def split(*entries: Any) -> NamedSharding:
    return NamedSharding(mesh(), P(*entries))


X = np.arange(40 * 6, dtype=np.float32).reshape(40, 6)
Y = np.arange(40, dtype=np.int32)


@pytest.mark.parametrize("entries", [("data",), (("data", "model"),), ("data", "model"), ()])
def test_batches_are_the_rows_in_order(entries: tuple[Any, ...]) -> None:
    shardings = {"x": split(*entries), "y": split("data")}
    batches = Batches({"x": X, "y": Y}, shardings, batch_size=8, seed=None, epochs=1)
    made = list(batches)
    assert len(made) == batches.batches_per_epoch == 5
    for k, batch in enumerate(made):
        np.testing.assert_array_equal(batch["x"], X[8 * k : 8 * k + 8])
        np.testing.assert_array_equal(batch["y"], Y[8 * k : 8 * k + 8])
        assert batch["x"].sharding == shardings["x"]


def test_rows_that_several_devices_hold_are_read_once() -> None:
    counted = Counted(X)
    batches = Batches({"x": counted}, split("data"), batch_size=8, epochs=1, prefetch=0)
    assert len(list(batches)) == 5
    assert sorted(counted.read) == list(range(40))


def test_every_epoch_has_all_rows_in_another_order() -> None:
    batches = Batches(Y, split("data"), batch_size=8, seed=3, epochs=2)
    rows = np.concatenate([np.asarray(b) for b in batches])
    first, second = rows[:40], rows[40:]
    assert sorted(first) == sorted(second) == list(range(40))
    assert list(first) != list(second) and list(first) != list(range(40))


def test_a_restart_goes_on_at_the_very_batch() -> None:
    def made() -> Batches:
        return Batches(Y, split("data"), batch_size=8, seed=1)

    batches = made()
    before = [np.asarray(next(batches)) for _ in range(12)]
    position = None
    batches.close()
    batches = made()
    for k in range(7):
        np.testing.assert_array_equal(next(batches), before[k])
        position = json.loads(json.dumps(asdict(batches.position)))
    assert position is not None
    assert (position["epoch"], position["batch"]) == (1, 2)
    again = made()
    again.seek(position)
    for k in range(7, 12):
        np.testing.assert_array_equal(next(again), before[k])
    for other in (batches, again):
        other.close()
    with pytest.raises(DataError, match="batch_size 8, this has batch_size 4"):
        Batches(Y, split("data"), batch_size=4, seed=1).seek(position)


def test_what_does_not_fill_a_batch() -> None:
    def rows(policy: str, size: int = 16) -> list[int]:
        batches = Batches(Y, split("data"), batch_size=size, seed=None, policy=policy, epochs=1)
        return [int(r) for b in batches for r in np.asarray(b)]

    assert rows("drop") == list(range(32))
    assert rows("leave") == list(range(40))
    assert rows("pad") == [*range(40), *range(8)]
    with pytest.raises(DataError, match=r"shape \(2,\) can't be split .*the devices do not divide"):
        Batches(Y[:34], split("data"), batch_size=16, policy="leave")


def test_the_batch_sharding_is_the_plans() -> None:
    def step(w: jax.Array, batch: Any) -> Any:
        loss = ((batch["x"] @ w) ** 2).mean()
        return w - 0.1 * loss, loss

    run = parallelize(step, mode="DATA_PARALLEL")
    w = np.ones((6, 2), np.float32)
    shardings = run.prepare(w, {"x": X[:8]}).in_shardings[1]
    batches = Batches({"x": X}, shardings, batch_size=8, seed=None)
    _, loss = run(w, next(batches))
    batches.close()
    assert float(loss) == pytest.approx(float(((X[:8] @ w) ** 2).mean()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "guess"}, "policy 'guess': expected one of drop, pad, leave"),
        ({"batch_size": 41}, "40 rows do not fill a batch of 41"),
        ({"batch_size": 6}, r"shape \(6,\) can't be split"),
        ({"batch_size": 0}, "batch_size 0"),
    ],
)
def test_broken_requests(options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        Batches(Y, split("data"), **{"batch_size": 8, **options})


def test_leaves_of_different_lengths_and_errors_of_the_source() -> None:
    with pytest.raises(DataError, match=r"\['x'\] has 40, \['y'\] has 39"):
        Batches({"x": X, "y": Y[:39]}, split("data"), batch_size=8)

    class Broken(Counted):
        def __getitem__(self, rows: Any) -> Any:
            raise OSError("disk gone")

    batches = Batches(Broken(X), split("data"), batch_size=8)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    batches.close()


def test_one_process_has_all_files_and_its_own_count() -> None:
    assert own_files(["a", "b"]) == ("a", "b")
    assert agreed_steps(7) == 7
    with pytest.raises(DataError, match="can't make different numbers"):
        agreed_steps(7, "leave")


APART = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import jax, numpy as np
from executor import Batches, DataError, agreed_steps, initialize, own_files
role = initialize(timeout_s=60)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.executor.test_data import Counted
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
x = Counted(np.arange(44 * 3.0, dtype="f4").reshape(44, 3))
batches = Batches(x, NamedSharding(mesh, P("data")), batch_size=8, epochs=1, policy="pad")
batches.compare()
x.read.clear()  # the sample that processes compare
total = jax.jit(lambda a: a.sum())
sums = [float(total(b)) for b in batches]
files = own_files([f"part-{{k}}" for k in range(5)])
steps = [agreed_steps(len(files)), agreed_steps(len(files), "pad")]
rows = sorted(set(map(int, x.read)))
said = [role.process, len(x.read), rows, sums, files, steps]
sys.stdout.write("RESULT " + json.dumps(said) + "\\n")
"""


def test_processes_read_their_own_rows_and_agree() -> None:
    lines: list[str] = []
    job = Job((sys.executable, "-c", APART), 2, 4)
    outcome = run_local(job, lambda _, line: lines.append(line))
    assert outcome.code == 0, "\n".join(lines)
    told = sorted(json.loads(x.split(" ", 1)[1]) for x in lines if x.startswith("RESULT"))
    (_, read0, rows0, sums0, files0, steps0), (_, read1, rows1, sums1, files1, steps1) = told
    assert read0 == read1 == 24  # half of six batches of eight
    assert set(rows0) | set(rows1) == set(range(44))
    assert sums0 == sums1
    assert (files0, files1) == (["part-0", "part-2", "part-4"], ["part-1", "part-3"])
    assert steps0 == steps1 == [2, 3]
