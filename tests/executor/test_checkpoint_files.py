"""Saved states without devices: what is in them, in and out of safetensors, merged; damage."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from executor import CheckpointError, Checkpoints
from executor.checkpoint import parts
from executor.checkpoint.common import path_text
from executor.checkpoint.saved import cast, merged, only, open_state, steps_in, write_state
from executor.cli.main import main

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
pytestmark = pytest.mark.devices
ROOT = Path(__file__).resolve().parents[2]
LARGE = 10**12


def state() -> Any:
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
    w = jax.device_put(
        np.arange(96.0, dtype=np.float32).reshape(12, 8), NamedSharding(mesh, P("a"))
    )
    raw = np.random.default_rng(0).integers(0, 256, (6, 8), np.uint8)
    params = {
        "layers": [{"w": w, "b.ias": raw.view(jnp.bfloat16)}, {"w": -w, "b.ias": raw.view("f2")}],
        "f8": raw.view(jnp.float8_e4m3fn),
        "n": np.int8(3),
    }
    nan = np.array([0x7FC12345, 0x7F800001], np.uint32).view(np.float32)
    return {"params": params, "opt": {"mu/": nan, "none": None, "empty": jnp.zeros((0, 4))}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(2)})
        checkpoints.save(3, state(), extra={"position": 48})
    return folder


def contents(where: Path, **options: Any) -> dict[str, tuple[str, bytes]]:
    return {
        path_text(p): (f"{x.dtype}{x.shape}", np.asarray(x).tobytes())
        for p, x in open_state(where, **options).leaves.items()
    }


def planner(*words: Any) -> int:
    return main(["checkpoint", *map(str, words)])


def test_there_and_back_through_safetensors_bit_for_bit(run: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "all.safetensors", tmp_path / "back"
    assert planner("convert", run, there) == 0
    assert planner("convert", there, back) == 0
    assert contents(there) == contents(back) == contents(run)
    wanted = state()
    with Checkpoints(back) as checkpoints:
        found = checkpoints.restore(wanted)
        assert checkpoints.steps == (3,) and checkpoints.extra() == {"position": 48}
        assert isinstance(checkpoints.shapes()["params"]["layers"], list)
    for got, had in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(had).tobytes()


def test_the_library_reads_what_is_written_here(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "params.safetensors"
    assert planner("convert", run, there, "--only", "params/layers", "--separator", ".") == 0
    found = safetensors_numpy.load_file(there)
    assert set(found) == {f"params.layers.{k}.{n}" for k in (0, 1) for n in ("w", "b~1ias")}
    layers = state()["params"]["layers"]
    for k in (0, 1):
        for name, path in (("w", "w"), ("b.ias", "b~1ias")):
            got, had = found[f"params.layers.{k}.{path}"], np.asarray(layers[k][name])
            assert (got.dtype, got.tobytes()) == (had.dtype, had.tobytes())


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    tensors = {"model.0.weight": np.arange(6.0).reshape(2, 3), "model.0.bias": np.ones(3, np.int16)}
    there = tmp_path / "hub.safetensors"
    safetensors_numpy.save_file(tensors, there, metadata={"format": "np"})
    assert planner("convert", there, tmp_path / "run", "--separator", ".") == 0
    with Checkpoints(tmp_path / "run") as checkpoints:
        shapes = checkpoints.shapes()
        assert shapes["model"]["0"]["weight"].dtype == np.float64
        like = {"model": [{"weight": np.zeros((2, 3)), "bias": np.zeros(3, np.int16)}]}
        found = checkpoints.restore(like)
    np.testing.assert_array_equal(found["model"][0]["weight"], tensors["model.0.weight"])


@pytest.mark.parametrize("to", ["folder", "named.safetensors"])
def test_large_states_become_several_files_with_an_index(
    run: Path, tmp_path: Path, to: str
) -> None:
    there = tmp_path / to
    assert planner("convert", run, there, "--max-shard-size", "200B", "--to", "safetensors") == 0
    folder = there if to == "folder" else tmp_path
    index = next(folder.glob("*.index.json"))
    told = json.loads(index.read_text())
    files = set(told["weight_map"].values())
    assert len(files) > 2 and files == {f.name for f in folder.glob("*.safetensors")}
    assert told["metadata"]["total_size"] == sum(x.nbytes for x in open_state(run).leaves.values())
    assert contents(folder) == contents(index) == contents(run)
    with pytest.raises(CheckpointError, match="is there already"):
        write_state(open_state(run), there, form="safetensors", separator="/", max_bytes=200)
    victim = folder / sorted(files)[1]
    victim.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=rf"names {victim.name}, which is not there"):
        open_state(index)


def test_parameters_alone_and_rounded(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "p.safetensors"
    assert planner("convert", run, there, "--params-only", "--dtype", "bfloat16") == 0
    found = open_state(there)
    assert {p[0] for p in found.leaves} == {"params"}
    types = {path_text(p): x.dtype.name for p, x in found.leaves.items()}
    assert types["params/layers/0/w"] == types["params/f8"] == "bfloat16"
    assert types["params/n"] == "int8"
    w = np.asarray(state()["params"]["layers"][0]["w"])
    got = np.asarray(found.leaves["params", "layers", "0", "w"])
    np.testing.assert_array_equal(got, w.astype(jnp.bfloat16))
    with pytest.raises(CheckpointError, match="has nothing below wrong; it has opt, params"):
        only(open_state(run), [("wrong",)])


def test_merging_takes_parts_of_each_and_refuses_doubles(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpoints(tmp_path / "other") as checkpoints:
        checkpoints.save(7, {"params": {"f8": jnp.ones(2)}, "opt": {"new": jnp.ones(3)}})
    out = tmp_path / "merged"
    assert planner("merge", f"{run}:params", f"{tmp_path / 'other'}:opt", out) == 0
    found = contents(out)
    assert found == {
        **{p: x for p, x in contents(run).items() if p.startswith("params/")},
        **{p: x for p, x in contents(tmp_path / "other").items() if p.startswith("opt/")},
    }
    assert open_state(out).step == 3 and open_state(out).extra == {"position": 48}
    assert planner("merge", run, tmp_path / "other", tmp_path / "no") == 2
    assert "params/f8 is in" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    inner = {("params",): open_state(run).leaves["params", "f8"]}
    with pytest.raises(CheckpointError, match="params is a leaf"):
        merged([open_state(run), type(open_state(run))(run, inner)])


def test_info_says_what_is_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner("info", run) == 0
    text = capsys.readouterr().out
    for word in ("step     3", '{"position": 48}', "params/layers/0/b.ias", "opt/mu~1", "[12,8]"):
        assert word.replace("     ", "") in text.replace("     ", ""), text
    assert "bfloat16" in text and "384 B" in text
    assert planner("info", run, "--step", 1) == 0
    assert "[2]" in capsys.readouterr().out
    assert planner("info", run, "--step", 2) == 2
    assert "no checkpoint of step 2" in capsys.readouterr().err
    assert planner("info", run / "1") == 0
    assert planner("info", run / "1" / "state") == 0
    assert planner("info", run.parent / "nothing") == 2
    assert "expected a folder of steps, of Orbax, or safetensors" in capsys.readouterr().err


def test_a_step_that_is_being_written_is_not_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "5").mkdir()
    assert steps_in(tmp_path) == ()
    assert steps_in(run) == (1, 3)


@pytest.mark.parametrize("how", ["cut", "header", "rubbish", "empty", "offsets", "type"])
def test_damaged_and_foreign_safetensors_are_refused(run: Path, tmp_path: Path, how: str) -> None:
    there = tmp_path / "x.safetensors"
    safetensors_numpy.save_file({"a": np.arange(9.0), "b": np.ones(3)}, there)
    raw = there.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    if how == "cut":
        there.write_bytes(raw[:-8])
    elif how == "header":
        there.write_bytes(raw[:20] + b"\xff\xff" + raw[22:])
    elif how == "rubbish":
        there.write_bytes(b"PK\x03\x04" * 100)
    elif how == "empty":
        there.write_bytes(b"")
    else:
        if how == "offsets":
            header["a"]["data_offsets"] = [0, 8]
        else:
            header["a"]["dtype"] = "Q17"
        text = json.dumps(header).encode()
        there.write_bytes(struct.pack("<Q", len(text)) + text + raw[-96:])
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged, or no safetensors"):
        open_state(there)


def test_a_damaged_leaf_ends_a_conversion_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(0, {"good": jnp.ones(4), "bad": jnp.arange(2.0**18)})
    files = [f for f in (tmp_path / "run").rglob("*") if f.parent.name == "d"]
    max(files, key=lambda f: f.stat().st_size).write_bytes(b"rubbish")
    saved = open_state(tmp_path / "run")
    for form, out in (("safetensors", "out.safetensors"), ("orbax", "out")):
        with pytest.raises(CheckpointError, match="leaf bad is damaged or missing"):
            write_state(saved, tmp_path / out, form=form, separator="/", max_bytes=LARGE)
    left = {f.name for f in tmp_path.iterdir()}
    assert left <= {"run", "out"} and steps_in(tmp_path / "out") == ()


def test_types_that_safetensors_lack_are_named(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(0, {"a": jnp.ones(4, jnp.int4)})
    saved = open_state(tmp_path / "run")
    with pytest.raises(CheckpointError, match="have no type for a: int4"):
        write_state(saved, tmp_path / "o", form="safetensors", separator="/", max_bytes=LARGE)


def test_a_checkpoint_of_orbax_alone(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        tree = {"layers": [{"w.x": jnp.ones((2, 2))}], "n": 3}
        manager.save(5, args=ocp.args.StandardSave(tree))
    assert planner("convert", tmp_path / "theirs", tmp_path / "o.safetensors") == 0
    found = safetensors_numpy.load_file(tmp_path / "o.safetensors")
    assert set(found) == {"layers/0/w.x", "n"}


KEYS = st.text(st.sampled_from("ab~/.01"), min_size=1, max_size=3)


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(
        st.tuples(KEYS, KEYS),
        st.sampled_from(["float32", "bfloat16", "int8", "bool", "uint32"]),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from("/."),
)
def test_any_names_there_and_back(
    tmp_path_factory: Any, names: dict[tuple[str, str], str], separator: str
) -> None:
    folder = tmp_path_factory.mktemp("names")
    tree: dict[str, dict[str, Any]] = {}
    for k, ((a, b), dtype) in enumerate(names.items()):
        tree.setdefault(a, {})[b] = jnp.full((k + 1,), k, jnp.dtype(dtype))
    with Checkpoints(folder / "a") as checkpoints:
        checkpoints.save(0, tree)
    for source, to, form in (
        ("a", "b.safetensors", "safetensors"),
        ("b.safetensors", "c", "orbax"),
    ):
        saved = open_state(folder / source)
        write_state(saved, folder / to, form=form, separator=separator, max_bytes=LARGE)
    with Checkpoints(folder / "c") as checkpoints:
        found = checkpoints.restore(tree)
        assert jax.tree.structure(checkpoints.shapes()) == jax.tree.structure(tree)
    for got, had in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(had).tobytes()


def test_parts_make_up_the_leaf(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 100)  # some rows of a leaf
    leaf = open_state(run).leaves["params", "layers", "0", "w"]
    indices = list(leaf.parts())
    assert len(indices) == 4 and [i[0].stop - i[0].start for i in indices] == [3] * 4
    assert b"".join(leaf.read(i).tobytes() for i in indices) == np.asarray(leaf).tobytes()
    assert leaf.rows == 3  # as it was split
    assert [i[0].stop for i in leaf.parts(multiple=2)] == [6, 12]
    assert [i[0].stop for i in replace(leaf, rows=1).parts(multiple=5)] == [5, 10, 12]
    assert len(list(open_state(run).leaves["params", "n"].parts())) == 1
    for to in ("o.safetensors", "o"):
        write_state(
            open_state(run),
            tmp_path / to,
            form="orbax" if to == "o" else "safetensors",
            separator="/",
            max_bytes=LARGE,
        )
        assert contents(tmp_path / to) == contents(run)


BOUNDED = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from executor.cli.main import main
def peak():
    fields = dict(x.split(":", 1) for x in open("/proc/self/status").read().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1000
import threading, time
most = 0.0
def watch():
    global most
    while True:
        most = max(most, peak()); time.sleep(0.005)
import executor.checkpoint.saved, executor.checkpoint.files.tensor_files, safetensors
import jax; jax.devices()
before = peak()
threading.Thread(target=watch, daemon=True).start()
assert main(["checkpoint", "convert", sys.argv[1], sys.argv[2]]) == 0
print("MB", most - before)
"""


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to read memory from")
    tensors = {f"w{k}": np.full((6000, 10000), k, np.float32) for k in range(4)}  # 240 MB each
    safetensors_numpy.save_file(tensors, tmp_path / "a.safetensors")
    del tensors
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for source, to in (("a.safetensors", "run"), ("run", "b.safetensors")):
        command = [sys.executable, "-c", BOUNDED, str(tmp_path / source), str(tmp_path / to)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        used = float(done.stdout.split("MB ")[1].split()[0])
        assert used < 400, (source, used)  # of 960 MB in leaves of 240 MB
    a, b = (tmp_path / f"{n}.safetensors" for n in "ab")
    assert contents(a) == contents(b)


def test_casting_leaves_others_alone(run: Path) -> None:
    found = cast(open_state(run), np.dtype(np.float16))
    assert {x.dtype.name for x in found.leaves.values()} == {"float16", "int8"}
