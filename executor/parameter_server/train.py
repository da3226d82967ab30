"""Run a training loop on workers, with parameters on servers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from executor.parameter_server.asked import CPU, Asked, asked, gpus_of, rule_of
from executor.parameter_server.clock import Rule
from executor.parameter_server.codec import coded
from executor.parameter_server.evaluator import Evaluate, Evaluation, Evaluator, Reader
from executor.parameter_server.layout import SPLIT_BYTES, Array, layout_of
from executor.parameter_server.links import Links, LocalLinks, RayLinks
from executor.parameter_server.partition import Partitioner
from executor.parameter_server.replica import MEANS, check_update_on
from executor.parameter_server.shard import Counts, Shard
from executor.parameter_server.tables import joined
from executor.parameter_server.worker import ParameterServer
from planner.errors import RequestError

Loop = Callable[[ParameterServer], Any]
PLACE = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


class LostError(RequestError):
    """All workers, or a server, were lost."""


@dataclass(frozen=True)
class Served:
    """What a run gave.

    Attributes:
        params: the last values; None if no worker called ``init``.
        tables: the last values of the tables, whole, by name.
        returned: what the loop returned, by worker; None of those that were lost.
        lost: ranks of the workers whose process ended before their loop did.
        counts: what every server did.
        evaluations: (version, result) of each evaluation, where there was an evaluator; the last
            is of ``params``. A result may be the exception that the evaluation raised.
    """

    params: Any
    tables: dict[str, Array]
    returned: tuple[Any, ...]
    lost: tuple[int, ...]
    counts: tuple[Counts, ...]
    evaluations: tuple[Evaluation, ...] = ()


def train(
    loop: Loop,
    *,
    workers: int | None = None,
    servers: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    update_on: str = "server",
    mode: str | None = None,
    staleness: int | None = None,
    aggregate: int | None = None,
    discard_lag: int | None = None,
    lag_scaled: bool = False,
    backend: str | None = None,
    address: str | None = None,
    gpus: int | None = None,
    wait_s: float = 300.0,
    split_bytes: int = SPLIT_BYTES,
    partition: Partitioner | None = None,
    compress: str | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: float = 60.0,
    row_cache: int = 0,
) -> Served:
    """Run ``loop`` on every worker.

    Args:
        loop: told its ``ParameterServer``; calls ``init(params)``, then pulls and pushes.
        workers, servers: how many; None takes what ``planner launch`` was told, or 1.
        optimizer: applied on the servers, to each part of the parameters by itself; None adds what
            is pushed.
        update_on: "worker" has the servers average only, and the optimizer run in every worker,
            where it may look at several elements at once. For mode "sync".
        mode, staleness, aggregate, discard_lag, lag_scaled: as for ``Rule``; None takes mode and
            staleness from ``planner.set_parallel_mode``.
        backend: "ray", every worker and server a process; or "local", threads of this process. None
            takes what ``planner launch`` was told, or "ray".
        address: of a Ray cluster; None takes what ``planner launch`` was told, or starts one on
            this host and ends it.
        gpus: of each worker, on Ray; None takes what ``planner launch`` was told, or 0: workers
            compute on CPUs.
        wait_s: deadline of every wait, in seconds.
        split_bytes, partition: as for ``layout_of``.
        compress: "bf16", "int8" or "2bit": gradients travel in a half, a quarter or a sixteenth of
            the bytes, and what was rounded away is added to the next push.
        evaluate: told the parameters (and the tables, if there are some), by a process (or thread)
            of its own that nobody waits for.
        evaluate_every: seconds from one evaluation to the next; values that have not changed are
            left out, the last are evaluated too.
        row_cache: as for ``ParameterServer``; not for mode "sync", whose reads are of the last
            update.

    Raises:
        RequestError: a request that makes no sense, or that contradicts what the launcher was told,
            an optimizer that looks at several elements at once (``clip_by_global_norm``, say), or
            no Ray for backend "ray".
        WaitError: a wait took longer than ``wait_s``.
        LostError: all workers were lost.
        Exception: what the loop raised.
    """
    rule = Rule(*rule_of(mode, staleness), aggregate, discard_lag, lag_scaled)
    given = {"workers": workers, "servers": servers, "backend": backend, "address": address}
    job = asked(os.environ, gpus=gpus, **given)
    cut: dict[str, Any] = {"split_bytes": split_bytes, "partition": partition}
    layout_of({}, job.servers, **cut)
    if aggregate is not None and aggregate > job.workers:
        raise RequestError(f"aggregate={aggregate}: there are {job.workers} workers")
    check_update_on(update_on, rule, optimizer, evaluate=evaluate)
    there = optimizer if update_on == "server" else MEANS
    if there is not None:
        check_elementwise(there)
    if row_cache < 0 or (row_cache and rule.mode == "sync"):
        raise RequestError(
            f"row_cache={row_cache} in mode {rule.mode!r}: expected a number from 0 on, in mode "
            "'ssp' or 'async'"
        )
    if not evaluate_every > 0:
        raise RequestError(f"evaluate_every={evaluate_every}: expected seconds, more than 0")
    if compress is not None:
        coded("float32", compress)
    done = {"rule": rule, "optimizer": optimizer, "update_on": update_on}
    options = {"wait_s": wait_s, "compress": compress, "row_cache": row_cache, **done, **cut}
    shard = (rule, job.workers, there, wait_s)
    watch = (evaluate, evaluate_every)
    if job.backend == "local":
        shards = [Shard(*shard) for _ in range(job.servers)]
        return _local(loop, shards, job.workers, options, *watch)
    return _on_ray(loop, shard, job, options, *watch)


def check_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Servers hold parts of arrays: refuse an optimizer whose updates depend on how they are cut.

    Raises:
        RequestError: it does.
    """
    draw = np.random.default_rng(0)
    values, gradients = (draw.normal(size=12).astype(np.float32) for _ in range(2))

    def updated(cuts: Sequence[slice]) -> Any:
        out = []
        for cut in cuts:
            v, g = {"x": values[cut]}, {"x": 100 * gradients[cut]}
            updates, _ = optimizer.update(g, optimizer.init(v), v)
            out.append(np.asarray(updates["x"]))
        return np.concatenate(out)

    whole, parts = updated([slice(0, 12)]), updated([slice(0, 5), slice(5, 12)])
    if not np.allclose(whole, parts, rtol=1e-5, atol=1e-7):
        raise RequestError(
            "the optimizer looks at several elements at once (as clip_by_global_norm does): on "
            "servers that hold parts of arrays its updates would differ; apply that part to the "
            "gradients in the loop, before they are pushed"
        )


def _one(loop: Loop, links: Links, rank: int, workers: int, options: dict[str, Any]) -> Any:
    """A worker's life. Its layout comes back for the last values."""
    server = ParameterServer(links, rank, workers, **options)
    try:
        returned = loop(server)
        server.settle()
    finally:
        with contextlib.suppress(Exception):
            server.leave()
    return returned, server.shapes


def _local(
    loop: Loop,
    shards: list[Shard],
    workers: int,
    options: dict[str, Any],
    evaluate: Evaluate | None,
    every_s: float,
) -> Served:
    links = LocalLinks(shards, workers + 1)
    returned: list[Any] = [None] * workers
    shapes = None
    evaluator = Evaluator(every_s)
    if evaluate is not None:
        evaluator.start(Reader(links, evaluate, options["wait_s"], **_cut(options)).once)
    with evaluator, ThreadPoolExecutor(workers, "worker") as pool:
        futures = {
            pool.submit(_one, loop, links, rank, workers, options): rank for rank in range(workers)
        }
        for future in as_completed(futures):
            returned[futures[future]], own = future.result()
            shapes = shapes if own is None else own
        evaluations = evaluator.finish()
    found = [shard.now() for shard in shards]
    tables = joined([shard.tables() for shard in shards])
    return _served(shapes, found, tables, returned, (), options, evaluations)


def _cut(options: dict[str, Any]) -> dict[str, Any]:
    """Of a worker's options those of ``layout_of``."""
    return {name: options[name] for name in ("split_bytes", "partition")}


def _served(
    shapes: Any,
    found: Sequence[Any],
    tables: dict[str, Array],
    returned: Sequence[Any],
    lost: Any,
    options: dict[str, Any],
    evaluations: tuple[Evaluation, ...],
) -> Served:
    params = None
    if shapes is not None:
        layout = layout_of(shapes, len(found), **_cut(options))
        params = layout.gather([values.values for values, _ in found])
    counts = tuple(counts for _, counts in found)
    return Served(params, tables, tuple(returned), tuple(lost), counts, evaluations)


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[Any]:
    """Ray, joined or started; what was started is ended."""
    try:
        import ray
    except ImportError as error:
        raise RequestError(
            "backend 'ray' needs Ray: pip install 'meshwright[ray]'; or pass backend='local'"
        ) from error
    mine = not ray.is_initialized()
    if mine:
        ray.init(address=address or "local", log_to_driver=True, include_dashboard=False)
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


def _on_ray(
    loop: Loop,
    shard: tuple[Any, ...],
    job: Asked,
    options: dict[str, Any],
    evaluate: Evaluate | None,
    every_s: float,
) -> Served:
    workers, servers = job.workers, job.servers
    with _ray(job.address) as ray:
        serving = ray.remote(Shard).options(
            max_concurrency=2 * workers + 4, runtime_env=CPU, **PLACE
        )
        actors = [serving.remote(*shard) for _ in range(servers)]
        links = RayLinks(actors)
        working = ray.remote(_one).options(max_retries=0, **PLACE, **gpus_of(ray, job))
        refs = {working.remote(loop, links, k, workers, options): k for k in range(workers)}
        returned: list[Any] = [None] * workers
        lost: list[int] = []
        shapes = None
        pending = list(refs)
        evaluator = Evaluator(every_s)
        if evaluate is not None:
            reading = ray.remote(Reader).options(max_restarts=-1, runtime_env=CPU, **PLACE)
            actors.append(reading.remote(links, evaluate, options["wait_s"], **_cut(options)))
            evaluator.start(lambda seen: ray.get(actors[-1].once.remote(seen)))
        try:
            while pending:
                (done, *_), pending = ray.wait(pending, num_returns=1)
                rank = refs[done]
                try:
                    returned[rank], own = ray.get(done)
                    shapes = shapes if own is None else own
                except ray.exceptions.WorkerCrashedError:
                    lost.append(rank)
                    links.call("leave", [(rank,)] * servers, options["wait_s"])
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
            if len(lost) == workers:
                raise LostError("all workers were lost")
            evaluations = evaluator.finish()
            found = links.call("now", [()] * servers, options["wait_s"])
            tables = joined(links.call("tables", [()] * servers, options["wait_s"]))
            return _served(shapes, found, tables, returned, sorted(lost), options, evaluations)
        finally:
            evaluator.stop()
            for ref in pending:
                ray.cancel(ref, force=True)
            for actor in actors:
                ray.kill(actor)
