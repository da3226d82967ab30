"""Workers with one mesh: the run is that of one process; batches and modes that do not fit."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from executor.launch.start import Job, run_local
from executor.parameter_server import ParameterServer, Rule, WaitError, join_devices, train
from executor.parameter_server.jobs.joined import check_rule, needed
from planner.errors import RequestError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def launched(kind: str, devices: int) -> list[Any]:
    lines: list[str] = []
    job = Job((sys.executable, str(HERE / "joined_program.py"), kind), 2, devices)
    outcome = run_local(job, lambda k, line: lines.append(line))
    assert outcome.code == 0, lines
    return sorted(json.loads(line) for line in lines if line.startswith("[") and "Gloo" not in line)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, found: None) -> Any:
    """The tests' own modules, here and in processes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.syspath_prepend(str(HERE))
    import test_hybrid

    return test_hybrid


@pytest.mark.parametrize(
    ("kind", "devices"),
    [("same", 4), pytest.param("parts", 4, marks=pytest.mark.slow), ("whole", 3)],
)
def test_two_processes_train_as_one(kind: str, devices: int, tree: Any) -> None:
    """Also with six devices, which do not divide the rows, and dense parameters on servers."""
    first, second = launched(kind, devices)
    expected, params = tree.alone()
    rows = [len(np.unique(ids)) for ids, _ in tree.DATA]
    for _, losses, _, table in (first, second):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(table, params["embed"].sum(axis=1), rtol=1e-4, atol=1e-4)
    assert [a + b for a, b in zip(first[2], second[2], strict=True)] == rows
    assert all(0 < b <= a for a, b in zip(first[2], second[2], strict=True))


def test_other_batches_are_refused(tree: Any) -> None:
    for _, text in launched("others", 4):
        assert "another batch than in process 0: in 1; expected the whole batch" in text


def test_what_indices_need() -> None:
    def indices(batch: Any, key: Any) -> Any:
        return [batch["ids"] * 2 + key, batch["y"].astype(int) * 0 + 1]

    batch = {"ids": np.zeros(3, np.int32), "x": np.zeros(2), "y": np.zeros(2)}
    assert needed(indices, (batch, 3)) == (True, False, True, True)
    assert needed(lambda a, b: [a], (1.0, 2.0)) == (True, False)


@pytest.mark.parametrize("rule", [Rule("async"), Rule("ssp", 2), Rule("sync", aggregate=1)])
def test_modes_that_do_not_join(rule: Rule) -> None:
    server = SimpleNamespace(num_workers=2, rule=rule, on_lost="fail")
    with pytest.raises(RequestError, match=r"joined devices with mode=.*expected mode='sync'"):
        check_rule(server)
    with pytest.raises(RequestError, match=r"on_lost='leave': expected train\(on_lost='fail'\)"):
        check_rule(SimpleNamespace(num_workers=2, rule=Rule(), on_lost="leave"))


def test_threads_do_not_join() -> None:
    def loop(server: ParameterServer) -> None:
        join_devices(server)

    train(loop, workers=1, backend="local")  # nothing to join
    with pytest.raises(RequestError, match=r"threads of one process.*backend='ray'"):
        train(loop, workers=2, backend="local", wait_s=20, on_lost="fail")


def test_worker_0_is_heard_by_all() -> None:
    def loop(server: ParameterServer) -> str:
        return server.meet(f"from {server.rank}" if server.is_chief else None)

    told = train(loop, workers=3, servers=2, backend="local", wait_s=20).returned
    assert told == ("from 0",) * 3

    def more(server: ParameterServer) -> None:
        for k in range(2):
            server.meet(str(k) if server.is_chief else None)

    with pytest.raises(RequestError, match="says '1', and has said '0': expected one text"):
        train(more, workers=2, backend="local", wait_s=20, on_lost="fail")

    def silent(server: ParameterServer) -> None:
        server.meet(None)

    with pytest.raises(WaitError, match=r"waited 0.2 s for worker 0 to say"):
        train(silent, workers=2, backend="local", wait_s=0.2, on_lost="fail")


def joined(server: ParameterServer) -> Any:
    """A worker's life: its part of the devices, the dense layers under SPMD over all."""
    jax.config.update("jax_num_cpu_devices", 2)
    join_devices(server, timeout_s=60)
    from test_hybrid import DATA, ROWS, SGD, fresh, loss

    from executor.parameter_server import hybrid

    run = hybrid(loss, fresh(), SGD, server=server, placement={"embed": "ps"})
    losses = [float(run(*batch)) for batch in DATA]
    server.barrier()
    embed = server.pull_rows({"['embed']": np.arange(ROWS)})["['embed']"]
    return losses, run.plan.mesh.num_devices, embed


@pytest.mark.slow
def test_on_ray_twice(tree: Any) -> None:
    pytest.importorskip("ray")
    expected, params = tree.alone()
    import ray

    ray.init(address="local", include_dashboard=False)
    try:
        for _ in range(2):  # one Ray: a process that has joined is not taken again
            done = train(
                joined, workers=2, servers=2, optimizer=tree.SGD, wait_s=120, on_lost="fail"
            )
            for losses, devices, embed in done.returned:
                assert devices == 4
                np.testing.assert_allclose(losses, expected, rtol=1e-5)
                np.testing.assert_allclose(embed, params["embed"], rtol=1e-4, atol=1e-6)
    finally:
        ray.shutdown()


def resumed(server: ParameterServer, folder: Path, kill: int | None) -> Any:
    """Trains, saves, and goes on from what it finds; worker 1 may be killed before a step."""
    import os
    import signal

    jax.config.update("jax_num_cpu_devices", 2)
    join_devices(server, timeout_s=60)
    from test_hybrid import DATA, fresh, loss

    from executor import Checkpoints
    from executor.parameter_server import hybrid

    losses = []
    with Checkpoints(folder / "dense", asynchronous=False) as kept:
        adam = optax.adam(0.01)
        run = hybrid(loss, fresh(), adam, server=server, placement={"embed": "ps"})
        begin = run.begin(*DATA[0])
        if earlier := [k for k in kept.steps if k <= begin]:
            run.state = kept.restore(run.state, step=earlier[-1])
        for k in range(begin, len(DATA)):
            if k == kill and server.rank == 1:
                time.sleep(3)  # the servers' snapshot is written
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(float(run(*DATA[k])))
            if (k + 1) % 2 == 0 and k + 1 > max(kept.steps, default=0):
                kept.save(k + 1, run.state)
    if server.is_chief:
        time.sleep(2)  # the other waits
    return begin, losses


@pytest.mark.slow
def test_a_job_that_lost_a_worker_goes_on(tree: Any, tmp_path: Path) -> None:
    """It ends, and started again goes on from its snapshots and its saves."""
    pytest.importorskip("ray")
    from executor.parameter_server import LostError

    options: dict[str, Any] = {
        "workers": 2,
        "servers": 2,
        "optimizer": tree.SGD,
        "wait_s": 120,
        "on_lost": "fail",
    }
    whole = train(partial(resumed, folder=tmp_path / "a", kill=None), **options).returned
    options |= {"snapshots": tmp_path / "served", "snapshot_every": 2}
    with pytest.raises(LostError, match=r"worker \d was lost"):
        train(partial(resumed, folder=tmp_path / "b", kill=3), **options)
    again = train(partial(resumed, folder=tmp_path / "b", kill=None), **options).returned
    assert [begin for begin, _ in (*whole, *again)] == [0, 0, 2, 2]
    for _, losses in again:
        np.testing.assert_allclose(losses, whole[0][1][2:], rtol=1e-6)
