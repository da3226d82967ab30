"""Kill workers, servers and copies of parameter-server jobs; is any update lost or made twice?

Each run trains on Ray, two workers and two servers, and one process of it, drawn at random, is
killed (``kill -9``) at a random moment between the first push and the last. Half the runs count:
every push adds one to every element, without an optimizer, so that the values say how many pushes
are in them, on each server. The others train a small model with Adam, and their last loss is held
against the highest of undisturbed runs.

What is promised, and checked:

========================  ==================================================================
replicas, a kill          every push is in the values once
worker, started again     every push is in the values once, also half-sent ones
snapshots, server killed  pushes in the values + pushes counted as lost = all, none twice
any                       the run ends; the loss is at most 2 % above that of 10 undisturbed
========================  ==================================================================

    python benchmarks/ps_faults.py --runs 50
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from executor.parameter_server import ParameterServer, Served, train

WORKERS, SERVERS, PUSHES, PAUSE_S = 2, 2, 120, 0.02
DEADLINE_S = 120.0
TOLERANCE = 0.02
PLAIN = 10
NAMES = {"worker": "worker_process", "server": "Serving", "copy": "Copy"}
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(256, 24)).astype(np.float32)
Y = (X @ DRAW.normal(size=(24, 4)) + DRAW.normal(size=(256, 4))).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A run: its mode, what keeps values safe, what is trained, and who is killed."""

    mode: str
    kept: str
    counting: bool
    victim: str
    seed: int


def cases(runs: int, seed: int) -> Iterator[Case]:
    """Runs drawn at random."""
    draw = random.Random(seed)
    for k in range(runs):
        kept = draw.choice(["replicas", "snapshots"])
        victims = ["worker", "server", *(["copy"] if kept == "replicas" else [])]
        mode = draw.choice(["sync", "ssp", "async"])
        yield Case(mode, kept, k % 2 == 0, draw.choice(victims), draw.randrange(10**6))


def loss(params: Any) -> Any:
    """Of the small model on all rows."""
    return jnp.mean((X @ params["w"] + params["b"] - Y) ** 2)


def loop(counting: bool, folder: str) -> Any:
    """What every worker does; it notes its first and last push in the folder."""

    def run(server: ParameterServer) -> int:
        from pathlib import Path

        fresh = {"w": jnp.zeros((24, 4)), "b": jnp.zeros(4)}
        params = server.init(fresh)
        mine = slice(server.rank, None, server.num_workers)

        @jax.jit
        def gradient(params: Any) -> Any:
            return jax.grad(lambda p: jnp.mean((X[mine] @ p["w"] + p["b"] - Y[mine]) ** 2))(params)

        begun = server.clock
        for k in range(begun, PUSHES):
            ones = jax.tree.map(np.ones_like, params)
            params = server.push_pull(ones if counting else gradient(params))
            if k == begun:
                (Path(folder) / f"begun-{server.rank}").touch()
            time.sleep(PAUSE_S)
        return begun

    return run


def descendants(names: tuple[str, ...]) -> list[int]:
    """Processes of this one's Ray that show such a name."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat[1])
            if any(f"ray::{name}" in words for name in names):
                found.append(int(entry.name))

    def ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return sorted(pid for pid in found if ours(pid))


class Killer(threading.Thread):
    """Kills one process, some time after all workers have pushed."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__(daemon=True)
        self.case, self.folder = case, folder
        self.draw = random.Random(case.seed)
        self.done = threading.Event()
        self.killed: int | None = None

    def run(self) -> None:
        """Wait, choose, kill."""
        while len(list(self.folder.glob("begun-*"))) < WORKERS:
            if self.done.wait(0.05):
                return
        if self.done.wait(self.draw.uniform(0, 0.8 * PUSHES * PAUSE_S)):
            return
        there = descendants((NAMES[self.case.victim],))
        if there:
            self.killed = self.draw.choice(there)
            os.kill(self.killed, signal.SIGKILL)


def options(case: Case) -> dict[str, Any]:
    """Of ``train``."""
    rule: dict[str, Any] = {"mode": case.mode}
    return rule | ({"staleness": 3} if case.mode == "ssp" else {})


def once(case: Case) -> tuple[Served, bool, float]:
    """A run with its kill: what came out, whether somebody was killed, and how long it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept: dict[str, Any] = {"replicas": True}
        if case.kept == "snapshots":
            kept = {"snapshots": folder / "kept", "snapshot_every": 7}
        killer = Killer(case, folder)
        killer.start()
        begun = time.monotonic()
        done = train(
            loop(case.counting, name),
            workers=WORKERS,
            servers=SERVERS,
            optimizer=None if case.counting else optax.adam(0.1),
            wait_s=DEADLINE_S,
            restarts=2,
            on_lost="wait",
            split_bytes=64,
            backend="ray",
            **options(case),
            **kept,
        )
        killer.done.set()
        return done, killer.killed is not None, time.monotonic() - begun


def verdict(case: Case, done: Served, plain: dict[str, float]) -> tuple[bool, str]:
    """Whether the promises hold, and the figures."""
    lost = sum(sum(c.lost.values()) for c in done.counts)
    if case.counting:
        seen = sorted({float(v) for x in jax.tree.leaves(done.params) for v in np.ravel(x)})
        whole = PUSHES * (1 if case.mode == "sync" else WORKERS)
        exact = seen == [float(whole)]
        allowed = case.kept == "snapshots" and case.victim == "server"
        counted = all(
            c.applied + sum(c.lost.values()) + sum(c.discarded.values()) == PUSHES * WORKERS
            for c in done.counts
        )
        fine = counted and (exact or (allowed and seen[-1] <= whole and lost > 0))
        return fine, f"values {seen[0]:g} to {seen[-1]:g} of {whole}, lost {lost}"
    last = float(loss(done.params))
    off = last / plain[case.mode] - 1  # lower is no harm
    return off <= TOLERANCE, f"loss {last:.5f}, {100 * off:+.2f} %, lost {lost}"


def undisturbed(mode: str) -> float:
    """The last loss of a run in threads."""
    rule: dict[str, Any] = options(Case(mode, "", False, "", 0))
    with tempfile.TemporaryDirectory() as name:
        done = train(
            loop(False, name),
            workers=WORKERS,
            servers=SERVERS,
            optimizer=optax.adam(0.1),
            backend="local",
            split_bytes=64,
            **rule,
        )
    return float(loss(done.params))


def main() -> int:
    """Run all; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=300_000_000,
        log_to_driver=False,
    )
    plain = {}
    for mode in ("sync", "ssp", "async"):  # stale runs differ from one another: the worst of some
        plain[mode] = max(undisturbed(mode) for _ in range(1 if mode == "sync" else PLAIN))
        print(f"undisturbed {mode}: loss at most {plain[mode]:.5f}", flush=True)
    table = Table("run", "mode", "kept by", "killed", "s", "what came out", "")
    broken, killed, times = 0, 0, []
    for k, case in enumerate(cases(args.runs, args.seed)):
        try:
            done, hit, taken = once(case)
            fine, text = verdict(case, done, plain)
        except Exception as error:
            fine, hit, taken, text = False, True, 0.0, f"{type(error).__name__}: {error}"
        killed += hit
        times.append(taken)
        broken += not fine
        row = (case.mode, case.kept, case.victim if hit else "nobody", f"{taken:.0f}", text)
        table.add_row(str(k), *row, "" if fine else "BROKEN")
        print(k, *row, "" if fine else "BROKEN", flush=True)
    ray.shutdown()
    Console().print(table)
    print(
        f"{args.runs} runs, {killed} kills, {broken} broken promises; a run took "
        f"{statistics.median(times):.0f} s (median)"
    )
    return broken > 0


if __name__ == "__main__":
    raise SystemExit(main())
