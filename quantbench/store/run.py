"""Defines, writes and reads run.json: a run's device, options, software versions and ending.

The module also checks the names of runs.
"""

import json
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, StoreError, require_choice
from quantbench.files import read_json, reason, write_file
from quantbench.store.record import ORIGINS
from quantbench.store.typed import decode, encode

RUN_FORMAT = "quantbench-run"
RUN_VERSION = 2
ENDINGS = ("running", "complete", "interrupted", "budget", "failed")


# Longest name of a run, in characters. File systems allow 255 bytes, and suffixes such as `-merged`
# are added later.
_LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def require_name(operation: str, name: str) -> str:
    """Returns `name` if it is a safe name for a folder, without path separators.

    operation: name of the operation in the error message.

    Raises StoreError for an unsafe name.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise StoreError(
            operation,
            f"name {name!r}"[:100],
            f"letters, digits, '.', '_' and '-', at most {_LONGEST_NAME}",
        )
    return name


def now_text() -> str:
    """Returns the current time as run.json stores it: ISO 8601 in UTC, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RunInfo:
    """Metadata of a run, the contents of run.json.

    device: constants of the device.
    state: state of the device when the run began.
    software: version of each software by name.
    axes: sizes along each axis of the sweep, by axis name.
    options: all other options. The plan can be rebuilt from axes, options and seed.
    seed: seed of the inputs and of the order of the points.
    environment: environment variables that affect times.
    started, ended: times in ISO 8601 and UTC; `ended` is None during the run.
    how_ended: ending of the run, one of ENDINGS.
    origin, source: origin and source of the times, as in `Record`.
    phases_s: total duration of each phase in s, by phase.
    num_records: number of records when run.json was last written; None if they were not counted.
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
    """Writes run.json atomically, so that a reader never sees a partial file."""
    data = {"format": RUN_FORMAT, "version": RUN_VERSION, **encode(info)}
    text = json.dumps(data, indent=1) + "\n"
    expected = "a results folder that can be written"
    write_file("write run", folder / "run.json", text, expected=expected)


def read_run_info(folder: Path) -> RunInfo:
    """Reads run.json.

    Raises StoreError if the file is missing or broken, or has another format or version.
    """
    path = folder / "run.json"
    try:
        data = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        what = str(folder)
        if os.path.isfile(folder):
            what += " is a file"
        raise StoreError("read run", what, "a folder with run.json in it") from None
    except (OSError, ValueError) as error:
        raise StoreError("read run", f"{path} ({reason(error)})", "a readable JSON file") from None
    if not isinstance(data, dict) or data.pop("format", None) != RUN_FORMAT:
        raise StoreError("read run", str(path), f'a JSON object with format "{RUN_FORMAT}"')
    version = data.pop("version", None)
    if version != RUN_VERSION:
        raise StoreError("read run", f"{path} has version {version!r}", f"version {RUN_VERSION}")
    try:
        info = decode(RunInfo, data)
        require_name(f"read run {folder}", info.run_id)
        return info
    except InputError as error:
        raise StoreError(
            "read run", f"{path} ({error})", "a run.json as quantbench writes it"
        ) from None
