"""Stages on the devices of several processes: equal to the plain step, saved and restored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from executor.launch.start import Job, run_local

pytestmark = pytest.mark.devices
ROOT = Path(__file__).resolve().parents[2]

WORK = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import jax, jax.numpy as jnp, numpy as np
from executor import Checkpoints, initialize, parallelize
role = initialize(timeout_s=60)
from tests.executor import test_stage_programs as programs

name, stages, schedule, folder, again = sys.argv[1:6]
step, state, batch = getattr(programs, name)()
run = parallelize(step, stages=int(stages), microbatches=8, remat="none", schedule=schedule)
shardings = run.prepare(state, batch).in_shardings[0]
checkpoints = Checkpoints(folder)
done = checkpoints.steps[-1] if checkpoints.steps else 0
now = checkpoints.restore(state, shardings=shardings, step=done) if done else state
for _ in range(2):
    now, told = run(now, batch)
if not again:
    checkpoints.save(2, now)
checkpoints.close()

plain, want = jax.jit(step), state
for _ in range(done + 2):
    want, expected = plain(want, batch)


def norm(x):
    return float(np.sum(np.square(np.asarray(x, np.float64))))


off = whole = 0.0
own = 0
for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(now), strict=True):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
        b = jax.random.key_data(b) if b.addressable_shards else b
        if not b.addressable_shards:
            continue
    a = np.asarray(a)
    for s in b.addressable_shards:
        own += 1
        off += norm(np.asarray(s.data, np.float64) - a[s.index])
        whole += norm(a[s.index])
losses = [float(jax.tree.leaves(x)[0]) for x in (told, expected)]
relative = (off / max(whole, 1e-30)) ** 0.5
sys.stdout.write(json.dumps([role.process, done, own, relative, *losses]) + "\\n")
"""


def launched(processes: int, *words: object) -> list[Any]:
    lines: list[str] = []
    script = (sys.executable, "-c", WORK, *map(str, words))
    code = run_local(Job(script, processes, 4 // processes), lambda k, line: lines.append(line))
    found = sorted(json.loads(x) for x in lines if x.startswith("[") and "Gloo" not in x)
    assert len(found) == processes, (code, lines)
    return found


@pytest.mark.parametrize(
    ("processes", "name", "stages", "schedule"),
    [
        (2, "layers", 2, "1f1b"),
        pytest.param(4, "scanned", 4, "zb-h1", marks=pytest.mark.slow),
        pytest.param(2, "noisy", 2, "zb-h1", marks=pytest.mark.slow),
        pytest.param(4, "layers", 2, "interleaved-2", marks=pytest.mark.slow),
    ],
)
def test_equal_saved_and_restored(
    processes: int, name: str, stages: int, schedule: str, tmp_path: Path
) -> None:
    first = launched(processes, name, stages, schedule, tmp_path / "run", "")
    again = launched(4 if processes == 2 else 2, name, 2, "1f1b", tmp_path / "run", 1)
    assert [row[1] for row in (*first, *again)] == [0] * len(first) + [2] * len(again)
    for _, _, own, difference, loss, expected in (*first, *again):
        assert own
        assert difference < 1e-5
        assert loss == pytest.approx(expected, rel=1e-5)
