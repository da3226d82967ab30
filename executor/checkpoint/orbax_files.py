"""Orbax checkpoints on disk: what is in one, its leaves part by part, and writing from parts.

Orbax's own reader says what leaves there are; their data is read with TensorStore, as Orbax does,
because Orbax reads whole leaves and through a collective. Nothing here uses a device.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from executor.checkpoint.common import CheckpointError, Path, key_text, nested, shown, stored
from executor.checkpoint.common import unstored as unstored_key
from executor.checkpoint.parts import Index, Stored

DATA_FILE_BYTES = 64 * 2**20
"""Bytes at which Orbax begins another file. In one file (2 GB, its own choice) writes go one after
the other, and a save takes some two times as long (`benchmarks/checkpoint.py`)."""

NOTES = "meshwright"
"""Under this name Orbax keeps for us what it can't: which containers are lists, empty arrays."""


@dataclass(frozen=True)
class Contents:
    """What a saved state is made of.

    Attributes:
        leaves: by path.
        sequences: the paths of lists.
        tree: as Orbax has it, with descriptions as leaves.
    """

    leaves: Mapping[Path, Stored]
    sequences: tuple[Path, ...]
    tree: Any


def notes(leaves: Mapping[Path, Any], sequences: tuple[Path, ...]) -> dict[str, Any]:
    """What is kept beside a state that Orbax has no place for; JSON."""
    return {
        NOTES: {
            "sequences": [list(path) for path in sequences],
            "empty": [
                {"path": list(path), "shape": list(x.shape), "dtype": np.dtype(x.dtype).name}
                for path, x in leaves.items()
            ],
        }
    }


def contents(folder: File) -> Contents:
    """What is in the folder of a state; reads no data.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    try:
        found = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder))
        tree, own = found.tree, (found.custom_metadata or {}).get(NOTES)
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_description)[0]
    except Exception as error:
        raise CheckpointError(f"{folder} is damaged, or not a checkpoint: {error}") from error
    leaves: dict[Path, Stored] = {}
    ours = own is not None
    for path, leaf in flat:
        keys = tuple(key_text(k) for k in path)
        if not is_description(leaf):
            raise CheckpointError(f"{folder}: {shown(keys)} is no array: {type(leaf).__name__}")
        if ours:
            keys = tuple(unstored_key(k) for k in keys)
        leaves[keys] = _leaf(folder, keys, leaf)
    if own is None:
        return Contents(leaves, _sequences(tree), tree)
    for empty in own["empty"]:
        keys = tuple(empty["path"])
        like = np.empty(tuple(empty["shape"]), jax.numpy.dtype(empty["dtype"]))
        leaves[keys] = Stored(keys, like.shape, like.dtype, like.__getitem__)
    return Contents(leaves, tuple(tuple(path) for path in own["sequences"]), tree)


def is_description(x: Any) -> bool:
    """Whether Orbax describes an array by this."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "name")


def _sequences(tree: Any) -> tuple[Path, ...]:
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_description)[0]
    return tuple(
        sorted(
            {
                tuple(key_text(k) for k in path[:i])
                for path, _ in flat
                for i, entry in enumerate(path)
                if isinstance(entry, jax.tree_util.SequenceKey)
            }
        )
    )


def _leaf(folder: File, path: Path, description: Any) -> Stored:
    def read(index: Index) -> np.ndarray:
        try:
            opened = ts.open(_spec(folder, description.name), open=True, read=True).result()
            return np.asarray(opened[index].read().result())
        except Exception as error:
            raise CheckpointError(
                f"{folder}: leaf {shown(path)} is damaged or missing: {error}"
            ) from error

    storage = getattr(description, "storage", None)
    chunk = (storage and storage.chunk_shape) or (1,)
    return Stored(path, tuple(description.shape or ()), np.dtype(description.dtype), read, chunk[0])


def _spec(folder: File, name: str) -> dict[str, Any]:
    """Where TensorStore finds a leaf, by its name in Orbax."""
    known = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{folder / name}/"}
    if (folder / "manifest.ocdbt").exists():
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    driver = "zarr3" if known.get("use_zarr3") else "zarr"
    # a chunk that is not there is damage, not zeros
    return {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}


class _StoredHandler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Has Orbax write leaves that are on disk, one after the other and part by part.

    Where Orbax no longer asks this method, it takes a leaf as an array, whole.
    """

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._turn: asyncio.Lock | None = None

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """See Orbax."""
        self._turn = None
        return await super().serialize(values, infos, args)

    async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            opened = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            chunk = opened.chunk_layout.write_chunk.shape or (1,)
            for index in value.parts(chunk[0]):
                await opened[index].write(value.read(index))


def state_handler(*, from_disk: bool = False) -> ocp.PyTreeCheckpointHandler:
    """What writes a state: of arrays, or of `Stored` leaves.

    Parameters hardly shrink, and compressing them takes longer than writing them: nothing is
    compressed. Where several processes hold a shard, each writes a part of it; in a single process
    that would gain nothing, and cutting the parts blocks training.
    """
    handlers = ocp.type_handlers
    known: list[tuple[Any, Any]] = [(Stored, _StoredHandler())]
    if not from_disk:
        apart = jax.process_count() > 1
        known = [
            (np.ndarray, handlers.NumpyHandler()),
            (jax.Array, handlers.ArrayHandler(use_replica_parallel=apart)),
        ]
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        type_handler_registry=handlers.create_type_handler_registry(*known),
    )


def stored_tree(leaves: Mapping[Path, Any]) -> Any:
    """Leaves as the dicts that Orbax is given."""
    return nested({tuple(stored(k) for k in path): leaf for path, leaf in leaves.items()})
