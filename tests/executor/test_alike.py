"""Processes that differ are named, and none trains on: settings, step, state, data, steps."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executor.data.sources import Arrays, Elements, sample_rows
from executor.launch.start import Job, run_local
from executor.processes.agreement import alike, fingerprints
from executor.processes.agreement.alike import _differences, _named
from executor.processes.agreement.fingerprints import Fingerprint, arguments, program, stable_text
from executor.processes.agreement.settings import settings
from executor.processes.meet import ProcessMismatchError
from executor.processes.progress import ENDED, StepProgress
from executor.processes.sockets import HostError, Peer
from tests.executor.test_peers import job

ROOT = Path(__file__).resolve().parents[2]

DIFFER = f"""
import importlib.metadata, os, sys
sys.path.insert(0, {str(ROOT)!r})
kind, odd = sys.argv[1], os.environ["MESHWRIGHT_PROCESS"] == "1"
if odd and kind == "devices":
    os.environ["JAX_NUM_CPU_DEVICES"] = "3"
if odd and kind == "version":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.1.2" if name == "jaxlib" else version(name)
import jax, jax.numpy as jnp, numpy as np
if odd and kind == "x64":
    jax.config.update("jax_enable_x64", True)
from executor import Batches, initialize, parallelize, train
role = initialize(timeout_s=60)
slope = 0.25 if odd and kind == "literal" else 0.125
rate = 0.001 if odd and kind == "learning rate" else 0.01
rows = np.random.default_rng(5 if odd and kind == "dataset" else 1).normal(size=(64, 8))
rows = rows.astype("f4")[: 56 if odd and kind in ("rows", "loop") else 64]
rng = np.random.default_rng(3 if odd and kind == "init" else 0)
state = {{"a": rng.normal(size=(8, 16)).astype("f4"), "b": rng.normal(size=(16, 8)).astype("f4")}}


def step(w, x):
    def loss(w):
        h = x @ w["a"]
        return jnp.mean((jnp.where(h > 0, h, slope * h) @ w["b"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - rate * g, w, grads), {{"loss": value}}


run = parallelize(step, mesh=f"data={{jax.device_count()}}", zero=3)
if kind == "loop":
    for k in range(len(rows) // 8):
        state, metrics = run(state, rows[8 * k : 8 * k + 8])
    jax.block_until_ready(metrics)
else:
    compiled = run.prepare(state, rows[:8])
    seed = 7 if odd and kind == "shuffle seed" else 0
    batches = Batches(rows, compiled.in_shardings[1], batch_size=8, seed=seed)
    train(run, state, batches, steps=4, progress=False)
print("TRAINED", flush=True)
"""

KINDS = {
    "literal": "has literal 0.25 at differ.py:",
    "init": "has argument [0]['a']",
    "devices": "has 3 cpu devices",
    "loop": "has ended after 7 steps",
    "learning rate": "has literal 0.001 at differ.py:",
    "dataset": "has array 0 of the rows",
    "shuffle seed": "has seed=7",
    "rows": "has 56 rows",
    "x64": "has jax_enable_x64=True",
    "version": "has jaxlib 0.1.2",
}
QUICK = ("literal", "init", "devices", "loop")


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k not in QUICK)]
)
def test_a_process_that_differs_is_named_by_all(kind: str, tmp_path: Path) -> None:
    lines: list[tuple[int | None, str]] = []
    script = tmp_path / "differ.py"
    script.write_text(DIFFER)
    command = (sys.executable, str(script), kind)
    outcome = run_local(Job(command, 2, 2, grace_s=60.0), lambda k, x: lines.append((k, x)))
    assert outcome.codes == (1, 1), lines
    for process in range(2):
        said = [x for k, x in lines if k == process and KINDS[kind] in x and "process 1 (" in x]
        assert said and "process 0 (" in said[-1], lines
    assert kind == "loop" or not any("TRAINED" in x for _, x in lines)


def traced(function: Callable[..., Any], *args: Any) -> tuple[Fingerprint, ...]:
    return program(jax.make_jaxpr(function)(*args))


def make_step(scale: float, table: Any = None, policy: Any = None) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        def body(x: Any, _: Any) -> tuple[Any, None]:
            return jnp.tanh(x) * scale, None

        held = 0 if table is None else jnp.sum(x.sum() * table)
        layer = jax.checkpoint(lambda x: jnp.sin(x @ x), policy=policy)
        return jax.lax.scan(body, layer(x) + held, None, length=3)[0]

    return step


X = jnp.ones((4, 4))


def test_the_same_program_has_the_same_text() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("b", "a", "c")
    again = jax.checkpoint_policies.save_only_these_names("c", "b", "a")
    first = traced(make_step(0.5, np.arange(300.0), policy), X)
    second = traced(make_step(0.5, np.arange(300.0), again), X)
    assert [e.value for e in first] == [e.value for e in second]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (make_step(0.25, np.arange(300.0)), "literal 0.25 at test_alike.py:"),
        (make_step(0.5, np.arange(300.0) + 1), "a captured constant float"),
        (make_step(0.5), "captured constant"),
    ],
)
def test_another_program_is_told_at_its_line(other: Any, text: str) -> None:
    mine, his = traced(make_step(0.5, np.arange(300.0)), X), traced(other, X)
    k = next(k for k, (a, b) in enumerate(zip(mine, his, strict=False)) if a.value != b.value)
    assert text in mine[k].text or text in his[k].text


def program_hash() -> str:
    """The hash of a program with a set and a callback in it."""
    policy = jax.checkpoint_policies.save_only_these_names("b", "a", "c")
    step = make_step(0.5, np.arange(300.0), policy)
    found = traced(lambda x: jax.pure_callback(np.sin, x, step(x)), X)
    return fingerprints.hash_of(" ".join(e.value for e in found))


def test_texts_do_not_depend_on_the_process() -> None:
    """Another process has other addresses and another order of sets."""
    code = "from tests.executor.test_alike import program_hash; print(program_hash())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == program_hash()


def test_values_as_text() -> None:
    assert stable_text({"b", "a"}) == stable_text({"a", "b"}) == "{str 'a', str 'b'}"
    assert stable_text(functools.partial(max, 3)) == stable_text(functools.partial(max, 3))
    assert stable_text(object()) == "builtins.object"
    assert stable_text(jax.devices()[0]) == stable_text(jax.devices()[1])
    assert stable_text(np.float32(1)) != stable_text(np.float64(1))
    assert stable_text(jax.random.key(1)) != stable_text(jax.random.key(2))


def test_differences_are_those_from_most_processes() -> None:
    told = [{"part": ["a", "b"]}, {"part": ["a", "x"]}, {"part": ["a", "b"]}]
    assert _differences(told) == [("part", 1, 1, 0)]
    told[0]["part"] = ["y", "x"]
    assert _differences(told) == [("part", 0, 0, 1), ("part", 1, 2, 0)]
    assert _differences([{"part": ["a"]}, {"part": [""]}, {"part": ["a"]}]) == []
    assert _differences([{"part": ["a"]}, {"part": ["a", "b"]}]) == [("part", 1, 1, 0)]


def test_many_differences_are_counted() -> None:
    where = [("data", k, 1, 0) for k in range(alike.NAMED + 2)]
    has = {"data": {str(k): f"entry {k}" for k in range(alike.NAMED + 2)}}
    text = _named(where, [{"host": "a", "has": has}, {"host": "b", "has": has}])
    assert "process 1 (b) has entry 7, process 0 (a) has entry 7" in text
    assert "entry 8" not in text and "2 differences more" in text


def test_a_batch_may_differ_where_no_two_processes_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x, y = np.zeros((8, 2), np.float32), np.ones((8, 2), np.float32)

    def same(sharding: Any, all_of_it: bool) -> bool:
        a, b = (arguments((z,), (sharding,), lambda k: all_of_it) for z in (x, y))
        return [e.value for e in a] == [e.value for e in b]

    assert same(split, False) and not same(split, True)
    monkeypatch.setattr(
        fingerprints, "_shared", lambda s, shape: fingerprints._parts(s, shape)
    )  # as if other processes held all of it too
    assert not same(whole, False)
    places = arguments((jax.device_put(x, split),), (split,), lambda k: True)
    assert places[0].shown == "argument [0] is float32[8, 2]"


def test_a_changed_number_changes_the_hash_of_a_large_array() -> None:
    x = np.zeros(3 * fingerprints.CHUNK // 4, np.float32)
    before = fingerprints.array_hash(x)
    x[-1] = 1e-30
    assert fingerprints.array_hash(x) != before
    assert fingerprints.array_hash(x.reshape(3, -1)) != fingerprints.array_hash(x)


def test_settings_say_what_differs() -> None:
    here = {e.value: e for e in settings({})}
    with jax.default_matmul_precision("float32"):
        there = [e for e in settings({"XLA_FLAGS": "--xla_a=1"}) if e.value not in here]
    assert [e.text for e in there] == [
        "jax_default_matmul_precision=float32",
        "XLA_FLAGS=--xla_a=1",
    ]


def test_rows_are_compared_by_content(tmp_path: Path) -> None:
    rows = np.zeros((1000, 4), np.float32)
    before = Arrays(rows).content()
    rows[501] = 1
    assert Arrays(rows).content() != before
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert Arrays(mapped[:]).content() == Arrays(mapped).content() != Arrays(rows).content()
    assert sample_rows(5, 3).tolist() == [0, 2, 4] and sample_rows(2, 9).tolist() == [0, 1]
    assert Elements(list_like(rows)).content() != Elements(list_like(rows + 1)).content()


def list_like(rows: Any) -> Any:
    class Rows:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, k: int) -> Any:
            return {"x": rows[k]}

    return Rows()


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(k: int) -> None:
        try:
            results[k] = calls[k]()
        except Exception as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_all_get_the_answer_of_process_0() -> None:
    watches, told = job(3)
    long = "x" * 1_000_000  # in pieces
    for _ in range(2):
        calls = [
            lambda k=k: watches[k].meetings.meet("sum", [k, long], lambda v: [x[0] for x in v])
            for k in range(3)
        ]
        assert in_threads(calls) == [[0, 1, 2]] * 3
    assert not any(t.event.is_set() for t in told)


def test_processes_at_different_places_are_named() -> None:
    watches, _ = job(2)
    calls = [lambda k=k: watches[k].meetings.meet(f"place {k}", k, len) for k in range(2)]
    for error in in_threads(calls):
        assert isinstance(error, ProcessMismatchError)
        assert "process 0 (" in str(error) and "place 0" in str(error) and "place 1" in str(error)


def test_who_does_not_come_is_named() -> None:
    watches, _ = job(2)
    watches[0].meetings.timeout_s = 0.2
    with pytest.raises(HostError, match=r"place: process 1 .* did not come in 0.2 s"):
        watches[0].meetings.meet("place", 0, len)
    watches[1].leave()
    with pytest.raises(HostError, match=r"process 1 .* has ended and does not come"):
        watches[0].meetings.timeout_s = 20.0
        watches[0].meetings.meet("place", 0, len)


@pytest.mark.parametrize("who", [0, 1])
def test_who_waits_for_a_step_that_another_never_calls_ends_all(
    who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.processes.progress.SURE_S", 0.1)
    watches, told = job(2)
    watches[1 - who].progress.begin()

    def waits() -> None:
        with contextlib.suppress(HostError):
            watches[who].meetings.meet("planning again", 0, len)

    waiting = threading.Thread(target=waits, daemon=True)
    waiting.start()
    for k in range(2):
        assert told[k].event.wait(10)
        assert told[k].code == 1
        text = told[k].text or ""
        assert f"process {who} (" in text and "waits for all (planning again)" in text
    watches[1 - who].leave()
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_step_that_is_refused_was_not_begun() -> None:
    ends: list[str] = []
    progress = StepProgress(Peer(0, "a", 1), ends.append)
    progress.begin()
    progress.hear(Peer(1, "b", 2), 0, "waits")
    assert "process 1 (pid 2 on b) waits after 0 steps" in (progress.waits_in_vain() or "")
    progress.refuse()
    assert progress.waits_in_vain() is None
    progress.begin()
    progress.clear()
    assert progress.waits_in_vain() is None
    progress.hear(Peer(1, "b", 2), 0, ENDED)
    progress.clear()
    progress.end()
    assert len(ends) == 1 and "has ended after 0 steps" in ends[0]
