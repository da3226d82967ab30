"""safetensors files (huggingface.co/docs/safetensors): one, or several with an index.

The library checks a file when it is opened. It has no NumPy types for 8-bit floats and writes only
tensors that are whole in memory, so this module reads and writes the data in parts. A file has 8
bytes of header length, a JSON header of types, shapes and offsets, then the elements,
little-endian.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from executor.checkpoint.common import CheckpointError, Path, brief, path_text
from executor.checkpoint.fields import file_name, object_of, parsed
from executor.checkpoint.files.tensor_sums import (
    check_header,
    check_index,
    check_tensor,
    header_bytes,
    index_bytes,
)
from executor.checkpoint.parts import Index, Stored

NOTES = "meshwright"
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"

TYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


def tensor_files(where: File) -> tuple[File, ...]:
    """The safetensors files of a state; none if ``where`` is something else.

    Raises:
        CheckpointError: an index is damaged, missing or not unique, or a file is missing.
    """
    if where.is_dir():
        indices = sorted(where.glob(f"*{INDEX}"))
        if len(indices) > 1:
            index_names = ", ".join(x.name for x in indices)
            raise CheckpointError(f"{where} has several indices: {index_names}; name one of them")
        if indices:
            return tensor_files(indices[0])
        files = tuple(sorted(where.glob(f"*{SUFFIX}")))
        part = next((x for x in files if re.search(rf"-\d{{5}}-of-\d{{5}}{SUFFIX}$", x.name)), None)
        if part is not None:
            raise CheckpointError(
                f"{part} is one of several files, but their index (*{INDEX}) is not there: the "
                "rest may be missing too"
            )
        return files
    if where.name.endswith(INDEX):
        try:
            raw = where.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{where} can't be read: {brief(error)}") from error
        index = object_of(parsed(raw, where), where)
        check_index(raw, index, where)
        files_of = object_of(index.get("weight_map"), f"weight_map of {where}")
        names = sorted({file_name(name, where) for name in files_of.values()})
        gone = [name for name in names if not (where.parent / name).is_file()]
        if gone:
            raise CheckpointError(f"{where} names {gone[0]}, which is not there")
        return tuple(where.parent / name for name in names)
    if where.name.endswith(SUFFIX):
        if not where.is_file():
            raise CheckpointError(f"no file {where}")
        return (where,)
    return ()


def read_tensors(
    files: Sequence[File], *, verify: bool = False
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors by name, and the metadata of the files; reads no data. If a file has checksums, its
    header is compared with them here, and each tensor before its first part is read.

    Args:
        files: the files to read.
        verify: whether a file without checksums is an error.

    Raises:
        CheckpointError: safetensors is not installed, a file is damaged or foreign, a type has no
            counterpart, or two files have a tensor with the same name.
    """
    leaves: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, begin, raw = _header(file)
        file_metadata = header.pop("__metadata__", {})
        sums = check_header(raw, file_metadata, file)
        if sums is None and verify:
            raise CheckpointError(
                f"{file} has no checksums: it was written by an older version or another program"
            )
        for key, value in file_metadata.items():
            metadata.setdefault(key, value)
        order = sorted(header, key=lambda name: header[name]["data_offsets"])
        if sums is not None and len(sums) != len(order):
            raise CheckpointError(f"{file} is damaged: {len(sums)} crc32 for {len(order)} tensors")
        for k, name in enumerate(order):
            entry = header[name]
            if name in leaves:
                raise CheckpointError(f"{file}: {name} is in another file as well")
            dtype = TYPES.get(entry["dtype"])
            if dtype is None:
                raise CheckpointError(f"{file}: {name} is of type {entry['dtype']}, unknown here")
            crc = None if sums is None else sums[k]
            leaves[name] = _leaf(file, name, dtype, entry, begin, crc)
    return leaves, metadata


def write_tensors(
    leaves: Mapping[Path, Stored],
    to: File,
    separator: str,
    max_bytes: int,
    metadata: Mapping[str, str],
) -> list[File]:
    """Write leaves as one file, or as several with an index.

    Args:
        leaves: the leaves to write.
        to: a file that ends in ``.safetensors``, or a folder, in which names start with ``model``.
        separator: joins keys in names.
        max_bytes: largest size of the elements in a file; a larger leaf gets a separate file.
        metadata: texts for the header of every file.

    Raises:
        CheckpointError: a file exists already or can't be written, or a type has no counterpart;
            no file is left in that case.
    """
    for path, leaf in leaves.items():
        if leaf.dtype not in _NAMES:
            raise CheckpointError(f"safetensors have no type for {path_text(path)}: {leaf.dtype}")
    base = to if to.name.endswith(SUFFIX) else to / f"model{SUFFIX}"
    stem = base.name.removesuffix(SUFFIX)
    groups = _groups(leaves, max_bytes)
    count = len(groups)
    names = [f"{stem}-{k + 1:05d}-of-{count:05d}{SUFFIX}" for k in range(count)]
    files = [base.parent / name for name in names] if count > 1 else [base]
    index = base.parent / f"{stem}{INDEX}"
    there = [file for file in (*files, index) if file.exists()]
    if there:
        raise CheckpointError(f"{there[0]} is there already")
    written: list[File] = []
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for file, group in zip(files, groups, strict=True):
            with _in_place(file) as out:
                _write(out, {path_text(p, separator): leaves[p] for p in group}, metadata)
            written.append(file)
        if count > 1:
            index_content = {
                "metadata": {"total_size": sum(x.nbytes for x in leaves.values())},
                "weight_map": {
                    path_text(p, separator): file.name
                    for file, group in zip(files, groups, strict=True)
                    for p in group
                },
            }
            with _in_place(index) as out:
                out.write(index_bytes(index_content))
            written.append(index)
    except BaseException as error:
        for file in written:
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {to}: {brief(error)}") from error
        raise
    return written


def _header(file: File) -> tuple[dict[str, Any], int, bytes]:
    """The header, where the data begins, and the bytes before it."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            "safetensors is not installed: pip install 'meshwright[safetensors]'"
        ) from error
    try:
        with safe_open(file, framework="numpy"):  # checks length, offsets, overlaps
            pass
        with file.open("rb") as raw:
            first = raw.read(8)
            (length,) = struct.unpack("<Q", first)
            text = raw.read(length)
            return object_of(parsed(text, file), file), 8 + length, first + text
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{file} is damaged, or no safetensors: {brief(error)}") from error


def _leaf(
    file: File, name: str, dtype: np.dtype[Any], entry: Any, begin: int, crc: int | None
) -> Stored:
    shape = tuple(entry["shape"])
    first, last = (begin + offset for offset in entry["data_offsets"])
    unchecked = [] if crc is None else [crc]

    def read(index: Index) -> np.ndarray:
        if unchecked:  # the whole tensor, before its first part is read
            check_tensor(file, name, first, last, unchecked[0])
            unchecked.clear()
        if first == last:
            return np.empty(shape, dtype)[index]
        try:
            raw = np.memmap(file, np.uint8, "r", first, (last - first,))
            return np.array(raw.view(dtype).reshape(shape)[index])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: {name} can't be read: {brief(error)}") from error

    return Stored((name,), shape, dtype, read)


def _groups(leaves: Mapping[Path, Stored], max_bytes: int) -> list[list[Path]]:
    groups: list[list[Path]] = [[]]
    used = 0
    for path, leaf in leaves.items():
        if groups[-1] and used + leaf.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(path)
        used += leaf.nbytes
    return groups


@contextlib.contextmanager
def _in_place(file: File) -> Iterator[BinaryIO]:
    """Open a file for writing; it appears in its place only when it is complete."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # a link there would lead elsewhere
    try:
        with unfinished.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _write(out: BinaryIO, leaves: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    # the largest elements first, so that all are aligned to their size
    order = sorted(leaves, key=lambda name: (-leaves[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        leaf = leaves[name]
        header[name] = {
            "dtype": _NAMES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [at, at + leaf.nbytes],
        }
        at += leaf.nbytes
    out.write(header_bytes(header, None, len(order)))
    sums = dict.fromkeys(order, 0)
    for name in order:
        leaf = leaves[name]
        for index in leaf.parts() if leaf.size else ():
            part = np.ascontiguousarray(leaf.read(index)).reshape(-1).view(np.uint8).data
            sums[name] = zlib.crc32(part, sums[name])
            out.write(part)
    out.seek(0)
    # tensors without elements share their offset with others: sort as a reader does
    places = sorted(order, key=lambda name: header[name]["data_offsets"])
    out.write(header_bytes(header, [sums[name] for name in places], len(order)))
