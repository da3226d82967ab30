"""Checksums of the files of a checkpoint: written before it gets its name, compared on reading.

`checksums.json` in a step's folder has the size and CRC-32 of every file. Each process computes the
checksums of the files that it wrote. CRC-32 detects every flipped bit, and every burst of up to 32
bits. It detects accidents; it is not a signature.

Orbax changes two files in the commit itself. Their checksums are added right after it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path as File
from typing import TypeVar

from executor.checkpoint.common import CheckpointError
from executor.checkpoint.fields import object_of, parsed

NAME = "checksums.json"
PART = "checksums-of-process-"
FORMAT = "meshwright-checksums-1"
LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Files that Orbax changes in the commit; they are not needed to read a state."""

CHUNK_BYTES = 2**20
THREADS = 4

T = TypeVar("T")
Sum = tuple[int, int]
"""Size in bytes and CRC-32 of a file."""


@dataclass(frozen=True)
class Checksums:
    """The checksums of a folder.

    Attributes:
        folder: the folder of the step.
        files: path below the folder, with "/" -> size in bytes and CRC-32.
    """

    folder: File
    files: Mapping[str, Sum]

    def check(self, names: Iterable[str]) -> None:
        """Compare files with their checksums, several at a time.

        Args:
            names: paths below the folder; those without a checksum are skipped.

        Raises:
            CheckpointError: files are missing or damaged; names up to three.
        """
        known = [name for name in names if name in self.files]
        bad = [text for text in _mapped(self._damage, known) if text]
        if bad:
            more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise CheckpointError(f"{self.folder}: {'; '.join(bad[:3])}{more}")

    def _damage(self, name: str) -> str:
        """The damage to a file, in words; empty if there is none."""
        size, crc = self.files[name]
        try:
            got = sum_of(self.folder / name)
        except OSError as error:
            return f"{name} is missing or can't be read ({error.strerror})"
        if got[0] != size:
            return f"{name} is damaged: got {got[0]} bytes, expected {size}"
        if got[1] != crc:
            return f"{name} is damaged: got crc32 {got[1]:08x}, expected {crc:08x}"
        return ""


def sum_of(file: File) -> Sum:
    """Size in bytes and CRC-32 of a file; raises OSError."""
    if not stat.S_ISREG(os.stat(file).st_mode):  # a link to a device or a pipe has no end
        raise OSError(errno.EINVAL, "no regular file")
    size = crc = 0
    buffer = bytearray(CHUNK_BYTES)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            size += count
    return size, crc


def files_in(folder: File) -> list[str]:
    """Paths of all files below a folder, sorted; links to folders are not followed."""
    paths = []
    for where, _, names in os.walk(folder):
        paths += [(File(where) / name).relative_to(folder).as_posix() for name in names]
    return sorted(paths)


def write_part(state: File, process: int) -> None:
    """Write the checksums of the files that one process wrote into the folder of a state."""
    names = [f"ocdbt.process_{process}/{x}" for x in files_in(state / f"ocdbt.process_{process}")]
    _write(state / f"{PART}{process}.json", _sums(state, names))


def seal(folder: File) -> None:
    """Write the checksums of a step that is complete but does not have its final name yet."""
    sums: dict[str, Sum] = {}
    names = files_in(folder)
    for part in [x for x in names if File(x).name.startswith(PART)]:
        part_sums = _read(folder / part)
        above = File(part).parent
        sums.update({(above / name).as_posix(): known for name, known in part_sums.items()})
        (folder / part).unlink()
    left = [x for x in names if not File(x).name.startswith(PART) and x not in (NAME, *LATE)]
    known = {x: sums[x] for x in left if x in sums}
    _write(folder / NAME, known | _sums(folder, [x for x in left if x not in known]))


def add_late(folder: File) -> None:
    """After the commit, add checksums of the files that it changed; skips a step that is gone."""
    checksums = read_sums(folder)
    if checksums is not None:
        late = [name for name in LATE if (folder / name).is_file()]
        _write(folder / NAME, dict(checksums.files) | _sums(folder, late))


def read_sums(folder: File) -> Checksums | None:
    """The checksums of a step's folder; None if it has none.

    Raises:
        CheckpointError: they are damaged.
    """
    file = folder / NAME
    return Checksums(folder, _read(file)) if file.is_file() else None


def verified(folder: File) -> tuple[int, int, list[str]]:
    """Compare all files of a step with their checksums.

    Returns:
        The number of files compared, their size in bytes, and the files without a checksum.

    Raises:
        CheckpointError: there are no checksums, or files are missing or damaged.
    """
    checksums = read_sums(folder)
    if checksums is None:
        raise CheckpointError(
            f"{folder} has no checksums: it was written by an older version or another program; "
            "`planner checkpoint convert` writes a copy that has them"
        )
    checksums.check(checksums.files)
    others = [name for name in files_in(folder) if name not in checksums.files and name != NAME]
    return len(checksums.files), sum(size for size, _ in checksums.files.values()), others


def _sums(folder: File, names: list[str]) -> dict[str, Sum]:
    return dict(zip(names, _mapped(lambda name: sum_of(folder / name), names), strict=True))


def _mapped(function: Callable[[str], T], names: list[str]) -> list[T]:
    with ThreadPoolExecutor(max(1, min(THREADS, len(names)))) as pool:
        return list(pool.map(function, names))


def _write(file: File, sums: Mapping[str, Sum]) -> None:
    """Write atomically: one line of JSON, and its CRC-32 on a second line."""
    body = json.dumps({"format": FORMAT, "files": {k: list(v) for k, v in sorted(sums.items())}})
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as out:
        out.write(f"{body}\n{zlib.crc32(body.encode()):08x}\n")
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)


def _read(file: File) -> dict[str, Sum]:
    try:
        body, _, ending = file.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from error
    if ending != f"{zlib.crc32(body):08x}\n".encode():
        raise CheckpointError(f"{file} is damaged: its own crc32 differs")
    known = object_of(parsed(body, file), file)
    files = object_of(known.get("files"), f"files of {file}")
    if known.get("format") != FORMAT:
        raise CheckpointError(f"{file}: got format {known.get('format')!r}, expected {FORMAT!r}")
    for name, pair in files.items():
        plain = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not plain or name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise CheckpointError(f"{file}: {name!r} is no file below it with bytes and crc32")
    return {name: (pair[0], pair[1]) for name, pair in files.items()}
