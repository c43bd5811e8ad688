"""Whether a result can be written where it is wanted, asked before the work that makes it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from quantbench.errors import StoreError


def check_file(operation: str, path: Path) -> None:
    """Raise StoreError where the file `path` cannot be made, its folders included. Nothing is left behind."""
    if os.path.isdir(path):
        raise StoreError(operation, f"{path} (Is a directory)", "a file that can be written")
    _try(operation, path.parent, str(path), "a file that can be written")


def check_folder(operation: str, folder: Path) -> None:
    """Raise StoreError where a folder, or a file in it, cannot be made. Nothing is left behind."""
    _try(operation, folder, str(folder), "a folder that can be written")


def _try(operation: str, folder: Path, wanted: str, expected: str) -> None:
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(operation, f"{wanted} ({error.strerror})", expected) from None
    finally:
        for path in missing:
            with suppress(OSError):  # not empty: somebody else has come to use it
                path.rmdir()
