"""One entry point for all kinds of sources."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from executor.data.batches import Batches
from executor.data.common import DataError
from executor.data.files import Files, read_file
from executor.data.sources import Elements
from executor.data.streams import Streams


def shard(
    source: Any,
    shardings: Any,
    *,
    batch_size: int,
    policy: str = "drop",
    seed: int | None = 0,
    epochs: int | None = None,
    prefetch: int = 2,
    read: Callable[[Any], Any] | None = None,
    count: Callable[[Any], int] | None = None,
) -> Batches | Streams:
    """Batches of a source for a plan; each process reads its share.

    Args:
        source: arrays, memory maps or a pytree of them, rows first; a list of files; an object with
            ``len(source)`` and ``source[k]``, a row, such as a ``grain.MapDataset`` or a
            ``grain.sources.RandomAccessDataSource``; or a function (lane, lanes) -> an iterable of
            rows, such as a ``grain.IterDataset`` or ``grain.DataLoader``. A single process may pass
            the iterable itself.
        shardings: shardings of one batch, a pytree of the same form or one for all leaves: those of
            the plan, such as ``step.prepare(state, batch).in_shardings[1]``.
        batch_size: rows of a batch, over all processes.
        policy: for rows that do not fill a batch in all processes: "drop", "pad" or "leave".
        seed: seed of the order of rows; None keeps the source's order. It does not affect
            iterators, which define the order themselves.
        epochs: number of epochs; None continues forever.
        prefetch: batches to read ahead.
        read: a file -> a pytree of arrays with rows first; for files only. ``.npy`` and ``.npz``
            files do not need it.
        count: a file -> its number of rows, if that is cheaper than reading it; for files only.

    Raises:
        DataError: the source is none of these, or `Batches`, `Files` or `Streams` refuse it.
    """
    if isinstance(source, str | os.PathLike):
        raise DataError(f"{source}: a source is a list of files; pass [{str(source)!r}]")
    if _is_files(source):
        source = Files(source, read or read_file, count)
    elif read is not None or count is not None:
        raise DataError(f"read= and count= are for a list of files, not {type(source).__name__}")
    elif isinstance(source, Elements):
        pass
    elif _is_walked(source):
        return Streams(
            _maker(source),
            shardings,
            batch_size=batch_size,
            lanes=None if callable(source) else 1,
            policy=policy,
            epochs=epochs,
            prefetch=prefetch,
        )
    elif _is_random_access(source):
        source = Elements(source)
    return Batches(
        source,
        shardings,
        batch_size=batch_size,
        seed=seed,
        policy=policy,
        epochs=epochs,
        prefetch=prefetch,
    )


def _is_files(source: Any) -> bool:
    return (
        isinstance(source, list | tuple)
        and bool(source)
        and all(isinstance(x, str | os.PathLike) for x in source)
    )


def _is_random_access(source: Any) -> bool:
    return (
        hasattr(source, "__getitem__")
        and hasattr(source, "__len__")
        and not hasattr(source, "shape")
        and not isinstance(source, list | tuple | dict)
    )


def _is_walked(source: Any) -> bool:
    if callable(source):
        return True
    return hasattr(source, "__iter__") and not hasattr(source, "__getitem__")


def _maker(source: Any) -> Callable[[int, int], Any]:
    """Return a function as it is; wrap an iterable as the single lane of a single process."""
    if callable(source):
        maker: Callable[[int, int], Any] = source
        return maker
    name = type(source).__name__
    if jax.process_count() > 1:
        raise DataError(
            f"{name} would give every process the same rows; pass a function (lane, lanes) -> "
            f"{name} that gives each lane its own, such as one that begins with "
            "source[lane::lanes], or a source with len() and [] if rows are available by number"
        )
    if iter(source) is source:
        raise DataError(f"{name} can be walked through once only; pass a function that makes it")
    return lambda lane, lanes: source
