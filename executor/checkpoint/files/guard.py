"""Compares each file of a state with its checksum once, before the file is read.

The files that describe a state are compared when it is opened. The data files of an array are
compared before the array is read; the OCDBT tree that Orbax writes lists them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path as File
from typing import Any

import tensorstore as ts

from executor.checkpoint.common import CheckpointError, brief
from executor.checkpoint.files.checksums import read_sums

log = logging.getLogger("meshwright")
_DATA = re.compile(r"ocdbt\.process_[^/]*/d/")
_warned: set[str] = set()


class ChecksumGuard:
    """Compares the files in the folder of a state with their checksums.

    Args:
        state: the folder of the state; the folder of the step has the checksums. Without them,
            nothing is compared, and a warning is logged once.

    Raises:
        CheckpointError: the checksums or the files that describe the state are damaged.
    """

    def __init__(self, state: File) -> None:
        self._state = state
        self._sums = read_sums(state.parent)
        self._passed: set[str] = set()
        self._of_arrays: dict[str, set[str]] | None = None
        if self._sums is None:
            _warn(state)
        else:
            inside = [x for x in self._sums.files if x.startswith(f"{state.name}/")]
            self._data = {x for x in inside if _DATA.match(x.removeprefix(f"{state.name}/"))}
            self.check(x for x in inside if x not in self._data)

    def files_of(self, arrays: Iterable[str]) -> list[str]:
        """The data files of arrays (Orbax's names) that have checksums, sorted."""
        if self._sums is None:
            return []
        if self._of_arrays is None:
            self._of_arrays = data_files(self._state)
        files: set[str] = set()
        for array in arrays:
            files |= {f"{self._state.name}/{x}" for x in self._of_arrays.get(array, ())}
        return sorted(files & self._sums.files.keys())

    def check(self, files: Iterable[str]) -> None:
        """Compare files that were not compared yet; raises CheckpointError, which names them."""
        left = [x for x in files if x not in self._passed]
        if self._sums is not None and left:
            self._sums.check(left)
            self._passed.update(left)


def data_files(state: File) -> dict[str, set[str]]:
    """The data files of each array, by Orbax's name of the array, as paths below the folder. Small
    arrays are stored in the tree itself and have none.

    Raises:
        CheckpointError: the tree can't be read, or refers to a file outside the folder.
    """
    if not (state / "manifest.ocdbt").exists():
        return {}
    files_by_array: dict[str, set[str]] = {}
    try:
        store = ts.KvStore.open(f"file://{state}/").result()
        root = ts.ocdbt.dump(store).result()["versions"][-1]["root"]
        for key, value in _values(store, root.get("location"), b""):
            name = "/".join(value.split(":")[1:3]).replace("//", "/").lstrip("/")
            if ".." in name.split("/"):
                raise CheckpointError(f"{state} refers to {name!r}, outside of the folder")
            array = key.rpartition(b"/")[0].decode(errors="replace")
            files_by_array.setdefault(array, set()).add(name)
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{state} is damaged, or not a checkpoint: {brief(error)}") from error
    return files_by_array


def writer_of(file: str) -> int:
    """The process that wrote a data file; 0 if its name has no process number."""
    match = re.search(r"ocdbt\.process_([0-9]{1,9})/", file)
    return int(match[1]) if match else 0


def _values(store: Any, node: str | None, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    """Keys and locations of the values below a node of the tree that are stored in files."""
    if node is None:
        return
    for entry in ts.ocdbt.dump(store, node).result()["entries"]:
        key = prefix + entry["key"]
        if "indirect_value" in entry:
            yield key, entry["indirect_value"]
        elif "location" in entry:
            below = prefix + entry.get("subtree_common_prefix", b"")
            yield from _values(store, entry["location"], below)


def _warn(state: File) -> None:
    """Warn that there are no checksums, once per folder of checkpoints."""
    run = str(state.parent.parent)
    if run not in _warned:
        _warned.add(run)
        log.warning(
            "%s has no checksums (written by an older version or another program): bits that "
            "changed inside its arrays are not noticed",
            state.parent,
        )
