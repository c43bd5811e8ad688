"""Runs on disk: what is written is what is read, and nothing that was kept is ever lost."""

import errno
import json
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
from made_devices import A100 as SPEC

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, StoreError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Discarded, Grade, Measurement
from quantbench.store.folder import RunWriter, find_runs, read_run
from quantbench.store.record import (
    Failed,
    GridPosition,
    Measured,
    Record,
    Skipped,
    record_from_json,
    record_key,
    record_to_json,
)
from quantbench.store.run import RunInfo
from quantbench.timing.options import TimingOptions
from quantbench.workload import Collective, Gemm, Softmax

STATE = DeviceState(sm_clock_mhz=1410.0, throttle_reasons=("sw_power_cap",), note="")
INFO = RunInfo(
    run_id="2026-11-20T134500-n",
    device=SPEC,
    state=STATE,
    software={"torch": "2.11.0"},
    axes={"n": [64, 128]},
    options={"dims": ["n"]},
    seed=0,
    environment={},
    started="2026-11-20T13:45:00+00:00",
)
MEASUREMENT = Measurement(
    samples_us=(10.0, 10.5, 9.75),
    clocks_mhz=(1410.0, 1400.0, 1410.0),
    discarded=(Discarded(30.0, "throttled", 900.0),),
    stopped_by="precision",
    mode="events",
    cache="cold",
    state_before=STATE,
    state_after=replace(STATE, temperature_c=55.0),
)
LAUNCH = Launch(
    "nvjet_hsh_128x256", (8, 4, 1), (384, 1, 1), 168, 213016, 1, Tile(128, 256, 64, stages=3)
)


def record(n: int, outcome: object = None, **changes: object) -> Record:
    gemm = Gemm(m=64, n=n, k=64)
    made = Record(
        run_id=INFO.run_id,
        key=record_key(gemm, "torch.mm", TimingOptions()),
        workload=gemm,
        provider="torch.mm",
        outcome=outcome or Measured(MEASUREMENT, Grade("B", ("clock fell by 3 %",))),  # type: ignore[arg-type]
        launch=LAUNCH,
        places=(GridPosition({"n": n}, "gemm"),),
        elapsed_s=1.5,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def written(results: Path, *records: Record, info: RunInfo = INFO) -> Path:
    """The folder of a run of these records."""
    with RunWriter.create(results, info) as writer:
        writer.extend(records)
    return writer.folder


def sizes(folder: Path) -> list[int]:
    """The size n of each record."""
    return [r.workload.n for r in read_run(folder).records]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "made",
    [
        record(8),
        record(8, Skipped("fp8 needs a GPU")),
        record(8, Failed("timeout", "no answer within 60 s"), launch=None),
        record(8, launch=Launch("unknown_kernel")),
        record(8, origin="imported", source="a table"),
        record(8, role="reference", places=()),
        record(8, workload=Softmax(4, 16, 16), provider="torch.eager"),
        record(8, workload=Collective("all_reduce", 4096, 16, "fp16", num_nodes=2)),
    ],
)
def test_a_record_survives_json(made: Record) -> None:
    assert record_from_json(json.loads(json.dumps(record_to_json(made)))) == made


@pytest.mark.parametrize("odd", [10**400, float("nan"), float("inf"), True, "1", None])
def test_a_time_that_is_no_number_is_refused(odd: object) -> None:
    with pytest.raises(InputError, match=r"^record: elapsed_s = .*; expected a finite number$"):
        record_from_json({**record_to_json(record(8)), "elapsed_s": odd})


def test_the_key_names_workload_provider_and_timing() -> None:
    gemm = Gemm(1, 2, 3)
    keys = {
        record_key(gemm, "torch.mm", TimingOptions()),
        record_key(Gemm(2, 1, 3), "torch.mm", TimingOptions()),
        record_key(gemm, "triton.stream_k", TimingOptions()),
        record_key(gemm, "torch.mm", TimingOptions(cache="hot")),
    }
    assert len(keys) == 4
    assert record_key(gemm, "torch.mm", TimingOptions()) == record_key(
        Gemm(1, 2, 3), "torch.mm", TimingOptions()
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = [record(8), record(16, Skipped("why")), record(24, Failed("crash", "killed by SIGSEGV"))]
    with RunWriter.create(tmp_path, INFO) as writer:
        writer.extend(kept)
        writer.update(replace(INFO, how_ended="complete", phases_s={"measuring": 1.0}))
    (folder,) = find_runs(tmp_path)
    assert folder == tmp_path / "a100-test" / INFO.run_id
    run = read_run(folder)
    assert list(run.records) == kept
    assert run.info == replace(
        INFO, how_ended="complete", phases_s={"measuring": 1.0}, num_records=3
    )
    assert run.warnings == ()


def test_each_record_is_on_disk_before_the_next(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, INFO) as writer:
        for number in range(1, 4):
            writer.append(record(8 * number))
            assert len(read_run(writer.folder).records) == number


@pytest.mark.slow
def test_a_last_line_torn_at_any_byte_costs_that_record_alone(tmp_path: Path) -> None:
    folder = written(tmp_path, record(8), record(16))
    path = folder / "records.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert sizes(folder) == [8]
        (warning,) = read_run(folder).warnings
        assert "last line is torn" in warning
    path.write_bytes(whole[:-1])  # only the newline is missing: the record is whole
    assert len(read_run(folder).records) == 2


def test_resuming_after_a_torn_line_leaves_whole_lines_only(tmp_path: Path) -> None:
    folder = written(tmp_path, record(8), record(16))
    path = folder / "records.jsonl"
    whole = path.read_bytes()
    for end in (len(whole) - 30, len(whole) - 1):
        path.write_bytes(whole[:end])
        writer, run = RunWriter.resume(folder)
        with writer:
            writer.append(record(24))
        assert sizes(folder) == [*(r.workload.n for r in run.records), 24]  # type: ignore[union-attr]


def test_a_line_that_is_there_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, INFO) as writer:
        writer.extend([record(8), record(16)])
        writer.update(INFO)
    path = writer.folder / "records.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    reference = second.replace(
        '"role":"point"', '"role":"reference"'
    )  # repetitions of a point are none of it
    path.write_text(reference + reference.replace('"elapsed_s":', '"elapsed_s":7') + second)
    assert (len(read_run(writer.folder).records), read_run(writer.folder).warnings) == (3, ())
    again = second.replace('"elapsed_s":', '"elapsed_s":7')  # the same point, at another time
    path.write_text(first + second + first + again)
    assert sizes(writer.folder) == [8, 16]
    assert read_run(writer.folder).warnings == (
        f"{path}: records that repeat another count once (lines 3, 4)",
    )


def test_several_kernels_of_one_workload_in_a_foreign_table_are_no_repeats(tmp_path: Path) -> None:
    info = replace(INFO, origin="imported", source="a table")
    one = replace(record(8), origin="imported", source="a table", launch=Launch("one"))
    run = read_run(written(tmp_path, one, replace(one, launch=Launch("two")), info=info))
    assert (len(run.records), run.warnings) == (2, ())


def test_the_same_measurement_with_another_grade_replaces_the_first(tmp_path: Path) -> None:
    first = record(1)
    lower = replace(
        first, outcome=replace(first.outcome, grade=Grade("B", ("the device changed",)))
    )
    slower = replace(first.outcome.measurement, samples_us=(99.0,) * 5, clocks_mhz=())
    other = replace(first, outcome=replace(first.outcome, measurement=slower))
    with RunWriter.create(tmp_path, INFO) as writer:
        writer.extend([first, record(2), lower])
        writer.end("complete", {})
    run = read_run(writer.folder)
    assert run.records == (lower, record(2))
    assert run.warnings == ()
    with RunWriter.resume(writer.folder)[0] as again:
        assert again.count == 3
        again.append(other)  # a point that was measured twice counts once
    assert read_run(writer.folder).records == (lower, record(2))


def test_a_line_that_is_missing_is_named_with_the_way_to_measure_it_again(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, INFO) as writer:
        writer.extend(map(record, (8, 16, 24)))
        writer.update(INFO)
    path = writer.folder / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])
    again = f"; measure what is missing: quantbench sweep --resume {writer.folder}"
    assert read_run(writer.folder).warnings == (f"{path}: 1 of 3 records missing{again}",)
    path.unlink()
    assert read_run(writer.folder).warnings == (
        f"{path} is missing, and with it every record{again}",
    )
    resumed, run = RunWriter.resume(writer.folder)
    with resumed:
        assert run.records == ()
        resumed.extend(map(record, (8, 16, 24)))
        resumed.update(resumed.info)
    assert read_run(writer.folder).warnings == ()


def test_a_run_behind_a_link_is_resumed_where_it_lies(tmp_path: Path) -> None:
    folder = written(tmp_path / "results", record(8))
    link = tmp_path / "link"
    link.symlink_to(folder)
    resumed, _ = RunWriter.resume(link)
    with resumed:
        assert resumed.folder == folder
        resumed.append(record(16))
        resumed.update(replace(resumed.info, how_ended="complete"))
    assert len(read_run(folder).records) == 2
    # A link to run.json alone stays one.
    elsewhere = tmp_path / "elsewhere.json"
    (folder / "run.json").rename(elsewhere)
    (folder / "run.json").symlink_to(elsewhere)
    resumed, _ = RunWriter.resume(folder)
    with resumed:
        resumed.update(replace(resumed.info, how_ended="budget"))
    assert (folder / "run.json").is_symlink()
    assert read_run(folder).info.how_ended == "budget"


def test_an_empty_new_run_leaves_nothing_behind(tmp_path: Path) -> None:
    results = tmp_path / "results"
    with RunWriter.create(results, INFO) as writer:
        writer.remove_if_empty()
    assert list(tmp_path.iterdir()) == []
    with RunWriter.create(results, INFO) as writer:
        writer.append(record(8))
        writer.remove_if_empty()
    assert len(read_run(writer.folder).records) == 1
    resumed, _ = RunWriter.resume(writer.folder)
    with resumed:
        resumed.remove_if_empty()
    assert len(read_run(writer.folder).records) == 1


def test_a_broken_line_in_the_middle_is_refused_by_its_number(tmp_path: Path) -> None:
    folder = written(tmp_path, record(8), record(16))
    path = folder / "records.jsonl"
    path.write_bytes(b'{"version": 1, "key\n' + path.read_bytes())
    with pytest.raises(
        StoreError, match=r"^read run: .*records\.jsonl:1 \(.*; expected one record a line$"
    ):
        read_run(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 4),
        ("version", 1),
        ("key", None),
        ("origin", "dreamt"),
        ("places", 3),
        ("workload", {"kind": "gemm"}),
        ("elapsed_s", "x"),
    ],
)
def test_a_record_with_a_foreign_field_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    folder = written(tmp_path)
    data = {**record_to_json(record(8)), field: value}
    (folder / "records.jsonl").write_text(json.dumps(data) + "\n")
    with pytest.raises(StoreError, match=r"records\.jsonl:1"):
        read_run(folder)


def test_nan_is_never_written(tmp_path: Path) -> None:
    with (
        RunWriter.create(tmp_path, INFO) as writer,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        writer.append(record(8, elapsed_s=float("nan")))
    assert read_run(writer.folder).records == ()


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    with (
        RunWriter.create(tmp_path, INFO),
        pytest.raises(StoreError, match=r"exists; expected a new run id, or --resume$"),
    ):
        RunWriter.create(tmp_path, INFO)


def test_two_writers_into_one_run_are_refused(tmp_path: Path) -> None:
    with (
        RunWriter.create(tmp_path, INFO) as writer,
        pytest.raises(StoreError, match="is being written by another sweep"),
    ):
        RunWriter.resume(writer.folder)
    resumed, _ = RunWriter.resume(writer.folder)  # the first one has let go
    resumed.close()


class _FullDisk:
    """A file that takes half of what it is given and then has no room."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._room = 100
        self.name, self.fileno, self.close = file.name, file.fileno, file.close

    def write(self, data: memoryview) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(data[: self._room])
        self._room -= written
        return written


def test_a_full_disk_is_said_and_leaves_whole_lines(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, INFO) as writer:
        writer.append(record(8))
        real, writer._records = writer._records, _FullDisk(writer._records)  # type: ignore[assignment]
        with pytest.raises(
            StoreError, match=r"\(No space left on device\); expected room on the disk$"
        ):
            writer.append(record(16))
        writer._records = real
        assert sizes(writer.folder) == [8]
        assert read_run(writer.folder).warnings == ()
        writer.append(record(24))
    assert sizes(writer.folder) == [8, 24]


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden"])
def test_a_run_never_leaves_the_results_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="expected letters, digits"):
        RunWriter.create(tmp_path, replace(INFO, run_id=name))


def test_a_results_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "results"
    blocked.write_text("a file, not a folder")
    with pytest.raises(
        StoreError,
        match=r"^create run: .*results.*; expected a results folder that can be written$",
    ):
        RunWriter.create(blocked, INFO)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"expected a folder with run\.json in it$"),
        ("{", r"expected a readable JSON file$"),
        ("[]", r'expected a JSON object with format "quantbench-run"$'),
        ('{"format": "quantbench-run", "version": 1}', r"has version 1; expected version 2$"),
        (
            '{"format": "quantbench-run", "version": 2}',
            r"expected a run\.json as quantbench writes it$",
        ),
    ],
)
def test_a_foreign_run_json_is_refused_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(StoreError, match=message) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)
