"""The same rounds as ``parameter_server.py``, between two hosts: network namespaces and a veth
pair, a Ray node, a server and a worker in each. Needs root, ``ip`` and, for the peer, a Python that
has MXNet 1.9.1. Ours with float32, with values pulled as bfloat16, and with gradients pushed so;
MXNet sends float32.

    python benchmarks/ps_hosts.py --mxnet PYTHON --sizes 100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from parameter_server import SIZES, Found, Host, mxnet

from executor.parameter_server.transport.wire import SYSTEM

ROOT = Path(__file__).resolve().parent.parent
LINKS, ADDRESSES, PORT = ("mwpa", "mwpb"), ("10.77.41.1", "10.77.41.2"), 6399
PULL = {"pull_dtype": "bfloat16"}
KINDS = {"ours": {}, "ours, bf16 pulls": PULL, "ours, all bf16": PULL | {"compress": "bf16"}}
ONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from parameter_server import ours
print("FOUND", json.dumps(ours(sys.argv[2], int(sys.argv[3]), **json.loads(sys.argv[4]))))
"""


def ip(*words: str) -> None:
    """Run ``ip``; raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with an address each."""
    names = [f"mwp{os.getpid()}{x}" for x in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        pair = ("type", "veth", "peer", LINKS[1], "netns", names[1])
        ip("link", "add", LINKS[0], "netns", names[0], *pair)
        for name, link, address in zip(names, LINKS, ADDRESSES, strict=True):
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{address}/24", "dev", link)
            ip(*inside, "link", "set", link, "up")
            ip(*inside, "link", "set", "lo", "up")
        a, b = (
            Host(("ip", "netns", "exec", name), address, link)
            for name, link, address in zip(names, LINKS, ADDRESSES, strict=True)
        )
        yield a, b
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def cluster(hosts: tuple[Host, Host]) -> Iterator[str]:
    """A Ray node on each host; gives the address. Only what was started here is ended."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2"]
    ray.append("--object-store-memory=2000000000")
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    head.append(f"--system-config={json.dumps(SYSTEM)}")
    address = f"{hosts[0].address}:{PORT}"
    running = []
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    try:
        for host, more in zip(hosts, (head, [f"--address={address}"]), strict=True):
            words = [*host.inside, *ray, f"--node-ip-address={host.address}", *more]
            running.append(
                subprocess.Popen(words, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
            )
            time.sleep(10)
        yield address
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def ours(host: Host, mode: str, mb: int, options: dict[str, str]) -> Found:
    """A run of ``train`` from the first host; raises RuntimeError with its words if it fails."""
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    words = [*host.inside, sys.executable, "-c", ONE, str(ROOT), mode, str(mb), json.dumps(options)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: Found = json.loads(line.removeprefix("FOUND "))
            return found
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])


def main() -> None:
    """Print updates/s of all, peers in turn, and ratios of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mxnet", help="a Python that has MXNet 1.9.1")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100], choices=SIZES)
    parser.add_argument("--modes", nargs="+", default=["sync", "async"])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with two_hosts() as hosts:
        for mb in args.sizes:
            for mode in args.modes:
                rates: dict[str, list[float]] = {}
                for _ in range(args.repeat):
                    with cluster(hosts) as address:
                        for kind, options in KINDS.items():
                            more = {"address": address, "wait_s": 120.0, **options}
                            found = ours(hosts[0], mode, mb, more)
                            rates.setdefault(kind, []).append(found["updates"])
                    if args.mxnet is not None:
                        found = mxnet(args.mxnet, mode, mb, hosts)
                        rates.setdefault("mxnet", []).append(found["updates"])
                medians = {peer: statistics.median(x) for peer, x in rates.items()}
                peer = medians.get("mxnet")
                for kind, rate in medians.items():
                    ratio = "" if peer is None else f" {rate / peer:.2f} of MXNet"
                    print(f"{mb} MB {mode} {kind} {rate:.2f} updates/s{ratio}", flush=True)


if __name__ == "__main__":
    main()
