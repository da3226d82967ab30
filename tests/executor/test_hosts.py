"""Several processes as one: joining, running one plan, and refusing two."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from executor import HostError, initialize
from executor.launch.start import Job, free_port, run_local
from executor.processes import bootstrap as hosts
from executor.processes.bootstrap import addresses_of, bind_address, check_here, check_own_name

ROOT = Path(__file__).resolve().parents[2]

TRAIN = f"""
import json, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "examples")!r}]
import jax, jax.numpy as jnp, numpy as np
from executor import initialize, parallelize

role = initialize(timeout_s=60)


def step(w, x):
    def loss(w):
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.5 * g, w, grads), value


rng = np.random.default_rng(0)
w = {{"a": rng.normal(size=(16, 32)).astype("f4"), "b": rng.normal(size=(32, 16)).astype("f4")}}
x = rng.normal(size=(32, 16)).astype("f4")
mesh = sys.argv[1] if len(sys.argv) < 3 else sys.argv[1 + role.process]
run = parallelize(step, mesh=mesh, zero=3, donate_argnums=0)
losses = []
for _ in range(4):
    w, loss = run(w, x)
    losses.append(float(loss))
sys.stdout.write(json.dumps([role.process, jax.device_count(), losses]) + "\\n")
"""


def launched(processes: int, devices: int, *meshes: str) -> tuple[Any, list[str]]:
    lines: list[str] = []
    job = Job((sys.executable, "-c", TRAIN, *meshes), processes, devices)
    return run_local(job, lambda k, line: lines.append(line)), lines


def results(lines: list[str]) -> list[Any]:
    return sorted(json.loads(line) for line in lines if line.startswith("[") and "Gloo" not in line)


def test_processes_give_the_losses_of_one() -> None:
    outcome, lines = launched(1, 8, "data=4,model=2")
    assert outcome.code == 0, lines
    ((_, _, alone),) = results(lines)
    outcome, lines = launched(2, 4, "data=4,model=2")
    assert outcome.code == 0, lines
    found = results(lines)
    assert [(k, devices) for k, devices, _ in found] == [(0, 8), (1, 8)]
    for _, _, losses in found:
        assert losses == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


KEYS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import jax, jax.numpy as jnp, numpy as np
from executor import initialize, parallelize, share
from planner import make_plan
role = initialize(timeout_s=60)


def step(state, x):
    noise = jax.random.normal(state["key"], x.shape)
    return {{**state, "key": jax.random.split(state["key"])[0]}}, (x + noise).sum()


state = {{"key": jax.random.key(7), "half": jnp.ones(8, jnp.bfloat16), "number": 3}}
x = np.ones((16, 4), np.float32)
run = parallelize(step, mesh="data=4")
for _ in range(2):
    state, total = run(state, x)
alone, twice = {{"key": jax.random.key(7)}}, None
for _ in range(2):
    alone, twice = step(alone, jnp.asarray(x))
np.testing.assert_allclose(float(total), float(twice), rtol=1e-5)
shared = share(run.plan if role.process == 0 else None)
assert shared.digest == run.plan.digest
sys.stdout.write("FINE\\n")
"""


def test_keys_and_plans_travel() -> None:
    lines: list[str] = []
    outcome = run_local(Job((sys.executable, "-c", KEYS), 2, 2), lambda k, line: lines.append(line))
    assert outcome.code == 0 and lines.count("FINE") == 2, lines


def test_processes_with_different_plans_are_refused() -> None:
    outcome, lines = launched(2, 4, "data=4,model=2", "data=8")
    text = "\n".join(lines)
    assert outcome.code != 0
    assert "plans differ: process 0 has" in text and "process 1 has" in text
    assert "first difference: process 0" in text and '"data": 8' in text


PART = f"""
import atexit, json, pathlib, sys, threading
sys.path.insert(0, {str(ROOT)!r})
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from planner import compat
how, folder = sys.argv[1:]
said, late_ones = [], []


@atexit.register
def write():  # registered before those of initialize, so it runs after them
    said.append(late_ones == [True] if out is None else out.is_ready())
    pathlib.Path(folder, str(role.process)).write_text(json.dumps(said))


before = jax.config.jax_num_cpu_devices
assert not compat.knows_devices() and jax.config.jax_num_cpu_devices == before
from executor.processes.bootstrap import finalize, initialize
role = initialize(timeout_s=60)
here = jax.local_device_count()
assert compat.knows_devices() and jax.config.jax_num_cpu_devices == before
mesh = jax.make_mesh((2, here), ("process", "device"), axis_types=(AxisType.Auto,) * 2)


def note(total, late):
    late_ones.extend([True] if late else [])
    return np.float32(0)


def step(x):
    late = jax.lax.axis_index("device") == here - 1
    turns = jnp.where(late, 4000, 0)
    y = jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ y) + x[0, 0], jnp.ones((200, 200)))
    total = y.sum()
    if how == "dropped":
        total = jax.pure_callback(note, jax.ShapeDtypeStruct((), "f4"), total, late)
    return jax.lax.all_gather(x + 0 * total, "process").reshape(2, 1)


def run():
    global out
    out = jax.jit(step)(x)


step = jax.shard_map(
    step, mesh=mesh, in_specs=P("process", "device"), out_specs=P(None, "device"), check_vma=False
)
each = NamedSharding(mesh, P("process", "device"))
x = jax.make_array_from_process_local_data(each, np.full((1, here), 1 + role.process, "f4"))
thread = threading.Thread(target=run)
thread.start()
thread.join()
if here > 1:
    said.append(np.asarray(out.addressable_data(0)).ravel().tolist())
if how == "dropped":
    out = None
if how == "notebook":
    jax.set_mesh(mesh)
    sys.last_value = ValueError("an earlier cell's")
    finalize()
    del sys.last_value
"""


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ("exit", 4),
        ("exit", 1),
        *(pytest.param(how, 4, marks=pytest.mark.slow) for how in ("dropped", "notebook")),
    ],
)
def test_what_is_under_way_ends_before_processes_part(
    how: str, devices: int, tmp_path: Path
) -> None:
    """Of a program over several devices a process, the last is late, and nobody waits for it."""
    lines: list[tuple[int, str]] = []
    job = Job((sys.executable, "-c", PART, how, str(tmp_path)), 2, devices)
    outcome = run_local(job, lambda k, line: lines.append((k, line)))
    assert outcome.codes == (0, 0), lines
    for process in range(2):
        said = json.loads((tmp_path / str(process)).read_text())
        assert said == [*([[1.0, 2.0]] if devices > 1 else []), True], lines


@pytest.mark.parametrize("error", [None, ValueError("bad batch")])
def test_who_ends_by_an_error_waits_for_nothing(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has under way the others may never join."""
    waited: list[bool] = []
    monkeypatch.setattr(hosts, "settle", lambda: waited.append(True))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    hosts._settle_at_exit()
    assert waited == ([] if error else [True])


def test_one_process_starts_nothing() -> None:
    assert initialize(processes=1, process=0).processes == 1


def test_a_name_without_an_address_is_said() -> None:
    with pytest.raises(HostError, match=r"'no\.such\.host\.invalid' has no address"):
        initialize("no.such.host.invalid:1", 2, 1)


def test_nobody_at_the_address_is_said() -> None:
    where = f"127.0.0.1:{free_port()}"
    with pytest.raises(HostError, match=r"was not reached .* nothing listens"):
        initialize(where, 2, 1, timeout_s=0.5)


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostError, match="the port can't be used"):
            initialize(where, 2, 0)


@pytest.mark.parametrize(("where", "told"), [("192.0.2.1:8476", True), ("127.0.0.1:1", False)])
def test_another_hosts_address_is_told(
    where: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_here(where, addresses_of(where))  # 192.0.2.0/24 is kept for documentation, RFC 5737
    assert ("does not have that address" in caplog.text) == told


@pytest.mark.parametrize(
    ("where", "address"),
    [("localhost:1", "127.0.0.1"), ("127.0.0.1:1", "127.0.0.1"), ("192.0.2.1:1", "")],
)
def test_process_0_listens_at_the_coordinators_address(where: str, address: str) -> None:
    assert bind_address(where, addresses_of(where)) == address


def test_a_name_that_resolves_to_loopback_is_listened_for_everywhere() -> None:
    loopback = ((socket.AF_INET, ("127.0.1.1", 1)),)
    assert bind_address("node1:1", loopback) == ""


@pytest.mark.parametrize(("coordinator", "told"), [("node1:1", True), ("127.0.0.1:1", False)])
def test_a_name_that_means_this_host_only_is_told(
    coordinator: str,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    check_own_name(coordinator)
    assert ("resolves to 127.0.1.1" in caplog.text) == told


def test_a_server_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HostError, match="this process is a server"):
        initialize("here:1")
