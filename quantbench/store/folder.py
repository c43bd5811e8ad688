"""A run's folder: made once, written by one process, read by anybody.

Each record is one line, flushed to the disk before the next point starts, so that whatever kills the process costs at
most the point in flight. A torn last line is dropped and reported; a broken line before it means that the file was
tampered with or the disk is failing, and is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

from quantbench.errors import InputError, StoreError
from quantbench.files import folders_with, open_binary, read_bytes, reason
from quantbench.store.record import Record, record_from_json, record_to_json
from quantbench.store.run import RunInfo, read_run_info, require_name, write_run_info

#: records.jsonl may be this large
LARGEST_RECORDS_BYTES = 2**32


@dataclass(frozen=True)
class Run:
    """A run as read back. folder: where it lies. warnings: what was tolerated while reading, in words."""

    folder: Path
    info: RunInfo
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()


def read_run(folder: Path) -> Run:
    """Read a whole run. Raises StoreError in one line that names the file and the line."""
    info = read_run_info(folder)
    path = folder / "records.jsonl"
    records, torn = _read_records(path)
    warnings = [] if torn is None else [f"{path}: the last line is torn ({torn} bytes); its point was not kept"]
    return Run(folder, info, tuple(records), tuple(warnings))


def _read_records(path: Path) -> tuple[list[Record], int | None]:
    """Records of the file, and the size of a torn last line if there is one."""
    if not os.path.lexists(path):
        return [], None
    records = []
    try:
        with open_binary(path, most_bytes=LARGEST_RECORDS_BYTES) as file:
            for number, line in enumerate(file, start=1):
                try:
                    records.append(record_from_json(json.loads(line)))
                except (InputError, ValueError, RecursionError) as error:
                    if not line.endswith(b"\n"):
                        return records, len(line)
                    raise StoreError("read run", f"{path}:{number} ({error})", "one record a line") from None
    except OSError as error:
        raise StoreError("read run", f"{path} ({reason(error)})", "a readable file") from None
    return records, None


class RunWriter:
    """The one process that writes into a run's folder. Use as a context manager; see `create` and `resume`."""

    def __init__(self, folder: Path, info: RunInfo, records: FileIO) -> None:
        self.folder = folder
        self.info = info
        self._records = records

    @classmethod
    def create(cls, results: Path, info: RunInfo) -> RunWriter:
        """Make `results/<device-slug>/<run-id>/` and write run.json. An existing run is never written over."""
        for name in (info.device.name, info.run_id):
            require_name("create run", name)
        folder = results / info.device.name / info.run_id
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise StoreError("create run", f"{folder} exists", "a new run id, or --resume") from None
        except OSError as error:
            raise StoreError(
                "create run", f"{folder} ({error.strerror})", "a results folder that can be written"
            ) from None
        records = _open_alone(folder)
        try:
            write_run_info(folder, info)
        except StoreError:
            records.close()
            raise
        return cls(folder, info, records)

    @classmethod
    def resume(cls, folder: Path) -> tuple[RunWriter, Run]:
        """Open a run to add what is missing. A torn last line is cut off (its point will be measured again)."""
        read_run_info(folder)  # says what is wrong with the folder before a file is made in it
        records = _open_alone(folder)
        try:
            run = read_run(folder)
            _end_at_a_line(folder / "records.jsonl", torn=bool(run.warnings))
        except StoreError:
            records.close()
            raise
        return cls(folder, run.info, records), run

    def append(self, record: Record) -> None:
        """Write one record and force it to the disk; where that fails, nothing of it is left in the file."""
        self.extend((record,))

    def extend(self, records: Iterable[Record]) -> None:
        """Write many records that cost nothing to make again (an import) and force them to the disk once, at the end;
        where that fails, nothing of them is left in the file."""
        start = os.fstat(self._records.fileno()).st_size
        try:
            for record in records:
                line = json.dumps(record_to_json(record), separators=(",", ":"), allow_nan=False) + "\n"
                left = memoryview(line.encode())
                while left:
                    left = left[self._records.write(left) :]
            os.fsync(self._records.fileno())
        except OSError as error:
            os.ftruncate(self._records.fileno(), start)
            raise StoreError("write record", f"{self._records.name} ({error.strerror})", "room on the disk") from None

    def update(self, info: RunInfo) -> None:
        """Replace run.json, for how the run ended and what it cost."""
        self.info = info
        write_run_info(self.folder, info)

    def close(self) -> None:
        """Let go of the folder."""
        self._records.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_alone(folder: Path) -> FileIO:
    """Open records.jsonl for this process alone; the kernel lets go of the lock however the process ends."""
    import fcntl

    try:
        # Unbuffered: what is written is with the system.
        records = FileIO(folder / "records.jsonl", "ab", opener=_open_without_waiting)
    except OSError as error:
        raise StoreError("write run", f"{folder} ({error.strerror})", "a results folder that can be written") from None
    try:
        fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        records.close()
        raise StoreError("write run", f"{folder} is being written by another sweep", "one sweep per run") from None
    return records


def _open_without_waiting(path: str, flags: int) -> int:
    """For FileIO: a pipe in the place of a file is refused, not waited for."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _end_at_a_line(path: Path, *, torn: bool) -> None:
    """Cut a torn last line off; end a whole one that lacks only its newline."""
    data = read_bytes(path, most_bytes=LARGEST_RECORDS_BYTES)
    if not data or data.endswith(b"\n"):
        return
    with path.open("r+b") as file:
        if torn:
            file.truncate(data.rfind(b"\n") + 1)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def find_runs(results: Path) -> Iterator[Path]:
    """Folders below `results` that hold a run, oldest first by name."""
    yield from folders_with(results, "*/*/run.json")
