"""Flipped bits in saved states are found; what has no checksums still loads, with a line."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from executor import CheckpointError, Checkpoints
from executor.checkpoint.files import checksums, guard
from executor.cli.main import main

pytest.importorskip("safetensors", reason="safetensors is not installed")
from safetensors.numpy import load_file, save_file

from tests.executor.test_checkpoint_hosts import RESTORE, SAVE, results, run

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import flipped_bits  # noqa: E402

pytestmark = pytest.mark.devices
FLIPS = 30


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flipped_bits.saved(tmp_path_factory.mktemp("states"))


def flip(file: Path, at: int = -1) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 4
    file.write_bytes(raw)


def data_file(step: Path, process: int = 0) -> Path:
    """The largest file that a process wrote."""
    files = (step / "state" / f"ocdbt.process_{process}" / "d").iterdir()
    return max(files, key=lambda x: x.stat().st_size)


def test_every_flipped_bit_is_found(states: Path) -> None:
    flips = [flipped_bits.flipped(states, seed) for seed in range(FLIPS)]
    assert not [x for x in flips if not x.found or x.loaded == "wrong"]
    assert {x.form for x in flips if x.loaded == "refused"} == set(flipped_bits.FORMS)


@pytest.mark.slow
def test_three_hundred_flipped_bits_are_found(states: Path) -> None:
    flips = [flipped_bits.flipped(states, seed) for seed in range(FLIPS, 300)]
    assert not [x for x in flips if not x.found or x.loaded == "wrong"]


def test_verify_says_what_it_compared_and_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.arange(4096.0)}, extra={"a": step})
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.count("no damage") == 2 and "without" not in told
    flip(data_file(tmp_path / "2"))
    (tmp_path / "2" / "extra" / "metadata").unlink()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "extra/metadata is missing" in error and "is damaged: got crc32" in error
    assert len(error.splitlines()) == 1
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "1"]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "2")]) == 2
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "7"]) == 2


def test_only_what_is_read_is_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    large = {name: rng.normal(size=2**20).astype(np.float32) for name in ("a", "b")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, large)
    with Checkpoints(tmp_path, keep=None) as checkpoints:
        checkpoints.save(2, {"b": large["b"]})
    files = guard.data_files(tmp_path / "1" / "state")
    assert set(files) == {"a", "b"}
    for name in sorted(files["a"]):
        flip(tmp_path / "1" / "state" / name)
    with Checkpoints(tmp_path) as checkpoints:
        if not files["a"] & files["b"]:
            found = checkpoints.restore({"b": large["b"]}, step=1, partial=True)
            np.testing.assert_array_equal(found["b"], large["b"])
        with pytest.raises(CheckpointError, match="is damaged: got crc32"):
            checkpoints.restore({"a": large["a"]}, step=1, partial=True)


def test_files_of_arrays_in_a_deep_tree(tmp_path: Path) -> None:
    config = {"max_decoded_node_bytes": 2000, "max_inline_value_bytes": 10}
    store = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    ).result()
    with ts.Transaction() as transaction:
        for k in range(700):
            store.with_transaction(transaction)[f"layer{k}.w/0.{k % 3}"] = b"x" * 100
    found = guard.data_files(tmp_path)
    assert set(found) == {f"layer{k}.w" for k in range(700)}
    assert all((tmp_path / name).is_file() for names in found.values() for name in names)


def test_a_checkpoint_without_checksums_loads_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": jnp.arange(9.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, extra={"a": 1})
    (tmp_path / "1" / checksums.NAME).unlink()
    with caplog.at_level(logging.WARNING), Checkpoints(tmp_path) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(state)["w"], state["w"])
        checkpoints.restore(state)
    told = [x.getMessage() for x in caplog.records if "has no checksums" in x.getMessage()]
    assert len(told) == 1 and str(tmp_path / "1") in told[0]
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert "has no checksums" in capsys.readouterr().err


def test_safetensors_of_other_programs_have_none(
    states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(states / "one.safetensors")
    save_file(tensors, tmp_path / "theirs.safetensors")
    assert main(["checkpoint", "info", str(tmp_path / "theirs.safetensors")]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "theirs.safetensors")]) == 2
    assert "has no checksums" in capsys.readouterr().err


def test_checksums_of_a_killed_commit_are_whole_but_for_two_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that ends right after the commit adds nothing to the checksums any more."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(9)})
    found = checksums.read_sums(tmp_path / "1")
    assert found is not None
    early = {k: v for k, v in found.files.items() if k not in checksums.LATE}
    body = json.dumps({"format": checksums.FORMAT, "files": early})
    crc = checksums.zlib.crc32(body.encode())
    (tmp_path / "1" / checksums.NAME).write_text(f"{body}\n{crc:08x}\n")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert f"without a checksum: {', '.join(checksums.LATE)}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b"])
def test_names_in_checksums_stay_below_the_folder(name: str, tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(9)})
    body = json.dumps({"format": checksums.FORMAT, "files": {name: [1, 2]}})
    crc = checksums.zlib.crc32(body.encode())
    (tmp_path / "1" / checksums.NAME).write_text(f"{body}\n{crc:08x}\n")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="no file below"),
    ):
        checkpoints.shapes()


@pytest.mark.slow
def test_each_process_writes_the_checksums_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    results(SAVE, 2, 2, str(folder), "data=4", '{"zero": 3}')
    found = checksums.read_sums(folder / "1")
    assert found is not None
    assert {guard.writer_of(name) for name in found.files} == {0, 1}
    assert not list(folder.rglob(f"{checksums.PART}*"))
    assert main(["checkpoint", "verify", str(folder)]) == 0
    flip(data_file(folder / "1", process=1))
    for processes in (1, 2):
        outcome, lines = run(RESTORE, processes, 4 // processes, str(folder), "data=4", "{}")
        assert outcome.code != 0
        told = "\n".join(lines)
        assert "is damaged: got crc32" in told, told
        if processes == 2:
            raised = [x for x in lines if "CheckpointError" in x and "by process 1" in x]
            assert {x[0] for x in raised} >= {"0", "1"}, told
