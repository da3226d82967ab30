"""Flip bits in the files of saved states: is every one noticed?

A state is saved as a run's folder, as one safetensors file, and as several. Each round flips one
bit of one file, drawn among the files of the state with equal chances, then verifies the state and
loads it. A flip is found if `planner checkpoint verify` refuses the state. A load is wrong if it
ends without an error and with other values than were saved.

    python benchmarks/flipped_bits.py --flips 300
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

FORMS = ("run", "one.safetensors", "many")


@dataclass(frozen=True)
class Flip:
    """One flipped bit: where, whether `verify` found it, and what loading gave: "refused",
    "equal" (the file is not read, or not all of it), or "wrong"."""

    form: str
    file: str
    found: bool
    loaded: str


def make_state() -> Any:
    """Some arrays, placed on up to 8 devices."""
    mesh = jax.make_mesh((len(jax.devices()),), ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    rng = np.random.default_rng(0)
    w = jax.device_put(rng.normal(size=(512, 64)).astype(np.float32), split)
    return {"params": {"w": w, "b": rng.normal(size=64).astype(np.float32)}, "n": np.int64(7)}


def saved(folder: Path) -> Path:
    """The state in each of `FORMS`."""
    from executor import Checkpoints
    from executor.cli.main import main

    with Checkpoints(folder / "run") as checkpoints:
        checkpoints.save(5, make_state(), extra={"position": {"batch": 3}})
    convert = ["checkpoint", "convert", str(folder / "run")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*convert, str(folder / "one.safetensors")]) == 0
        more = ["--to", "safetensors", "--max-shard-size", "1KB"]
        assert main([*convert, str(folder / "many"), *more]) == 0
    return folder


def flipped(folder: Path, seed: int) -> Flip:
    """Flip one bit, look, and flip it back."""
    from executor.cli.main import main

    draw = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    where = folder / form
    files = [where] if where.is_file() else sorted(x for x in where.rglob("*") if x.is_file())
    file = draw.choice([x for x in files if x.stat().st_size and not x.name.startswith("owner-")])
    raw = bytearray(file.read_bytes())
    at, bit = draw.randrange(len(raw)), 1 << draw.randrange(8)
    raw[at] ^= bit
    file.write_bytes(raw)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = main(["checkpoint", "verify", str(where)])
        return Flip(form, str(file.relative_to(folder)), code == 2, _loaded(where))
    finally:
        raw[at] ^= bit
        file.write_bytes(raw)


def _loaded(where: Path) -> str:
    from executor import CheckpointError, Checkpoints
    from executor.checkpoint.saved import open_state

    expected = {"params/w": make_state()["params"]["w"], "params/b": make_state()["params"]["b"]}
    try:
        if where.name == "run":
            with Checkpoints(where) as checkpoints:
                found = checkpoints.restore(make_state())
            values = {f"params/{name}": x for name, x in found["params"].items()}
            number = found["n"]
        else:
            leaves = open_state(where).leaves
            values = {name: leaves["params", name[7:]].whole() for name in expected}
            number = leaves["n",].whole()
    except (CheckpointError, KeyError):
        return "refused"
    same = all(np.array_equal(values[name], x) for name, x in expected.items()) and number == 7
    return "equal" if same else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=300)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as name:
        folder = saved(Path(name))
        flips = [flipped(folder, seed) for seed in range(options.flips)]
    for flip in flips:
        if not flip.found or flip.loaded == "wrong":
            print(flip)
    for form in FORMS:
        some = [flip for flip in flips if flip.form == form]
        counts = {
            kind: sum(x.loaded == kind for x in some) for kind in ("refused", "equal", "wrong")
        }
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        print(f"{form}: {sum(x.found for x in some)} of {len(some)} found; loads: {told}")
    raise SystemExit(not all(flip.found and flip.loaded != "wrong" for flip in flips))


if __name__ == "__main__":
    main()
