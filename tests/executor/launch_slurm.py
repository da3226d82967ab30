"""A Slurm of the tests' own: munged, slurmctld and slurmd on this host, one node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor.launch.start import free_port

CONFIG = """\
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=5
PropagateResourceLimits=NONE
NodeName={name} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={name} Default=YES State=UP MaxTime=INFINITE OverSubscribe=FORCE:4
"""
SERVERS = ("munged", "slurmctld", "slurmd")


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the variables with which ``srun`` finds it; skips the test where it can't run."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    paths = {name: shutil.which(name, path=path) for name in (*SERVERS, "srun", "sinfo", "munge")}
    absent = [name for name, place in paths.items() if place is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)} here (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    folder.chmod(0o755)  # munge refuses folders that others may write
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    name = socket.gethostname().partition(".")[0]
    config = CONFIG.format(
        name=name,
        control=free_port(),
        node=free_port(),
        folder=folder,
        cpus=len(os.sched_getaffinity(0)),
    )
    (folder / "slurm.conf").write_text(config)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{k}={folder}/munge.{k}" for k in ("socket", "key-file", "pid-file", "log-file")]
    munge[1] = f"--key-file={folder}/munge.key"
    commands = {
        "munged": ["--foreground", "--force", f"--seed-file={folder}/munge.seed", *munge],
        "slurmctld": ["-D"],
        "slurmd": ["-D", "-N", name],
    }
    running: list[subprocess.Popen[bytes]] = []
    try:
        for server, words in commands.items():
            with open(folder / f"{server}.out", "wb") as out:
                command = [str(paths[server]), *words]
                running.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            if server == "munged":
                _wait(folder, running, lambda: (folder / "munge.socket").exists())
        ask = [str(paths["sinfo"]), "-h", "-o", "%T"]
        _wait(
            folder,
            running,
            lambda: (
                "idle"
                in subprocess.run(ask, env=env, capture_output=True, text=True, timeout=30).stdout
            ),
        )
        yield {"SLURM_CONF": env["SLURM_CONF"]}
    finally:
        for one in reversed(running):
            one.terminate()
        for one in reversed(running):
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        _end_steps(env["SLURM_CONF"])


def _end_steps(config: str) -> None:
    """Kill what slurmd left of steps that it was still cleaning up."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            here = f"SLURM_CONF={config}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if here and (folder / "comm").read_text().strip() == "slurmstepd":
                os.kill(int(folder.name), signal.SIGKILL)


def _wait(folder: Path, running: list[subprocess.Popen[bytes]], ready: object) -> None:
    deadline = time.monotonic() + 60
    while not ready():  # type: ignore[operator]
        ended = [one.args[0] for one in running if one.poll() is not None]  # type: ignore[index]
        if ended or time.monotonic() > deadline:
            said = "".join(
                path.read_text(errors="replace")[-500:]
                for path in [
                    *folder.glob("*.out"),
                    *folder.glob("*.log"),
                    *folder.glob("munge.log*"),
                ]
            )
            pytest.skip(f"Slurm does not start here ({ended or 'not ready in 60 s'}): {said}")
        time.sleep(0.2)
