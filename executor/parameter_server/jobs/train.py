"""Run a training loop on workers, with parameters on servers."""

from __future__ import annotations

import math
import numbers
import os
from functools import partial
from pathlib import Path

import optax

from executor.parameter_server.jobs.asked import job_request, rule_of
from executor.parameter_server.jobs.job import (
    Loop,
    Served,
    TrainingJob,
    places_of,
    served,
    worker_life,
)
from executor.parameter_server.jobs.on_ray import imported, on_ray
from executor.parameter_server.jobs.threads import together
from executor.parameter_server.placement.layout import SPLIT_BYTES
from executor.parameter_server.placement.partition import Partitioner
from executor.parameter_server.server.clock import Rule
from executor.parameter_server.server.shard import Shard
from executor.parameter_server.server.snapshots import Writer, read
from executor.parameter_server.transport.codec import coded
from executor.parameter_server.transport.links import LocalLinks
from executor.parameter_server.transport.wire import check_pull_dtype
from executor.parameter_server.worker.evaluator import Evaluate, Evaluator, ValueReader
from executor.parameter_server.worker.replica import MEANS, check_update_on
from planner.errors import RequestError


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
    pull_dtype: str | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: float = 60.0,
    row_cache: int = 0,
    snapshots: str | Path | None = None,
    snapshot_every: int = 100,
    replicas: bool = False,
    restarts: int = 0,
    on_lost: str = "leave",
) -> Served:
    """Run ``loop`` on every worker.

    Args:
        loop: called with its ``ParameterServer``; calls ``init(params)``, then pulls and pushes.
        workers, servers: number of each; None uses the value from ``planner launch``, or 1.
        optimizer: applied on the servers, to each part of the parameters separately; None adds the
            pushed values.
        update_on: "server", or "worker": the servers only average, and every worker runs the
            optimizer, which may then depend on several elements at once. For mode "sync".
        mode, staleness, aggregate, discard_lag, lag_scaled: as for ``Rule``; None uses the mode and
            staleness of ``planner.set_parallel_mode``.
        backend: "ray": every worker and server is a process; or "local": all are threads of this
            process. None uses the value from ``planner launch``, or "ray".
        address: address of a Ray cluster; None uses the value from ``planner launch``, or starts a
            cluster on this host and shuts it down at the end.
        gpus: GPUs per worker, on Ray; None uses the value from ``planner launch``, or 0: workers
            compute on CPUs.
        wait_s: deadline of every wait, in seconds.
        split_bytes, partition: as for ``layout_of``.
        compress: "bf16", "int8" or "2bit": gradients are sent in a half, a quarter or a sixteenth
            of the bytes, and the rounding error is added to the next push.
        pull_dtype: "bfloat16": values are sent to the workers in half the bytes; the servers'
            values are not rounded.
        evaluate: called with the parameters (and the tables, if there are any) in a separate
            process (or thread); training does not wait for it.
        evaluate_every: seconds between evaluations; unchanged values are skipped, and the final
            values are evaluated, too.
        row_cache: as for ``ParameterServer``; not for mode "sync", whose reads are of the last
            update.
        snapshots: a folder that all hosts share; every server writes its state there, and a job
            resumes from the snapshots in it, also with another number of servers or workers.
        snapshot_every: updates between snapshots.
        replicas: every server has a copy in another process, which has every push before the push
            is acknowledged. For backend "ray".
        restarts: maximum number of restarts of a worker whose process is lost; its loop begins at
            ``ParameterServer.clock``. For backend "ray".
        on_lost: what happens when a worker is lost: "leave": the others go on without it, until it
            is back; "wait": they wait for it; "fail": the job ends.

    Raises:
        RequestError: an invalid request, one that contradicts the settings of ``planner launch``,
            an optimizer that depends on several elements at once (such as
            ``clip_by_global_norm``), no Ray for backend "ray", or a damaged snapshot.
        WaitError: a wait took longer than ``wait_s``.
        LostError: all workers were lost, or a server with its state.
        Exception: what the loop raised.
    """
    rule = Rule(*rule_of(mode, staleness), aggregate, discard_lag, lag_scaled)
    given = {"workers": workers, "servers": servers, "backend": backend, "address": address}
    on = job_request(os.environ, gpus=gpus, **given)
    if on.backend == "local" and (replicas or restarts):
        raise RequestError("replicas and restarts need processes: backend='ray'")
    recovery = {"snapshots": snapshots is not None, "replicas": replicas, "restarts": restarts}
    check_update_on(update_on, rule, optimizer, evaluate=evaluate, **recovery)
    if row_cache < 0 or (row_cache and rule.mode == "sync"):
        raise RequestError(
            f"row_cache={row_cache} in mode {rule.mode!r}: expected a number from 0 on, in mode "
            "'ssp' or 'async'"
        )
    if compress is not None:
        coded("float32", compress)
    check_pull_dtype(pull_dtype)
    timed = isinstance(wait_s, numbers.Real) and 0 < wait_s < math.inf
    if not timed or not callable(evaluate or train):
        raise RequestError(
            f"wait_s={wait_s!r}, evaluate={evaluate!r}: expected seconds, more than 0, and a "
            "function"
        )
    done = {"rule": rule, "optimizer": optimizer, "update_on": update_on, "wait_s": wait_s}
    done["on_lost"] = on_lost
    job = TrainingJob(
        loop,
        on,
        rule,
        optimizer if update_on == "server" else MEANS,
        wait_s,
        cut={"split_bytes": split_bytes, "partition": partition},
        options={"compress": compress, "row_cache": row_cache, "pull_dtype": pull_dtype, **done},
        places=places_of(snapshots, on.servers, snapshot_every),
        replicas=replicas,
        restarts=restarts,
        on_lost=on_lost,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
    )
    if on.backend == "ray":
        imported()  # before snapshots are resharded
    job = job.checked().going_on()
    return _local(job) if on.backend == "local" else on_ray(job)


def _local(job: TrainingJob) -> Served:
    """Run workers and servers as threads."""
    shards = [Shard(*job.shard) for _ in range(job.servers)]
    writers = []
    for k, shard in enumerate(shards):
        if job.places is not None:
            if job.begin is not None:
                shard.load(*read(job.places.of(k), job.begin[k]))
                shard.again(job.workers, job.number)
            writers.append(Writer(shard, job.places, k))
    links = LocalLinks(shards, 4 * job.workers + 1)  # a loop may have a few threads
    evaluator = Evaluator(job.evaluate_every)
    if job.evaluate is not None:
        evaluator.start(ValueReader(links, job.evaluate, job.wait_s, **job.cut).once)
    with evaluator:
        ended = together(partial(worker_life, job, links), job.workers, links.fail)
        evaluations = evaluator.finish()
    returned = [outcome for outcome, _, _ in ended]
    shapes = next((tree for _, tree, _ in ended if tree is not None), None)
    states = [shard.now() for shard in shards]
    tables = [shard.tables() for shard in shards]
    unsaved = [why for writer in writers if (why := writer.finish())]
    return served(job, shapes, states, tables, returned, evaluations=evaluations, unsaved=unsaved)
