"""The table that a sweep ends with: rows of all ops of a place, and the cliffs that `check` finds there."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console
from simulator import SimulatedGpu, along, records_of, write_simulated

from quantbench.analysis.check import check_run
from quantbench.analysis.staircase import Explanation
from quantbench.analysis.summary import Point, points_of, rows_of
from quantbench.cli.check_output import check_to_json, cliff_to_json
from quantbench.launch import Tile
from quantbench.measurement import Grade
from quantbench.report.table import ops_line, row_words, rows_to_json, sweep_table
from quantbench.store.folder import read_run
from quantbench.workload import Gemm

GPU = SimulatedGpu(108, Tile(128, 256))


def test_rows_tell_the_cliffs_of_check(tmp_path: Path) -> None:
    records = records_of(
        GPU, along("n", range(1024, 4097, 64), Gemm(4096, 1, 4096)), noise=0.005, seed=1, launches=True
    )
    run = read_run(write_simulated(tmp_path, GPU, records))
    spec = run.info.device
    check = check_run(run, rules=())
    rows = rows_of(points_of(run.records, spec), spec)
    said = {row.axes["n"]: row_words(row, check, spec) for row in rows}
    # 6 columns of 32 tiles are the 192 of two waves; a seventh, from n = 1537 on, begins a third.
    cliff = next(cliff for cliff in check.cliffs if cliff.at == 1536)
    assert said[1600].startswith(
        f"▼ +{100 * (cliff.ratio - 1):.0f} % time in gemm: 128x256 tile on 108 SMs: 2 to 3 waves"
    )
    assert not [n for n, words in said.items() if "▼" in words and n not in {c.next for c in check.cliffs}]
    console = Console(width=200, record=True, file=StringIO())
    console.print(sweep_table(rows, check, spec))
    assert said[1600] in console.export_text()
    assert {row["axes"]["n"]: row["words"] for row in rows_to_json(rows, check, spec)} == said
    assert [cliff_to_json(c) for c in check.cliffs] == check_to_json(check)["cliffs"]


def test_an_assumed_tile_is_called_so_and_dropped_where_the_steps_speak_against_it(tmp_path: Path) -> None:
    gemms = along("n", (1024, 2050), Gemm(4096, 1, 4096))
    run = read_run(write_simulated(tmp_path, GPU, records_of(GPU, gemms, noise=0.005, seed=1)))
    spec = run.info.device
    check = check_run(run, rules=())
    (_, row) = rows_of(points_of(run.records, spec), spec)
    assert row_words(row, check, spec) == "gemm: wave 3 of 3 is 67 % full: 11 % idle (128x256 assumed)"
    # Time that grows with n alone: whatever makes it, it is no tile of 256 columns.
    smooth = SimulatedGpu(108, Tile(128, 16))
    gemms = along("n", range(4096, 8193, 128), Gemm(4096, 1, 4096))
    folder = write_simulated(tmp_path, smooth, records_of(smooth, gemms, noise=0.002, seed=1), run_id="smooth")
    run = read_run(folder)
    check = check_run(run, rules=())
    (period,) = check.periods
    assert Explanation(128, 256, 108) not in period.recovered.plausible
    row = rows_of(points_of(run.records, spec), spec)[1]
    assert "assumed" not in row_words(row, check, spec)


def _point(op: str, us: float, grade: str = "A", count: int = 1) -> Point:
    work = Gemm(256, 256, 256)
    return Point(
        op, {"tp": 1}, op, count, "torch.mm", work, None, us, us, us, 1.0, 1.0, 0.5, Grade(grade, ("made up",)), 10,
        0.0, None,
    )  # fmt: skip


def test_a_row_is_one_layer_with_logits_apart(tmp_path: Path) -> None:
    gemms = along("n", (1024, 2048), Gemm(4096, 1, 4096))
    check = check_run(read_run(write_simulated(tmp_path, GPU, records_of(GPU, gemms, noise=0.005, seed=1))), rules=())
    spec = GPU.spec()
    (row,) = rows_of([_point("qkv", 10.0), _point("proj", 5.0), _point("logits", 100.0, "C")], spec)
    assert (row.latency_us, row.logits_us, row.grade.letter) == (15.0, 100.0, "C")
    assert ops_line([row]) == "a row sums, of one layer, qkv + proj (torch.mm); logits, once per model, are not in it"
    console = Console(width=200, record=True, file=StringIO())
    console.print(sweep_table([row], check, spec))
    header, line = console.export_text().splitlines()[:2]
    assert header.split()[:4] == ["tp", "ops", "time", "logits"]
    assert line.split()[2:6] == ["15.0", "µs", "100", "µs"]
    (alone,) = rows_of([_point("logits", 100.0)], spec)
    assert (alone.latency_us, alone.logits_us) == (100.0, None)
    # Runs from before measured whole models.
    (whole,) = rows_of([_point("qkv", 10.0, count=32)], spec)
    assert ops_line([whole]) == "a row sums, of 32 layers, qkv (torch.mm)"
