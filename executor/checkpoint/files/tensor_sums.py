"""Checksums in safetensors files: of each tensor and of the header, in the header's metadata.

The header precedes the tensors. So zeros of the same length are written first, and replaced once
the tensors are written. Other programs ignore the checksums and read the file as usual.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

from executor.checkpoint.common import CheckpointError

TENSORS, HEADER = "meshwright.crc32.tensors", "meshwright.crc32"
"""Keys of the metadata: for the CRC-32 of the tensors in the order of their data, and for that of
length and header, computed with zeros in its place; each has 8 hexadecimal digits."""

CHUNK_BYTES = 4 * 2**20
_ZEROS = "00000000"
_MARK = f'"{HEADER}'.encode()
"""Prefix of both keys: after one flipped bit, one of them still shows that there are checksums."""


def header_bytes(header: Mapping[str, Any], sums: Sequence[int] | None, count: int) -> bytes:
    """Length and header of a file, padded to a multiple of 8 bytes.

    Args:
        header: the header, with its ``__metadata__``.
        sums: CRC-32 of the tensors; None while they are unknown.
        count: number of tensors.
    """
    texts = [_ZEROS] * count if sums is None else [f"{crc:08x}" for crc in sums]
    metadata = header["__metadata__"] | {TENSORS: " ".join(texts), HEADER: _ZEROS}
    raw = sealed(dict(header) | {"__metadata__": metadata}, ending=b"", multiple=8)
    length = struct.pack("<Q", len(raw))
    return length + raw.replace(_field(_ZEROS), _field(f"{zlib.crc32(length + raw):08x}"))


def sealed(tree: Mapping[str, Any], ending: bytes, multiple: int = 1) -> bytes:
    """Compact JSON, padded with spaces to a multiple of ``multiple`` bytes."""
    raw = json.dumps(tree, separators=(",", ":")).encode() + ending
    return raw + b" " * (-len(raw) % multiple)


def check_header(raw: bytes, metadata: Mapping[str, str], where: File) -> list[int] | None:
    """Compare length and header with their CRC-32.

    Returns:
        The CRC-32 of the tensors in the order of their data; None if the file has none.

    Raises:
        CheckpointError: the header is damaged.
    """
    if _MARK not in raw:
        return None
    if not _holds(raw, metadata.get(HEADER)):
        raise CheckpointError(
            f"{where} is damaged: the crc32 of its header differs (or another program wrote it "
            "again with the metadata of this one)"
        )
    return [int(text, 16) for text in metadata[TENSORS].split()]


def check_tensor(file: File, name: str, first: int, last: int, crc: int) -> None:
    """Compare the bytes of a tensor with their CRC-32; raises CheckpointError, which names it."""
    got = 0
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(first)
            left = last - first
            while left and (chunk := opened.read(min(left, CHUNK_BYTES))):
                got = zlib.crc32(chunk, got)
                left -= len(chunk)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from error
    if left or got != crc:
        raise CheckpointError(f"{file}: {name} is damaged: got crc32 {got:08x}, expected {crc:08x}")


def index_bytes(index: Mapping[str, Any]) -> bytes:
    """The text of an index, with its CRC-32 in its metadata."""
    metadata = index["metadata"] | {TENSORS: "in each file", HEADER: _ZEROS}
    raw = sealed(dict(index) | {"metadata": metadata}, ending=b"\n")
    return raw.replace(_field(_ZEROS), _field(f"{zlib.crc32(raw):08x}"))


def check_index(raw: bytes, index: Mapping[str, Any], where: File) -> bool:
    """Compare an index with its CRC-32; returns whether it has one.

    Raises:
        CheckpointError: the CRC-32 differs.
    """
    if _MARK not in raw:
        return False
    metadata = index.get("metadata")
    if not isinstance(metadata, dict) or not _holds(raw, metadata.get(HEADER)):
        raise CheckpointError(f"{where} is damaged: its crc32 differs")
    return True


def _holds(raw: bytes, crc: Any) -> bool:
    """Whether the CRC-32 of the bytes, with zeros in its field, is ``crc``."""
    if not isinstance(crc, str) or not re.fullmatch(r"[0-9a-f]{8}", crc):
        return False
    field = _field(crc)
    return raw.count(field) == 1 and zlib.crc32(raw.replace(field, _field(_ZEROS))) == int(crc, 16)


def _field(crc: str) -> bytes:
    return f'"{HEADER}":"{crc}"'.encode()
