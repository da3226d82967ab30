"""Measurements of an unfinished calibration, in a folder beside its file, so that the same command
continues where it was interrupted.

The folder holds the compiled programs (JAX's persistent compilation cache) and the times of every
finished round. It belongs to one request: another cluster, device, version of JAX, scale or list of
programs starts from the beginning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from costmodels.files import write_whole

_CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


class Rounds:
    """Times of finished rounds, in seconds per program, stored in a folder if there is one.

    Args:
        folder: where the rounds are stored; None stores nothing.
        request: the request as plain values; stored rounds of another request are dropped.
    """

    def __init__(self, folder: Path | None, request: Mapping[str, object]) -> None:
        self.folder = folder
        self.request = dict(request)
        self.done: list[list[float]] = []
        if folder is not None:
            self.done = self._read(folder / "rounds.json")

    def _read(self, path: Path) -> list[list[float]]:
        try:
            content = json.loads(path.read_text())
            fits = content["request"] == self.request
            rounds = [[float(s) for s in times] for times in content["rounds"]] if fits else []
        except (OSError, ValueError, KeyError, TypeError):  # no file yet, or a foreign one
            return []
        programs = self.request["programs"]
        size = len(programs) if isinstance(programs, list) else 0
        return rounds if all(len(times) == size for times in rounds) else []

    def add(self, times: Sequence[float]) -> None:
        """Add a finished round, and store it."""
        self.done.append(list(times))
        if self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            content = {"request": self.request, "rounds": self.done}
            write_whole(self.folder / "rounds.json", json.dumps(content))


def folder_of(out: Path) -> Path:
    """The folder beside an unfinished profile."""
    return out.with_name(out.name + ".part")


@contextmanager
def compiled_in(folder: Path) -> Iterator[None]:
    """Write compiled programs to the folder, and read them from there."""
    settings = {"jax_compilation_cache_dir": str(folder / "compiled"), **_CACHE}
    before = {name: getattr(jax.config, name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def forget(folder: Path) -> None:
    """Remove the folder of a calibration that ended."""
    shutil.rmtree(folder, ignore_errors=True)
