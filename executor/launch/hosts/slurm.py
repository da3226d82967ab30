"""Processes that Slurm's srun starts, inside an allocation or with a new one. They read their roles
from Slurm's variables (``executor.processes.roles``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from executor.launch.hosts.ssh import SILENCE_S
from executor.launch.job import Job, OutputLine, Start, Task, need, outer, reported, sent, shared
from executor.processes.hello import new_secret

LABEL = re.compile(r" *(\d+): (.*)", re.S)


@dataclass(frozen=True)
class Slurm:
    """Starts processes with srun.

    Attributes:
        python: the interpreter, on every node.
        options: more options for srun: nodes, partition, time.
        gpus: GPUs of each process; None leaves it to Slurm.
    """

    python: str
    options: tuple[str, ...] = ()
    gpus: int | None = None

    def start(self, job: Job, restart: int, failed: Sequence[str] = (), /) -> Start:
        """One task: srun. Every step has a different port."""
        need("srun", "slurm-client")
        variables = {**outer(), **new_secret(), **shared(job, restart)}
        return Start(
            job.processes, (Task(command(self, job), variables, read=read, flags=("--relay",)),)
        )


def command(slurm: Slurm, job: Job) -> tuple[str, ...]:
    """The command line of srun; its input goes to the guards of all processes."""
    return (
        *("srun", f"--ntasks={job.processes}", "--label", "--input=all", "--kill-on-bad-exit=0"),
        *([] if slurm.gpus is None else [f"--gpus-per-task={slurm.gpus}"]),
        *slurm.options,
        *sent(job, slurm.python, "--report", "--silence", str(SILENCE_S)),
    )


def read(text: str) -> OutputLine:
    """Parse a line of srun: the process that wrote it, and whether it reports a failure.

    >>> read("12: a: b")
    OutputLine(process=12, text='a: b', failed=None)
    """
    match = LABEL.match(text)
    return reported(int(match[1]), match[2]) if match else OutputLine(None, text)
