"""Writes, reads and finds runs on disk: folders with a run.json and a records.jsonl.

`RunWriter` flushes each record, one line, to disk before the next point starts, so a crash loses at
most the point in progress. `read_run` accepts and reports an incomplete last line, missing lines
and repeated lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from io import FileIO
from pathlib import Path

from quantbench.errors import InputError, StoreError
from quantbench.files import folders_with, open_binary, reason
from quantbench.store.record import Failed, Measured, Record, record_from_json, record_to_json
from quantbench.store.run import RunInfo, now_text, read_run_info, require_name, write_run_info
from quantbench.units import listed

# Maximum number of lines that a message names.
_MOST_NAMED = 5
# Maximum number of runs that a message names.
_MOST_RUNS_NAMED = 3
_WRITABLE = "a results folder that can be written"
#: largest size of a records.jsonl that is read
_LARGEST_RECORDS_BYTES = 2**32


@dataclass(frozen=True)
class Run:
    """A run that was read from disk.

    warnings: messages about accepted defects of records.jsonl.
    retried: keys of the points that were measured again after a failure.
    regraded: number of records that replaced a record with the same measurement and another grade.
    torn_bytes: number of bytes in an incomplete last line of records.jsonl; 0 if there is none.
    """

    folder: Path
    info: RunInfo
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()
    retried: frozenset[str] = frozenset()
    regraded: int = 0
    torn_bytes: int = 0


def read_run(folder: Path) -> Run:
    """Reads the metadata and the records of a run.

    A point of a measured run keeps one record. A second record of the point replaces the first if
    the first is a failure, or if both have the same measurement with different grades. Any other
    line that repeats an earlier line or point is skipped and reported.

    Raises StoreError, which names the file and, for a broken record, the line.
    """
    info = read_run_info(folder)
    path = folder / "records.jsonl"
    records: list[Record] = []
    points: dict[str, int] = {}  # index in `records` of each point, by key
    digests: set[bytes] = set()
    retried: set[str] = set()
    regraded = 0
    repeats = []
    torn_bytes = 0
    for number, (line, record) in enumerate(_lines(path), start=1):
        if record is None:
            torn_bytes = len(line)
            break
        digest = sha256(line.strip()).digest()
        # An imported table may have several kernels for one workload. The records of these kernels
        # have the same key, and all are kept.
        is_point = info.origin == "measured" and record.role == "point"
        place = points.get(record.key) if is_point else None
        if digest in digests:
            repeats.append(number)
        elif place is None:
            if is_point:
                points[record.key] = len(records)
            records.append(record)
        elif _same_measurement(records[place], record):
            regraded += 1
            records[place] = record
        elif isinstance(records[place].outcome, Failed) and record.key not in retried:
            retried.add(record.key)
            records[place] = record
        else:
            repeats.append(number)
            continue
        digests.add(digest)
    warnings = []
    absent = not os.path.lexists(path)
    if absent:
        warnings.append(f"{path} is missing, and with it every record")
    if torn_bytes:
        warnings.append(
            f"{path}: the last line is torn ({torn_bytes} bytes); its point was not kept"
        )
    if repeats:
        lines = listed(repeats, _MOST_NAMED)
        warnings.append(f"{path}: records that repeat another count once (lines {lines})")
    # num_records counts all written records, also those that a later record replaced.
    missing = (info.num_records or 0) - len(records) - len(retried) - regraded
    if missing > 0 and not absent:
        warnings.append(f"{path}: {missing} of {info.num_records} records missing")
    if info.origin == "measured" and (absent or torn_bytes or missing > 0):
        warnings[-1] += f"; measure what is missing: quantbench sweep --resume {folder}"
    return Run(
        folder, info, tuple(records), tuple(warnings), frozenset(retried), regraded, torn_bytes
    )


def _same_measurement(one: Record, other: Record) -> bool:
    """Returns whether two records of a point have the same measurement with different grades."""
    if not isinstance(one.outcome, Measured) or not isinstance(other.outcome, Measured):
        return False
    same = one.outcome.measurement == other.outcome.measurement
    return same and one.outcome.grade != other.outcome.grade


def _lines(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """Yields each line of records.jsonl with its record.

    The record of an incomplete last line is None. Raises StoreError for any other broken line.
    """
    if not os.path.lexists(path):
        return
    try:
        with open_binary(path, most_bytes=_LARGEST_RECORDS_BYTES) as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = record_from_json(json.loads(line))
                except (InputError, ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise StoreError(
                            "read run", f"{path}:{number} ({error})", "one record a line"
                        ) from None
                    record = None
                yield line, record
    except OSError as error:
        raise StoreError("read run", f"{path} ({reason(error)})", "a readable file") from None


class RunWriter:
    """Writer of a run, with an exclusive lock on the run's records.jsonl.

    Create a writer with `create` or `resume`, and use it as a context manager.

    records: the open and locked records.jsonl.
    count: number of written records, including those that a later record replaced.
    made: folders that were created for the run, innermost first; empty for a resumed run.
    """

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        records: FileIO,
        *,
        count: int = 0,
        made: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self.info = info
        self.count = count
        self._records = records
        self._made = made

    @classmethod
    def create(cls, results: Path, info: RunInfo) -> RunWriter:
        """Creates `results/<device-slug>/<run-id>/` and writes run.json.

        Raises StoreError if the run exists, if the name of the run or of its device is unsafe, or
        if the folder cannot be written.
        """
        require_name("create run", info.device.name)
        require_name("create run", info.run_id)
        folder = results / info.device.name / info.run_id
        made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
        info = replace(info, num_records=None)
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise StoreError(
                "create run", f"{folder} exists", "a new run id, or --resume"
            ) from None
        except OSError as error:
            raise StoreError("create run", f"{folder} ({error.strerror})", _WRITABLE) from None
        records = _open_locked(folder)
        try:
            write_run_info(folder, info)
        except StoreError:
            records.close()
            raise
        return cls(folder, info, records, made=made)

    @classmethod
    def resume(cls, folder: Path) -> tuple[RunWriter, Run]:
        """Opens an existing run to append records, and returns the writer and the run.

        An incomplete last line is removed, so that its point is measured again.

        folder: folder of the run, or a symbolic link to the folder.

        Raises StoreError if the folder contains no readable run, or if another process writes it.
        """
        if folder.is_symlink():
            folder = folder.resolve()
        read_run_info(folder)  # raises before a file is created in a folder without a run
        records = _open_locked(folder)
        try:
            run = read_run(folder)
            _trim_torn_line(folder / "records.jsonl", run.torn_bytes)
        except StoreError:
            records.close()
            raise
        count = len(run.records) + len(run.retried) + run.regraded
        return cls(folder, run.info, records, count=count), run

    def append(self, record: Record) -> None:
        """Appends one record and flushes it to disk. A failed write leaves the file unchanged."""
        self.extend((record,))

    def extend(self, records: Iterable[Record]) -> None:
        """Appends many records, with one flush to disk at the end.

        Raises StoreError if the write fails, and leaves the file unchanged.
        """
        start = os.fstat(self._records.fileno()).st_size
        added = 0
        try:
            for record in records:
                added += 1
                data = record_to_json(record)
                line = json.dumps(data, separators=(",", ":"), allow_nan=False)
                left = memoryview(f"{line}\n".encode())
                while left:
                    left = left[self._records.write(left) :]
            os.fsync(self._records.fileno())
        except OSError as error:
            os.ftruncate(self._records.fileno(), start)
            raise StoreError(
                "write record", f"{self._records.name} ({error.strerror})", "room on the disk"
            ) from None
        self.count += added

    def update(self, info: RunInfo) -> None:
        """Replaces run.json with `info` and the current number of records."""
        self.info = replace(info, num_records=self.count)
        write_run_info(self.folder, self.info)

    def end(self, how: str, phases_s: Mapping[str, float]) -> None:
        """Writes the run's ending and time of ending to run.json, and adds durations of phases.

        how: ending of the run, one of `run.ENDINGS`.
        phases_s: duration of each phase in s, by phase, which is added to the durations so far.
        """
        total_s = Counter(self.info.phases_s)
        total_s.update(phases_s)
        self.update(replace(self.info, ended=now_text(), how_ended=how, phases_s=dict(total_s)))

    def close(self) -> None:
        """Closes records.jsonl, which releases the lock."""
        self._records.close()

    def remove_if_empty(self) -> None:
        """Removes the folder of a new run without records; call this method before `close`.

        Parent folders that were created for the run are removed too. A resumed run is never
        removed.
        """
        if self.count or not self._made:
            return
        for name in ("records.jsonl", "run.json"):
            (self.folder / name).unlink(missing_ok=True)
        for path in self._made:
            with suppress(OSError):  # a folder that another process uses is not empty
                path.rmdir()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_locked(folder: Path) -> FileIO:
    """Opens records.jsonl with an exclusive lock, which the OS releases when the process ends.

    Raises StoreError if another process holds the lock.
    """
    import fcntl

    path = folder / "records.jsonl"
    try:
        # The file is unbuffered, so every write reaches the operating system. With O_NONBLOCK,
        # opening a pipe does not wait for a reader.
        records = FileIO(
            path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)
        )
    except OSError as error:
        raise StoreError("write run", f"{folder} ({error.strerror})", _WRITABLE) from None
    try:
        fcntl.flock(records, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        records.close()
        raise StoreError(
            "write run", f"{folder} is being written by another sweep", "one sweep per run"
        ) from None
    return records


def _trim_torn_line(path: Path, torn: int) -> None:
    """Removes an incomplete last line, or adds the newline that a complete last line lacks.

    torn: number of bytes in the incomplete line; 0 if there is none.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if torn:
            file.truncate(size - torn)
        elif size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_one_run(folder: Path) -> Run:
    """Reads the run in `folder`, or the only run below it.

    Raises StoreError if the folder itself is no run but contains runs, as results/ does, or if it
    contains records of another run.
    """
    if not os.path.exists(folder / "run.json"):
        below = [*find_runs(folder), *folders_with(folder, "*/run.json")]
        if len(below) == 1:
            folder = below[0]
        elif below:
            holds = f"{folder} holds {len(below)} runs"
            names = listed(below, _MOST_RUNS_NAMED)
            raise StoreError("read run", holds, f"one of them: {names}")
    run = read_run(folder)
    others = sorted({record.run_id for record in run.records} - {run.info.run_id})
    if others:
        raise StoreError(
            "read run",
            f"{folder} has records of {', '.join(others[:_MOST_RUNS_NAMED])}",
            f"records of {run.info.run_id} alone",
        )
    return run


def find_runs(results: Path) -> Iterator[Path]:
    """Yields the folders `results/<device>/<run>` that contain a run, sorted by path."""
    yield from folders_with(results, "*/*/run.json")
