"""What could go wrong without a word: it is refused, or right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor import CheckpointError, Checkpoints, DataError
from executor.cli.main import main
from executor.data import shard

pytestmark = pytest.mark.devices


def saved(folder: Path, state: Any, step: int = 1, **options: Any) -> Path:
    with Checkpoints(folder, **options) as checkpoints:
        checkpoints.save(step, state)
    return folder


def test_files_without_their_index_are_no_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path / "run", {str(k): np.ones(300, np.float32) for k in range(4)})
    out = tmp_path / "out"
    words = ["checkpoint", "convert", str(run), str(out), "--max-shard-size", "2KB"]
    assert main([*words, "--to", "safetensors"]) == 0
    (out / "model.safetensors.index.json").unlink()
    sorted(out.glob("*.safetensors"))[-1].unlink()
    assert main(["checkpoint", "info", str(out)]) == 2
    assert "their index" in capsys.readouterr().err


def test_extra_is_what_it_was_when_it_was_saved(tmp_path: Path) -> None:
    extra = {"position": {"batch": 1}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(4)}, extra=extra)
        extra["position"]["batch"] = 2
        checkpoints.wait()
        assert checkpoints.extra() == {"position": {"batch": 1}}
        with pytest.raises(CheckpointError, match="extra is no JSON"):
            checkpoints.save(2, {"a": jnp.ones(4)}, extra={"x": np.float32(1)})
        assert checkpoints.steps == (1,)


def test_the_latest_is_not_removed_for_an_older_one(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, {"a": jnp.ones(4)})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="step 5 is there, and with keep=1"):
            checkpoints.save(3, {"a": jnp.ones(4)})
        assert checkpoints.steps == (5,)


def test_keys_are_wanted_by_shape_and_empty_ones_stay_keys(tmp_path: Path) -> None:
    def make() -> Any:
        return {
            "key": jax.random.key(3, impl="rbg"),
            "none": jax.random.split(jax.random.key(1), 4)[:0],
            "x": jnp.ones(3),
        }

    saved(tmp_path, make())
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(jax.eval_shape(make))
    assert jax.random.key_impl(found["key"]) == jax.random.key_impl(make()["key"])
    np.testing.assert_array_equal(
        jax.random.key_data(found["key"]), jax.random.key_data(make()["key"])
    )
    assert found["none"].dtype == make()["none"].dtype and found["none"].shape == (0,)


def test_a_number_too_large_for_a_type_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path / "run", {"w": np.array([1.0, 1e6, np.inf], np.float32)})
    words = ["checkpoint", "convert", str(run), "--dtype"]
    assert main([*words, "float16", str(tmp_path / "a.safetensors")]) == 2
    assert "w has 1000000.0, too large for float16" in capsys.readouterr().err
    assert not (tmp_path / "a.safetensors").exists()
    assert main([*words, "bfloat16", str(tmp_path / "b.safetensors")]) == 0


def test_nothing_is_written_among_other_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path / "run", {"w": np.ones(3)})
    other = saved(tmp_path / "other", {"v": np.ones(3)}, step=7)
    for form in ("orbax", "safetensors"):
        assert main(["checkpoint", "convert", str(run), str(other), "--to", form]) == 2
        assert "is there already, and not empty" in capsys.readouterr().err
    with Checkpoints(other) as checkpoints:
        assert checkpoints.steps == (7,)


def test_keys_that_look_like_numbers_stay_keys(tmp_path: Path) -> None:
    state = {"layers": {"04": np.ones(2), "1": np.zeros(2)}, "list": [np.ones(1), np.ones(1)]}
    run = saved(tmp_path / "run", state)
    out = tmp_path / "out.safetensors"
    assert main(["checkpoint", "merge", str(run), str(out)]) == 0
    assert main(["checkpoint", "convert", str(out), str(tmp_path / "back")]) == 0
    with Checkpoints(tmp_path / "back") as checkpoints:
        shapes = checkpoints.shapes()
    assert sorted(shapes["layers"]) == ["04", "1"] and len(shapes["list"]) == 2


def test_a_files_own_separator_counts(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", {"a/b": np.ones(2), "c": {"d": np.zeros(2)}})
    file = tmp_path / "x.safetensors"
    assert main(["checkpoint", "convert", str(run), str(file)]) == 0
    words = ["checkpoint", "convert", str(file), str(tmp_path / "back"), "--separator", "."]
    assert main(words) == 0
    with Checkpoints(tmp_path / "back") as checkpoints:
        assert sorted(checkpoints.shapes()) == ["a/b", "c"]


def test_positions_that_are_not_there_are_refused() -> None:
    rows = np.arange(10)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    padded = shard(rows, one, batch_size=4, policy="pad")
    for _ in range(2):
        next(padded)
    at = padded.position
    padded.close()
    with pytest.raises(DataError, match="batch 2 of epoch 0; with policy 'drop' an epoch has 2"):
        shard(rows, one, batch_size=4, policy="drop", epochs=1).seek(at)


def test_files_and_folders_of_data_are_named(tmp_path: Path) -> None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(DataError, match="a source is a list of files"):
        shard(str(tmp_path / "x.npy"), one, batch_size=2)
    np.savez(tmp_path / "x.npz", a=np.ones((4, 2)))
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"x\.npz: "):
        shard([tmp_path / "x.npz"], one, batch_size=2)
