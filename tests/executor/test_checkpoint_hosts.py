"""Checkpoints of several processes: any number to any other, and killed at any moment."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from executor.launch.start import Job, Outcome, run_local

pytestmark = [pytest.mark.devices, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]

STATE = f"""
import hashlib, json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import jax, numpy as np, optax
from executor import Checkpoints, initialize, parallelize
role = initialize(timeout_s=60)
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
OPTIMIZER = optax.adam(1e-2)
def fresh():
    rng = np.random.default_rng(0)
    params = {{
        "a": rng.normal(size=(24, 48)).astype("f4"),
        "layers": [{{"w": rng.normal(size=(48, 24)).astype("f4")}} for _ in range(2)],
        "half": jnp.asarray(rng.normal(size=(24, 12)), jnp.bfloat16),
        "bytes": rng.integers(-128, 128, (36, 24)).astype(np.int8),
    }}
    real = {{k: params[k] for k in ("a", "layers", "half")}}
    return {{"params": params, "opt": OPTIMIZER.init(real), "n": jnp.uint32(7)}}
def train_step(state, x):
    real = {{k: state["params"][k] for k in ("a", "layers", "half")}}
    def loss(params):
        h = jnp.tanh(x @ params["a"])
        h = sum(jnp.tanh(h @ layer["w"]) for layer in params["layers"])
        return jnp.mean(h**2) + jnp.mean(params["half"].astype(jnp.float32) ** 2)
    value, grads = jax.value_and_grad(loss)(real)
    updates, opt = OPTIMIZER.update(grads, state["opt"])
    real = optax.apply_updates(real, updates)
    params = {{**state["params"], **real}}
    return {{"params": params, "opt": opt, "n": state["n"] + 1}}, value
X = np.linspace(-1, 1, 48 * 24, dtype=np.float32).reshape(48, 24)
def digests(tree):
    out = {{}}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        out[jax.tree_util.keystr(path)] = hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
    return out
folder, mesh, mode = sys.argv[1:4]
step = parallelize(train_step, mesh=mesh, **json.loads(mode))
state = fresh()
shardings = step.prepare(state, X).in_shardings[0]
"""

SAVE = (
    STATE
    + """
state, _ = step(state, X)
with Checkpoints(folder) as checkpoints:
    checkpoints.save(1, state, plan=step.plan, extra={"position": 48})
specs = sorted({str(s.spec) for s in jax.tree.leaves(shardings)})
sys.stdout.write(f"RESULT {json.dumps([role.process, digests(state), specs])}\\n")
"""
)

RESTORE = (
    STATE
    + """
with Checkpoints(folder) as checkpoints:
    state = checkpoints.restore(state, shardings=shardings)
    assert checkpoints.extra() == {"position": 48}
assert jax.tree.map(lambda x: x.sharding, state) == shardings
found = digests(state)
specs = sorted({str(s.spec) for s in jax.tree.leaves(shardings)})
step(state, X)
sys.stdout.write(f"RESULT {json.dumps([role.process, found, specs])}\\n")
"""
)


def run(code: str, processes: int, devices: int, *arguments: str) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    command = (sys.executable, "-c", code, *arguments)
    outcome = run_local(Job(command, processes, devices), lambda k, x: lines.append(f"{k}: {x}"))
    return outcome, lines


def results(code: str, processes: int, devices: int, *arguments: str) -> list[Any]:
    outcome, lines = run(code, processes, devices, *arguments)
    assert outcome.code == 0, "\n".join(lines)
    return sorted(json.loads(x.split("RESULT ", 1)[1]) for x in lines if "RESULT " in x)


def test_saved_by_eight_devices_restored_by_any_number_under_other_plans(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    saved = results(SAVE, 2, 4, folder, "data=4,model=2", '{"zero": 3}')
    state = saved[0][1]
    assert saved[1][1] == state
    plans = {json.dumps(saved[0][2])}
    for processes, devices, mesh, mode in (
        (1, 8, "data=2,model=4", "{}"),
        (1, 1, "data=1", "{}"),
        (3, 4, "data=12", '{"zero": 3}'),
        (1, 6, "data=3,model=2", '{"zero": 1}'),
        (2, 2, "model=4", '{"mode": "AUTO_PARALLEL"}'),
    ):
        for _, found, specs in results(RESTORE, processes, devices, folder, mesh, mode):
            assert found == state, (processes, devices)
            plans.add(json.dumps(specs))
    assert len(plans) > 2  # they were other plans


KILLED = f"""
import os, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
import jax, numpy as np
from executor import Checkpoints, initialize
role = initialize(timeout_s=60)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
folder, victim, moment = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
mesh = jax.make_mesh((4,), ("a",), (AxisType.Auto,))
split = NamedSharding(mesh, P("a"))
def state(n):
    rows = np.full((2048, 2048), n, np.float32)
    return {{
        f"w{{k}}": jax.make_array_from_callback(rows.shape, split, lambda i: rows[i] + k)
        for k in range(8)
    }}
checkpoints = Checkpoints(folder)
if moment < 0:  # only look
    print("RESULT", role.process, list(checkpoints.steps))
    found = checkpoints.restore(state(0))
    step = checkpoints.steps[-1]
    for k in range(8):
        for shard in found[f"w{{k}}"].addressable_shards:
            assert (np.asarray(shard.data) == step + k).all()
    checkpoints.save(step + 1, state(step + 1))
    checkpoints.wait()
    print("AGAIN", list(checkpoints.steps))
    checkpoints.close()
    sys.exit(0)
checkpoints.save(1, state(1))
checkpoints.wait()
big = state(2)
jax.block_until_ready(big)
def written():
    # the part of step 2 that is on disk; 2 once it is whole
    if os.path.exists(f"{{folder}}/2"):
        return 2.0
    sizes = [0.0]
    for top, _, names in os.walk(f"{{folder}}/.unfinished-1"):
        sizes.append(1e-9)
        for name in names:
            try:
                sizes.append(os.path.getsize(f"{{top}}/{{name}}"))
            except OSError:
                pass  # it has another name by now
    return sum(sizes) / sum(x.nbytes for x in jax.tree.leaves(big))
def end():
    while written() < moment:
        time.sleep(0.001)
    os.kill(os.getpid(), 9)
if role.process == victim:
    threading.Thread(target=end, daemon=True).start()
checkpoints.save(2, big)
print("SAVING", role.process, flush=True)
checkpoints.wait()
print("SAVED", role.process, flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_while_saving_leaves_the_last_one(
    tmp_path: Path, victim: int
) -> None:
    """At several moments, from before the first byte to after the last."""
    ends = []
    for moment in (0.0, 1e-18, 0.2, 0.5, 0.9, 2.0):  # how much of it is on disk
        folder = str(tmp_path / f"{victim}-{moment}")
        outcome, lines = run(KILLED, 2, 2, folder, str(victim), str(moment))
        assert outcome.codes[victim] == 128 + signal.SIGKILL, "\n".join(lines)
        outcome, lines = run(KILLED, 2, 2, folder, "0", "-1")
        assert outcome.code == 0, "\n".join(lines)
        told = {x.split("RESULT ", 1)[1][2:] for x in lines if "RESULT " in x}
        assert len(told) == 1 and told <= {"[1]", "[1, 2]"}, told
        ends += told
        assert all(x.endswith("2]") or x.endswith("3]") for x in lines if "AGAIN" in x)
    assert ends[0] == ends[1] == "[1]" and ends[-1] == "[1, 2]", ends
