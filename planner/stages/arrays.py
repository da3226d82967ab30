"""Arrays with a stage dimension: moves rows between stages, reads and replaces rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import mlir

from planner.annotate import FREE, SHIFT, shard
from planner.spec import STAGE

_shift = jex_core.Primitive(SHIFT)


def _moved(x: Any, *, by: int) -> Any:
    config = [(by, -by, 0), *((0, 0, 0) for _ in x.shape[1:])]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


_shift.def_impl(_moved)
_shift.def_abstract_eval(lambda x, *, by: x)
mlir.register_lowering(_shift, mlir.lower_fun(_moved, multiple_results=False))


def shift(x: jax.Array, by: int) -> jax.Array:
    """[stages, ...]: row k becomes row k + ``by``; zeros fill the rows without a source.

    >>> shift(jnp.arange(1.0, 4.0), 1).tolist()
    [0.0, 1.0, 2.0]
    """
    return _shift.bind(x, by=by)  # type: ignore[no-any-return]


def by_stage(x: Any) -> Any:
    """[stages, ...] with each row on its stage's devices; the planner shards the rest."""
    return shard(x, STAGE, *(FREE for _ in x.shape[1:]))


def row_of(x: Any, k: Any) -> Any:
    """``x[k]`` for a scalar k.

    >>> import jax.numpy as jnp
    >>> row_of(jnp.arange(6).reshape(3, 2), jnp.array(1)).tolist()
    [2, 3]
    """
    dims = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(x.ndim - 1)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(x, k[None], dims, (1, *x.shape[1:]), mode=mode)


def with_row(x: Any, row: Any, k: Any) -> Any:
    """``x`` with ``x[:, k]`` replaced.

    >>> import jax.numpy as jnp
    >>> with_row(jnp.zeros((2, 3)), jnp.ones(2), jnp.array(1)).tolist()
    [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    """
    starts = [0, k, *(0 for _ in x.shape[2:])]
    return jax.lax.dynamic_update_slice(x, row[:, None], starts, allow_negative_indices=False)
