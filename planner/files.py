"""Reading files that others wrote: regular files of bounded size, strict text and JSON."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import zlib
from collections import Counter
from typing import Any

MIB = 2**20
"""Bytes."""
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device"}


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The contents of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: it can't be read, is no regular file (a pipe does not block), or is larger than the
            limit; ``strerror`` says which.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a null byte in the path
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))
        with open(handle, "rb", closefd=False) as file:
            raw = file.read(limit + 1)
    finally:
        os.close(handle)
    if len(raw) > limit:
        reason = f"it is larger than {limit / MIB:g} MiB, the limit for such a file"
        raise OSError(errno.EFBIG, reason, str(path))
    return raw


def read_text(path: str | os.PathLike[str], limit: int) -> str:
    """The UTF-8 text of a regular file of at most ``limit`` bytes; raises OSError."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"it is no UTF-8 text (byte {error.start})"
        raise OSError(errno.EILSEQ, reason, str(path)) from error


def gunzipped(raw: bytes, limit: int) -> bytes:
    """The decompressed contents of a gzip file, at most ``limit`` bytes; uses no more memory.

    Raises:
        ValueError: it is no gzip file, is damaged, or contains more.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            inside = file.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not a gzip file: {error}") from error
    if len(inside) > limit:
        raise ValueError(f"decompressed, it is larger than {limit / MIB:g} MiB, the limit")
    return inside


def parsed_json(text: str) -> Any:
    """Parse JSON by the standard: no NaN, no infinity, no key twice in one object.

    Raises:
        ValueError: the text is not such JSON; the message is one line.
    """
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=_refused)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for ``object_pairs_hook``; raises ValueError for a key given twice."""
    whole = dict(pairs)
    if len(whole) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = max(counts, key=lambda key: counts[key])
        raise ValueError(f"the key {twice[:60]!a} stands twice in one object")
    return whole


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
