"""The words of older parameter-server systems, every one of the table, and what a job makes of
them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.parameter_server import PsRole, Rule, ps_role, train
from executor.parameter_server.jobs.asked import JobRequest, gpus_of, job_request, rule_of
from executor.parameter_server.launch.roles import SYSTEMS
from executor.processes.roles import RoleError
from planner import set_parallel_mode
from planner.errors import RequestError

PAGE = Path(__file__).parents[3] / "docs/how-to/move-from-other-parameter-servers.md"
OLD = [name for system in SYSTEMS for name in (*system.variables, *system.unused)]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OLD:
        if not name.startswith("-"):
            monkeypatch.delenv(name, raising=False)


PADDLE = {
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:7164,10.0.0.2:7164",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_TRAINER_ID": "3",
}
INIT = {"PADDLE_INIT_PSERVERS": "a,b", "PADDLE_INIT_NUM_GRADIENT_SERVERS": "4"}
DMLC = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "2"}
ROOT = {"DMLC_PS_ROOT_URI": "node0", "DMLC_PS_ROOT_PORT": "9091"}
MS = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_SERVER_NUM": "2"}
SCHED = {"MS_SCHED_HOST": "node0", "MS_SCHED_PORT": "8118"}
CLUSTER = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1", "p:2"], "evaluator": ["e:1"]}


def tf(kind: str | None, index: int = 0, **cluster: Any) -> dict[str, str]:
    task = {} if kind is None else {"task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps({"cluster": cluster or CLUSTER, **task})}


# name of a row, flags, variables -> role, rank, workers, servers, address
ROWS: list[tuple[str, str, dict[str, str], tuple[Any, ...]]] = [
    ("pserver", "pserver --num_gradient_servers=4", {}, ("server", None, 4, None, None)),
    ("train", "train --pservers=a,b", {}, ("worker", None, None, 2, "a:6379")),
    ("--port", "paddle train --pservers=a --port 7", {}, ("worker", None, None, 1, "a:7")),
    ("--num_gradient_servers", "--num_gradient_servers 4", INIT, ("chief", 0, 4, 2, "a:6379")),
    ("--pservers", "--pservers=x,y,z", {}, ("chief", 0, None, 3, "x:6379")),
    ("--trainer_id", "train --trainer_id=2", INIT, ("worker", 2, 4, 2, "a:6379")),
    ("--worker_num", "--worker_num=3 --server_num=2", {}, ("chief", 0, 3, 2, None)),
    ("--server_num", "--server_num 5", {}, ("chief", 0, None, 5, None)),
    ("TRAINING_ROLE", "", {**PADDLE, "TRAINING_ROLE": "PSERVER"}, ("server", None, 4, 2)),
    ("PADDLE_TRAINING_ROLE", "", {"PADDLE_TRAINING_ROLE": "PSERVER"}, ("server", None, None)),
    ("PADDLE_PSERVERS_IP_PORT_LIST", "", PADDLE, ("worker", 3, 4, 2, "10.0.0.1:7164")),
    ("PADDLE_TRAINERS_NUM", "", {**PADDLE, "PADDLE_TRAINERS_NUM": "9"}, ("worker", 3, 9, 2)),
    ("PADDLE_TRAINER_ID", "", {**PADDLE, "PADDLE_TRAINER_ID": "0"}, ("chief", 0, 4, 2)),
    (
        "PADDLE_PORT",
        "",
        {**PADDLE, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "7164"},
        ("server", 1, 4, 2, "10.0.0.1:7164"),
    ),
    (
        "POD_IP",
        "",
        {**PADDLE, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.1", "PADDLE_PORT": "7164"},
        ("server", 0, 4, 2, "10.0.0.1:7164"),
    ),
    ("PADDLE_INIT_PSERVERS", "", INIT, ("chief", 0, 4, 2, "a:6379")),
    ("PADDLE_INIT_PORT", "", {**INIT, "PADDLE_INIT_PORT": "7"}, ("chief", 0, 4, 2, "a:7")),
    ("PADDLE_INIT_NUM_GRADIENT_SERVERS", "", INIT, ("chief", 0, 4, 2, "a:6379")),
    ("PADDLE_INIT_TRAINER_ID", "", {**INIT, "PADDLE_INIT_TRAINER_ID": "1"}, ("worker", 1, 4)),
    ("DMLC_ROLE", "", DMLC, ("worker", None, 4, 2, None)),
    ("DMLC_ROLE", "", {**DMLC, "DMLC_ROLE": "server"}, ("server", None, 4, 2, None)),
    ("DMLC_ROLE", "", {**DMLC, **ROOT, "DMLC_ROLE": "scheduler"}, ("scheduler", None, 4, 2)),
    ("DMLC_NUM_WORKER", "", {**DMLC, "DMLC_NUM_WORKER": "1"}, ("chief", 0, 1, 2, None)),
    ("DMLC_NUM_SERVER", "", {"DMLC_NUM_SERVER": "2"}, ("chief", 0, None, 2, None)),
    ("DMLC_PS_ROOT_URI", "", {**DMLC, **ROOT}, ("worker", None, 4, 2, "node0:9091")),
    ("DMLC_PS_ROOT_PORT", "", {**DMLC, **ROOT}, ("worker", None, 4, 2, "node0:9091")),
    ("DMLC_WORKER_ID", "", {**DMLC, "DMLC_WORKER_ID": "1"}, ("worker", 1, 4, 2)),
    (
        "DMLC_SERVER_ID",
        "",
        {**DMLC, "DMLC_ROLE": "server", "DMLC_SERVER_ID": "1", "DMLC_WORKER_ID": "3"},
        ("server", 1, 4, 2),
    ),
    ("-n", "tools/launch.py -n 4 -s 2 python train.py -n 9", {}, ("chief", 0, 4, 2, None)),
    ("-s", "-n 4", {}, ("chief", 0, 4, 4, None)),
    ("--num-workers", "--num-workers 4 --num-servers=2", {}, ("chief", 0, 4, 2, None)),
    ("--num-servers", "--num-servers=2", {}, ("chief", 0, None, 2, None)),
    ("MS_ROLE", "", {**MS, "MS_ROLE": "MS_PSERVER"}, ("server", None, 4, 2, None)),
    ("MS_ROLE", "", {**MS, **SCHED, "MS_ROLE": "MS_SCHED"}, ("scheduler", None, 4, 2)),
    ("MS_WORKER_NUM", "", {**MS, "MS_NODE_ID": "3"}, ("worker", 3, 4, 2, None)),
    ("MS_SERVER_NUM", "", {"MS_SERVER_NUM": "3"}, ("chief", 0, None, 3, None)),
    ("MS_SCHED_HOST", "", {**MS, **SCHED}, ("worker", None, 4, 2, "node0:8118")),
    ("MS_SCHED_PORT", "", {**MS, **SCHED}, ("worker", None, 4, 2, "node0:8118")),
    ("MS_NODE_ID", "", {**MS, "MS_NODE_ID": "0"}, ("chief", 0, 4, 2, None)),
    ("TF_CONFIG", "", tf("chief"), ("chief", 0, 3, 2, "p:1")),
    ("TF_CONFIG", "", tf("worker", 1), ("worker", 2, 3, 2, "p:1")),
    ("TF_CONFIG", "", tf("ps", 1), ("server", 1, 3, 2, "p:1")),
    ("TF_CONFIG", "", tf("evaluator"), ("evaluator", 0, 3, 2, "p:1")),
    ("TF_CONFIG", "", tf("worker", 0, worker=["w:1", "w:2"], ps=["p:1"]), ("chief", 0, 2, 1)),
    ("TF_CONFIG", "", tf("master", 0, master=["m:1"], ps=["p:1"]), ("chief", 0, 1, 1)),
    ("TF_CONFIG", "", tf(None), ("chief", 0, 3, 2, "p:1")),
]


@pytest.mark.parametrize(("name", "words", "variables", "expected"), ROWS)
def test_a_row_of_the_table(
    name: str, words: str, variables: dict[str, str], expected: tuple[Any, ...]
) -> None:
    found = ps_role(words.split(), variables)
    assert found is not None
    told = (found.role, found.rank, found.workers, found.servers, found.address)
    assert told[: len(expected)] == expected
    if name != "-s" or "-s" in words:
        assert name in found.source


def test_every_name_that_means_something_has_a_row() -> None:
    names = {n for s in SYSTEMS for n in (*s.variables, *s.flags, *s.words)}
    assert {name for name, *_ in ROWS} == names


@pytest.mark.parametrize("name", [n for system in SYSTEMS for n in system.unused])
def test_what_has_no_meaning_here_is_told(name: str) -> None:
    system = next(s for s in SYSTEMS if name in s.unused)
    variables = {"PaddlePaddle": INIT, "MXNet": DMLC, "MindSpore": MS}[system.name]
    flags = name.startswith("-")
    found = ps_role([name, "x"] if flags else [], variables if flags else {**variables, name: "x"})
    assert found is not None
    (note,) = found.notes
    assert note.startswith(f"{name}: no meaning here: ")


def test_the_page_lists_what_is_known() -> None:
    text = PAGE.read_text(encoding="utf-8").split("## What becomes of ")[1]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    names = {n for s in SYSTEMS for n in (*s.variables, *s.flags, *s.words, *s.unused)}
    assert listed == names


@pytest.mark.parametrize(
    "words",
    [
        "tools/launch.py -n 4 -s 2 -H hosts python train.py -n 9",
        "tools/launch.py -n4 -s2 -Hhosts python train.py -n9",
        "python tools/launch.py -n=4 -s2 -H 'two hosts'",
        "/usr/bin/python3.11 launch.py -n 4 -s 2 -Hhosts",
    ],
)
def test_a_command_line_in_its_forms(words: str) -> None:
    note = "-H: no meaning here: hosts join by `ray start`"
    expected = PsRole("chief", 0, 4, 2, None, "MXNet (-n, -s)", (note,))
    assert ps_role(words, {}) == ps_role(shlex.split(words), {}) == expected


@pytest.mark.parametrize("words", ["python train.py -n 4 -s 2", "train.py -n4", "python -n 4"])
def test_command_lines_of_other_programs(words: str) -> None:
    assert ps_role(words, {}) is None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "[::1]:9091"),
        ("[::1]", "[::1]:9091"),
        ("[::1]:7", "[::1]:7"),
        ("node0:7", "node0:7"),
        ("fe80::2:1", "[fe80::2:1]:9091"),
    ],
)
def test_addresses_of_the_head(host: str, address: str) -> None:
    found = ps_role((), {**DMLC, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": "9091"})
    assert found is not None and found.address == address and found.port is None


def test_a_port_without_a_host() -> None:
    told = {**DMLC, "DMLC_PS_ROOT_PORT": "9000"}
    scheduler, server = (ps_role((), {**told, "DMLC_ROLE": x}) for x in ("scheduler", "server"))
    assert scheduler is not None and scheduler.address is None
    assert "`ray start --head --port=9000` on this host" in scheduler.instead
    assert server is not None and "`ray start --address=HEAD:9000` on this host" in server.instead


def test_a_flag_that_nobody_knows_is_told() -> None:
    found = ps_role(["-n", "2", "-s", "1", "--colour", "red"], {})
    assert found is not None and found.notes == ("--colour: not known here",)


@pytest.mark.parametrize(
    "variables",
    [{}, {"PADDLE_TRAINERS_NUM": "4"}, {"DMLC_NUM_WORKER": "4"}, tf("worker", 0, worker=["w:1"])],
)
def test_jobs_without_servers_are_none_of_ours(variables: dict[str, str]) -> None:
    assert ps_role((), variables) is None


@pytest.mark.parametrize(
    ("words", "variables", "text"),
    [
        ("", {"DMLC_ROLE": "boss", "DMLC_NUM_SERVER": "1"}, r"DMLC_ROLE='boss': expected one of w"),
        ("-n x -s 1", {}, r"-n='x': expected a whole number"),
        ("", {**MS, "MS_NODE_ID": "7"}, "MindSpore: worker 7 of 4, expected a number from 0 to 3"),
        ("--pservers a,b --server_num 3", {}, "--server_num says 3 servers, --pservers lists 2"),
        ("", {"TF_CONFIG": "{"}, "TF_CONFIG: .*expected"),
        ("", tf("chief", worker="b:1", ps=["p:1"]), "TF_CONFIG: 'worker' is \"b:1\"; expected .*h"),
        ("", tf("chief", worker=["b:1"], ps="d:1"), "TF_CONFIG: 'ps' is \"d:1\"; expected"),
        ("", tf("chief", worker=["b:1"], ps=[1]), r"TF_CONFIG: 'ps' is \[1\]; expected"),
    ],
)
def test_what_contradicts_itself(words: str, variables: dict[str, str], text: str) -> None:
    with pytest.raises(RoleError, match=text):
        ps_role(words.split(), variables)


def test_a_text_that_no_shell_takes() -> None:
    with pytest.raises(RoleError, match=r"-n 4 -H .*: No closing quotation"):
        ps_role("-n 4 -H 'hosts", {})


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (PsRole("scheduler", address="node0:9091"), "`ray start --head --port=9091` on this host"),
        (PsRole("scheduler"), "`ray start --head` on this host"),
        (PsRole("server", 1, address="node0:9091"), "`ray start --address=node0:9091` on this"),
        (PsRole("worker", 2, 4, 2, "h:1"), "--workers 4 --servers 2 --ray-address h:1 train.py"),
        (PsRole("evaluator", 0), "train(..., evaluate=)"),
    ],
)
def test_what_to_do_instead(role: PsRole, text: str) -> None:
    assert text in role.instead


def test_the_chief_has_nothing_to_do_instead() -> None:
    assert PsRole("chief", 0).instead == ""


# ---- what a call to train makes of them ----------------------------------------------------

LAUNCHED = {
    "MESHWRIGHT_PS_WORKERS": "4",
    "MESHWRIGHT_PS_SERVERS": "2",
    "MESHWRIGHT_PS_BACKEND": "local",
}
NOTHING = {"workers": None, "servers": None, "backend": None, "address": None}


def test_what_is_asked_for() -> None:
    assert job_request({}, **NOTHING) == JobRequest(1, 1, "ray", None)
    assert job_request({}, **{**NOTHING, "workers": 3}) == JobRequest(3, 1, "ray", None)
    assert job_request(LAUNCHED, **NOTHING) == JobRequest(4, 2, "local", None)
    assert job_request(LAUNCHED, **{**NOTHING, "workers": 4}) == JobRequest(4, 2, "local", None)
    numbers = {"DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "2"}
    assert job_request(numbers, **{**NOTHING, "backend": "local"}) == JobRequest(
        3, 2, "local", None
    )
    part = {"MESHWRIGHT_PS_BACKEND": "local", "MESHWRIGHT_PS_SERVERS": "1"}
    assert job_request({**numbers, **part}, **NOTHING) == JobRequest(3, 1, "local", None)
    assert job_request({**numbers, **LAUNCHED}, **NOTHING) == JobRequest(4, 2, "local", None)
    found = job_request(
        {}, workers=np.int64(3), servers=np.int32(2), gpus=np.int8(1), backend="ray"
    )
    assert found == JobRequest(3, 2, "ray", None, 1)
    assert {type(x) for x in (found.workers, found.servers, found.gpus)} == {int}


def test_older_words_are_told(caplog: pytest.LogCaptureFixture) -> None:
    variables = {"MS_WORKER_NUM": "3", "MS_SERVER_NUM": "2", "MS_INTERFACE": "eth0"}
    assert job_request(variables, **NOTHING).workers == 3
    assert "workers and servers: as MindSpore (MS_WORKER_NUM, MS_SERVER_NUM) says" in caplog.text
    assert "MS_INTERFACE: no meaning here" in caplog.text


@pytest.mark.parametrize(
    ("variables", "given", "text"),
    [
        (LAUNCHED, {"workers": 3}, r"train\(workers=3\), but planner launch .* says workers=4"),
        (LAUNCHED, {"backend": "ray"}, r"train\(backend='ray'\), but .* says backend='local'"),
        (DMLC, {}, r"MXNet .* makes this process the worker: workers are Ray tasks here"),
        ({**MS, "MS_NODE_ID": "2"}, {}, "makes this process the worker 2: "),
        ({**DMLC, "DMLC_ROLE": "server"}, {"workers": 4}, "the server: servers are Ray actors"),
        (tf("evaluator"), {}, "the evaluator 0: an evaluator is a function here"),
        ({"DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "2"}, {"servers": 1}, "says servers=2"),
        ({"MESHWRIGHT_PS_WORKERS": "x"}, {}, "MESHWRIGHT_PS_WORKERS='x': expected a whole"),
        ({}, {"backend": "local", "gpus": 1}, "gpus=1 with backend 'local': expected"),
        ({"MESHWRIGHT_PS_GPUS": "2"}, {"gpus": 1}, r"train\(gpus=1\), but .* says gpus=2"),
        ({}, {"workers": 0}, "workers=0: expected at least 1"),
        ({}, {"workers": "4"}, "workers='4': got str, expected a whole number"),
        ({}, {"servers": 2.0}, "servers=2.0: got float, expected a whole number"),
        (LAUNCHED, {"workers": True}, "workers=True: got bool, expected a whole number"),
        ({}, {"gpus": "1"}, "gpus='1': got str, expected a whole number"),
        ({}, {"address": 6379}, "address=6379: got int, expected text such as 'head:6379'"),
        ({}, {"address": "127.0.0.1:1"}, "cannot reach Ray at 127.0.0.1:1"),
    ],
)
def test_contradictions(variables: dict[str, str], given: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        job_request(variables, **{**NOTHING, **given})


@pytest.mark.parametrize("name", ["staleness", "aggregate", "discard_lag"])
@pytest.mark.parametrize("value", ["4", 2.5, True])
def test_rules_are_of_whole_numbers(name: str, value: Any) -> None:
    given: dict[str, Any] = {"mode": "sync" if name == "aggregate" else "ssp", name: value}
    kind = type(value).__name__
    with pytest.raises(RequestError, match=f"{name}={value!r}: got {kind}, expected a whole num"):
        Rule(**given)
    assert getattr(Rule(**{**given, name: np.int64(4)}), name) == 4


def test_the_staleness_that_was_set_is_that_of_its_mode() -> None:
    before = set_parallel_mode("DATA_PARALLEL", update="ssp", staleness=4)
    try:
        assert rule_of(None, None) == rule_of("ssp", None) == ("ssp", 4)
        assert rule_of("ssp", 0) == rule_of(None, 0) == ("ssp", 0)
        assert rule_of("async", None) == ("async", 0)
    finally:
        set_parallel_mode(before.mode, search=before.search)


class FakeRay:
    """A cluster with three GPUs."""

    @staticmethod
    def cluster_resources() -> dict[str, float]:
        return {"CPU": 4.0, "GPU": 3.0}


def test_what_ray_is_asked_for() -> None:
    assert gpus_of(FakeRay, JobRequest(4))["runtime_env"]["env_vars"]["JAX_PLATFORMS"] == "cpu"
    assert gpus_of(FakeRay, JobRequest(3, gpus=1)) == {"num_gpus": 1}
    with pytest.raises(RequestError, match="2 workers with gpus=2 each need 4 GPUs, the Ray clust"):
        gpus_of(FakeRay, JobRequest(2, gpus=2))


def test_a_run_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    done = train(lambda server: (server.rank, server.num_workers, server.is_chief))
    assert done.returned == ((0, 4, True), (1, 4, False), (2, 4, False), (3, 4, False))
    assert len(done.counts) == 2
