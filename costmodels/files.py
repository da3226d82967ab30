"""Writing files whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: with its permissions if it is there, else those of any new
    file (the umask's). Of a symbolic link the file that it points to is written.

    Raises:
        OSError: it can't be written.
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
