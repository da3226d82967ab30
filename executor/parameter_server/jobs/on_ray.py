"""Run a job on Ray: one actor per server, one task per worker."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from executor.parameter_server.jobs.asked import CPU, gpus_of
from executor.parameter_server.jobs.job import Served, TrainingJob, served, worker_life
from executor.parameter_server.server.answers import LostError, WaitError
from executor.parameter_server.transport.ray_links import AGAIN_S, RayLinks, gone
from executor.parameter_server.transport.serving import Copy, Serving
from executor.parameter_server.transport.wire import MEMORY_ENV, SYSTEM
from executor.parameter_server.worker.evaluator import Evaluator, ValueReader
from executor.processes.bootstrap import finalize, is_joined
from planner.errors import RequestError

LOG = logging.getLogger(__name__)
SPREAD = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
TELL_S = 2.0
"""Seconds without a worker that ends, after which servers are checked and ``leave`` is repeated."""
WHERE = {"runtime_env": CPU, **SPREAD}


def imported() -> Any:
    """The ``ray`` module.

    Raises:
        RequestError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RequestError(
            "backend 'ray' needs Ray: pip install 'meshwright[ray]'; or pass backend='local'"
        ) from error
    return ray


@dataclass
class _Own:
    """Whether a job in this process has started Ray, and will shut it down."""

    running: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_OWN = _Own()


@contextlib.contextmanager
def ray_at(address: str | None) -> Iterator[Any]:
    """Connect to Ray or start it, unless it is initialized; shut down only what was started here.

    Raises:
        RequestError: another job in this process has started Ray.
    """
    ray = imported()
    with _OWN.lock:
        if _OWN.running:
            raise RequestError(
                "another training in this process has started Ray, and ends it when it ends itself:"
                " call ray.init(address='local', include_dashboard=False) before both"
            )
        is_owner = not ray.is_initialized()
        if is_owner:
            _start(ray, address)
        _OWN.running = is_owner
    try:
        yield ray
    finally:
        if is_owner:
            with _OWN.lock:
                _OWN.running = False
                ray.shutdown()


def _start(ray: Any, address: str | None) -> None:
    system = {"_system_config": dict(SYSTEM)} if address in (None, "local") else {}
    with warnings.catch_warnings():  # Ray's processes are new programs, without JAX's state
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(address=address or "local", log_to_driver=True, include_dashboard=False, **system)


@contextlib.contextmanager
def _sending(job: TrainingJob) -> Iterator[None]:
    """Context in which a job is sent to other processes.

    Raises:
        RequestError: its loop or its ``evaluate`` can't be sent.
    """
    try:
        yield
    except Exception as error:  # Ray's own message is about the whole job
        from ray import cloudpickle

        for what, value in (("the loop", job.loop), ("evaluate", job.evaluate)):
            try:
                cloudpickle.dumps(value)
            except Exception as why:
                raise RequestError(
                    f"{what} can't be sent to another process: {why}; let it make its locks, files "
                    "and connections itself"
                ) from error
        raise


@dataclass
class Team:
    """The workers of a job: those that run, have returned, or were lost."""

    job: TrainingJob
    links: RayLinks
    ray: Any
    running: dict[Any, int] = field(default_factory=dict)
    returned: dict[int, Any] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    left: dict[int, Any] = field(default_factory=dict)
    asked: dict[int, Any] = field(default_factory=dict)
    shapes: Any = None

    def start(self, rank: int) -> None:
        """Start a worker."""
        job = self.job
        once = self.ray.remote(max_calls=1)  # JAX can be set up only once per process
        task = once(worker_process).options(max_retries=0, **SPREAD, **gpus_of(self.ray, job.on))
        with _sending(job):
            ref = task.remote(job, RayLinks(self.links.actors, rank), rank)
        self.running[ref] = rank

    def follow(self) -> None:
        """Wait until every worker has returned or is lost for good.

        Raises:
            LostError: all workers were lost, or one was lost and ``on_lost`` is "fail".
            Exception: what a loop raised.
        """
        for rank in range(self.job.workers):
            self.start(rank)
        errors = self.ray.exceptions
        missing = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
            errors.LocalRayletDiedError,
        )
        while self.running:
            done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=TELL_S)
            if not done:
                self.see()
                self.tell()
                continue
            rank = self.running.pop(done[0])
            try:
                self.returned[rank], shapes, self.left[rank] = self.ray.get(done[0])
                self.shapes = self.shapes if shapes is None else shapes
            except self.ray.exceptions.RayTaskError as error:
                cause = error.cause or error
                if isinstance(cause, TypeError) and "pickle" in str(cause):
                    raise RequestError(
                        f"worker {rank}: {cause}; what a loop returns is sent to this process: "
                        "expected numbers, text, arrays, and what holds them"
                    ) from error
                raise cause from error
            except missing as error:
                self.missing(rank, error)
        self.tell()
        if len(self.lost) == self.job.workers:
            raise LostError("all workers were lost")

    def see(self) -> None:
        """Check that servers are alive, without waiting: call each one that has answered before.

        Raises:
            LostError: a server is gone for good; it may be one that no worker ever calls.
        """
        errors = self.ray.exceptions
        for server, actor in enumerate(self.links.actors):
            ref = self.asked.get(server)
            if ref is not None and not self.ray.wait([ref], timeout=0)[0]:
                continue  # it is busy or restarting
            try:
                if ref is not None:
                    self.ray.get(ref)
            except errors.ActorDiedError as error:
                raise gone(server, "answer", error) from error
            except errors.RayActorError:
                pass
            self.asked[server] = actor.members.remote()

    def tell(self) -> None:
        """Repeat ``leave`` for workers that have left: a server restored from a snapshot may wait
        for them."""
        for rank in {*self.returned, *self.lost}:
            messages = self.left.get(rank, [(rank,)] * self.links.count)
            self.links.call("leave", messages, self.job.wait_s)

    def missing(self, rank: int, error: Exception) -> None:
        """Handle the loss of a worker's process: restart it, go on without it, or raise LostError,
        as ``on_lost`` and ``restarts`` say."""
        if self.job.on_lost == "fail":
            raise LostError(f"worker {rank} was lost: {error}") from error
        LOG.warning("worker %d was lost: %s", rank, error)
        again = self.restarts.get(rank, 0) < self.job.restarts
        if self.job.on_lost == "leave" or not again:
            self.links.call("leave", [(rank,)] * self.links.count, self.job.wait_s)
        if again:
            self.restarts[rank] = self.restarts.get(rank, 0) + 1
            self.start(rank)
        else:
            self.lost.append(rank)


def worker_process(job: TrainingJob, links: RayLinks, rank: int) -> tuple[Any, Any, list[Any]]:
    """Run a worker in a separate process; at the end, disconnect from the processes it joined."""
    outcome = worker_life(job, links, rank)
    if is_joined():
        nobody = [None] * (links.count - 1)
        while links.call("members", [(), *nobody], job.wait_s)[0]:  # a failed worker ends the job
            time.sleep(AGAIN_S)
            links.call("leave", outcome[2], job.wait_s)  # a server may have restarted meanwhile
        try:
            finalize()
        except Exception as error:  # the work is done
            LOG.warning("worker %d has returned; parting from the others: %s", rank, error)
    return outcome


def on_ray(job: TrainingJob) -> Served:
    """Run a job; see ``train``."""
    with ray_at(job.on.address) as ray:
        actors: list[Any] = []
        copies: list[Any] = []
        team = None
        evaluator = Evaluator(job.evaluate_every)
        try:
            if job.replicas:
                copy = ray.remote(Copy).options(max_restarts=-1, **WHERE)
                copies = [copy.remote(job.shard) for _ in range(job.servers)]
            lives = -1 if job.replicas or job.places is not None else 0
            serving = ray.remote(Serving).options(
                max_concurrency=4 * job.workers + 4,
                max_restarts=lives,
                runtime_env={"env_vars": {**CPU["env_vars"], **MEMORY_ENV}},
                **SPREAD,
            )
            for k in range(job.servers):
                twin = copies[k] if copies else None
                begin = None if job.begin is None else job.begin[k]
                again = (job.workers, job.number)
                actors.append(serving.remote(job.shard, k, job.places, twin, begin, again))
            links = RayLinks(actors)
            if job.evaluate is not None:
                reading = ray.remote(ValueReader).options(max_restarts=-1, **WHERE)
                with _sending(job):
                    reader = reading.remote(links, job.evaluate, job.wait_s, **job.cut)
                copies.append(reader)
                evaluator.start(lambda seen: ray.get(reader.once.remote(seen)))
            team = Team(job, links, ray)
            team.follow()
            evaluations = evaluator.finish()
            none: list[tuple[Any, ...]] = [()] * job.servers
            server_states = links.call("now", none, job.wait_s)
            tables = links.call("tables", none, job.wait_s)
            try:
                unsaved = [x for x in links.call("finish", none, job.wait_s) if x]
            except (LostError, WaitError) as error:  # the trained values are here
                unsaved = [str(error)]
            returned = [team.returned.get(k) for k in range(job.workers)]
            ended = (team.lost, team.restarts, evaluations, unsaved)
            return served(job, team.shapes, server_states, tables, returned, *ended)
        finally:
            evaluator.stop()
            for ref in team.running if team is not None else ():
                ray.cancel(ref, force=True)
            for actor in (*actors, *copies):
                ray.kill(actor)
