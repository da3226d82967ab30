"""Orbax checkpoints on disk: what is in one, its leaves part by part, and writing from parts.

Orbax's own reader says what leaves there are; their data is read with TensorStore, as Orbax does,
because Orbax reads whole leaves and through a collective. Nothing here uses a device.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from executor.checkpoint.common import (
    CheckpointError,
    Path,
    brief,
    key_text,
    nested,
    path_text,
    stored,
)
from executor.checkpoint.common import unstored as unstored_key
from executor.checkpoint.fields import keys_of, object_of, parsed, paths_of
from executor.checkpoint.files.checksums import write_part
from executor.checkpoint.files.guard import ChecksumGuard
from executor.checkpoint.parts import Index, Stored

DATA_FILE_BYTES = 64 * 2**20
"""Bytes at which Orbax begins another file. In one file (2 GB, its own choice) writes go one after
the other, and a save takes some two times as long (`benchmarks/checkpoint.py`)."""

NOTES = "meshwright"
"""Under this name Orbax keeps for us what it can't: which containers are lists, empty arrays."""

_DAMAGED = "is damaged, or not a checkpoint"


@dataclass(frozen=True)
class Contents:
    """What a saved state is made of.

    Attributes:
        leaves: by path.
        sequences: the paths of lists.
        tree: as Orbax has it, with descriptions as leaves.
        names: Orbax's names of the leaves that have elements, by path.
        guard: compares files with their checksums.
        owner: of the run's folder when it was saved, in words.
    """

    leaves: Mapping[Path, Stored]
    sequences: tuple[Path, ...]
    tree: Any
    names: Mapping[Path, str]
    guard: ChecksumGuard
    owner: str = ""


def notes(
    leaves: Mapping[Path, Any], sequences: tuple[Path, ...], owner: str = ""
) -> dict[str, Any]:
    """What is kept beside a state that Orbax has no place for; JSON."""
    return {
        NOTES: {
            "sequences": [list(path) for path in sequences],
            "empty": [
                {"path": list(path), "shape": list(x.shape), "dtype": np.dtype(x.dtype).name}
                for path, x in leaves.items()
            ],
            "owner": owner,
        }
    }


def contents(folder: File) -> Contents:
    """What is in the folder of a state; reads no data. Files are compared with their checksums:
    those that describe the state here, those of a leaf before it is read.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint.
    """
    guard = ChecksumGuard(folder)
    _check_names(folder)
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder))
        tree, note_fields = metadata.tree, (metadata.custom_metadata or {}).get(NOTES)
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_description)[0]
    except Exception as error:
        raise CheckpointError(
            f"{folder} is damaged, or not a checkpoint: {brief(error)}"
        ) from error
    leaves: dict[Path, Stored] = {}
    names: dict[Path, str] = {}
    ours = note_fields is not None
    for path, leaf in flat:
        keys = tuple(key_text(k) for k in path)
        if not is_description(leaf):
            raise CheckpointError(f"{folder}: {path_text(keys)} is no array: {type(leaf).__name__}")
        if str(leaf.name).startswith("/") or ".." in str(leaf.name).split("/"):
            raise CheckpointError(f"{folder}: {leaf.name!r} leads out of the folder")
        if ours:
            keys = tuple(unstored_key(k) for k in keys)
        leaves[keys] = _leaf(folder, keys, leaf, guard)
        names[keys] = str(leaf.name)
    if note_fields is None:
        return Contents(leaves, _sequences(tree), tree, names, guard)
    where = f"the notes of {folder}"
    note_fields = object_of(note_fields, where)
    for keys, like in _empty(note_fields.get("empty"), where):
        leaves[keys] = Stored(keys, like.shape, like.dtype, like.__getitem__)
    sequences = paths_of(note_fields.get("sequences"), where)
    return Contents(leaves, sequences, tree, names, guard, str(note_fields.get("owner", ""))[:200])


def _empty(entries: Any, where: str) -> Iterator[tuple[Path, np.ndarray]]:
    """Arrays without elements, from notes."""
    if not isinstance(entries, list):
        raise CheckpointError(f"{where}: no list of empty arrays")
    for entry in entries:
        empty = object_of(entry, where)
        shape = empty.get("shape")
        if not isinstance(shape, list) or 0 not in shape or not all(map(_is_size, shape)):
            raise CheckpointError(f"{where}: {shape!r} is no shape of an empty array")
        try:
            array = np.empty(tuple(shape), jax.numpy.dtype(empty.get("dtype")))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: {brief(error)}") from error
        yield keys_of(empty.get("path"), where), array


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < 2**63


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


def _check_names(folder: File) -> None:
    """Raise CheckpointError if an array of the state has no description, or they can't be read.

    Orbax opens all of them at once. When one fails, TensorStore prints a traceback for each other.
    """
    file = folder / "_METADATA"
    try:
        known = object_of(parsed(file.read_bytes(), file), file)
        arrays = object_of(known.get("tree_metadata"), file).values()
        names = [
            ".".join(key["key"] for key in array["key_metadata"])
            for array in arrays
            if array["value_metadata"]["value_type"] in ("jax.Array", "np.ndarray")
        ]
    except (OSError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder} {_DAMAGED}: {error!r}") from error
    ending = "zarr.json" if known.get("use_zarr3") else ".zarray"
    if not (folder / "manifest.ocdbt").exists():
        there = {name for name in names if (folder / name / ending).is_file()}
    else:
        try:
            store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
            keys = (key.decode(errors="replace") for key in store.list().result())
            there = {key.removesuffix(f"/{ending}") for key in keys if key.endswith(ending)}
        except ValueError as error:
            raise CheckpointError(f"{folder} {_DAMAGED}: {brief(error)}") from error
    for name in names:
        if name not in there:
            raise CheckpointError(f"{folder} {_DAMAGED}: leaf {name} is missing")


def _leaf(folder: File, path: Path, description: Any, guard: ChecksumGuard) -> Stored:
    def read(index: Index) -> np.ndarray:
        try:
            guard.check(guard.files_of([description.name]))
            opened = ts.open(_spec(folder, description.name), open=True, read=True).result()
            return np.asarray(opened[index].read().result())
        except Exception as error:
            raise CheckpointError(
                f"{folder}: leaf {path_text(path)} is damaged or missing: {brief(error)}"
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
        self._failed = False

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """See Orbax."""
        self._turn, self._failed = None, False
        return await super().serialize(values, infos, args)

    async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if self._failed:  # Orbax has closed the loop that an open would come back to
                return
            self._failed = True
            opened = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            chunk = opened.chunk_layout.write_chunk.shape or (1,)
            for index in value.parts(chunk[0]):
                await opened[index].write(value.read(index))
            self._failed = False


class _Own:
    """An array as Orbax reads it; Orbax takes a ``jax.Array`` on the devices of one process for a
    mistake."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _ArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Also writes arrays that some processes have no part of, as those of a pipeline stage; Orbax
    has process 0 describe every array, and expects a part of it there."""

    def __init__(self) -> None:
        apart = jax.process_count() > 1
        super().__init__(use_replica_parallel=apart)
        self._whole, self._parts = (
            ocp.type_handlers.ArrayHandler(
                use_replica_parallel=apart, primary_host=host, enable_write_sharding_file=False
            )
            for host in (0, None)
        )

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """See Orbax."""
        args = args or [ocp.SaveArgs()] * len(values)
        rows = list(zip(values, infos, args, strict=True))
        some = [row for row in rows if not everywhere(row[0])]
        if not some:
            return await super().serialize(values, infos, args)
        whole = [row for row in rows if everywhere(row[0])]
        futures = []
        if whole:  # a file of shardings would have to name all arrays
            futures += await self._whole.serialize(*zip(*whole, strict=True))
        here = [(_Own(x), *rest) for x, *rest in some if x.addressable_shards]
        if here:
            futures += await self._parts.serialize(*zip(*here, strict=True))
        return futures


def everywhere(x: jax.Array) -> bool:
    """Whether every process has a part of an array."""
    devices: set[Any] = set(x.sharding.device_set)
    return bool(len({d.process_index for d in devices}) == jax.process_count())


class _StateHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Has each process write the checksums of its files once they are written."""

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: Any = None
    ) -> Any:
        """See Orbax."""
        futures = await super().async_save(directory, item, save_args, args)

        def written() -> None:
            write_part(File(str(getattr(directory, "path", directory))), jax.process_index())

        return [ocp.future.ChainedFuture(futures, written)]


@ocp.args.register_with_handler(_StateHandler, for_save=True)
@dataclass
class StateSave(ocp.args.PyTreeSave):  # type: ignore[misc]
    """What is saved by `state_handler`; fields as in Orbax."""


@ocp.args.register_with_handler(_StateHandler, for_restore=True)
@dataclass
class _StateRestore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """Orbax asks for both; states are restored without this handler."""


def state_handler(*, from_disk: bool = False) -> _StateHandler:
    """What writes a state: of arrays, or of `Stored` leaves.

    Parameters hardly shrink, and compressing them takes longer than writing them: nothing is
    compressed. Where several processes hold a shard, each writes a part of it; in a single process
    that would gain nothing, and cutting the parts blocks training.
    """
    handlers = ocp.type_handlers
    known: list[tuple[Any, Any]] = [(Stored, _StoredHandler())]
    if not from_disk:
        known = [(np.ndarray, handlers.NumpyHandler()), (jax.Array, _ArrayHandler())]
    return _StateHandler(
        use_compression=False,
        type_handler_registry=handlers.create_type_handler_registry(*known),
    )


def stored_tree(leaves: Mapping[Path, Any]) -> Any:
    """Leaves as the dicts that Orbax is given."""
    return nested({tuple(stored(k) for k in path): leaf for path, leaf in leaves.items()})
