"""On Ray: processes are killed, and every push is in the values once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ps_faults import descendants
from executor.parameter_server import LostError, ParameterServer, WaitError, train
from executor.parameter_server.server.snapshots import listed

PUSHES = 30
pytestmark = pytest.mark.slow


def count(folder: Path, die: int | None = None) -> Any:
    """Every push adds one; says when it has begun, and kills itself once at push ``die``."""

    def loop(server: ParameterServer) -> int:
        params = server.init({"w": jnp.zeros((5, 3)), "b": jnp.zeros(7)})
        begun = server.clock
        for k in range(begun, PUSHES):
            if server.rank == 1 and k == die and begun == 0:
                os._exit(9)
            params = server.push_pull(jax.tree.map(np.ones_like, params))
            (folder / f"begun-{server.rank}").touch()
            time.sleep(0.05)
        return begun

    return loop


def kill(folder: Path, name: str) -> list[int]:
    """Kill a process of that name when both workers have pushed."""
    killed: list[int] = []

    def run() -> None:
        until = time.monotonic() + 120
        while len(list(folder.glob("begun-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        killed.append(descendants((name,))[0])
        os.kill(killed[0], signal.SIGKILL)

    threading.Thread(target=run, daemon=True).start()
    return killed


OPTIONS: dict[str, Any] = {
    "workers": 2,
    "servers": 2,
    "split_bytes": 20,
    "wait_s": 120.0,
    "backend": "ray",
}


def values(done: Any) -> set[float]:
    return {float(v) for x in jax.tree.leaves(done.params) for v in np.ravel(x)}


@pytest.mark.parametrize(("mode", "name"), [("async", "Serving"), ("sync", "Copy")])
def test_a_copy_loses_nothing(tmp_path: Path, mode: str, name: str) -> None:
    pytest.importorskip("ray")
    killed = kill(tmp_path, name)
    done = train(count(tmp_path), mode=mode, replicas=True, **OPTIONS)
    assert killed and done.lost == ()
    assert values(done) == {float(PUSHES * (2 if mode == "async" else 1))}
    assert all(c.applied == 2 * PUSHES and not c.lost for c in done.counts)


def test_snapshots_lose_what_came_after_and_say_so(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    killed = kill(tmp_path, "Serving")
    kept = {"snapshots": tmp_path / "kept", "snapshot_every": 15}
    done = train(count(tmp_path), mode="async", **kept, **OPTIONS)
    lost = [sum(c.lost.values()) for c in done.counts]
    assert killed and sorted(lost)[0] == 0 and sorted(lost)[1] > 0
    assert all(c.applied + sum(c.lost.values()) == 2 * PUSHES for c in done.counts)
    assert values(done) == {float(2 * PUSHES - n) for n in lost}


def test_a_server_comes_back_in_a_job_that_goes_on(tmp_path: Path) -> None:
    """What the job began with is no longer kept then."""
    pytest.importorskip("ray")
    kept: dict[str, Any] = {"snapshots": tmp_path / "kept", "snapshot_every": 5, "mode": "async"}
    one = OPTIONS | {"workers": 1, "servers": 1}
    folder = tmp_path / "kept" / "of-1" / "server-0"

    def loop(until: int, die: int | None) -> Any:
        def run(server: ParameterServer) -> tuple[int, float]:
            import ray

            params = server.init(np.zeros(3, np.float32))
            begun = server.clock
            for k in range(begun, until):
                params = server.push_pull(np.ones(3, np.float32))
                if k == die:
                    late = time.monotonic() + 60
                    while listed(folder)[-1] < 20 and time.monotonic() < late:
                        time.sleep(0.05)
                    assert 10 not in listed(folder)
                    actor: Any = server._links.actors[0]  # type: ignore[attr-defined]
                    os.kill(
                        ray.get(actor.__ray_call__.remote(lambda served: os.getpid())),
                        signal.SIGKILL,
                    )
                time.sleep(0.05)
            return begun, float(params[0])

        return run

    assert train(loop(10, None), **kept, **one).returned == ((0, 10.0),)
    done = train(loop(40, 29), **kept, **one)
    (begun, value), lost = done.returned[0], sum(done.counts[0].lost.values())
    assert begun == 10 and value == 40 - lost and lost <= 10


def test_a_server_without_either_ends_the_job_in_words(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    killed = kill(tmp_path, "Serving")
    with pytest.raises(LostError, match=r"server \d is gone.*replicas=True"):
        train(count(tmp_path), mode="async", **OPTIONS)
    assert killed


@pytest.mark.parametrize(("mode", "on_lost"), [("sync", "wait"), ("async", "leave")])
def test_a_worker_that_comes_back_goes_on(tmp_path: Path, mode: str, on_lost: str) -> None:
    pytest.importorskip("ray")
    done = train(count(tmp_path, die=10), mode=mode, restarts=1, on_lost=on_lost, **OPTIONS)
    assert done.restarts == {1: 1} and done.returned == (0, 10) and done.lost == ()
    assert values(done) == {float(PUSHES * (2 if mode == "async" else 1))}


def test_a_job_may_end_with_its_first_worker(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises((LostError, WaitError), match="worker 1 was lost"):
        train(count(tmp_path, die=3), mode="async", on_lost="fail", **OPTIONS)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_is_lost_while_large_values_are_read(tmp_path: Path, mode: str) -> None:
    """Values of 3 MiB a server lie in Ray's memory, which its owner's death takes with it."""
    pytest.importorskip("ray")

    def loop(server: ParameterServer) -> list[float]:
        params = {"w": np.zeros((6, 2**18), np.float32)}
        kept = [server.init(params)]
        for _ in range(PUSHES):
            kept = [*kept[-3:], server.push_pull(jax.tree.map(np.ones_like, params))]
            (tmp_path / f"begun-{server.rank}").touch()
            time.sleep(0.05)
        assert all(x["w"].min() <= x["w"].max() for x in kept)  # still readable
        return sorted({float(x) for x in kept[-1]["w"][:, 0]})

    killed = kill(tmp_path, "Serving")
    more = {"split_bytes": 2**19}
    done = train(loop, mode=mode, replicas=True, **(OPTIONS | more))
    assert killed and values(done) == {float(PUSHES * (2 if mode == "async" else 1))}
    assert all(c.applied == 2 * PUSHES and not c.lost for c in done.counts)


def test_a_lost_server_that_holds_nothing_ends_the_job_soon(tmp_path: Path) -> None:
    """No worker asks it, so nobody else would notice before the end."""
    pytest.importorskip("ray")

    def loop(server: ParameterServer) -> None:
        import ray

        server.init({"w": np.zeros(3, np.float32)})
        assert server.layout.busy(tables=False) == (0,)
        if server.rank == 0:
            idle: Any = server._links.actors[1]  # type: ignore[attr-defined]
            pid = ray.get(idle.__ray_call__.remote(lambda served: os.getpid()))
            (tmp_path / "pid").write_text(str(pid))
        (tmp_path / f"begun-{server.rank}").touch()
        for _ in range(600):
            server.push_pull({"w": np.ones(3, np.float32)})
            time.sleep(0.1)
        (tmp_path / f"ended-{server.rank}").touch()

    def run() -> None:
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("begun-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    threading.Thread(target=run, daemon=True).start()
    with pytest.raises(LostError, match="server 1 is gone"):
        train(loop, mode="async", **(OPTIONS | {"split_bytes": 2**20}))
    assert not list(tmp_path.glob("ended-*"))
