"""What a calibration has measured so far, in a folder beside its file, so that the same command
goes on where it was interrupted.

The folder holds the compiled programs (JAX's persistent compilation cache) and the times of every
finished round. It is of one request: another cluster, device, jax or list of programs starts anew.
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
    """Times of finished rounds, seconds by program, kept in a folder if there is one.

    Args:
        folder: where they are kept; None keeps nothing.
        request: what was asked for, plain values; rounds of another request are dropped.
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
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or not written by this
            return []
        programs = self.request["programs"]
        size = len(programs) if isinstance(programs, list) else 0
        return rounds if all(len(times) == size for times in rounds) else []

    def add(self, times: Sequence[float]) -> None:
        """Keep a finished round."""
        self.done.append(list(times))
        if self.folder is not None:
            self.folder.mkdir(exist_ok=True)
            content = {"request": self.request, "rounds": self.done}
            write_whole(self.folder / "rounds.json", json.dumps(content))


def folder_of(out: Path) -> Path:
    """The folder beside a profile that is not finished."""
    return out.with_name(out.name + ".part")


@contextmanager
def compiled_in(folder: Path) -> Iterator[None]:
    """Compiled programs go to the folder, and come from there."""
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
