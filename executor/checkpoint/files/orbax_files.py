"""Orbax checkpoints on disk: their contents, reading leaves in parts, and writing from parts.

Orbax's reader lists the leaves. Their data is read with TensorStore, as Orbax does, because Orbax
reads whole leaves and through a collective. Nothing here uses a device.
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
"""Bytes at which Orbax starts another file. With one file (2 GB, Orbax's default), writes run one
after another, and a save takes about twice as long (`benchmarks/checkpoint.py`)."""

NOTES = "meshwright"
"""Name of the custom metadata for what Orbax can't represent: which containers are lists, and empty
arrays."""

_DAMAGED = "is damaged, or not a checkpoint"


@dataclass(frozen=True)
class Contents:
    """Contents of a saved state.

    Attributes:
        leaves: the leaves by path.
        sequences: the paths of lists.
        tree: Orbax's tree, with descriptions as leaves.
        names: Orbax's names of the leaves that have elements, by path.
        guard: compares files with their checksums.
        owner: owner of the run's folder when the state was saved, as text.
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
    """Metadata of a state that Orbax has no place for, as JSON."""
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
    """Contents of the folder of a state; reads no data. Files are compared with their checksums:
    the files that describe the state here, the files of a leaf before the leaf is read.

    Raises:
        CheckpointError: the folder is damaged, or not a checkpoint.
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
    """The arrays without elements that the notes list, by path."""
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
    """Whether ``x`` is Orbax's description of an array."""
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
    """Raise CheckpointError if an array of the state is missing, or the metadata can't be read.

    Orbax opens all arrays at once. If one fails, TensorStore prints a traceback for each of the
    others.
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
    """The TensorStore spec of a leaf, from its name in Orbax."""
    known = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{folder / name}/"}
    if (folder / "manifest.ocdbt").exists():
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    driver = "zarr3" if known.get("use_zarr3") else "zarr"
    # a missing chunk is damage, not zeros
    return {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}


class _StoredHandler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Makes Orbax write leaves that are on disk, one after another and in parts.

    If Orbax stops calling ``_open_and_write``, it converts each leaf to a whole array instead.
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
            if self._failed:  # Orbax has closed the event loop in which an open would resume
                return
            self._failed = True
            opened = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
            chunk = opened.chunk_layout.write_chunk.shape or (1,)
            for index in value.parts(chunk[0]):
                await opened[index].write(value.read(index))
            self._failed = False


class _Own:
    """A wrapper of an array for Orbax, which treats a ``jax.Array`` on the devices of one process
    as a mistake."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _ArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Also writes arrays that some processes have no part of, such as those of a pipeline stage.
    In Orbax, process 0 describes every array and must have a part of it."""

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
        if whole:  # a sharding file would have to name all arrays
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
    """Makes each process write the checksums of its files after the files."""

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
    """Arguments of a save with `state_handler`; the fields are Orbax's."""


@ocp.args.register_with_handler(_StateHandler, for_restore=True)
@dataclass
class _StateRestore(ocp.args.PyTreeRestore):  # type: ignore[misc]
    """Orbax requires arguments for both directions; states are restored without this handler."""


def state_handler(*, from_disk: bool = False) -> _StateHandler:
    """The handler that writes a state of arrays, or of `Stored` leaves.

    Nothing is compressed: parameters hardly shrink, and compressing them takes longer than writing
    them. If several processes hold a shard, each writes a part of it. In a single process that
    would gain nothing, and cutting the parts blocks training.
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
    """The leaves as nested dicts, the form that is passed to Orbax."""
    return nested({tuple(stored(k) for k in path): leaf for path, leaf in leaves.items()})
