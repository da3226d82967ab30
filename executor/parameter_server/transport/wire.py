"""How values are sent with Ray: copied once, into the memory that the processes of a host share.

Large values are put there once per version, however many workers read them, and are read in place.
Small values are part of the message, which is faster than several messages to the store.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from executor.parameter_server.placement.layout import Flat
from planner.errors import RequestError

INLINE_BYTES = 2 * 2**20
"""Messages up to this size contain their arrays (on a Ray that was started here)."""

SYSTEM = {
    "max_direct_call_object_size": INLINE_BYTES,
    # Freed memory is reused at once: pages that a process has not touched cost far more than the
    # copy. By default Ray collects freed objects for a second.
    "free_objects_batch_size": 1,
}
"""Settings of a Ray that is started here; for another, use ``ray start --system-config``."""

MEMORY_ENV = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
"""Environment of servers and of workers on CPUs: the memory of freed arrays stays mapped for the
next ones."""

PULL_DTYPES = (None, "bfloat16")


@dataclass(frozen=True)
class Shared:
    """Values in shared memory.

    Attributes:
        ref: Ray's reference to them, as bytes; they exist as long as a reference does.
        dtypes: dtypes of the values, by name. Ray would copy arrays of bfloat16, but not bytes.
    """

    ref: Any
    dtypes: Mapping[str, str]


def check_pull_dtype(pull_dtype: str | None) -> None:
    """Check the dtype in which pulled values are sent.

    Raises:
        RequestError: the dtype is not supported.
    """
    if pull_dtype not in PULL_DTYPES:
        raise RequestError(f"pull_dtype={pull_dtype!r}: expected None or 'bfloat16'")


def publish(flat: Flat) -> Any:
    """Values for several readers: in an actor, large ones are put into shared memory once."""
    if sum(x.nbytes for x in flat.values()) <= INLINE_BYTES or not _in_actor():
        return flat
    import ray

    raw = {name: x.view(np.uint8) for name, x in flat.items()}
    return Shared(ray.put(raw), {name: str(x.dtype) for name, x in flat.items()})


def fetch(answers: Sequence[Any], wait_s: float) -> list[Any]:
    """Answers of servers, with their values read in place: read-only, nothing is copied."""
    refs = [x.values.ref for x in answers if is_shared(x)]
    if not refs:
        return list(answers)
    import ray

    read = iter(ray.get(refs, timeout=wait_s))
    return [replace(x, values=_typed(next(read), x.values)) if is_shared(x) else x for x in answers]


def _typed(raw: Flat, shared: Shared) -> Flat:
    return {name: raw[name].view(np.dtype(dtype)) for name, dtype in shared.dtypes.items()}


def is_shared(answer: Any) -> bool:
    """Whether the values of an answer lie in Ray's shared memory."""
    return isinstance(getattr(answer, "values", None), Shared)


def _in_actor() -> bool:
    ray = sys.modules.get("ray")
    return (
        ray is not None
        and ray.is_initialized()
        and ray.get_runtime_context().get_actor_id() is not None
    )


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x: Any, dtype: str) -> Any:
    return x.astype(dtype)


def rounded_to(values: Mapping[str, Any], dtype: str) -> Flat:
    """Values whose floating-point arrays of a wider dtype are rounded to ``dtype``."""
    return {
        name: np.asarray(
            _cast(x, dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            and x.dtype.itemsize > jnp.dtype(dtype).itemsize
            else x
        )
        for name, x in values.items()
    }
