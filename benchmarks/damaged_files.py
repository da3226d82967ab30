"""Give `planner checkpoint` damaged and malicious files: does it refuse them, and touch no other?

Five kinds of files are mutated by a seed: the bytes of a safetensors file, its header, the notes
in the header, the index of several files, and any file of a checkpoint folder. Each mutation runs
`info`, `verify` or `convert` in a sandbox folder that also holds folders whose names the mutations
use. A case passes if the command ends with code 0, or with code 2 and one line, and if every file
outside the output is as it was before.

    python benchmarks/damaged_files.py --each 1000
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VICTIMS = ("victim", "0", "1", "7")
NASTY: tuple[Any, ...] = (
    "../victim",
    "../../victim",
    "/",
    "..",
    ".",
    "",
    "a\x00b",
    "~1~0",
    "x" * 5000,
    "a/" * 3000 + "b",
    "9" * 5000,
    "999999999999",
    -1,
    0,
    1,
    True,
    None,
    2**31,
    2**60,
    2**63,
    2**64,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    ["../victim"],
    {"..": "../victim"},
    [2**60, 2**60],
    [0, 2**62],
    "F32",
    "I64",
    "float32",
    "O",
)
DEEP = "[" * 100_000


@dataclass(frozen=True)
class Case:
    """What a mutation gave: the command, its exit code, its error output, what is wrong."""

    words: tuple[str, ...]
    code: int | None
    error: str
    wrong: str


def bases(folder: Path) -> Path:
    """Write the files that are mutated: a checkpoint folder, one safetensors file, and several."""
    import jax.numpy as jnp
    import numpy as np

    from executor import Checkpoints
    from executor.cli.main import main

    state = {
        "params": {"layers": [jnp.arange(64.0), jnp.ones((4, 4), jnp.bfloat16)], "b": jnp.ones(3)},
        "opt": {"empty": jnp.zeros((0, 3)), "n": np.int64(4)},
    }
    with Checkpoints(folder / "run") as checkpoints:
        checkpoints.save(3, state, extra={"position": {"batch": 4}})
    words = ["checkpoint", "convert", str(folder / "run" / "3")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, str(folder / "one.safetensors")]) == 0
        more = ["--to", "safetensors", "--max-shard-size", "100B"]
        assert main([*words, str(folder / "many"), *more]) == 0
    return folder


def checked(kind: str, seed: int, base: Path, sandbox: Path) -> Case:
    """Mutate a copy of one kind of file, and run a command on it."""
    draw = random.Random(f"{kind} {seed}")
    inside = sandbox / "inside"
    source = _SOURCES[kind](draw, base, inside)
    for name in VICTIMS:
        for parent in (sandbox, inside):
            (parent / name).mkdir(parents=True, exist_ok=True)
            (parent / name / "file").write_text("precious")
    out = inside / "out" / draw.choice(["new", "new.safetensors"])
    verb = draw.choice(["info", "verify", "convert", "convert"])
    words = ["checkpoint", verb, str(source)] + [str(out)] * (verb == "convert")
    if verb == "convert" and out.suffix == "":
        words += ["--to", draw.choice(["orbax", "safetensors"])]
    before = _prints(sandbox, out.parent)
    code, error, wrong = _run(words)
    if not wrong and code not in (0, 2):
        wrong = f"exit code {code}"
    if not wrong and code == 2 and len(error.strip().splitlines()) != 1:
        wrong = "the error is not one line"
    after = _prints(sandbox, out.parent)
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    if changed:
        wrong = f"changed outside of the output: {changed[:3]}"
    return Case(tuple(words), code, error, wrong)


def _run(words: list[str]) -> tuple[int | None, str, str]:
    from executor.cli.main import main

    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            return main(words), error.getvalue(), ""
        except BaseException as failure:
            return None, error.getvalue(), f"{type(failure).__name__}: {failure}"[:300]


def _prints(folder: Path, apart: Path) -> dict[str, str]:
    """Every file and folder but those in ``apart``, with a digest of each file."""
    found = {}
    for path in folder.rglob("*"):
        if apart not in (path, *path.parents):
            whole = path.is_file()
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if whole else ""
    return found


def _bytes_mutated(draw: random.Random, raw: bytes) -> bytes:
    """Flipped, cut, doubled, or overwritten somewhere."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 3])):
        at = draw.randrange(len(data)) if data else 0
        match draw.randrange(5):
            case 0 | 1 if data:
                data[at] ^= 1 << draw.randrange(8)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = draw.randbytes(draw.choice([1, 8, 100]))
            case _:
                data[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**60, 2**64 - 1]))
    return bytes(data)


def _json_mutated(draw: random.Random, tree: Any) -> str:
    """Some values and keys replaced by nasty ones, as text."""
    if draw.random() < 0.05:
        return DEEP
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 2, 4])):
        places: list[tuple[Any, Any]] = []
        _places(tree, places)
        if not places:
            break
        holder, key = draw.choice(places)
        nasty = copy.deepcopy(draw.choice(NASTY))
        match draw.randrange(4):
            case 0 if isinstance(holder, dict):
                holder[str(nasty)] = holder.pop(key)
            case 1:
                holder.pop(key)
            case _:
                holder[key] = nasty
    text = json.dumps(tree)
    return text.replace('"x"', DEEP) if draw.random() < 0.02 else text


def _places(tree: Any, places: list[tuple[Any, Any]]) -> None:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(entries):
        places.append((tree, key))
        if isinstance(value, dict | list):
            _places(value, places)


def _split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data, without the checksums: whoever means harm leaves them out."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = {"meshwright": header["__metadata__"]["meshwright"]}
    return header, raw[8 + length :]


def _joined(header: str, data: bytes) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _one(draw: random.Random, base: Path, inside: Path) -> tuple[Path, bytes]:
    inside.mkdir(parents=True, exist_ok=True)
    return inside / "bad.safetensors", (base / "one.safetensors").read_bytes()


def _raw_source(draw: random.Random, base: Path, inside: Path) -> Path:
    file, raw = _one(draw, base, inside)
    file.write_bytes(_bytes_mutated(draw, raw))
    return file


def _header_source(draw: random.Random, base: Path, inside: Path) -> Path:
    file, raw = _one(draw, base, inside)
    header, data = _split(raw)
    file.write_bytes(_joined(_json_mutated(draw, header), data))
    return file


def _notes_source(draw: random.Random, base: Path, inside: Path) -> Path:
    file, raw = _one(draw, base, inside)
    header, data = _split(raw)
    notes = header["__metadata__"]
    notes["meshwright"] = _json_mutated(draw, json.loads(notes["meshwright"]))
    file.write_bytes(_joined(json.dumps(header), data))
    return file


def _index_source(draw: random.Random, base: Path, inside: Path) -> Path:
    shutil.copytree(base / "many", inside / "many")
    index = next((inside / "many").glob("*.index.json"))
    tree = json.loads(index.read_text())
    tree["metadata"] = {"total_size": tree["metadata"]["total_size"]}
    index.write_text(_json_mutated(draw, tree))
    return draw.choice([index, index.parent])


def _folder_source(draw: random.Random, base: Path, inside: Path) -> Path:
    folder = inside / "run"
    shutil.copytree(base / "run", folder)
    if draw.random() < 0.7:
        (folder / "3" / "checksums.json").unlink()
    files = sorted(x for x in folder.rglob("*") if x.is_file())
    file = draw.choice(files)
    raw = file.read_bytes()
    try:
        tree = json.loads(raw)
    except ValueError:
        tree = None
    match draw.randrange(8):
        case 0:
            file.unlink()
        case 1:
            file.unlink()
            file.symlink_to(draw.choice(["/dev/null", "../../../victim/file", "nowhere", "."]))
        case 2 | 3 | 4 if isinstance(tree, dict):
            file.write_text(_json_mutated(draw, tree))
        case _:
            file.write_bytes(_bytes_mutated(draw, raw))
    return draw.choice([folder, folder / "3"])


_SOURCES: dict[str, Callable[[random.Random, Path, Path], Path]] = {
    "bytes": _raw_source,
    "header": _header_source,
    "notes": _notes_source,
    "index": _index_source,
    "folder": _folder_source,
}
KINDS = tuple(_SOURCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=1000, help="mutations of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        base = bases(Path(name) / "base")
        for kind in options.kinds:
            begun, refused, wrong = time.monotonic(), 0, 0
            for seed in range(options.each):
                sandbox = Path(name) / f"{kind}-{seed}"
                case = checked(kind, seed, base, sandbox)
                shutil.rmtree(sandbox, ignore_errors=True)  # a failed save may write for a moment
                refused += case.code == 2
                if case.wrong:
                    wrong += 1
                    print(kind, seed, case.words[1], case.wrong, case.error[-500:], flush=True)
            took = time.monotonic() - begun
            print(
                f"{kind}: {options.each} mutations, {refused} refused, {wrong} wrong, {took:.0f} s",
                flush=True,
            )
            bad += wrong
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
