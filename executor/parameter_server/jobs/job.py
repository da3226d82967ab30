"""The parts of a job and its result; the same for threads and for Ray."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from executor.parameter_server.jobs.asked import JobRequest
from executor.parameter_server.placement.elementwise import check_elementwise
from executor.parameter_server.placement.layout import Array, Layout, layout_from, layout_of
from executor.parameter_server.placement.reshard import check_dumps, reshard
from executor.parameter_server.server.answers import Counts
from executor.parameter_server.server.clock import Rule
from executor.parameter_server.server.snapshots import (
    Places,
    busy_of,
    earlier,
    forget,
    read,
    replace_all,
)
from executor.parameter_server.server.store import SECOND, VALUES
from executor.parameter_server.server.tables import joined
from executor.parameter_server.transport.links import Links
from executor.parameter_server.worker.evaluator import Evaluate, Evaluation
from executor.parameter_server.worker.worker import ParameterServer
from planner.errors import RequestError

Loop = Callable[[ParameterServer], Any]
ON_LOST = ("leave", "wait", "fail")
LAZY = {
    inspect.iscoroutinefunction: "is async",
    inspect.isasyncgenfunction: "is async",
    inspect.isgeneratorfunction: "yields",
}
SYNC, STALE = "'sync'", "'ssp' or 'async'"


@dataclass(frozen=True)
class Served:
    """The result of a run.

    Attributes:
        params: the final values; None if no worker called ``init``.
        tables: the final values of the whole tables, by name.
        returned: what the loop returned, by worker; None for lost workers.
        lost: ranks of the workers whose process ended before their loop did, and that were not
            restarted or were lost again.
        counts: the ``Counts`` of every server.
        evaluations: (version, result) of each evaluation, if there was an evaluator; the last is
            of ``params``. A result may be the exception that the evaluation raised.
        restarts: number of restarts of a worker, by rank.
        unsaved: the error of every server that could not write its last snapshot.
    """

    params: Any
    tables: dict[str, Array]
    returned: tuple[Any, ...]
    lost: tuple[int, ...]
    counts: tuple[Counts, ...]
    evaluations: tuple[Evaluation, ...] = ()
    restarts: Mapping[int, int] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingJob:
    """A training request; see ``train`` for the other fields.

    Attributes:
        on: the number of workers and servers, and what they run on.
        cut: arguments of ``layout_of``.
        options: further arguments of every ``ParameterServer``.
        begin: number of updates in the snapshot that each server resumes from; None starts anew.
        number: the push after which every worker begins, if a job resumes with another number of
            workers.
    """

    loop: Loop
    on: JobRequest
    rule: Rule
    optimizer: optax.GradientTransformation | None
    wait_s: float
    cut: Mapping[str, Any]
    options: Mapping[str, Any]
    places: Places | None = None
    replicas: bool = False
    restarts: int = 0
    on_lost: str = "leave"
    evaluate: Evaluate | None = None
    evaluate_every: float = 60.0
    begin: tuple[int, ...] | None = None
    number: int | None = None

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.on.workers

    @property
    def servers(self) -> int:
        """Number of servers."""
        return self.on.servers

    @property
    def shard(self) -> tuple[Any, ...]:
        """Arguments of every ``Shard``."""
        return self.rule, self.workers, self.optimizer, self.wait_s

    def layout(self, tree: Any) -> Layout:
        """The layout that every worker computes for these parameters."""
        return layout_of(tree, self.servers, **self.cut)

    def checked(self) -> TrainingJob:
        """This job; raises RequestError if it is invalid."""
        self.layout({})
        for kind, text in LAZY.items():
            if kind(self.loop):
                raise RequestError(
                    f"the loop {text}: expected a plain function, which runs at once"
                )
        aggregate = self.rule.aggregate
        if aggregate is not None and aggregate > self.workers:
            raise RequestError(f"aggregate={aggregate}: there are {self.workers} workers")
        if self.optimizer is not None:
            if not hasattr(self.optimizer, "update"):
                raise RequestError(
                    f"optimizer={self.optimizer!r}: expected an optax.GradientTransformation, such "
                    "as optax.adam(1e-3)"
                )
            check_elementwise(self.optimizer)
        if self.on_lost not in ON_LOST:
            raise RequestError(f"on_lost={self.on_lost!r}: expected one of {', '.join(ON_LOST)}")
        if self.restarts < 0 or (self.on_lost == "wait" and not self.restarts):
            raise RequestError(
                f"restarts={self.restarts}, on_lost={self.on_lost!r}: expected at least 0, and at "
                "least 1 to wait for a worker"
            )
        if self.places is not None and self.places.every < 1:
            raise RequestError(f"snapshot_every={self.places.every}: expected at least 1")
        if not self.evaluate_every > 0:
            raise RequestError(
                f"evaluate_every={self.evaluate_every}: expected seconds, more than 0"
            )
        return self

    def going_on(self) -> TrainingJob:
        """This job, resumed from the snapshots in its folder, if there are any. Snapshots with
        another layout are resharded first.

        Raises:
            RequestError: a snapshot is damaged.
        """
        if self.places is None:
            return self
        previous = earlier(self.places, self.rule.mode)
        if previous is None:
            forget(self.places, None)
            return self
        there, versions = previous
        dumps = [read(there.of(k), version) for k, version in enumerate(versions)]
        self._check_mode(dumps)
        check_dumps(dumps, self.optimizer)
        old = layout_from(dumps[0][0]["about"])
        shapes = [
            jax.ShapeDtypeStruct(s, np.dtype(d))
            for s, d in zip(old.shapes, old.dtypes, strict=True)
        ]
        new = replace(self.layout(shapes), paths=old.paths)
        if new.about != old.about:
            dumps = reshard(old, new, dumps, self.optimizer)
            replace_all(self.places, dumps)
            versions = tuple(int(facts["version"]) for facts, _ in dumps)
        forget(self.places, versions)
        busy = [dumps[k] for k in busy_of(dumps[0][0])]
        return replace(self, begin=versions, number=self._number(busy))

    def _check_mode(self, dumps: Sequence[Any]) -> None:
        saved_sync, now = (VALUES + SECOND in dumps[0][1]), self.rule.mode == "sync"
        if saved_sync != now and self.places is not None:
            raise RequestError(
                f"the snapshots in {self.places.folder} are of mode "
                f"{SYNC if saved_sync else STALE}, got mode {self.rule.mode!r}: go on in theirs, "
                "or in another folder"
            )

    def _number(self, dumps: Sequence[Any]) -> int | None:
        """The push after which every worker begins if the number of workers changed, else None."""
        if all(facts["workers"] == self.workers for facts, _ in dumps):
            return None
        if self.rule.mode == "sync":
            return min(int(facts["version"]) for facts, _ in dumps)
        done = (sum(n for n, _ in facts["last"].values()) for facts, _ in dumps)
        return min(int(n) for n in done) // self.workers


def places_of(folder: str | Path | None, servers: int, every: int) -> Places | None:
    """Where snapshots are stored; None without snapshots. Raises RequestError for an empty name."""
    if folder == "":
        raise RequestError("snapshots='': expected the name of a folder, or None")
    return None if folder is None else Places(Path(folder).absolute(), servers, every)


def worker_life(job: TrainingJob, links: Links, rank: int) -> tuple[Any, Any, list[Any]]:
    """Run a worker; returns what its loop returned, the shapes of the parameters, and the arguments
    of ``leave`` for each server."""
    server = ParameterServer(links, rank, job.workers, **job.cut, **job.options)
    try:
        returned = _run(job.loop, server)
        server.settle()
    except BaseException as error:
        if job.on_lost != "fail" or job.on.backend == "local":
            # Threads wait for this worker. Otherwise the job fails, and to leave would let servers
            # apply what the others have pushed.
            _leave(server)
        if isinstance(error, Exception) and (words := _in_words(error)) is not None:
            raise words from error
        raise
    _leave(server)
    return returned, server.shapes, server.leaving


def _run(loop: Loop, server: ParameterServer) -> Any:
    try:
        returned = loop(server)
    except SystemExit as error:
        if type(error) is not SystemExit:  # such as PreemptedError
            raise
        raise RequestError(
            f"worker {server.rank}: its loop called sys.exit({error.code!r}); expected it to "
            "return, or to raise what is wrong"
        ) from error
    return returned


def _leave(server: ParameterServer) -> None:
    with contextlib.suppress(Exception):
        server.leave()


def _in_words(error: Exception) -> RequestError | None:
    """The text of an error that can't be sent to another process; None for one that can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RequestError("".join(traceback.format_exception(error)))
    return None


def served(
    job: TrainingJob,
    shapes: Any,
    server_states: Sequence[Any],
    tables: Sequence[Any],
    returned: Sequence[Any],
    lost: Sequence[int] = (),
    restarts: Mapping[int, int] | None = None,
    evaluations: tuple[Evaluation, ...] = (),
    unsaved: Sequence[str] = (),
) -> Served:
    """The result of a job, from the final state of its servers."""
    params = None
    if shapes is not None:
        params = job.layout(shapes).gather(
            [values.values for values, _ in server_states], copy=True
        )
    return Served(
        params,
        joined(tables),
        tuple(returned),
        tuple(sorted(lost)),
        tuple(counts for _, counts in server_states),
        evaluations,
        restarts or {},
        tuple(unsaved),
    )
