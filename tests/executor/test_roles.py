"""Who a process is: every launcher's variables, and what is said when they are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from executor.processes.roles import Role, RoleError, first_host, read_role

TF = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}


def tf(kind: str, index: int) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": TF, "task": {"type": kind, "index": index}})}


OURS = {
    "MESHWRIGHT_PROCESSES": "4",
    "MESHWRIGHT_PROCESS": "3",
    "MESHWRIGHT_COORDINATOR": "head:7000",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "64",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Role()),
        (OURS, Role(4, 3, "head:7000", source="planner launch")),
        ({**OURS, "MESHWRIGHT_LOCAL": "1"}, Role(4, 3, "head:7000", 1, source="planner launch")),
        (
            {
                "MESHWRIGHT_PROCESSES": "4",
                "JOB_COMPLETION_INDEX": "2",
                "MESHWRIGHT_COORDINATOR": "job-workers-0-0.job",
            },
            Role(4, 2, "job-workers-0-0.job:8476", source="planner launch"),
        ),
        (MPI, Role(2, 1, f"10.96.0.1:{61440 + 17 * (23370 % 240)}", 0, source="OpenMPI")),
        (
            {**SLURM, "SLURM_STEP_ID": "3"},
            Role(8, 5, f"gpu07:{61440 + 17 * (4100 % 240)}", 1, source="Slurm"),
        ),
        (SLURM, Role(8, 5, f"gpu07:{61440 + 17 * (4097 % 240)}", 1, source="Slurm")),
        (
            {"TPU_WORKER_HOSTNAMES": "t0, t1", "TPU_WORKER_ID": "1"},
            Role(2, 1, "t0:8476", source="TPU slice"),
        ),
        ({"TPU_WORKER_HOSTNAMES": "t0", "TPU_WORKER_ID": "0"}, Role(source="TPU slice")),
        (
            {
                "PADDLE_INIT_TRAINER_ID": "1",
                "PADDLE_INIT_NUM_GRADIENT_SERVERS": "2",
                "PADDLE_INIT_PSERVERS": "192.168.0.1,192.168.0.2",
                "PADDLE_INIT_PORT": "7164",
            },
            Role(2, 1, "192.168.0.1:7164", source="PaddlePaddle"),
        ),
        (
            {
                "PADDLE_TRAINER_ID": "0",
                "PADDLE_TRAINERS_NUM": "2",
                "PADDLE_TRAINER_ENDPOINTS": "x:6170,y:6170",
            },
            Role(2, 0, "x:6170", source="PaddlePaddle"),
        ),
        (
            {
                "DMLC_ROLE": "worker",
                "DMLC_NUM_WORKER": "3",
                "DMLC_NUM_SERVER": "1",
                "DMLC_PS_ROOT_URI": "root",
                "DMLC_PS_ROOT_PORT": "9091",
                "DMLC_WORKER_ID": "2",
            },
            Role(3, 2, "root:9091", source="MXNet"),
        ),
        (
            {"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "3", "DMLC_PS_ROOT_URI": "root"},
            Role(3, 0, "root:8476", job="server", source="MXNet"),
        ),
        (
            {
                "MS_ROLE": "MS_WORKER",
                "MS_WORKER_NUM": "2",
                "MS_SCHED_HOST": "s",
                "MS_SCHED_PORT": "6667",
                "MS_NODE_ID": "1",
            },
            Role(2, 1, "s:6667", source="MindSpore"),
        ),
        (tf("chief", 0), Role(3, 0, "a:1", job="chief", source="TF_CONFIG")),
        (tf("worker", 1), Role(3, 2, "a:1", source="TF_CONFIG")),
        (tf("ps", 0), Role(3, 0, "a:1", job="server", source="TF_CONFIG")),
        ({**SLURM, **MPI}, Role(2, 1, "10.96.0.1:62970", 0, source="OpenMPI")),
    ],
)
def test_the_environment_says_who(environment: dict[str, str], expected: Role) -> None:
    assert read_role(environment) == expected


def test_a_shell_inside_an_allocation_is_alone() -> None:
    assert read_role({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}) == Role()


def test_arguments_win() -> None:
    given: dict[str, Any] = {"coordinator": "here:1", "processes": 2, "process": 1}
    assert read_role(MPI, **given) == Role(2, 1, "here:1", source="arguments")
    assert read_role(OURS, coordinator="here:1").coordinator == "here:1"
    assert read_role(OURS, coordinator="here:1").source == "arguments, planner launch"


@pytest.mark.parametrize(
    ("environment", "arguments", "text"),
    [
        ({"MESHWRIGHT_PROCESSES": "2"}, {}, "MESHWRIGHT_PROCESS is not set"),
        ({**OURS, "MESHWRIGHT_PROCESS": "four"}, {}, "MESHWRIGHT_PROCESS='four': expected a whole"),
        ({**OURS, "MESHWRIGHT_PROCESS": "4"}, {}, "got process 4 of 4.*from 0 to 3"),
        ({**OURS, "MESHWRIGHT_COORDINATOR": "a:b:c"}, {}, "IPv6"),
        ({**OURS, "MESHWRIGHT_COORDINATOR": "a:99999"}, {}, "expected host:port"),
        ({}, {"processes": 2, "process": 0}, "nothing says where process 0 is"),
        ({}, {"processes": 0}, "got 0 processes"),
        ({"TF_CONFIG": "{"}, {}, "TF_CONFIG: .*expected"),
        ({"TF_CONFIG": "[1]"}, {}, "TF_CONFIG: .*expected"),
        (tf("cook", 0), {}, "task type 'cook'"),
        ({"DMLC_NUM_WORKER": "2", "DMLC_ROLE": "x"}, {}, "DMLC_ROLE='x': expected worker"),
        ({"MS_WORKER_NUM": "2", "MS_ROLE": "x"}, {}, "MS_ROLE='x'"),
        ({"TPU_WORKER_HOSTNAMES": ",", "TPU_WORKER_ID": "0"}, {}, "TPU_WORKER_HOSTNAMES is empty"),
    ],
)
def test_what_is_wrong_is_said(
    environment: dict[str, str], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(RoleError, match=text):
        read_role(environment, **arguments)


def test_first_host_of_a_list() -> None:
    assert [first_host(x) for x in ("n1", "n[5,7]", "n[01-3],m", "a-b-2,c")] == [
        "n1",
        "n5",
        "n01",
        "a-b-2",
    ]
