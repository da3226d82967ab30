"""Kill processes of a run at random moments, also during a save; does it end as if nothing was?

A small next-byte model is trained on real text by ``planner launch`` in several processes, once
undisturbed, then once for every kill: ``kill -9`` of a random process at a random moment between
its start and its end, or while a checkpoint is being written. Each run must end with the same state
bit for bit, among it a count of the rows that it has seen (a batch lost or doubled changes it), and
every step must stand once in the metrics. "noticed" is the time from the kill to the word of it on
the other processes.

    python benchmarks/faults.py --kills 20 --processes 2 [--stages 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVE_EVERY = 60, 5
DEADLINE_S = 20.0

WORK = f"""
import hashlib, json, os, sys
from pathlib import Path
from pydoc_data.topics import topics
import jax, jax.numpy as jnp, numpy as np, optax
from jax.experimental import multihost_utils
from executor import initialize, parallelize, train
from executor.data import shard

folder = Path(sys.argv[1])
if "FAULTS_LEASE_S" in os.environ:
    from executor.checkpoint import owner
    owner.LEASE_S = float(os.environ["FAULTS_LEASE_S"])
    owner.BEAT_S = owner.LEASE_S / 10
role = initialize(deadline_s={DEADLINE_S})
restart = os.environ.get("MESHWRIGHT_RESTART", "0")
(folder / f"pid-{{restart}}-{{role.process}}").write_text(str(os.getpid()))
text = np.frombuffer("\\n".join(topics[k] for k in sorted(topics)).encode(), np.uint8)[:40_000]
windows = np.lib.stride_tricks.sliding_window_view(text, 9)[::9].astype(np.int32)
rows = {{"window": windows, "row": np.arange(len(windows), dtype=np.uint32)}}
optimizer = optax.adam(1e-2)


def make_state():
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = {{"embed": (256, 32), "hidden": (256, 512), "out": (512, 256)}}
    params = {{n: 0.1 * jax.random.normal(k, s) for k, (n, s) in zip(keys, sizes.items())}}
    seen = {{"rows": jnp.uint32(0), "squares": jnp.uint32(0), "batches": jnp.uint32(0)}}
    return {{"params": params, "opt": optimizer.init(params), "seen": seen}}


def train_step(state, batch):
    def loss(params):
        x = params["embed"][batch["window"][:, :8]].reshape(-1, 256)
        logits = jax.nn.relu(x @ params["hidden"]) @ params["out"]
        target = batch["window"][:, 8]
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"])
    seen, row = state["seen"], batch["row"]
    seen = {{
        "rows": seen["rows"] + row.sum(),
        "squares": seen["squares"] + (row * row).sum(),
        "batches": seen["batches"] + 1,
    }}
    params = optax.apply_updates(state["params"], updates)
    return {{"params": params, "opt": opt, "seen": seen}}, value


step = parallelize(train_step, donate_argnums=0, **json.loads(sys.argv[2]))
state = make_state()
compiled = step.prepare(state, {{k: v[:64] for k, v in rows.items()}})
batches = shard(rows, compiled.in_shardings[1], batch_size=64, seed=3)
done = train(step, state, batches, steps={STEPS}, directory=(folder / "run").resolve(),
             save_every={SAVE_EVERY}, log_every=5)


def parts(x):
    # what this process has of an array, in order
    found = {{str(s.index): np.asarray(s.data).tobytes() for s in x.addressable_shards}}
    return b"".join(found[k] for k in sorted(found))


def everyones(mine):
    return np.asarray(multihost_utils.process_allgather(np.asarray(mine)))


own = hashlib.sha256(b"".join(map(parts, jax.tree.leaves(done.state)))).digest()
digest = hashlib.sha256(everyones(np.frombuffer(own, np.uint8)).tobytes()).hexdigest()
seen = {{k: x.addressable_shards for k, x in done.state["seen"].items()}}
seen = {{k: int(everyones(s[0].data if s else np.uint32(0)).max()) for k, s in seen.items()}}
if role.process == 0:
    (folder / "result.json").write_text(json.dumps({{"digest": digest, "seen": seen}}))
"""


@dataclass
class Run:
    """What a run gave; ``unfinished``: whether a checkpoint was half written after the kill."""

    code: int
    seconds: float
    noticed_s: float | None
    result: dict[str, object]
    steps: list[int]
    unfinished: bool
    output: str


def launched(
    folder: Path,
    processes: int,
    kill: tuple[str, int, float] | None,
    number: signal.Signals = signal.SIGKILL,
    how: Mapping[str, Any] | None = None,
) -> Run:
    """Run the work; ``kill`` is (what to wait for, process, seconds after that), ``number`` the
    signal that is sent then, ``how`` the options of ``parallelize``."""
    folder.mkdir(parents=True)
    script = folder / "work.py"
    script.write_text(WORK)
    command = [sys.executable, "-m", "executor.cli", "launch", "-n", str(processes)]
    command += ["--devices-per-process", "2", "--logs", str(folder / "logs")]
    command += ["--max-restarts", "3", str(script), str(folder), json.dumps(how or {})]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    begun = time.monotonic()
    child = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    killed: list[float] = []
    half: list[Path] = []
    if kill is not None:
        threading.Thread(
            target=_kill, args=(folder, kill, begun, killed, half, number), daemon=True
        ).start()
    lines, noticed = [], None
    assert child.stdout is not None
    for line in child.stdout:
        lines.append(line)
        if killed and noticed is None and "was lost" in line:
            noticed = time.monotonic() - killed[0]
    code = child.wait()
    result = folder / "result.json"
    metrics = folder / "run" / "metrics.jsonl"
    return Run(
        code,
        time.monotonic() - begun,
        noticed if killed else None,
        json.loads(result.read_text()) if result.exists() else {},
        [json.loads(x)["step"] for x in metrics.read_text().splitlines()]
        if metrics.exists()
        else [],
        bool(half),
        "".join(lines),
    )


def _kill(
    folder: Path,
    kill: tuple[str, int, float],
    begun: float,
    killed: list[float],
    half: list[Path],
    number: signal.Signals,
) -> None:
    what, process, seconds = kill
    pid = folder / f"pid-0-{process}"
    while not pid.exists():
        time.sleep(0.01)
    if what == "save":
        while not _half_written(folder):
            time.sleep(0.001)
    time.sleep(seconds if what == "save" else max(0.0, begun + seconds - time.monotonic()))
    try:
        os.kill(int(pid.read_text()), number)
        killed.append(time.monotonic())
        half += _half_written(folder)
    except ProcessLookupError:
        return


def _half_written(folder: Path) -> list[Path]:
    return list((folder / "run").glob(".unfinished-*/*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--stages", type=int, help="pipeline stages, each a program of its own")
    parser.add_argument("--schedule", default="1f1b", help="of the stages")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    how: dict[str, Any] = {}
    if options.stages:
        how = {"stages": options.stages, "microbatches": 4, "schedule": options.schedule}
    draw = random.Random(options.seed)
    table = Table(title=f"{options.kills} kills, {options.processes} processes, {STEPS} steps")
    for column in (
        "kill",
        "process",
        "at",
        "noticed (s)",
        "run (s)",
        "same state",
        "each step once",
    ):
        table.add_column(column, justify="right")
    good, halves, waits = 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        calm = launched(Path(folder) / "calm", options.processes, None, how=how)
        if calm.code:
            raise SystemExit(calm.output)
        table.add_row("none", "", "", "", f"{calm.seconds:.0f}", "-", "yes")
        for k in range(options.kills):
            what = "save" if k % 3 == 2 else "any"
            at = draw.uniform(0, 0.2) if what == "save" else draw.uniform(3, calm.seconds)
            kill = (what, draw.randrange(options.processes), at)
            run = launched(Path(folder) / str(k), options.processes, kill, how=how)
            same = run.code == 0 and run.result == calm.result
            once = run.steps == list(range(1, STEPS + 1))
            good += same and once
            halves += run.unfinished
            if run.noticed_s is not None:
                waits.append(run.noticed_s)
            where = f"{at:.2f} s into a save" if what == "save" else f"{at:.1f} s"
            wait = "ended before" if run.noticed_s is None else f"{run.noticed_s:.2f}"
            row = (str(k + 1), str(kill[1]), where, wait, f"{run.seconds:.0f}")
            table.add_row(*row, "yes" if same else "NO", "yes" if once else "NO")
            print(*row, same, once, flush=True)
            if not (same and once):
                print(run.output[-4000:], run.result, calm.result, run.steps, sep="\n", flush=True)
    Console(width=100).print(table)
    print(
        f"{good} of {options.kills} runs ended with the undisturbed state and every step once\n"
        f"{options.kills - len(waits)} kills found a process that had ended, {halves} left a "
        "checkpoint half written"
    )
    if waits:
        print(
            f"noticed after {statistics.median(waits):.2f} s (median), {max(waits):.2f} s at most; "
            f"the deadline is {DEADLINE_S:g} s"
        )
    raise SystemExit(good != options.kills)


if __name__ == "__main__":
    main()
