"""The run that a report or a comparison is about, read and looked at before anything is made of it."""

from __future__ import annotations

import os
from pathlib import Path

from quantbench.errors import StoreError
from quantbench.files import folders_with
from quantbench.store.folder import Run, find_runs, read_run

_MOST_NAMED = 3


def read_one_run(folder: Path) -> Run:
    """Read the run in `folder`.

    Raises StoreError for a folder of several runs (results/ itself, or a device's), and for records that belong to
    another run: figures of two runs, and so perhaps of two devices, must not be mixed.
    """
    if not os.path.exists(folder / "run.json"):
        below = [*find_runs(folder), *folders_with(folder, "*/run.json")]
        if below:
            names = ", ".join(str(path) for path in below[:_MOST_NAMED]) + (", …" if len(below) > _MOST_NAMED else "")
            raise StoreError(
                "read run", f"{folder} holds {len(below)} run{'s' if len(below) > 1 else ''}", f"one of them: {names}"
            )
    run = read_run(folder)
    others = sorted({record.run_id for record in run.records} - {run.info.run_id})
    if others:
        shown = ", ".join(others[:_MOST_NAMED])
        raise StoreError("read run", f"{folder} has records of {shown}", f"records of {run.info.run_id} alone")
    return run
