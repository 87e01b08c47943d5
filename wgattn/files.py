"""Files that are written all at once or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file so that a reader, or an interruption, finds either the old one or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # Ctrl-C may come when it has its name already
            os.unlink(temporary)
        raise
