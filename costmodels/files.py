"""Atomic writes of files."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. An existing file keeps its permissions; a new one gets those of the
    umask. For a symbolic link, the file that it points to is written.

    Raises:
        OSError: the file can't be written.
    """
    path = path.resolve() if path.is_symlink() else path
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "x", encoding="utf-8") as out:
            out.write(text)
        if path.exists():
            draft.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
