"""The commands of tools.evidence: what they run, what they keep when they are stopped, and the page made of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from quantbench.analysis.summary import Point
from quantbench.cli.app import app
from quantbench.device import current, lookup
from quantbench.device.spec import DeviceSpec
from quantbench.latency.gemm.member import Growth
from quantbench.latency.gemm.training import Effort
from quantbench.latency.op_times import roofline_us
from quantbench.launch import Launch
from quantbench.measurement import Grade
from quantbench.profile.profile import Profile
from quantbench.workload import Gemm, Softmax, Workload
from tools.evidence import capture, side_by_side, timer_truth, write
from tools.evidence.nvbench import merge_nvbench
from tools.evidence.other_methods import Run
from tools.evidence.plan import COMMANDS, KERNEL_SWEEPS, RANDOM_SWEEP, Part, random_shapes, write_shapes
from tools.evidence.run import Running
from tools.evidence.sections import cost_section, kernel_section, prediction_section, timer_section

ROOT = Path(__file__).resolve().parents[2]
PARTS = [part for parts in COMMANDS.values() for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part.is_sweep], ids=lambda part: part.name)
def test_each_sweep_can_be_planned_for_an_h200(part: Part, tmp_path: Path) -> None:
    write_shapes(tmp_path)
    words = [word.replace("{folder}", str(tmp_path)) for word in part.words[1:]]
    words += ["--dry-run", "--gpu", "h200-sxm-141gb", "--budget", "none", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    assert len(json.loads(done.stdout)["points"]) >= 4


def test_each_command_fits_its_time_and_names_its_parts() -> None:
    limits_s = [sum(part.seconds for part in parts) for parts in COMMANDS.values()]
    assert max(limits_s) < 0.9 * 600
    assert sum(limits_s) < 0.75 * 1800  # of half an hour, which also has three starts and what must be mended
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {RANDOM_SWEEP, *KERNEL_SWEEPS, write.REPORTED} <= {part.name for part in PARTS if part.is_sweep}


@pytest.mark.parametrize("part", [part for part in PARTS if not part.is_sweep], ids=lambda part: part.name)
def test_each_other_part_is_a_module(part: Part) -> None:
    assert find_spec(part.words[0]) is not None


def test_random_shapes_are_the_same_each_time_and_within_their_ranges() -> None:
    shapes = random_shapes()
    assert shapes == random_shapes()
    assert len(set(shapes)) > 0.95 * len(shapes)
    assert all(1 <= m <= 16384 and 56 <= n <= 16448 and 56 <= k <= 16448 for m, n, k in shapes)
    assert all(n % 8 == 0 and k % 8 == 0 for _, n, k in shapes)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory from which tools and quantbench are found, on the CPU."""
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(name: str, seconds: float = 60.0) -> Part:
    words = ("--dim", "n=32,64", "-m", "32", "-k", "32", "--dtype", "fp32", "--precision", "20%")
    return Part(name, seconds, ("quantbench", "sweep", *words))


def started(folder: Path, *parts: Part, limit_s: float = 600.0, copy_to: Path | None = None) -> Running:
    """A start of command `b` with these parts."""
    running = Running(folder / "b", copy_to, parts, time.monotonic(), limit_s, 60.0, on_cpu=False)
    running.open({"name": current().name, "kind": "cpu"})
    return running


def test_without_a_gpu_the_run_refuses_with_one_line(here: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "tools.evidence.run", "b"], capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.endswith("expected a CUDA GPU (or --on-cpu, to try the command)\n")
    assert not list(here.iterdir())


@pytest.mark.slow
def test_a_command_is_taken_up_where_it_was_left_also_from_the_packed_file_alone(here: Path) -> None:
    broken = Part("broken", 60, ("quantbench", "sweep", "--dim", "size"))
    first = started(here / "work", small("one"), broken, copy_to=here / "out")
    first.run_parts()
    assert first.state["one"] == {"how_ended": "complete"}
    assert first.state["broken"] == {"how_ended": "failed with exit code 2"}
    assert "--dim" in (first.folder / "broken.log").read_text()

    shutil.rmtree(here / "work")
    again = started(here / "work", small("one"), small("broken"), copy_to=here / "out")
    assert again.done(small("one"))
    again.run_parts()
    assert again.done(small("broken"))
    assert [file.name for file in (here / "out").iterdir()] == ["evidence-b.tar.gz"]
    with tarfile.open(here / "out" / "evidence-b.tar.gz") as archive:
        names = archive.getnames()
    assert "b/state.json" in names
    assert sum(name.endswith("records.jsonl") for name in names) == 2


def test_another_devices_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    started(tmp_path).pack()
    (tmp_path / "b" / "state.json").write_text('{"device": "h200-sxm-141gb"}')
    with pytest.raises(SystemExit, match="is from h200-sxm-141gb; expected cpu"):
        started(tmp_path)


def test_a_part_without_time_is_left_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    running = started(tmp_path, small("one"), limit_s=10.0)
    running.run_parts()
    assert "one" not in running.state


def test_a_table_that_was_cut_short_is_finished_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def row(gemm: Gemm, *_: object) -> dict[str, object]:
        asked.append(str(gemm))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"workload": str(gemm), "sizes": [gemm.m, gemm.n, gemm.k]}

    monkeypatch.setattr(side_by_side, "measure_row", row)
    gemms = [Gemm(n, n, n) for n in (64, 128, 192)]
    out = tmp_path / "table.json"
    with pytest.raises(KeyboardInterrupt):
        side_by_side.measure_rows(out, lookup("h200-sxm-141gb"), gemms, {}, {})
    assert len(side_by_side.measure_rows(out, lookup("h200-sxm-141gb"), gemms, {}, {})) == 3
    assert asked == [str(gemm) for gemm in (*gemms, gemms[2])]
    assert [row["sizes"][0] for row in json.loads(out.read_text())["rows"]] == [64, 128, 192]


def test_the_profiler_joins_after_all_rows_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    spec, gemms, out = current(), [Gemm(n, n, n, dtype="fp32") for n in (32, 48)], tmp_path / "table.json"
    calls: list[int] = []

    def profiled(run: Run, device: DeviceSpec) -> list[float]:
        run()
        calls.append(1)
        return [3.0, 5.0, 4.0] if len(calls) != 2 else []

    rows = side_by_side.measure_rows(out, spec, gemms, {}, {"plain": lambda run, device: [1.0]})
    side_by_side.add_method(out, spec, gemms, rows, "profiler", profiled)
    side_by_side.add_method(out, spec, gemms, rows, "profiler", profiled)
    assert len(calls) == 2 * side_by_side.REPEATS
    kept = json.loads(out.read_text())["rows"]
    assert [row["medians_us"] for row in kept] == [
        {"plain": [1.0] * 3, "profiler": [4.0] * 2}, {"plain": [1.0] * 3, "profiler": [4.0] * 3}
    ]  # fmt: skip


@pytest.mark.slow
def test_a_late_part_is_ended_with_all_that_it_started(here: Path) -> None:
    (here / "late.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    running = started(here / "work")
    assert running._child(("late",), Part("late", 3, ()), 3.0) is None
    grandchild = int((here / "pid").read_text())
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "it is still running"
        time.sleep(0.05)


def test_nvbench_joins_the_rows_of_its_sizes(tmp_path: Path) -> None:
    rows = [{"sizes": [size] * 3, "medians_us": {"profiler": [9.0]}} for size in (128, 256)]
    for repeat, samples in enumerate(([5.0, 4.0, 6.0], [7.0])):
        file = tmp_path / f"{repeat}.json"
        file.write_text(json.dumps({"128": samples, "512": [1.0]}))
        merge_nvbench(rows, file)
    assert rows[0]["medians_us"] == {"profiler": [9.0], "nvbench": [5.0, 7.0]}
    assert rows[1]["medians_us"] == {"profiler": [9.0]}


def test_nvbench_fills_its_column_repeat_by_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], **_: object) -> None:
        if len(asked) == 2:
            raise subprocess.TimeoutExpired(words, 60.0)
        asked.append(words[-1])
        Path(words[3]).write_text('{"128": [5.0, 4.0, 6.0]}')

    asked: list[str] = []
    rows = [{"sizes": [128] * 3, "medians_us": {}, "wall_s": {}}]
    out, spec = tmp_path / "table.json", lookup("h200-sxm-141gb")
    monkeypatch.setattr(timer_truth, "find_spec", lambda name: None)
    timer_truth._add_nvbench(rows, out, spec)
    assert not out.exists()  # cuda-bench is not installed
    monkeypatch.setattr(timer_truth, "find_spec", lambda name: name)
    monkeypatch.setattr(timer_truth.subprocess, "run", run)
    timer_truth._add_nvbench(rows, out, spec)
    assert json.loads(out.read_text())["rows"][0]["medians_us"] == {"nvbench": [5.0, 5.0]}
    asked.clear()
    timer_truth._add_nvbench(rows, out, spec)
    assert rows[0]["medians_us"] == {"nvbench": [5.0, 5.0, 5.0]}
    assert len(asked) == 1  # the repeats that were there are not run again


TIMES = {
    "rows": [
        {"workload": "short", "medians_us": {"quantbench graph": [5.0, 5.1, 5.2], "profiler": [5.3]}},
        {"workload": "long", "medians_us": {"quantbench graph": [101.0, 101.0], "profiler": [100.0], "mamf": []}},
    ]
}  # fmt: skip


def test_the_timers_agreement_counts_in_microseconds_below_twenty_and_in_percent_above() -> None:
    lines = timer_section(TIMES)
    assert "| short | 5.10 µs | 5.30 µs | – |" in lines
    assert lines[-2] == (
        "- quantbench graph: differs from profiler by at most 1.00 % (median 1.00 %) from 20 µs on,"
        " at most 0.20 µs below"
    )
    assert lines[-1] == "- quantbench graph: repeats spread by at most 4.00 % (median 2.00 %)"


def test_what_a_point_costs_is_told_with_its_inputs_and_without() -> None:
    row = {
        "medians_us": {"quantbench": [10.0, 10.1], "mamf": [10.0, 11.0]},
        "wall_s": {"quantbench": [0.1, 0.3], "mamf": [2.0]}, "prepare_s": 0.5,
    }  # fmt: skip
    lines = cost_section({"repeats": 2, "rows": [row, row]})
    assert "| quantbench | 0.200 | 0.700 | 1.00 % | 1.00 % |" in lines
    assert "| mamf | 2.000 | 2.500 | 10.00 % | 10.00 % |" in lines
    # 30 s over 50 points and 2 s each are 13 times 0.2 s.
    assert "0.60 s for each of 50 points" in lines[-1]
    assert "2.600 s, and 0.200 s with our timer: 13.0 times cheaper, at a spread of 1.00 % against 10.00 %" in lines[-1]
    assert lines[-1].endswith(": met.")


@pytest.mark.parametrize(
    ("ours_s", "ours_us", "verdict"),
    [
        (0.12, [10.0, 10.1], "met"),
        (0.13, [10.0, 10.1], "missed"),
        (0.05, [10.0, 11.1], "missed"),
        (0.05, [10.0], "missed"),
    ],
)
def test_the_target_of_the_cost_is_met_or_missed(ours_s: float, ours_us: list[float], verdict: str) -> None:
    row = {
        "medians_us": {"quantbench": ours_us, "mamf": [10.0, 11.0]},
        "wall_s": {"quantbench": [ours_s], "mamf": [0.022]}, "prepare_s": 0.5,
    }  # fmt: skip
    assert cost_section({"repeats": 2, "rows": [row]})[-1].endswith(f": {verdict}.")


def point(work: Workload, provider: str, latency_us: float, launch: Launch | None = None) -> Point:
    return Point(
        "key", {}, work.kind, 1, provider, work, launch, latency_us, latency_us, latency_us, 1.0,
        work.min_bytes / latency_us / 1e3, 0.5, Grade("A"), 10, 0.0, None,
    )  # fmt: skip


def test_our_kernels_stand_beside_each_library_and_the_fastest_of_them() -> None:
    small, large = Gemm(64, 64, 64), Gemm(128, 128, 128)
    times_us = {
        small: {"torch.mm": 8.0, "torch.addmm": 10.0, "triton.persistent": 10.0},
        large: {"torch.mm": 9.0, "triton.persistent": 4.5},
    }
    points = [point(work, who, us) for work, each in times_us.items() for who, us in each.items()]
    lines = kernel_section(points, None)
    assert f"| gemm | triton.persistent | torch.mm | 2 | 1.26 | 0.80 | {small} (10.0 µs) |" in lines
    assert f"| gemm | triton.persistent | torch.addmm | 1 | 1.00 | 1.00 | {small} (10.0 µs) |" in lines
    assert f"| gemm | triton.persistent | the fastest of them | 1 | 0.80 | 0.80 | {small} (10.0 µs) |" in lines
    assert "measured with one of our kernels" in kernel_section(points[:1], None)[0]


def test_softmax_is_held_against_a_copy() -> None:
    work = Softmax(batch=4, rows=64, cols=64)
    seconds = work.min_bytes / 4000e9
    lines = kernel_section([point(work, "triton.fused", seconds * 1e6), point(work, "torch.eager", 1.0)], 5000.0)
    assert "- triton.fused: 0.80 to 0.80, median 0.80 of 1 shapes" in lines


@pytest.mark.slow
def test_prediction_is_tested_on_rows_that_were_not_fitted() -> None:
    quick = Effort(members=1, rows_first=100, rows_other=100, growth=Growth(trees=10))
    device = lookup("h200-sxm-141gb")
    points = []
    for m, n, k in random_shapes()[:330]:
        gemm = Gemm(m, n, k, layout="nt")
        points.append(point(gemm, "torch.mm", roofline_us(gemm, device)))
    lines = prediction_section(points, device, seeds=(0,), effort=quick)
    medians = {line.split("|")[1].strip(): float(line.split("|")[3].split()[0]) for line in lines[2:4]}
    assert medians["fitted here"] < medians["fitted on the public table of this GPU"]
    assert "330 random products in bf16" in lines[-1]
    assert "needs more" in prediction_section(points[:250], device)[0]


@pytest.mark.slow
def test_the_page_is_written_from_the_packed_file_and_tells_what_is_missing(here: Path) -> None:
    started(here / "work", small("hidden"), copy_to=here / "out").run_parts()
    shutil.rmtree(here / "work")
    for _ in range(2):  # writing again changes nothing
        write.main([here / "out"], results=Path("results"))
    (page,) = Path("results").glob("*/evidence/README.md")
    text = page.read_text()
    assert "Not measured yet: `python -m tools.evidence.run a`." in text
    assert "| hidden | 2 | complete |" in text
    assert len(Profile.load(page.parent / "profile.json").tables["gemm"]) == 2
    assert (page.parent / "report" / "report.html").exists()
    assert "torch" in text.splitlines()[4]
    assert len(list(Path("results").glob("*/*/run.json"))) == 1
    with pytest.raises(SystemExit, match=r"expected evidence-\*.tar.gz there"):
        write.main([here / "work"], results=here)


def test_what_a_machine_offers_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setattr(capture, "WORKLOADS", (Gemm(32, 32, 32, dtype="fp32"), Gemm(32, 32, 32, dtype="fp8")))
    monkeypatch.setattr(capture, "_PROVIDERS", ("torch.mm",))
    kernel = {"cat": "kernel", "name": "nvjet_sm90_tst_128x64_64x8_2x1_v_bz_TNT", "dur": 5.0}
    monkeypatch.setattr(capture.identity, "trace_events", lambda run: run() or [kernel])
    monkeypatch.setattr(sys, "argv", ["capture", str(tmp_path / "capture.json")])
    for _ in range(2):  # the second time everything is known
        capture.main()
    found = json.loads((tmp_path / "capture.json").read_text())
    assert found["device"]["kind"] == "cpu"
    assert found["software"]["torch"]
    first, second = found["kernels"]
    assert first["kernels"][0]["duration_us"] == 5.0
    assert first["launch"]["kernel"] == kernel["name"]
    assert second["skipped"] == "fp8 products need a CUDA device"


def test_an_error_of_the_compiler_does_not_end_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilationError(Exception):
        """Stands for triton's, which is no RuntimeError."""

    def traced(run: Run) -> list[dict[str, object]]:
        raise CompilationError("at 12:7: no such instruction")

    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setattr(capture, "WORKLOADS", (Gemm(32, 32, 32, dtype="fp32"), Gemm(64, 32, 32, dtype="fp32")))
    monkeypatch.setattr(capture, "_PROVIDERS", ("torch.mm",))
    monkeypatch.setattr(capture.identity, "trace_events", traced)
    monkeypatch.setattr(sys, "argv", ["capture", str(tmp_path / "capture.json")])
    capture.main()
    rows = json.loads((tmp_path / "capture.json").read_text())["kernels"]
    assert [row["error"] for row in rows] == ["at 12:7: no such instruction"] * 2
    assert not any(row["lost"] for row in rows)
