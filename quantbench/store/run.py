"""run.json: what a run is, on what it ran and how it ended.

History of the format:
1  first version.
2  num_records.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, StoreError, require_choice
from quantbench.files import read_json, reason
from quantbench.store.record import ORIGINS
from quantbench.store.typed import decode, encode

RUN_FORMAT = "quantbench-run"
RUN_VERSION = 2
ENDINGS = ("running", "complete", "interrupted", "budget", "failed")


# File systems take 255 bytes, and names are made longer (`-merged`).
_LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def require_name(operation: str, name: str) -> str:
    """Return `name` if a folder may be called so; raise StoreError otherwise: names from files and options never lead
    out of the folder that they are made in."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        expected = f"letters, digits, '.', '_' and '-', at most {_LONGEST_NAME}"
        raise StoreError(operation, f"name {name!r}"[:100], expected)
    return name


def now_text() -> str:
    """The time as run.json keeps it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunInfo:
    """What is true of a whole run.

    device, state: the device and how it was found. software: versions by name. axes: axis values by name. options:
    everything else that was asked for, enough to make the same plan again. environment: variables that change timing.
    started, ended: ISO 8601 in UTC; ended None while it runs. how_ended: one of ENDINGS. phases_s: seconds by phase.
    num_records: lines of records.jsonl when run.json was last written; None where that was not counted.
    """

    run_id: str
    device: DeviceSpec
    state: DeviceState
    software: dict[str, str]
    axes: dict[str, list[int]]
    options: dict[str, Any]
    seed: int
    environment: dict[str, str]
    started: str
    ended: str | None = None
    how_ended: str = "running"
    origin: str = "measured"
    source: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    num_records: int | None = None

    def __post_init__(self) -> None:
        require_choice("run.json", "how_ended", self.how_ended, ENDINGS)
        require_choice("run.json", "origin", self.origin, ORIGINS)


def write_run_info(folder: Path, info: RunInfo) -> None:
    """Write run.json whole or not at all: a reader never sees half of it."""
    data = {"format": RUN_FORMAT, "version": RUN_VERSION, **encode(info)}
    path = (folder / "run.json").resolve()  # a link stays one
    temporary = path.with_name("run.json.new")
    try:
        temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError("write run", f"{folder} ({error.strerror})", "a results folder that can be written") from None


def read_run_info(folder: Path) -> RunInfo:
    """The run's description. Raises StoreError with one line for a missing, foreign or broken file."""
    path = folder / "run.json"
    try:
        data = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        what = f"{folder} is a file" if os.path.isfile(folder) else str(folder)
        raise StoreError("read run", what, "a folder with run.json in it") from None
    except (OSError, ValueError) as error:
        raise StoreError("read run", f"{path} ({reason(error)})", "a readable JSON file") from None
    if not isinstance(data, dict) or data.pop("format", None) != RUN_FORMAT:
        raise StoreError("read run", str(path), f'a JSON object with format "{RUN_FORMAT}"')
    version = data.pop("version", None)
    if version not in range(1, RUN_VERSION + 1):
        raise StoreError("read run", f"{path} has version {version!r}", f"version 1 to {RUN_VERSION}")
    try:
        info = decode(RunInfo, data)
        require_name(f"read run {folder}", info.run_id)
        return info
    except InputError as error:
        raise StoreError("read run", f"{path} ({error})", "a run.json as quantbench writes it") from None
