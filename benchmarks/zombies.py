"""A job is frozen, another takes its run directory over, the first wakes up. Is every step once?

Job A of `benchmarks/faults.py` is stopped as a whole by SIGSTOP at a random moment, or while it
writes a checkpoint. Job B starts on the same directory and takes over after the lease (shortened to
a few seconds here). A process of B is killed by SIGKILL at a random moment, and B starts again. A
wakes up by SIGCONT in one of three ways:

- beside: at a random moment after the takeover, often at once, while B runs. Half of the time a
  launcher starts A again after it was fenced out, and a B that is dead then loses the directory.
- alone: B is frozen after the takeover, until A has ended.
- after: B has ended.

In the last two nothing but A runs, so every file and folder that differs afterwards was touched by
A; it may only go on deleting a checkpoint older than those that are left (decision 013). In all
three the directory must end as that of an undisturbed job: the result bit for bit, every step once
in the metrics, no line of an earlier owner after a line of a later one, the same checkpoints, each
by the owner that made its step, and all files equal to their checksums.

    python benchmarks/zombies.py --kills 40
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import faults

sys.path.insert(0, str(faults.ROOT))

LEASE_S = 3.0
TIMEOUT_S = 120.0
KEEP = 3
"""Checkpoints that `train` does not delete."""
WAKES = ("beside", "alone", "after")

Entries = dict[str, tuple[int, int, int]]
"""Path in a folder -> inode, bytes, time of change."""


@dataclass(frozen=True)
class Calm:
    """A job that nothing happens to.

    Attributes:
        result: what it wrote at its end.
        checkpoints: the steps that it left.
        seconds: from its first sign of life to its end.
    """

    result: dict[str, object]
    checkpoints: list[int]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of both jobs.

    Attributes:
        wake: how A woke up, one of ``WAKES``.
        fate: how A ended: "fenced out", "refused", "had ended before", "took over", or its code.
        killed: whether a process of B was killed.
        broken: what differs from the directory of an undisturbed job, in words.
        touched: paths that A touched after the takeover, where nothing else ran.
        seconds: of the round.
        text: what both jobs said.
    """

    wake: str
    fate: str
    killed: bool
    broken: list[str]
    touched: list[str]
    seconds: float
    text: str = field(repr=False)

    @property
    def good(self) -> bool:
        """Whether the directory is as if A had never woken up."""
        return not self.broken and not self.touched


class Job:
    """A job of several processes under a launcher, with its own files in ``folder``."""

    def __init__(self, folder: Path, run: Path, processes: int, restarts: int) -> None:
        folder.mkdir(parents=True)
        (folder / "run").symlink_to(run, target_is_directory=True)
        script = folder / "work.py"
        script.write_text(faults.WORK)
        command = [sys.executable, "-m", "executor.cli", "launch", "-n", str(processes)]
        command += ["--devices-per-process", str(4 // processes), "--max-restarts", str(restarts)]
        command += ["--logs", str(folder / "logs")]
        env = {**os.environ, "PYTHONPATH": str(faults.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        env["FAULTS_LEASE_S"] = str(LEASE_S)
        env["JAX_COMPILATION_CACHE_DIR"] = str(folder.parent.parent / "compiled")
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.folder, self.hangs = folder, False
        self.launcher = subprocess.Popen(
            [*command, str(script), str(folder)],
            env=env,
            stdout=(folder / "output").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def runs(self) -> bool:
        return self.launcher.poll() is None

    @property
    def text(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def result(self) -> dict[str, object]:
        """What it wrote at its end; empty if it did not get there."""
        file = self.folder / "result.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def signal(self, number: signal.Signals) -> None:
        """To the launcher and all processes below it."""
        if not self.runs:
            return
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        family = {self.launcher.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        for pid in sorted(family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:  # a thread inside a write stops after it
            until(lambda: all(_stands(pid) for pid in family), self)

    def kill(self, process: int, seconds: float, killed: list[bool]) -> None:
        """Kill a process of the first start some seconds after its first sign of life."""
        file = self.folder / f"pid-0-{process}"
        until(file.exists, self)
        time.sleep(seconds)
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            if str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                killed.append(True)

    def end(self) -> int:
        """Its exit code; a job that hangs is killed."""
        try:
            return self.launcher.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.hangs = True
            self.signal(signal.SIGKILL)
            return self.launcher.wait()


@contextlib.contextmanager
def started(folder: Path, run: Path, processes: int, restarts: int) -> Iterator[Job]:
    """A job that leaves no process behind."""
    job = Job(folder, run, processes, restarts)
    try:
        yield job
    finally:
        job.signal(signal.SIGKILL)
        job.launcher.wait()


def undisturbed(folder: Path, processes: int) -> Calm:
    """Two jobs, one after the other: the first fills the cache of compiled programs."""
    for name in ("first", "calm"):
        run = folder / f"{name}-shared"
        run.mkdir(parents=True)
        with started(folder / name, run, processes, 0) as job:
            until((job.folder / "pid-0-0").exists, job)
            begun = time.monotonic()
            if job.end():
                raise SystemExit(job.text)
    return Calm(job.result, checkpoints(run), time.monotonic() - begun)


def disturbed(
    folder: Path, processes: int, draw: random.Random, calm: Calm, wake: str = "beside"
) -> Outcome:
    """One round."""
    run = folder / "shared"
    run.mkdir(parents=True)
    begun = time.monotonic()
    killed: list[bool] = []
    restarts = draw.randrange(2) if wake == "beside" else 0
    with started(folder / "a", run, processes, restarts) as zombie:
        _freeze(zombie, run, draw)
        number, finished = owner(run), lines(run) == faults.STEPS
        with started(folder / "b", run, processes, 3) as job:
            victim, after = draw.randrange(processes), draw.uniform(0.0, 1.0) * calm.seconds
            killer = threading.Thread(target=job.kill, args=(victim, after, killed), daemon=True)
            touched, late = [], False
            if wake != "alone":
                killer.start()
            until(lambda: owner(run) > number, job)
            if wake == "beside":
                pauses = [0.0, draw.uniform(0, 0.5), draw.uniform(0, calm.seconds)]
                time.sleep(draw.choice(pauses))
                zombie.signal(signal.SIGCONT)
            elif wake == "after":
                job.end()
                touched, late = _touched(zombie, run)
            else:
                until(lambda: swept(run, number), job)
                time.sleep(draw.choice([0.0, draw.uniform(0, calm.seconds / 2)]))
                job.signal(signal.SIGSTOP)
                touched, late = _touched(zombie, run)
                job.signal(signal.SIGCONT)
                killer.start()
            codes = job.end(), zombie.end()
        text = f"{zombie.text}\n--- B, {codes}\n{job.text}"
        fate = "had ended before" if finished else _fate(zombie.text, codes[1])
        if late:
            fate += ", deleted an old checkpoint"
        broken = list(_broken(run, [job, zombie], calm))
    return Outcome(wake, fate, bool(killed), broken, touched, time.monotonic() - begun, text)


def _stands(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended."""
    with contextlib.suppress(OSError):
        stats = [x.read_text() for x in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(x.rpartition(")")[2].split()[0] in "TtZX" for x in stats)
    return True


def _freeze(job: Job, run: Path, draw: random.Random) -> None:
    """At a random step, or while it writes a checkpoint."""
    steps, saving = draw.randrange(faults.STEPS - 5), draw.random() < 0.5
    until(lambda: owner(run) > 0 and lines(run) >= steps, job)
    if saving:
        until(lambda: any(run.glob(".unfinished-*/*")), job)
        time.sleep(draw.uniform(0, 0.03))
    job.signal(signal.SIGSTOP)


def _touched(zombie: Job, run: Path) -> tuple[list[str], bool]:
    """Wake the zombie, wait for its end, and compare the directory. A deletion of old checkpoints
    that was under way goes on (decision 013): whether that happened, it is not in the list."""
    before, old = entries(run), {str(step) for step in checkpoints(run)[:-KEEP]}
    zombie.signal(signal.SIGCONT)
    zombie.end()
    after = entries(run)
    both = before.keys() | after.keys()
    differ = {path for path in both if before.get(path) != after.get(path)}
    late = {path for path in differ if path.split("/")[0] in old}
    return sorted(differ - late - ({"."} if late else set())), bool(late)


def _fate(text: str, code: int) -> str:
    if "FencedError" in text and "was taken over by" in text:
        return "fenced out" if code else "fenced out, then went on as a later owner"
    if "belongs to the job of" in text:
        return "refused"
    return "took over" if code == 0 else f"exit code {code}"


def _broken(run: Path, jobs: list[Job], calm: Calm) -> Iterator[str]:
    """What differs from the directory of an undisturbed job."""
    from executor.checkpoint.common import CheckpointError
    from executor.checkpoint.files.checksums import verified

    yield from (
        f"the job in {job.folder} did not end in {TIMEOUT_S:g} s" for job in jobs if job.hangs
    )
    if not any(job.launcher.returncode == 0 for job in jobs):
        yield f"no job ended well: {[job.launcher.returncode for job in jobs]}"
    yield from (f"another result: {x.result}" for x in jobs if x.result not in ({}, calm.result))
    found = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    seen = Counter(x["step"] for x in found)
    if twice := [step for step, count in seen.items() if count > 1]:
        yield f"steps done twice: {twice}"
    if missing := sorted(set(range(1, faults.STEPS + 1)) - seen.keys()):
        yield f"steps missing: {missing}"
    owners = [int(x["owner"].split()[0]) for x in found]
    if any(later < earlier for earlier, later in itertools.pairwise(owners)):
        yield f"owners of lines: {owners}"
    if checkpoints(run) != calm.checkpoints:
        yield f"checkpoints {checkpoints(run)}, expected {calm.checkpoints}"
    for step in checkpoints(run):
        made = next((x["owner"] for x in found if x["step"] == step), "nobody")
        if f'"owner": "{made}"' not in (run / str(step) / "state" / "_METADATA").read_text():
            yield f"checkpoint {step} is not by {made}, who made the step"
        try:
            verified(run / str(step))
        except CheckpointError as error:
            yield str(error)


def until(happened: Callable[[], bool], job: Job) -> None:
    """Wait for something, or the end of a job; a hang raises TimeoutError."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happened() and job.runs:
        if time.monotonic() > deadline:
            raise TimeoutError(job.text)
        time.sleep(0.002)


def lines(run: Path) -> int:
    """Of the metrics."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def owner(run: Path) -> int:
    """The number of the directory's owner; 0 if it has none."""
    files = (Path(name) for name in os.listdir(run) if name.startswith("owner-"))
    return max((int(x.stem.partition("-")[2]) for x in files), default=0)


def swept(run: Path, number: int) -> bool:
    """Whether the next owner removed what an owner left unfinished."""
    names = os.listdir(run)
    away = f"owner-{number}.json" not in names and not any(".removed-" in x for x in names)
    return away and not (run / f".unfinished-{number}").is_dir()


def checkpoints(run: Path) -> list[int]:
    """Their steps."""
    return sorted(int(x) for x in os.listdir(run) if x.isdecimal())


def entries(run: Path) -> Entries:
    """All files and folders, and the directory itself."""
    found = {}
    for folder, _, files in os.walk(run):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            x = os.lstat(path)
            found[os.path.relpath(path, run)] = (x.st_ino, x.st_size, x.st_mtime_ns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="of processes of B")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        calm = undisturbed(Path(name) / "calm", options.processes)
        print(f"undisturbed: {calm.seconds:.0f} s", flush=True)
        while sum(x.killed for x in outcomes) < options.kills:
            k = len(outcomes)
            draw = random.Random(f"{options.seed} {k}")
            wake = WAKES[k % len(WAKES)]
            got = disturbed(Path(name) / str(k), options.processes, draw, calm, wake)
            outcomes.append(got)
            word = "killed" if got.killed else "ended before the kill"
            good = "good" if got.good else f"NOT GOOD {got.broken} {got.touched}\n{got.text}"
            print(f"{k} {got.wake}: {got.fate}; B {word}; {got.seconds:.0f} s; {good}", flush=True)
    exact = [x for x in outcomes if x.wake != "beside"]
    seconds = sorted(x.seconds for x in outcomes)
    print(
        f"{len(outcomes)} rounds, {sum(x.killed for x in outcomes)} kills; "
        f"{sum(not x.broken for x in outcomes)} ended as if nothing had been; "
        f"{sum(bool(x.touched) for x in exact)} of {len(exact)} zombies that were watched alone "
        f"touched a file; {seconds[len(seconds) // 2]:.0f} s a round (median), "
        f"{seconds[-1]:.0f} s at most"
    )
    fates = Counter(x.fate for x in outcomes)
    print("the frozen job: " + ", ".join(f"{n} {fate}" for fate, n in sorted(fates.items())))
    raise SystemExit(not all(x.good for x in outcomes))


if __name__ == "__main__":
    main()
