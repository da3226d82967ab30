"""Run a training loop on workers, with parameters on servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from executor.parameter_server.clock import Rule
from executor.parameter_server.layout import SPLIT_BYTES, layout_of
from executor.parameter_server.links import Links, LocalLinks, RayLinks
from executor.parameter_server.partition import Partitioner
from executor.parameter_server.shard import Counts, Shard
from executor.parameter_server.worker import ParameterServer
from planner.errors import RequestError

Loop = Callable[[ParameterServer], Any]
CPU = {"env_vars": {"JAX_PLATFORMS": "cpu"}}


class LostError(RequestError):
    """All workers, or a server, were lost."""


@dataclass(frozen=True)
class Served:
    """What a run gave.

    Attributes:
        params: the last values; None if no worker called ``init``.
        returned: what the loop returned, by worker; None of those that were lost.
        lost: ranks of the workers whose process ended before their loop did.
        counts: what every server did.
    """

    params: Any
    returned: tuple[Any, ...]
    lost: tuple[int, ...]
    counts: tuple[Counts, ...]


def train(
    loop: Loop,
    *,
    workers: int,
    servers: int = 1,
    optimizer: optax.GradientTransformation | None = None,
    mode: str = "sync",
    staleness: int = 0,
    aggregate: int | None = None,
    discard_lag: int | None = None,
    lag_scaled: bool = False,
    backend: str = "ray",
    address: str | None = None,
    wait_s: float = 300.0,
    split_bytes: int = SPLIT_BYTES,
    partition: Partitioner | None = None,
) -> Served:
    """Run ``loop`` on every worker.

    Args:
        loop: told its ``ParameterServer``; calls ``init(params)``, then pulls and pushes.
        workers, servers: how many.
        optimizer: applied on the servers, to each part of the parameters by itself; None adds what
            is pushed.
        mode, staleness, aggregate, discard_lag, lag_scaled: as for ``Rule``.
        backend: "ray", every worker and server a process; or "local", threads of this process.
        address: of a Ray cluster; None starts one on this host, and ends it.
        wait_s: deadline of every wait, in seconds.
        split_bytes, partition: as for ``layout_of``.

    Raises:
        RequestError: a request that makes no sense, an optimizer that looks at several elements at
            once (``clip_by_global_norm``, say), or no Ray for backend "ray".
        WaitError: a wait took longer than ``wait_s``.
        LostError: all workers were lost.
        Exception: what the loop raised.
    """
    if workers < 1:
        raise RequestError(f"workers={workers}: expected at least 1")
    cut: dict[str, Any] = {"split_bytes": split_bytes, "partition": partition}
    layout_of({}, servers, **cut)
    rule = Rule(mode, staleness, aggregate, discard_lag, lag_scaled)
    if aggregate is not None and aggregate > workers:
        raise RequestError(f"aggregate={aggregate}: there are {workers} workers")
    if optimizer is not None:
        check_elementwise(optimizer)
    if backend not in ("ray", "local"):
        raise RequestError(f"backend {backend!r}: expected 'ray' or 'local'")
    options = {"wait_s": wait_s, **cut}
    shard = (rule, workers, optimizer, wait_s)
    if backend == "local":
        return _local(loop, [Shard(*shard) for _ in range(servers)], workers, options)
    return _on_ray(loop, shard, workers, servers, options, address)


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
    finally:
        with contextlib.suppress(Exception):
            server.leave()
    return returned, server.shapes


def _local(loop: Loop, shards: list[Shard], workers: int, options: dict[str, Any]) -> Served:
    links = LocalLinks(shards, workers)
    returned: list[Any] = [None] * workers
    shapes = None
    with ThreadPoolExecutor(workers, "worker") as pool:
        futures = {
            pool.submit(_one, loop, links, rank, workers, options): rank for rank in range(workers)
        }
        for future in as_completed(futures):
            returned[futures[future]], own = future.result()
            shapes = shapes if own is None else own
    found = [shard.now() for shard in shards]
    return _served(shapes, found, returned, (), options)


def _served(
    shapes: Any, found: Sequence[Any], returned: Sequence[Any], lost: Any, options: dict[str, Any]
) -> Served:
    params = None
    if shapes is not None:
        layout = layout_of(
            shapes,
            len(found),
            split_bytes=options["split_bytes"],
            partition=options["partition"],
        )
        params = layout.gather([values.values for values, _ in found])
    return Served(params, tuple(returned), tuple(lost), tuple(counts for _, counts in found))


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
    workers: int,
    servers: int,
    options: dict[str, Any],
    address: str | None,
) -> Served:
    with _ray(address) as ray:
        serving = ray.remote(Shard).options(
            max_concurrency=2 * workers + 2, num_cpus=0, runtime_env=CPU
        )
        actors = [serving.remote(*shard) for _ in range(servers)]
        links = RayLinks(actors)
        working = ray.remote(_one).options(num_cpus=0, max_retries=0, runtime_env=CPU)
        refs = {working.remote(loop, links, k, workers, options): k for k in range(workers)}
        returned: list[Any] = [None] * workers
        lost: list[int] = []
        shapes = None
        pending = list(refs)
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
            found = links.call("now", [()] * servers, options["wait_s"])
            return _served(shapes, found, returned, sorted(lost), options)
        finally:
            for ref in pending:
                ray.cancel(ref, force=True)
            for actor in actors:
                ray.kill(actor)
