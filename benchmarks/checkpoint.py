"""Save and restore of a state of 1 GB against the disk's own write and read of the same bytes.

Eight virtual CPU devices hold parameters and two moments, split over eight, four, two or none. The
disk writes plain files of the same bytes, one an array, from as many threads as cores, each ended
by fsync, and reads them into memory; both sides' files are thrown out of the page cache before they
are read. The two alternate. Targets: save + restore at most 1.3 times write + read; ``save``
returns within 10 % of the time that the save takes.

    python benchmarks/checkpoint.py [--gigabytes 1] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from executor import Checkpoints

SPECS = (P(("a", "b")), P("a", "b"), P("a"), P(None, "b"))


def make_state(gigabytes: float) -> Any:
    """24 arrays [rows, 1024] of random bits, in three trees, and a small replicated one in each."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
    rows = int(gigabytes * 1e9 / (24 * 4 * 1024)) // 8 * 8
    rng = np.random.default_rng(0)

    def one(spec: P, rows: int) -> jax.Array:
        array = rng.standard_normal((rows, 1024), np.float32)
        return jax.device_put(array, NamedSharding(mesh, spec))

    def tree() -> Any:
        layers = {f"layer{k}": one(SPECS[k % len(SPECS)], rows) for k in range(8)}
        return {**layers, "norm": one(P(), 8)}

    return jax.block_until_ready({"params": tree(), "mu": tree(), "nu": tree()})


def timed(run: Callable[[], Any]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def forget(folder: Path) -> None:
    """Throw files out of the page cache; they are on disk already."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(folder: Path, arrays: list[np.ndarray]) -> tuple[float, float]:
    """Seconds that plain files take to be written, and to be read."""
    folder.mkdir()

    def write(k: int) -> None:
        with (folder / str(k)).open("wb", buffering=0) as file:
            file.write(arrays[k].reshape(-1).view(np.uint8).data)
            os.fsync(file.fileno())

    def read(k: int) -> np.ndarray:
        into = np.empty(arrays[k].nbytes, np.uint8)
        with (folder / str(k)).open("rb", buffering=0) as file:
            file.readinto(into.data)
        return into

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrote = timed(lambda: list(pool.map(write, range(len(arrays)))))
        forget(folder)
        return wrote, timed(lambda: list(pool.map(read, range(len(arrays)))))


def checkpoint(folder: Path, state: Any, shardings: Any) -> tuple[float, float, float]:
    """Seconds until ``save`` returns, until it is on disk, and of a restore."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with Checkpoints(folder, keep=None) as checkpoints:
        begun = time.perf_counter()
        checkpoints.save(0, state)
        blocked = time.perf_counter() - begun
        checkpoints.wait()
        saved = time.perf_counter() - begun
        forget(folder)
        restored = timed(
            lambda: jax.block_until_ready(checkpoints.restore(like, shardings=shardings))
        )
    return blocked, saved, restored


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    state = make_state(options.gigabytes)
    mesh = jax.make_mesh((8,), ("all",), (AxisType.Auto,))
    same = jax.tree.map(lambda x: x.sharding, state)
    other = jax.tree.map(lambda x: NamedSharding(mesh, P(None, "all")), state)
    arrays = [np.asarray(x) for x in jax.tree.leaves(state)]
    total = sum(x.nbytes for x in arrays)

    table = Table(title=f"save + restore of {total / 1e9:.2f} GB / plain files, seconds")
    for name in ("round", "write", "read", "save", "blocked", "restore", "ratio", "blocked/save"):
        table.add_column(name, justify="right")
    table.add_column("restore, split otherwise", justify="right")
    ratios, shares = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for k in range(options.rounds + 1):  # the first warms up, and does not count
            folders = [Path(temporary) / name for name in ("plain", "same", "other")]
            measure: list[Callable[[], Any]] = [
                lambda f=folders[0]: disk(f, arrays),
                lambda f=folders[1]: checkpoint(f, state, same),
            ]
            found: list[Any] = [None, None]
            for i in (0, 1) if k % 2 else (1, 0):
                found[i] = measure[i]()
            (wrote, read), (blocked, saved, restored) = found
            otherwise = checkpoint(folders[2], state, other)[2]
            for folder in folders:
                shutil.rmtree(folder)
            if k == 0:
                continue
            ratios.append((saved + restored) / (wrote + read))
            shares.append(blocked / saved)
            numbers = (wrote, read, saved, blocked, restored, ratios[-1], shares[-1], otherwise)
            table.add_row(str(k), *(f"{x:.2f}" for x in numbers))
    console = Console(width=110)
    console.print(table)
    ratio, share = statistics.median(ratios), statistics.median(shares)
    console.print(f"median ratio {ratio:.2f}, target 1.30: {'met' if ratio <= 1.3 else 'missed'}")
    console.print(f"median blocked {share:.1%}, target 10 %: {'met' if share < 0.1 else 'missed'}")


if __name__ == "__main__":
    main()
