"""Files that others wrote: refused in one line, and nothing outside of the output is touched."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from executor import CheckpointError, Checkpoints
from executor.checkpoint.common import nested
from executor.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import damaged_files  # noqa: E402

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.devices
EACH = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged_files.bases(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("kind", damaged_files.KINDS)
def test_mutated_files_end_in_one_line_and_touch_no_other(
    kind: str, base: Path, tmp_path: Path
) -> None:
    cases = [damaged_files.checked(kind, k, base, tmp_path / str(k)) for k in range(EACH)]
    assert not [case for case in cases if case.wrong]
    assert any(case.code == 2 for case in cases)


@pytest.mark.slow
@pytest.mark.parametrize("kind", damaged_files.KINDS)
def test_a_thousand_mutations(kind: str, base: Path, tmp_path: Path) -> None:
    for k in range(EACH, 1000):
        case = damaged_files.checked(kind, k, base, tmp_path / str(k))
        assert not case.wrong, (k, case)


def tensors(file: Path, notes: Any, names: tuple[str, ...] = ("w",)) -> Path:
    """A safetensors file with notes."""
    text = notes if isinstance(notes, str) else json.dumps(notes)
    header: dict[str, Any] = {"__metadata__": {"meshwright": text}}
    for k, name in enumerate(names):
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [8 * k, 8 * k + 8]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + np.ones(2 * len(names), "<f4").tobytes())
    return file


@pytest.mark.parametrize("step", ["../victim", "/victim", -1, True, 1.0, 10**30, "3", [1]])
def test_a_step_in_notes_is_a_number(
    step: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    evil = tensors(tmp_path / "evil.safetensors", {"step": step})
    for more in (["--to", "orbax"], ["--to", "safetensors"]):
        assert main(["checkpoint", "convert", str(evil), str(tmp_path / "out"), *more]) == 2
    assert "expected an integer from 0" in capsys.readouterr().err
    assert [x.name for x in victim.iterdir()] == ["precious"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        ("[" * 100_000, "nested too deeply"),
        ([1], "expected a JSON object"),
        ({"separator": ""}, "separator"),
        ({"separator": "~"}, "separator"),
        ({"sequences": [[["a"]]]}, "expected a list of keys"),
        ({"sequences": 3}, "expected a list of paths"),
        ({"plan": [1]}, "expected text"),
        ({"extra": [1]}, "expected a JSON object"),
    ],
)
def test_notes_of_another_form_are_refused(
    notes: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = tensors(tmp_path / "evil.safetensors", notes)
    assert main(["checkpoint", "info", str(evil)]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1


def test_names_of_arrays_are_no_paths(tmp_path: Path) -> None:
    names = ("../../x", "/etc/x", "a/../../b", "..\\c")
    evil = tensors(tmp_path / "evil.safetensors", {"step": 1}, names)
    inside = tmp_path / "in" / "side"
    inside.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert main(["checkpoint", "convert", str(evil), str(inside / "out")]) == 0
    after = sorted(x for x in tmp_path.rglob("*") if inside / "out" not in (x, *x.parents))
    assert before == after
    with Checkpoints(inside / "out") as checkpoints:
        assert set(checkpoints.shapes()) == {"..", "", "a", "..\\c"}


def test_a_path_of_too_many_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = tensors(tmp_path / "evil.safetensors", {}, ("a/" * 20_000 + "b",))
    assert main(["checkpoint", "convert", str(evil), str(tmp_path / "out")]) == 2
    assert "a path of 20001 keys, expected at most 256" in capsys.readouterr().err


def test_a_conversion_of_a_damaged_file_prints_no_traceback(tmp_path: Path) -> None:
    """In a process of its own: Orbax's threads log past what replaces stderr."""
    whole = tmp_path / "whole.safetensors"
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(2000.0), "v": jnp.ones(3000)})
    assert main(["checkpoint", "convert", str(tmp_path / "run"), str(whole)]) == 0
    raw = bytearray(whole.read_bytes())
    raw[-100] ^= 4
    whole.write_bytes(raw)
    command = [sys.executable, "-m", "executor.cli", "checkpoint", "convert"]
    done = subprocess.run(
        [*command, str(whole), str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "is damaged: got crc32" in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_index_names_files_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "many").mkdir()
    tensors(tmp_path / "secret.safetensors", {})
    index = tmp_path / "many" / "x.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..", 3):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        assert main(["checkpoint", "info", str(index)]) == 2
        assert "expected the name of a file beside it" in capsys.readouterr().err


def test_lists_with_more_holes_than_leaves_are_refused() -> None:
    assert nested({("a", "2"): 1}, [("a",)]) == {"a": [None, None, 1]}
    with pytest.raises(CheckpointError, match="may have 1000000 empty places"):
        nested({("a", "999999999999"): 1}, [("a",)])


def test_empty_arrays_in_notes_have_no_elements(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"w": jnp.ones(3), "none": jnp.zeros((0, 4))})
    file = tmp_path / "0" / "state" / "_METADATA"
    known = json.loads(file.read_text())
    for shape in ([2**60], [-1, 0], [True, 0], ["0"], 0, None):
        known["custom_metadata"]["meshwright"]["empty"][0]["shape"] = shape
        file.write_text(json.dumps(known))
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError):
            checkpoints.shapes()


@pytest.mark.parametrize("step", [-1, True, "3", "../x", 1.5])
def test_a_step_to_save_is_a_number(step: Any, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(CheckpointError, match="expected an integer from 0"):
            checkpoints.save(step, {"w": jnp.ones(3)})
        checkpoints.save(np.int64(0), {"w": jnp.ones(3)})
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


def test_folders_with_names_like_numbers_are_no_steps(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"w": jnp.ones(3)})
    for name in ("07", "٣", "9" * 40):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "_METADATA").write_text("{}")
    assert main(["checkpoint", "info", str(tmp_path)]) == 0
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == (3,)


def test_links_in_a_folder_of_checkpoints_are_not_followed_to_delete(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    with Checkpoints(run) as checkpoints:
        checkpoints.save(2, {"w": jnp.ones(3)})
    (run / "2").rename(victim)
    (run / "2").symlink_to(victim)
    (run / "1.orbax-checkpoint-tmp-3").symlink_to(victim)
    before = sorted(victim.rglob("*"))
    with contextlib.suppress(CheckpointError), Checkpoints(run, keep=1) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, {"w": jnp.ones(3)})
    assert sorted(victim.rglob("*")) == before
