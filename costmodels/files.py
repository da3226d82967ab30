"""Writing files whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, with the permissions of any new file (the umask's).

    Raises:
        OSError: it can't be written.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "x", encoding="utf-8") as out:
            out.write(text)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
