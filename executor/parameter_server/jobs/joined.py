"""Workers whose devices form one mesh. What runs under SPMD is sharded over all of them. Rows of
tables move between the servers and the processes in parts, one part for each process.

Kim et al.'s hybrid (Parallax, EuroSys 2019, section 3: sparse variables on servers, dense ones by
all-reduce) with the planner's shardings in place of all-reduce.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from executor.launch.job import free_port
from executor.parameter_server.worker.worker import ParameterServer
from executor.processes import bootstrap
from planner.errors import RequestError
from planner.graph.jaxpr.depends import NONE, depends

Array = NDArray[Any]


def join_devices(
    server: ParameterServer, *, timeout_s: float = 300.0, deadline_s: float = 60.0
) -> None:
    """Make the devices of all workers one mesh (``executor.initialize``), for ``hybrid``.

    Every worker's loop must call it first, before JAX computes anything in it. When all loops have
    returned, the processes disconnect. If a worker is lost, the other workers and the job end, as
    in any program over several processes.

    Args:
        server: the ``ParameterServer`` of this worker. With one worker, nothing is done.
        timeout_s: how long to wait for the other workers, in seconds.
        deadline_s: seconds without an answer after which a host counts as lost.

    Raises:
        RequestError: the workers are threads of one process, JAX has computed already, the mode is
            not "sync" with all workers' pushes in every update (the devices compute together, so
            none can be ahead), or ``on_lost`` is not "fail" (an update of fewer would be wrong).
        HostError: the other workers did not join in time.
        WaitError: worker 0 did not send its address within ``wait_s``.
    """
    if server.num_workers == 1:
        return
    check_rule(server)
    address = f"[{server.host}]" if ":" in server.host else server.host
    first = server.meet(f"{address}:{free_port()}" if server.is_chief else None)
    try:
        bootstrap.initialize(
            first, server.num_workers, server.rank, timeout_s=timeout_s, deadline_s=deadline_s
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RequestError(
            f"join_devices: {error} Call it first in the loop, and let the loop close over NumPy "
            "arrays, not over those of JAX"
        ) from error


def check_rule(server: Any) -> None:
    """Raises RequestError unless every update has the pushes of all workers."""
    rule = server.rule
    if server.on_lost != "fail":
        raise RequestError(
            f"joined devices with on_lost={server.on_lost!r}: expected train(on_lost='fail'); one "
            "that is lost ends the others, and the job goes on from snapshots when it is started "
            "again"
        )
    if rule.mode != "sync" or rule.aggregate not in (None, server.num_workers):
        raise RequestError(
            f"joined devices with mode={rule.mode!r}, aggregate={rule.aggregate}: expected "
            "mode='sync' and aggregate=None; they compute each step together"
        )


def check_joined(server: Any) -> int:
    """The number of processes that share the mesh.

    Raises:
        RequestError: the processes are not the workers, ``check_rule`` fails, or the processes have
            different numbers of devices.
    """
    processes: int = jax.process_count()
    if processes == 1:
        return 1
    if (server.num_workers, server.rank) != (processes, jax.process_index()):
        raise RequestError(
            f"this is process {jax.process_index()} of {processes}, and worker {server.rank} of "
            f"{server.num_workers}: expected them to be the same; call join_devices(server) first "
            "in the loop, and not executor.initialize"
        )
    check_rule(server)
    counts = Counter(d.process_index for d in jax.devices())
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{counts[k]} in process {k}" for k in sorted(counts))
        raise RequestError(f"joined devices: {counts_text}; expected the same number in each")
    return processes


class JoinedParts:
    """Rows [size, *width], split into one part per process, in the order of the processes."""

    def __init__(self) -> None:
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        self.count, self.devices = jax.process_count(), len(devices)
        mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
        self.sharding = NamedSharding(mesh, PartitionSpec("rows"))
        self.whole = NamedSharding(mesh, PartitionSpec())

    def mine(self, size: int) -> slice:
        """This process's part of ``size`` rows. All parts are equally long, so the last one may
        extend past the end."""
        part = self._up(size) // self.count
        return slice(part * jax.process_index(), part * (jax.process_index() + 1))

    def _up(self, size: int) -> int:
        return -(-size // self.devices) * self.devices

    def join(self, part: Array, size: int, sharding: jax.sharding.Sharding) -> jax.Array:
        """The rows of all processes, from this process's part, which is padded with zeros."""
        slot = self.mine(size)
        whole = np.zeros((slot.stop - slot.start, *part.shape[1:]), part.dtype)
        whole[: len(part)] = part
        joined = jax.make_array_from_process_local_data(self.sharding, whole)
        out: jax.Array = _cut(size, sharding)(joined)
        return out

    def part(self, rows: jax.Array) -> Array:
        """This process's part of rows that are on the devices."""
        spread = _spread(self._up(rows.shape[0]), self.sharding)(rows)
        shards = sorted(spread.addressable_shards, key=lambda s: s.index[0].start or 0)
        return np.concatenate([np.asarray(s.data) for s in shards])

    def everywhere(self, arrays: Mapping[str, jax.Array]) -> dict[str, Array]:
        """Whole arrays, in every process, from arrays on the devices."""
        gathered = _spread(None, self.whole)(dict(arrays)) if arrays else {}
        return {name: np.asarray(x.addressable_data(0)) for name, x in gathered.items()}


@functools.lru_cache(maxsize=64)
def _cut(size: int, sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda rows: rows[:size], out_shardings=sharding)


@functools.lru_cache(maxsize=64)
def _spread(size: int | None, sharding: jax.sharding.Sharding) -> Any:
    def spread(rows: Any) -> Any:
        if size is None:
            return rows
        return jax.numpy.pad(rows, [(0, size - rows.shape[0])] + [(0, 0)] * (rows.ndim - 1))

    return jax.jit(spread, out_shardings=sharding)


def needed(function: Any, batch: Sequence[Any]) -> tuple[bool, ...]:
    """Which arrays of a batch ``function(*batch)`` depends on."""
    jaxpr = jax.make_jaxpr(function)(*batch)
    count = len(jaxpr.in_avals)
    wanted = NONE.union(*depends(jaxpr, [frozenset({k}) for k in range(count)]))
    return tuple(k in wanted for k in range(count))


def on_host(batch: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """A whole batch in this host's memory. Arrays on devices that are not wanted are not fetched;
    zeros take their place."""
    from jax.experimental import multihost_utils

    def here(leaf: Any, wanted: bool) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if not wanted:
            return _zeros(leaf)
        if leaf.is_fully_addressable:
            return jax.device_get(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    leaves, tree = jax.tree_util.tree_flatten(tuple(batch))
    host_leaves = [here(x, w) for x, w in zip(leaves, wanted, strict=True)]
    return jax.tree_util.tree_unflatten(tree, host_leaves)


def _zeros(leaf: jax.Array) -> Any:
    """Zeros with the shape and dtype of an array; they take no memory, unless they are keys."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.wrap_key_data(
        jax.numpy.zeros(data.shape, data.dtype), impl=jax.random.key_impl(leaf)
    )


def check_same(batch: Sequence[Any]) -> None:
    """Check that process-local arrays of a batch are the same in all processes.

    Raises:
        RequestError: they differ, so the processes were given different batches.
    """
    leaves = jax.tree_util.tree_leaves(batch)
    local_leaves = [x for x in leaves if not isinstance(x, jax.Array) or x.is_fully_addressable]
    if not local_leaves:
        return
    if other := _others(functools.reduce(_checksum, local_leaves, len(local_leaves))):
        raise RequestError(
            f"another batch than in process 0: in {other}; expected the whole batch as the same "
            "NumPy arrays in every process, or arrays over all processes "
            "(executor.shard, jax.make_array_from_process_local_data)"
        )


def check_clock(server: ParameterServer) -> None:
    """Check that all processes begin after the same step.

    Raises:
        RequestError: they begin after different steps.
    """
    if other := _others(server.clock):
        raise RequestError(
            f"worker {server.rank} begins after step {server.clock}, and {other} elsewhere than "
            "worker 0: the snapshots are not of one step; remove the newest of each server"
        )


def _others(checksum: int) -> str:
    """The processes whose checksum differs from that of process 0, as text."""
    from jax.experimental import multihost_utils

    checksums = np.asarray(multihost_utils.process_allgather(np.uint32(checksum))).reshape(-1)
    return ", ".join(str(k) for k in range(len(checksums)) if checksums[k] != checksums[0])


def _checksum(before: int, leaf: Any) -> int:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, before)
