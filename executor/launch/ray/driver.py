"""Run the processes of a job in Ray actors, one each. A separate program, started by `actors.Ray`.

It reads JOB from its environment, and writes every process's lines with the process number as a
prefix. After SIGUSR1 or SIGTERM all processes save and end. A local Ray that it started ends with
it; a cluster that it joined continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

JOB = "MESHWRIGHT_RAY_JOB"
ROOM_S = 120.0
WAIT_S = 0.5
LOST = 255


class Worker:
    """One process of the job, on a node. It runs inside Ray but does not depend on it."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue()

    def where(self, address: str) -> tuple[str, int]:
        """The node's address, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, int(probe.getsockname()[1])

    def begin(self, words: list[str], environment: dict[str, str], folder: str) -> None:
        """Start the process under a guard that ends it with this actor."""
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.child = subprocess.Popen(
            words,
            env={**env, **environment},
            cwd=folder if os.path.isdir(folder) else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Read the process's lines as they arrive."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.put(line.rstrip("\r\n"))
        self.lines.put(None)

    def more(self) -> tuple[list[str], int | None]:
        """Lines since the last call, and the exit code if the output has ended, else None."""
        out: list[str] = []
        with contextlib.suppress(queue.Empty):
            line = self.lines.get(timeout=WAIT_S)
            while line is not None:
                out.append(line)
                line = self.lines.get_nowait()
            return out, self.child.wait()
        return out, None

    def say(self, letter: str) -> None:
        """Send a letter of the guard's protocol."""
        with contextlib.suppress(OSError):
            if self.child.stdin is not None:
                self.child.stdin.write(letter + "\n")
                self.child.stdin.flush()


def placed_actors(ray: Any, job: dict[str, Any]) -> list[tuple[Any, str]]:
    """The actors and their nodes' addresses, grouped by node.

    Raises:
        SystemExit: Ray has no room for them.
    """
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": 1.0} | ({"GPU": float(job["gpus"])} if job["gpus"] else {})
    group = placement_group([needs] * job["processes"], strategy="SPREAD")
    if not group.wait(ROOM_S):
        print(f"Ray has no room for {job['processes']} processes with {needs} each", flush=True)
        sys.exit(2)
    actor = ray.remote(Worker)
    workers = [
        actor.options(
            num_cpus=1,
            num_gpus=job["gpus"] or 0,
            max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=k
            ),
        ).remote()
        for k in range(job["processes"])
    ]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = [address[table[k]] for k in range(job["processes"])]
    order = sorted(range(job["processes"]), key=lambda k: (nodes.index(nodes[k]), k))
    return [(workers[k], nodes[k]) for k in order]


def main() -> int:
    """Run the job that the environment describes; returns the largest exit code."""
    import ray

    job = json.loads(os.environ.pop(JOB))
    local = {} if job["address"] else {"num_cpus": max(job["processes"], os.cpu_count() or 1)}
    try:
        ray.init(
            address=job["address"] or "local",
            log_to_driver=False,
            logging_level="error",
            include_dashboard=False if local else None,
            **local,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        print(f"cannot reach Ray at {job['address'] or 'local'}: {error}", flush=True)
        return 2
    stop_event = threading.Event()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: stop_event.set())
    try:
        return show_output(ray, start(ray, job), stop_event)
    finally:
        ray.shutdown()


def start(ray: Any, job: dict[str, Any]) -> list[Any]:
    """Create the actors and start their processes; returns the actors."""
    placed = placed_actors(ray, job)
    host, port = ray.get(placed[0][0].where.remote(placed[0][1]))
    begun = []
    for k, (worker, node) in enumerate(placed):
        environment = {
            **job["environment"],
            "MESHWRIGHT_PROCESSES": str(len(placed)),
            "MESHWRIGHT_PROCESS": str(k),
            "MESHWRIGHT_LOCAL": str(sum(other == node for _, other in placed[:k])),
            "MESHWRIGHT_COORDINATOR": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        }
        begun.append(worker.begin.remote(job["words"], environment, job["folder"]))
    ray.get(begun)
    return [worker for worker, _ in placed]


def show_output(ray: Any, workers: list[Any], stop_event: threading.Event) -> int:
    """Print what the processes write until all have ended; returns the largest exit code."""
    pending = {worker.more.remote(): k for k, worker in enumerate(workers)}
    worst, passed_on = 0, False
    while pending:
        if stop_event.is_set() and not passed_on:
            passed_on = True
            for k in pending.values():
                workers[k].say.remote("T")
        for ready in ray.wait(list(pending), num_returns=1, timeout=WAIT_S)[0]:
            k = pending.pop(ready)
            try:
                lines, code = ray.get(ready)
            except ray.exceptions.RayError as error:
                lines, code = [f"Ray lost this process: {error}", f"\x1eexit code {LOST}"], LOST
            for line in lines:
                print(f"{k}: {line}", flush=True)
            if code is None:
                pending[workers[k].more.remote()] = k
            else:
                worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
