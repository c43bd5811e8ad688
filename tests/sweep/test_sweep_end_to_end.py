"""The command as a user runs it, on the CPU, really measuring: `python -m quantbench sweep`."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commands import refused, run, run_json
from fake_providers import HOLD

from quantbench.store.folder import read_run
from quantbench.store.record import Failed, Measured
from quantbench.store.schema import schema
from quantbench.sweep.axes import Held
from quantbench.sweep.child import WorkerProcess
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.session import SweepSession
from quantbench.timing.options import TimingOptions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_cpu")]

TIMING = "--precision 20% --cache hot --budget none"
QUICK = f"-m 64 -k 64 {TIMING} --dtype fp32"
# Bounds how long a test waits for another process; nothing is timed by it.
PATIENCE_S = 240


HELD_SWEEP = f"sweep --dim n=64:1312:32 {QUICK} --provider tests.fake_providers:Held"


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
        [sys.executable, "-m", "quantbench", *shlex.split(HELD_SWEEP)],
        cwd=tmp_path, env={**os.environ, HOLD: str(tmp_path / "hold")},
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


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def keys(folder: Path) -> list[str]:
    return [record.key for record in read_run(folder).records if record.role == "point"]


def test_a_worker_that_cannot_start_says_why_once(tmp_path: Path) -> None:
    words = f"sweep --dim n=64:192:64 {QUICK} --provider tests.fake_providers:NoKernelImage"
    said = str(refused(words))
    assert said.count("no kernel image is available for execution on the device") == 1
    assert "TORCH_USE_CUDA_DSA" not in said
    assert list((tmp_path / "results").glob("*/*")) == []


def test_a_reason_for_which_every_point_fails_is_said_once() -> None:
    provider = "tests.fake_providers:NoPython"
    said = run(f"sweep --dim n=63:69:2 {QUICK} --provider {provider}", code=1)
    assert said.count("Python.h") == 1
    assert f"4 × failed, {provider}: error: sh ended with exit status 1" in said
    assert "nothing was measured" in said


def test_a_sweep_measures_keeps_and_shows(tmp_path: Path) -> None:
    result = run_json(f"sweep --dim n=64:192:64 {QUICK}")
    assert result["how_ended"] == "complete"
    assert [row["axes"] for row in result["rows"]] == [{"n": 64}, {"n": 128}, {"n": 192}]
    assert all(row["latency_us"] > 0 and row["tflops"] > 0 for row in result["rows"])
    folder = tmp_path / result["run"]
    jsonschema.validate(json.loads((folder / "run.json").read_text()), schema("run"))
    for line in lines_of(folder):
        jsonschema.validate(line, schema("record"))
    run_read = read_run(folder)
    measured = [r.outcome for r in run_read.records]
    assert all(isinstance(outcome, Measured) for outcome in measured)
    assert all(o.measurement.mode == "cpu" for o in measured if isinstance(o, Measured))
    assert run_read.info.device.kind == "cpu"
    assert (tmp_path / result["picture"]).read_bytes().startswith(b"\x89PNG")


def test_a_list_of_shapes_is_measured_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("name,m,n,k\na,64,96,64\nb,8,8,8\n")
    result = run_json(f"sweep --shapes mine.csv {TIMING} --layout nt")
    axes = [row["axes"] for row in result["rows"]]
    assert {(at["m"], at["n"], at["k"]) for at in axes} == {(64, 96, 64), (8, 8, 8)}


def test_kill_9_costs_at_most_the_point_in_flight_and_resume_measures_the_rest(
    tmp_path: Path,
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
        run(f"sweep --resume {folder} --budget {budget}")
        after = keys(folder)
        assert after[: len(before)] == before
    points = [line for line in lines_of(folder) if line["role"] == "point"]
    # A point that is graded again has a second line, with the same samples.
    measured = {
        (line["key"], json.dumps(line["outcome"]["measurement"]["samples_us"])) for line in points
    }
    assert sorted(key for key, _ in measured) == sorted(after)
    assert len(after) == 40
    info = read_run(folder).info
    assert info.how_ended == "complete"
    sizes = {r.places[0].axes["n"] for r in read_run(folder).records if r.role == "point"}
    assert sizes == set(range(64, 1313, 32))
    # What earlier sittings measured is no part of this one's time.
    assert run_json(f"sweep --resume {folder}")["overhead_share"] == 1


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


def test_a_provider_that_crashes_and_hangs_costs_its_points_alone(
    tmp_path: Path,
) -> None:
    providers = tuple(f"tests.fake_providers:{name}" for name in ("Segfault", "Hangs", "Good"))
    quick = TimingOptions(half_width=0.2, cache="hot")
    options = SweepOptions(
        ("n=63,64",), Held(m=64, k=64, dtype="fp32"), providers, quick, limit_s=5.0
    )
    with SweepSession.new(
        lambda spec: options, tmp_path, partial(WorkerProcess, providers)
    ) as session:
        assert session.run(lambda progress: None).how == "complete"
    failed = {
        (r.provider.partition(":")[2], r.workload.n, r.outcome.error): r.outcome.message  # type: ignore[union-attr]
        for r in read_run(session.folder).records
        if r.role == "point" and isinstance(r.outcome, Failed)
    }
    assert set(failed) == {("Segfault", 63, "crash"), ("Hangs", 63, "timeout")}
    assert "killed by SIGSEGV" in failed["Segfault", 63, "crash"]
    assert "no answer within 5 s" in failed["Hangs", 63, "timeout"]


def test_a_plan_can_be_printed_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    plan = run_json("sweep --dim hidden --dry-run --gpu a100-sxm4-80gb")
    assert plan["device"] == "a100-sxm4-80gb"
    assert plan["estimate_s"] > 0
    assert {p["places"][0]["op"] for p in plan["points"]} == {"qkv", "proj", "mlp_up", "mlp_down"}
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_over_experts_says_that_the_loop_pads_nothing(tmp_path: Path) -> None:
    small = f"--hidden 64 --moe-ffn 32 --tokens 48 {TIMING} --dtype fp32"
    result = run_json(f"sweep --dim experts=2,4,16 {small}")
    assert {"top_k = 2", "ep = 1", "balanced routing", "gated experts"} <= set(result["assumed"])
    loop = [row for row in result["rows"] if row["provider"] == "torch.grouped_loop"]
    assert [row["axes"]["experts"] for row in loop] == [2, 4, 16]
    assert all(
        row["ops"] == ["experts_up_gate", "experts_down"] and row["latency_us"] > 0 for row in loop
    )
    folder = tmp_path / result["run"]
    assert not read_run(folder).warnings
    for line in lines_of(folder):
        jsonschema.validate(line, schema("record"))
    run(f"report {folder}")
    page = (folder / "report.html").read_text()
    assert "torch.grouped_loop multiplies each expert&#39;s rows as they are and pads none" in page
    assert "would pad 96 rows to 2,048" in page  # 6 rows for each of 16 experts


def test_a_wrong_result_is_counted_and_fails_the_sweep() -> None:
    words = f"sweep --dim n=64 {QUICK} --provider"
    said = run(f"{words} torch,tests.fake_providers:Wrong", code=1)
    assert "results compared with a reference: 1 right, 1 wrong" in said
    assert "results compared with a reference: 1 right, 0 wrong" in run(f"{words} torch")


def test_a_declared_tile_has_its_edges() -> None:
    """256 rows of tiles of 16 x 16 need another wave every few columns."""
    words = "--dim n=1024:1536:512@edges -m 256 -k 64 --dtype fp32 --gpu a100 --dry-run"
    found = run_json(f"sweep {words} --provider tests.fake_providers:Tiled --provider torch.mm")
    assert len(found["axes"]["n"]) > 2
    assumed = "user-defined providers are assumed to take as long as torch's"
    assert assumed in run(f"sweep {words} --provider tests.fake_providers:Tiled")
    assert assumed not in run(f"sweep {words} --provider torch.mm")
    assert len({point["provider"] for point in found["points"]}) == 2
    said = str(refused(f"sweep {words} --provider tests.fake_providers:Gud"))
    assert "has no attribute 'Gud'" in said


def test_a_plan_says_what_would_be_skipped_here() -> None:
    words = "sweep -m 64 -k 64 --dry-run"
    picky = "--dtype fp32 --provider torch,tests.fake_providers:Picky"
    assert "skipped" not in run(f"{words} --dim n=64,96 {picky}")
    said = run(f"{words} --dim n=64,96 --dtype fp8 --provider torch")
    assert "all would be skipped here, the first because fp8 products need a CUDA device" in said
    said = run(f"{words} --dim n=63,64 {picky.replace('torch,', '')}")
    assert "1 of 2 would be skipped here, the first because" in said
