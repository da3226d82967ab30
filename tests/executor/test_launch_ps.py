"""``planner launch --workers W --servers S``: what it starts, refuses, takes from older systems,
and writes for KubeRay."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor.cli.main import main
from executor.launch.job import Job, LaunchError
from executor.launch.kubernetes import manifests
from executor.launch.kubernetes.jobset import Pods
from executor.parameter_server.launch import rayjob
from executor.parameter_server.launch.job import Servers
from executor.parameter_server.launch.roles import SYSTEMS
from tests.executor.launching import alive, gone, launcher_process, wait_for
from tests.executor.test_launch_ray import needs_ray, ours

SCRIPT = """
import json, os, sys
import jax.numpy as jnp
from executor.parameter_server import train

def loop(server):
    server.init({"w": jnp.zeros(6)})
    server.push({"w": jnp.full(6, 1.0 + server.rank)})
    return server.rank, server.num_workers, os.getpid()

done = train(loop, mode="async", wait_s=60)
told = {n: v for n, v in os.environ.items() if n.startswith("MESHWRIGHT_PS_")}
ranks = [r[:2] for r in done.returned]
print(json.dumps([sys.argv[1:], done.params["w"].tolist()[:1], ranks, len(done.counts), told]))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for system in SYSTEMS for n in (*system.variables, *system.unused)]:
        if not name.startswith("-"):
            monkeypatch.delenv(name, raising=False)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "script.py").write_text(SCRIPT)


def launched(*words: str) -> int:
    return main(["launch", *words, "script.py", "--steps", "7"])


def result(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def test_threads_of_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launched("--workers", "3", "--servers", "2") == 0
    shown = result(capsys.readouterr().out)
    words = {"WORKERS": "3", "SERVERS": "2", "BACKEND": "local"}
    told = {f"MESHWRIGHT_PS_{name}": value for name, value in words.items()}
    assert shown == [["--steps", "7"], [6.0], [[0, 3], [1, 3], [2, 3]], 2, told]
    assert result((tmp_path / "logs" / "worker-0.out").read_text()) == shown


def test_a_script_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.replace("train(loop,", "train(loop, workers=2,")
    (tmp_path / "script.py").write_text(text)
    assert launched("--workers", "3") == 1
    told = capsys.readouterr().err
    assert "train(workers=2), but planner launch (" in told and "says workers=3; leave" in told


def test_numbers_of_older_systems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    monkeypatch.setenv("DMLC_NUM_SERVER", "3")
    monkeypatch.setenv("DMLC_INTERFACE", "eth0")
    assert launched() == 0
    told = capsys.readouterr()
    assert result(told.out)[2:4] == [[[0, 2], [1, 2]], 3]
    assert "2 workers, 3 servers: from MXNet (DMLC_NUM_WORKER, DMLC_NUM_SERVER)" in told.err
    assert "DMLC_INTERFACE: no meaning here" in told.err


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_PS_ROOT_PORT": "9000"}, "10.0.0.9:9000"),
        ({"DMLC_PS_ROOT_URI": "::1"}, "[::1]:6379"),
    ],
)
def test_a_cluster_is_not_left_for_this_host(
    variables: dict[str, str],
    place: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "3"}
    for name, value in {**variables, **numbers}.items():
        monkeypatch.setenv(name, value)
    assert launched() == 2
    told = capsys.readouterr()
    assert f"has the job's head at {place}, and --launcher local (the" in told.err
    assert "--launcher ray for the cluster there, or --workers 2 --servers 3 for th" in told.err
    assert "Ray's head at" not in told.err and told.out == ""
    assert launched("--workers", "2", "--servers", "3") == 0
    assert result(capsys.readouterr().out)[2:4] == [[[0, 2], [1, 2]], 3]


def test_kubernetes_has_a_head_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document()
    numbers = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "3", "DMLC_PS_ROOT_URI": "node0"}
    for name, value in numbers.items():
        monkeypatch.setenv(name, value)
    assert launched("--launcher", "k8s", "--image", "x") == 0
    told = capsys.readouterr()
    assert "2 workers, 3 servers: from MXNet" in told.err and "node0" not in told.out


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"DMLC_ROLE": "server", "DMLC_NUM_SERVER": "2"}, "the server: servers are Ray actors"),
        ({"MS_SERVER_NUM": "2"}, "(MS_SERVER_NUM) does not say how many workers; give --workers"),
        (
            {"DMLC_NUM_WORKER": "0", "DMLC_NUM_SERVER": "2"},
            "DMLC_NUM_WORKER='0': expected a whole number",
        ),
        ({}, "nothing says how many: give -n N"),
    ],
)
def test_numbers_that_are_none(
    variables: dict[str, str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--servers 2", "--servers 2 needs --workers"),
        ("--workers 4 -n 2", "-n 2 with --workers 4: -n starts processes"),
        ("--servers 0 --workers 4", "--servers 0: expected at least one"),
        ("--launcher ssh --workers 4", "--launcher ssh starts no parameter servers; use ray"),
        ("--workers 2 --devices-per-process 2", "--devices-per-process has no use with --workers"),
        ("--workers 2 --gpus 2", "--gpus is for --launcher slurm or k8s or ray, this is local"),
        ("--workers 2 --ray-address h:1", "--ray-address is for --launcher ray, this is local"),
        ("--workers 2 --env MESHWRIGHT_PS_WORKERS=5", "WORKERS=5: the launch sets MESHWRIGHT_PS_W"),
        ("--workers 2 --env MESHWRIGHT_PS_GPUS=5", "give --gpus instead"),
        ("--launcher sge --workers 2", "--launcher sge starts no parameter servers"),
    ],
)
def test_what_the_command_refuses(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(*words.split()) == 2
    assert text in capsys.readouterr().err


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install 'meshwright\[ray\]', or use --launcher l"):
        Servers(2, 1, "ray").start(Job(("python", "t.py"), 1), 0)


@needs_ray
def test_a_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--launcher", "ray", "--workers", "1", "--ray-address", "127.0.0.1:1"]
    assert launched(*words) == 2
    assert "cannot reach Ray at 127.0.0.1:1 (" in capsys.readouterr().err


@needs_ray
def test_the_head_of_an_older_system(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2"}
    for name, value in {**variables, "DMLC_PS_ROOT_URI": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", "1")
    assert launched("--launcher", "ray") == 2
    told = capsys.readouterr().err
    assert "Ray's head at 127.0.0.1:1: from MXNet" in told and "cannot reach Ray" in told


def test_accelerators_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert Servers(2, 1, "ray", gpus=3).variables["MESHWRIGHT_PS_GPUS"] == "3"
    document()
    words = ["--launcher", "k8s", "--workers", "4", "--image", "x", "--gpus", "2"]
    assert launched(*words) == 0
    import yaml

    cluster = yaml.safe_load(capsys.readouterr().out)["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (worker,) = group["template"]["spec"]["containers"]
    assert {"name": "MESHWRIGHT_PS_GPUS", "value": "2"} in head["env"]
    assert head["resources"] == {"requests": {"cpu": 1}}
    assert worker["resources"] == {"requests": {"cpu": 1}, "limits": {"nvidia.com/gpu": 2}}


def test_variables_of_an_outer_launch_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_PS_ADDRESS", "elsewhere:1")
    (task,) = Servers(2, 1, "local").start(Job((sys.executable, "t.py"), 1), 3).tasks
    assert "MESHWRIGHT_PS_ADDRESS" not in task.environment
    assert task.environment["MESHWRIGHT_RESTART"] == "3"


# ---- on Ray ------------------------------------------------------------------------------


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_tasks_and_actors(capsys: pytest.CaptureFixture[str]) -> None:
    assert launched("--launcher", "ray", "--workers", "2", "--servers", "2") == 0
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("[[")]
    arguments, values, ranks, servers, _ = json.loads(line)
    assert (arguments, values, servers) == (["--steps", "7"], [3.0], 2)
    assert ranks == [[0, 2], [1, 2]]


SLEEPS = """
import os, time
import jax.numpy as jnp
from executor.parameter_server import train

def loop(server):
    server.init({"w": jnp.zeros(6)})
    open(f"tmp{server.rank}", "w").write(str(os.getpid()))
    os.rename(f"tmp{server.rank}", f"pid{server.rank}")
    time.sleep(600)

train(loop, wait_s=60)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("local", signal.SIGINT),
        pytest.param("ray", signal.SIGTERM, marks=needs_ray),
        pytest.param("ray", signal.SIGKILL, marks=needs_ray),
    ],
)
def test_all_ends_with_the_launcher(tmp_path: Path, launcher: str, number: signal.Signals) -> None:
    (tmp_path / "sleep.py").write_text(SLEEPS)
    words = ["launch", "--launcher", launcher, "--workers", "2", "--servers", "2"]
    with launcher_process(words, "sleep.py") as child:
        pids = [int(wait_for(tmp_path / name, 120)) for name in ("pid0", "pid1")]
        all_pids = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal()]
        rays = [pid for pid in all_pids if ours(pid, pids) and pid != child.pid]
        assert all(map(alive, pids)) and len(rays) > (4 if launcher == "ray" else 0)
        child.send_signal(number)
        _, told = child.communicate(timeout=120)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGKILL: -9}
    assert child.returncode == expected[number], told
    gone(*pids, *rays)


CLUSTER_OF_TWO = """
import os, time
from ray.cluster_utils import Cluster

node = {"num_cpus": 2, "object_store_memory": 200_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
open("tmp", "w").write(cluster.address)
os.rename("tmp", "address")
while not os.path.exists("end"):
    time.sleep(0.1)
cluster.shutdown()
"""
WHERE = """
import jax.numpy as jnp
import ray
from executor.parameter_server import train

def loop(server):
    server.init({"w": jnp.zeros(6)})
    return ray.get_runtime_context().get_node_id()

print("nodes", len(set(train(loop, wait_s=60).returned)), flush=True)
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_a_cluster_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers go to both nodes; those of a launcher that is killed end, and the cluster is there
    for the next."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name, text in (("hold.py", CLUSTER_OF_TWO), ("where.py", WHERE), ("sleep.py", SLEEPS)):
        (tmp_path / name).write_text(text)
    with subprocess.Popen([sys.executable, "hold.py"]):
        try:
            address = wait_for(tmp_path / "address", 120)
            words = ["launch", "--launcher", "ray", "--workers", "4", "--ray-address", address]
            with launcher_process(words, "sleep.py") as child:
                pids = [int(wait_for(tmp_path / f"pid{rank}", 120)) for rank in range(4)]
                assert all(map(alive, pids))
                child.send_signal(signal.SIGKILL)
            gone(*pids, within_s=60)
            assert main([*words, "where.py"]) == 0, capsys.readouterr()
            assert "nodes 2" in capsys.readouterr().out
        finally:
            (tmp_path / "end").touch()


# ---- for KubeRay -------------------------------------------------------------------------

JOB = Job(("python", "train.py", "--x"), 1, None, {"A": "b"}, stop_s=90)
PODS = Pods("train", "registry/image:1")
SERVERS = Servers(4, 2, "ray")


def document() -> Any:
    pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'meshwright[k8s]'")
    pytest.importorskip("yaml", reason="needs PyYAML: pip install 'meshwright[k8s]'")
    return rayjob.manifest(JOB, PODS, SERVERS, 3)


def test_the_manifest() -> None:
    spec = document()["spec"]
    assert (spec["entrypoint"], spec["backoffLimit"]) == ("python train.py --x", 3)
    assert spec["shutdownAfterJobFinishes"] is True
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    env = {entry["name"]: entry["value"] for entry in head["containers"][0]["env"]}
    assert env == {
        "A": "b",
        "PYTHONUNBUFFERED": "1",
        "MESHWRIGHT_PS_WORKERS": "4",
        "MESHWRIGHT_PS_SERVERS": "2",
        "MESHWRIGHT_PS_BACKEND": "ray",
        "MESHWRIGHT_PS_ADDRESS": "auto",
    }
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 4, 4)
    worker = group["template"]["spec"]
    assert {entry["name"] for entry in worker["containers"][0]["env"]} == {"A", "PYTHONUNBUFFERED"}
    assert worker["terminationGracePeriodSeconds"] == 90


def test_what_pods_ask_for() -> None:
    document()
    found = rayjob.manifest(JOB, Pods("t", "i", 2, "4", "16Gi"), SERVERS, 0)
    manifests.check_manifest(found, *manifests.read_schema(None, rayjob.KIND))
    spec = found["spec"]["rayClusterSpec"]
    parts = [spec["headGroupSpec"], spec["workerGroupSpecs"][0]]
    head, worker = (x["template"]["spec"]["containers"][0]["resources"] for x in parts)
    assert head == {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
    assert worker["limits"] == {"nvidia.com/gpu": 2, "memory": "16Gi"}
    found = rayjob.manifest(JOB, PODS, SERVERS, 0)["spec"]["rayClusterSpec"]["headGroupSpec"]
    bare = found["template"]["spec"]["containers"][0]["resources"]
    assert bare == {"requests": {"cpu": 1}}


def change_at(found: Any, path: str, value: Any) -> Any:
    """A copy with a value put in; ``path`` by names and numbers."""
    out = copy.deepcopy(found)
    at = out
    *parts, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    for part in parts:
        at = at[part]
    at[last] = value
    return out


CLUSTER = "spec/rayClusterSpec"
CONTAINER = f"{CLUSTER}/workerGroupSpecs/0/template/spec/containers/0"
WRONG = [
    ("spec/entryPoint", "python t.py"),
    ("spec/shutdownAfterJobFinishes", "true"),
    ("spec/backoffLimit", "3"),
    (f"{CLUSTER}/headGroup", {}),
    (f"{CLUSTER}/headGroupSpec/rayStartParams", {"num-cpus": 1}),
    (f"{CLUSTER}/workerGroupSpecs/0/replicas", "4"),
    (f"{CLUSTER}/workerGroupSpecs/0/name", "workers"),
    (f"{CONTAINER}/gpus", 8),
    (f"{CONTAINER}/env/0/val", "x"),
    (f"{CONTAINER}/resources/requests", ["cpu"]),
]


def refused_by(schema: Any) -> list[str]:
    """Which of the wrong manifests a schema refuses."""
    out = []
    for path, value in WRONG:
        try:
            manifests.check_manifest(change_at(document(), path, value), schema, "it")
        except LaunchError:
            out.append(path)
    return out


def test_the_built_in_schema_takes_it_and_refuses_wrong_ones() -> None:
    schema, name = manifests.read_schema(None, rayjob.KIND)
    assert name == "the schema of RayJob v1"
    manifests.check_manifest(document(), schema, name)
    assert refused_by(schema) == [path for path, _ in WRONG]


def test_the_clusters_schema_takes_it_and_refuses_wrong_ones() -> None:
    path = os.environ.get("MESHWRIGHT_RAYJOB_CRD")
    if path is None:
        pytest.skip("MESHWRIGHT_RAYJOB_CRD does not name KubeRay's RayJob CRD (a YAML file)")
    found = document()
    schema, name = manifests.read_schema(Path(path), rayjob.KIND)
    manifests.check_manifest(found, schema, name)
    assert refused_by(schema) == [path for path, _ in WRONG]


@pytest.mark.parametrize("word", ["a b", "it's", "$HOME", "a;b", '"x"', ""])
def test_words_that_would_not_arrive(word: str) -> None:
    with pytest.raises(LaunchError, match="KubeRay hands the command to a shell twice"):
        rayjob.manifest(Job(("python", "t.py", word), 1), PODS, SERVERS, 0)


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(LaunchError, match="at most 47"):
        rayjob.manifest(JOB, Pods("x" * 48, "i"), SERVERS, 0)


def test_the_command_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    document()
    words = ["--launcher", "k8s", "--workers", "4", "--image", "registry/image:1"]
    assert launched(*words, "--max-restarts", "2", "--name", "it") == 0
    shown = capsys.readouterr().out
    import yaml

    found = yaml.safe_load(shown)
    assert (found["kind"], found["metadata"]["name"]) == ("RayJob", "it")
    assert found["spec"]["entrypoint"] == "python script.py --steps 7"
    assert found["spec"]["backoffLimit"] == 2


def test_a_stand_in_for_kubectl_gets_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document()
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\ncat > {tmp_path}/got\necho "$@"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--launcher", "k8s", "--workers", "4", "--image", "x", "--apply"]
    assert launched(*words) == 0
    assert capsys.readouterr().out == "apply -f -\n"
    assert json.loads((tmp_path / "got").read_text())["kind"] == "RayJob"
    kubectl.write_text("#!/bin/sh\necho no matches for kind >&2; exit 1\n")
    assert launched(*words) == 2
    assert "(no matches for kind); is a cluster with KubeRay in" in capsys.readouterr().err
