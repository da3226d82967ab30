"""Rounds of push and pull on one host, in turn with MXNet's where a Python that has it is given.

A round: every worker pushes all arrays once, pulls all of them and waits until they are there.
Updates/s is the rounds of one worker in a second (the slowest worker's), for both alike; MB/s is
what all workers push and pull. Two workers, two servers, plain SGD on the servers of both, the same
arrays. Every figure is of processes started anew, peers in turn, and the median of the repetitions.
The start is until the first values are there, processes and all. MXNet 1.9.1 pushes and pulls a
list of arrays; its settings are its defaults.

    python benchmarks/parameter_server.py --mxnet PYTHON --sizes 100 --repeat 3
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {1: (4, 256), 20: (20, 512), 100: (25, 1024)}
"""Layers and their width, by MB: a matrix and a vector each."""
ROUNDS = {1: 200, 20: 60, 100: 20}
WARM = 5
Found = dict[str, float]


def ours(mode: str, mb: int, **options: Any) -> Found:
    """One run of ``train`` on Ray, started and ended where no ``address`` is given."""
    import optax

    from executor.parameter_server import ParameterServer, train

    layers, width = SIZES[mb]

    def loop(server: ParameterServer) -> tuple[float, float]:
        import numpy as np

        shapes = {"w": (width, width), "b": (width,)}
        params = {
            f"{n}{k}": np.zeros(s, np.float32) for k in range(layers) for n, s in shapes.items()
        }
        gradients = {name: np.full(x.shape, 1e-3, np.float32) for name, x in params.items()}
        kept = server.init(params)
        ready = time.time()
        for _ in range(WARM):
            kept = server.push_pull(gradients)
        server.barrier()
        begun = time.perf_counter()
        for _ in range(ROUNDS[mb]):
            kept = server.push_pull(gradients)
        rate = ROUNDS[mb] / (time.perf_counter() - begun)
        assert kept is not None
        return rate, ready

    begun = time.time()
    done = train(loop, workers=2, servers=2, optimizer=optax.sgd(0.1), mode=mode, **options)
    rates, ready = zip(*done.returned, strict=True)
    return {"updates": min(rates), "start": max(ready) - begun}


MXNET = f"""
import json, sys, time
import mxnet as mx
mode, layers, width, rounds, folder = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
kv = mx.kv.create("dist_" + mode)
shapes = [(width, width), (width,)] * layers
arrays = [mx.nd.zeros(s) for s in shapes]
gradients = [mx.nd.full(s, 1e-3) for s in shapes]
keys = list(range(len(shapes)))
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, lazy_update=False))
kv.init(keys, arrays)
def pull():
    kv.pull(keys, out=arrays)
    for x in arrays:
        x.wait_to_read()
pull()
ready = time.time()
for _ in range({WARM}):
    kv.push(keys, gradients)
    pull()
kv._barrier()
begun = time.perf_counter()
for _ in range(rounds):
    kv.push(keys, gradients)
    pull()
rate = rounds / (time.perf_counter() - begun)
open(f"{{folder}}/{{kv.rank}}.json", "w").write(json.dumps([rate, ready]))
kv._barrier()
"""


@dataclass(frozen=True)
class Host:
    """Where a process of MXNet's runs: the words before its own, its address and interface."""

    inside: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"


def mxnet(python: str, mode: str, mb: int, hosts: Sequence[Host] = (Host(), Host())) -> Found:
    """One run of MXNet's scheduler, two servers and two workers, one of each on a host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "DMLC_PS_ROOT_URI": hosts[0].address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_SERVER": "2",
            "DMLC_NUM_WORKER": "2",
        }
        command = [python, "-c", MXNET, mode, *map(str, SIZES[mb]), str(ROUNDS[mb]), folder]
        begun = time.time()
        running = [
            subprocess.Popen(
                [*host.inside, *command],
                env=env
                | {
                    "DMLC_ROLE": role,
                    "DMLC_INTERFACE": host.interface,
                    "DMLC_NODE_HOST": host.address,
                },
                cwd=folder,
            )
            for role, host in (
                ("scheduler", hosts[0]),
                *((role, host) for role in ("server", "worker") for host in hosts),
            )
        ]
        try:
            for process in running[-2:]:
                process.wait(300)
        finally:
            for process in running:
                process.kill()
        found = [json.loads((Path(folder) / f"{k}.json").read_text()) for k in range(2)]
    return {"updates": min(r for r, _ in found), "start": max(t for _, t in found) - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mxnet", help="a Python that has MXNet 1.9.1")
    parser.add_argument("--sizes", type=int, nargs="+", default=sorted(SIZES), choices=SIZES)
    parser.add_argument("--modes", nargs="+", default=["sync", "async"])
    parser.add_argument("--pull-dtype", choices=["bfloat16"])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if options.mxnet is None:
        print("no --mxnet PYTHON: ours alone")
    print("MB mode peer updates/s MB/s start(s)", flush=True)
    for mb in options.sizes:
        for mode in options.modes:
            runs: dict[str, list[Found]] = {"ours": [], "mxnet": []}
            for _ in range(options.repeat):
                runs["ours"].append(ours(mode, mb, pull_dtype=options.pull_dtype))
                if options.mxnet is not None:
                    runs["mxnet"].append(mxnet(options.mxnet, mode, mb))
            show(mb, mode, {peer: found for peer, found in runs.items() if found})


def show(mb: int, mode: str, runs: dict[str, list[Found]]) -> None:
    """Print a row for each peer, and the ratio of medians."""
    layers, width = SIZES[mb]
    moved = 2 * 2 * 4 * layers * (width * width + width) / 1e6
    medians: dict[str, Any] = {}
    for peer, found in runs.items():
        rate, start = (statistics.median(x[key] for x in found) for key in ("updates", "start"))
        medians[peer] = rate
        print(f"{mb} {mode} {peer} {rate:.2f} {rate * moved:.0f} {start:.1f}", flush=True)
    if len(medians) == 2:
        print(f"{mb} {mode} ratio {medians['ours'] / medians['mxnet']:.2f}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
