"""The command as a user runs it, on the CPU, really measuring: `python -m quantbench sweep`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fake_providers import HOLD

from quantbench.__main__ import main
from quantbench.store.folder import read_run
from quantbench.store.record import Failed, Measured
from quantbench.store.schema import schema
from quantbench.sweep.axes import Held
from quantbench.sweep.child import WorkerProcess
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.session import SweepSession
from quantbench.timing.options import TimingOptions

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "QUANTBENCH_DEVICE": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
QUICK = ("-m", "64", "-k", "64", "--precision", "20%", "--cache", "hot", "--budget", "none")
HELD = ("--provider", "tests.fake_providers:Held", "--dtype", "fp32")
# Bounds how long a test waits for another process; nothing is timed by it.
PATIENCE_S = 240


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "quantbench", *words]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs the command in this process, in `tmp_path`; its worker is a process all the same."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["quantbench", *words])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    yield call
    signal.signal(signal.SIGTERM, on_sigterm)


def heed_ctrl_c() -> None:
    """Whoever runs the tests in the background of a shell has them ignore Ctrl-C, and all that they
    start with them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_and_wait_for_records(tmp_path: Path, count: int) -> tuple[subprocess.Popen[str], Path]:
    """A sweep of 40 points in the background, once its file holds `count` whole lines. It waits
    after some more points until the file `hold` is gone, so that it is never done before it is
    stopped."""
    (tmp_path / "hold").touch()
    process = subprocess.Popen(
        command("sweep", "--dim", "n=64:1312:32", *QUICK, *HELD, "--results", "results"),
        cwd=tmp_path, env={**ENVIRONMENT, HOLD: str(tmp_path / "hold")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        files = list(tmp_path.glob("results/*/*/records.jsonl"))
        if files and files[0].read_bytes().count(b"\n") >= count:
            return process, files[0].parent
        time.sleep(0.02)
    output, _ = process.communicate()
    raise AssertionError(f"the sweep never wrote {count} records:\n{output}")


def keys(folder: Path) -> list[str]:
    return [record.key for record in read_run(folder).records if record.role == "point"]


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why_once(run: Run, tmp_path: Path) -> None:
    provider = "tests.fake_providers:NoKernelImage"
    done = run("sweep", "--dim", "n=64:192:64", *QUICK, "--dtype", "fp32", "--provider", provider)
    assert done.returncode == 2
    assert (
        done.stderr.count("CUDA error: no kernel image is available for execution on the device")
        == 1
    )
    assert "TORCH_USE_CUDA_DSA" not in done.stdout + done.stderr
    assert list((tmp_path / "results").glob("*/*")) == []


@pytest.mark.slow
def test_a_reason_for_which_every_point_fails_is_said_once(run: Run) -> None:
    provider = "tests.fake_providers:NoPython"
    done = run("sweep", "--dim", "n=63:69:2", *QUICK, "--dtype", "fp32", "--provider", provider)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert said.count("Python.h") == 1
    assert (
        f"4 × failed, {provider}: error: sh ended with exit status 1: error: Python.h: No such file"
        in said
    )


@pytest.mark.slow
def test_a_sweep_measures_keeps_and_shows(run: Run, tmp_path: Path) -> None:
    done = run("sweep", "--dim", "n=64:192:64", *QUICK, "--dtype", "fp32", "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["how_ended"] == "complete"
    assert done.stderr.splitlines()[0] == f"run: {result['run']}"  # before anything is measured
    assert [row["axes"] for row in result["rows"]] == [{"n": 64}, {"n": 128}, {"n": 192}]
    assert all(row["latency_us"] > 0 and row["tflops"] > 0 for row in result["rows"])
    folder = tmp_path / result["run"]
    jsonschema.validate(json.loads((folder / "run.json").read_text()), schema("run"))
    for line in (folder / "records.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), schema("record"))
    run_read = read_run(folder)
    measured = [r.outcome for r in run_read.records]
    assert all(isinstance(outcome, Measured) for outcome in measured)
    assert all(o.measurement.mode == "cpu" for o in measured if isinstance(o, Measured))
    assert run_read.info.device.kind == "cpu"
    assert (tmp_path / result["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "GPU cliffs need a GPU" in done.stderr


@pytest.mark.slow
def test_a_list_of_shapes_is_measured_as_it_stands(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("name,m,n,k\na,64,96,64\nb,8,8,8\n")
    done = run("sweep", "--shapes", "mine.csv", *QUICK[4:], "--layout", "nt", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {(r["axes"]["m"], r["axes"]["n"], r["axes"]["k"]) for r in result["rows"]} == {
        (64, 96, 64),
        (8, 8, 8),
    }
    assert run("sweep", "--resume", result["run"]).returncode == 0
    assert len(keys(tmp_path / result["run"])) == 2


@pytest.mark.slow
def test_kill_9_costs_at_most_the_point_in_flight_and_resume_measures_the_rest(
    run: Run, tmp_path: Path
) -> None:
    process, folder = start_and_wait_for_records(tmp_path, count=8)
    process.kill()
    process.communicate()
    whole_lines = (folder / "records.jsonl").read_bytes().count(b"\n")
    before = keys(folder)
    assert len(read_run(folder).records) >= whole_lines >= 8
    assert 0 < len(before) < 40
    assert read_run(folder).info.how_ended == "running"
    for budget in ("1ms", "300s"):  # a first part of the rest, then all of it
        done = run("sweep", "--resume", str(folder), "--budget", budget)
        assert done.returncode in (0, 2), done.stderr
        after = keys(folder)
        assert after[: len(before)] == before
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["role"] == "point"]
    # A point that is graded again has a second line, with the same samples.
    measured = {(line["key"], json.dumps(line["measurement"]["samples_us"])) for line in points}
    assert sorted(key for key, _ in measured) == sorted(after)
    assert len(after) == 40
    info = read_run(folder).info
    assert info.how_ended == "complete"
    sizes = {r.places[0].axes["n"] for r in read_run(folder).records if r.role == "point"}
    assert sizes == set(range(64, 1313, 32))
    # What earlier sittings measured is no part of this one's time.
    nothing_left = run("sweep", "--resume", str(folder), "--json")
    assert json.loads(nothing_left.stdout)["overhead_share"] == 1


@pytest.mark.slow
def test_ctrl_c_stops_cleanly(tmp_path: Path) -> None:
    process, folder = start_and_wait_for_records(tmp_path, count=4)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"--resume {folder.relative_to(tmp_path)}" in output
    assert "Traceback" not in output
    run_read = read_run(folder)
    assert run_read.info.how_ended == "interrupted"
    assert run_read.warnings == ()
    assert len(keys(folder)) >= 3


@pytest.mark.slow
def test_a_provider_that_crashes_and_hangs_costs_its_points_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = tuple(f"tests.fake_providers:{name}" for name in ("Segfault", "Hangs", "Good"))
    quick = TimingOptions(half_width=0.2, cache="hot")
    options = SweepOptions(
        ("n=63,64",), Held(m=64, k=64, dtype="fp32"), providers, quick, limit_s=5.0
    )
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with SweepSession.new(
        lambda spec: options, tmp_path, partial(WorkerProcess, providers)
    ) as session:
        assert session.run(lambda progress: None).how == "complete"
    failed = {
        (r.provider.partition(":")[2], r.workload.n, r.outcome.kind): r.outcome.message  # type: ignore[union-attr]
        for r in read_run(session.folder).records
        if r.role == "point" and isinstance(r.outcome, Failed)
    }
    assert set(failed) == {("Segfault", 63, "crash"), ("Hangs", 63, "timeout")}
    assert "killed by SIGSEGV" in failed["Segfault", 63, "crash"]
    assert "no answer within 5 s" in failed["Hangs", 63, "timeout"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dim", "hiden"), "--dim: 'hiden'; expected one of hidden, heads"),
        (
            ("--dim", "hidden=4096:1024"),
            "--dim hidden: '4096:1024'; expected a stop that is not below",
        ),
        (("--dim", "hidden", "--dtype", "fp13"), "dtype = 'fp13'; expected one of"),
        (
            ("--dim", "hidden=100", "--heads", "3"),
            "hidden = 100 with heads = 3; expected hidden divisible by heads",
        ),
        (
            ("--dim", "hidden=96", "--heads", "6", "--tp", "4"),
            "heads = 6 with tp = 4; expected heads divisible by tp",
        ),
        (
            ("--dim", "n", "--provider", "cublas"),
            "provider: 'cublas'; expected package.module:Class or one of",
        ),
        (("--dim", "n", "--dry-run", "--gpu", "a1000"), "'a1000'; expected"),
        (
            ("--dim", "n", "--budget", "soon"),
            "--budget: 'soon'; expected a time such as 90s, 8m or 1h",
        ),
        (("--dim", "n", "--cache", "warm"), "cache = 'warm'; expected one of cold, hot"),
        (("--dim", "n", "--model", "gpt-9"), "gpt-9"),
        (
            ("--dim", "n", "--results", "/dev/null/x"),
            "--results: /dev/null/x (Not a directory); expected a folder",
        ),
        (("--shapes", "nowhere.csv"), "nowhere.csv"),
        (("--resume", "nowhere"), "nowhere; expected a folder with run.json in it"),
        (("--seq", "128"), "sweep: no --dim beside --seq; expected at least one of --dim hidden"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = run("sweep", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("quantbench: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_existing_corrupt_run_is_refused_and_left_as_it_is(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "cpu-x" / "broken"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{not json")
    done = run("sweep", "--resume", str(folder))
    assert done.returncode == 2
    assert "expected a readable JSON file" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    assert (folder / "run.json").read_text() == "{not json"


@pytest.mark.slow
def test_a_plan_can_be_printed_for_a_gpu_that_is_not_here(run: Run, tmp_path: Path) -> None:
    done = run("sweep", "--dim", "hidden", "--dry-run", "--gpu", "a100-sxm4-80gb", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["device"] == "a100-sxm4-80gb"
    assert plan["estimate_s"] > 0
    assert {p["places"][0]["op"] for p in plan["points"]} == {"qkv", "proj", "mlp_up", "mlp_down"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_over_experts_says_that_the_loop_pads_nothing(run: Run, tmp_path: Path) -> None:
    small = ("--hidden", "64", "--moe-ffn", "32", "--tokens", "48", *QUICK[4:])
    done = run("sweep", "--dim", "experts=2,4,16", *small, "--dtype", "fp32", "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert {"top_k = 2", "ep = 1", "balanced routing", "gated experts"} <= set(result["assumed"])
    loop = [row for row in result["rows"] if row["provider"] == "torch.grouped_loop"]
    assert [row["axes"]["experts"] for row in loop] == [2, 4, 16]
    assert all(
        row["ops"] == ["experts_up_gate", "experts_down"] and row["latency_us"] > 0 for row in loop
    )
    folder = tmp_path / result["run"]
    assert not read_run(folder).warnings
    for line in (folder / "records.jsonl").read_text().splitlines():
        jsonschema.validate(json.loads(line), schema("record"))
    assert run("report", str(folder)).returncode == 0
    page = (folder / "report.html").read_text()
    assert "torch.grouped_loop multiplies each expert&#39;s rows as they are and pads none" in page
    assert "would pad 96 rows to 2,048" in page  # 6 rows for each of 16 experts


@pytest.mark.slow
def test_a_plan_says_what_would_be_skipped_here(run: Run) -> None:
    words = (
        "--dim",
        "n=64,96",
        "-m",
        "64",
        "-k",
        "64",
        "--dtype",
        "fp32",
        "--dry-run",
        "--provider",
    )
    done = run("sweep", *words, "torch,tests.fake_providers:Picky")
    assert done.returncode == 0, done.stderr
    assert "skipped" not in done.stdout
    done = run("sweep", *words[:-2], "--dtype", "fp8", *words[-2:], "torch")
    assert done.returncode == 0, done.stderr
    assert (
        "all would be skipped here, the first because fp8 products need a CUDA device"
        in done.stdout
    )
    done = run("sweep", "--dim", "n=63,64", *words[2:], "tests.fake_providers:Picky")
    assert "1 of 2 would be skipped here, the first because" in done.stdout


@pytest.mark.slow
def test_a_sweep_that_measured_nothing_says_so_to_scripts(run: Run) -> None:
    words = (
        "--dim",
        "n=64,96",
        *QUICK,
        "--dtype",
        "fp32",
        "--provider",
        "tests.fake_providers:Wrong",
    )
    done = run("sweep", *words)
    assert done.returncode == 1
    assert "nothing was measured" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
