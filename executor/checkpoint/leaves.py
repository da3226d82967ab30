"""Leaves of a state: as they are saved, and as they are requested on restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from executor.checkpoint.common import CheckpointError, Path, leaves_of, path_text
from executor.checkpoint.parts import Stored
from executor.processes.meet import meet


@dataclass(frozen=True)
class RequestedLeaf:
    """A leaf to restore.

    Attributes:
        like: the value that the caller passed for it.
        struct: the expected shape and dtype on disk, and the sharding if it goes to devices.
    """

    like: Any
    struct: jax.ShapeDtypeStruct

    def restore_args(self) -> ocp.RestoreArgs:
        """Arguments for Orbax: restore to devices, or as a NumPy array."""
        if self.struct.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            sharding=self.struct.sharding,
            global_shape=self.struct.shape,
            dtype=self.struct.dtype,
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether no device of this process has a part of it."""
        sharding = self.struct.sharding
        return sharding is not None and not sharding.addressable_devices

    def fits(self, got: Stored) -> bool:
        """Whether a leaf saved with another dtype fits: for a Python number, only the kind of dtype
        has to match."""
        same_kind = got.dtype.kind == self.struct.dtype.kind
        return isinstance(self.like, _NUMBERS) and got.shape == () and same_kind

    def made(self, read: Any) -> Any:
        """The restored leaf, from what was read (None for an empty array)."""
        if self.is_elsewhere:
            struct = self.struct
            read = jax.make_array_from_single_device_arrays(
                struct.shape, struct.sharding, [], dtype=struct.dtype
            )
        elif self.struct.size == 0:
            read = _empty(self.struct)
        if isinstance(self.like, _NUMBERS):
            return type(self.like)(np.asarray(read).item())
        if _is_key(self.like):
            kind = jax.random.key_impl(jnp.empty((0,), self.like.dtype))  # works for shapes too
            return jax.random.wrap_key_data(read, impl=str(kind))
        return read


_NUMBERS = (bool, int, float, complex)


def arrays_to_save(leaves: Sequence[tuple[Path, Any]]) -> dict[Path, Any]:
    """Leaves as arrays: PRNG keys as their data, Python numbers as NumPy arrays.

    Raises:
        CheckpointError: a leaf is none of these; names it.
    """
    out: dict[Path, Any] = {}
    for path, leaf in leaves:
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        elif isinstance(leaf, (*_NUMBERS, np.generic)):
            leaf = np.asarray(leaf)
        if not isinstance(leaf, jax.Array | np.ndarray | Stored) or leaf.dtype.kind in "OSUMm":
            raise CheckpointError(
                f"{path_text(path)} is no array but {type(leaf).__name__}; nothing was saved"
            )
        out[path] = leaf
    return out


def check_holders(leaves: Mapping[Path, Any]) -> None:
    """Check that no two processes have a process-local array with the same name. All processes
    must call it.

    Raises:
        CheckpointError: some have one; names it. Raised in all processes.
    """
    if jax.process_count() == 1:
        return
    local_names = [
        path_text(path)
        for path, x in leaves.items()
        if isinstance(x, jax.Array) and x.is_fully_addressable
    ]
    twice = meet("saving a state", local_names, _twice)
    if twice:
        raise CheckpointError(
            f"{twice[0]} is an array of its own in each of several processes; expected one over "
            "the processes, as executor.parallelize returns it; nothing was saved"
        )


def _twice(names_by_process: list[list[str]]) -> list[str]:
    """Names that occur in more than one list."""
    counts = Counter(name for names in names_by_process for name in names)
    return [name for name, count in counts.items() if count > 1]


def wanted(like: Any, shardings: Any) -> dict[Path, RequestedLeaf]:
    """The requested leaves by path, in JAX's order.

    Raises:
        CheckpointError: ``shardings`` has another form, or a leaf is neither array nor number.
    """
    leaves = leaves_of(like)
    given: list[Any] = [None] * len(leaves)
    if shardings is not None:
        try:
            full = jax.tree_util.tree_broadcast(shardings, like, is_leaf=_is_sharding)
        except ValueError as error:
            raise CheckpointError(f"shardings of another form than the state: {error}") from error
        given = jax.tree_util.tree_leaves(full, is_leaf=_is_sharding)
    return {
        path: _wanted(path, leaf, sharding)
        for (path, leaf), sharding in zip(leaves, given, strict=True)
    }


def stored_struct(leaf: Stored) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf, without a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _wanted(path: Path, leaf: Any, sharding: Any) -> RequestedLeaf:
    if isinstance(leaf, _NUMBERS):
        return RequestedLeaf(leaf, jax.ShapeDtypeStruct((), np.asarray(leaf).dtype))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise CheckpointError(
            f"{path_text(path)} is expected as {type(leaf).__name__}, not an array"
        )
    sharding = sharding or getattr(leaf, "sharding", None)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape, dtype = leaf.shape, leaf.dtype
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # JAX would round it
        return RequestedLeaf(leaf, jax.ShapeDtypeStruct(shape, dtype))
    return RequestedLeaf(leaf, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))


def _empty(struct: jax.ShapeDtypeStruct) -> Any:
    array = np.empty(struct.shape, struct.dtype)
    if struct.sharding is None:
        return array
    return jax.make_array_from_callback(struct.shape, struct.sharding, lambda index: array[index])


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_sharding(x: Any) -> bool:
    return isinstance(x, jax.sharding.Sharding)
