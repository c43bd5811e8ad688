"""The table that a sweep ends with: rows of all ops of a place, and the cliffs that `check` finds
there.
"""

from dataclasses import replace

from simulator import SimulatedGpu, along, measurement, records_of, run_of
from sweep_doubles import recording

from quantbench.analysis.check import check_run
from quantbench.analysis.neighbours import curves_of_rows
from quantbench.analysis.staircase import TileCandidate
from quantbench.analysis.summary import Point, layer_rows, points_of, rows_of
from quantbench.launch import Launch, Tile
from quantbench.measurement import Grade
from quantbench.report.sweep_result import (
    ops_line,
    row_words,
    rows_to_json,
    sizes_table,
)
from quantbench.report.terminal import drawn
from quantbench.store.record import Measured
from quantbench.workload import Gemm

GPU = SimulatedGpu(108, Tile(128, 256))


def test_rows_tell_the_cliffs_of_check() -> None:
    records = records_of(
        GPU,
        along("n", range(1024, 4097, 64), Gemm(4096, 1, 4096)),
        noise=0.005,
        seed=1,
        launches=True,
    )
    run = run_of(GPU, records)
    spec = run.info.device
    check = check_run(run, rules=())
    rows = rows_of(points_of(run.records, spec))
    said = {row.axes["n"]: row_words(row, check) for row in rows}
    # 6 columns of 32 tiles are the 192 of two waves; a seventh, from n = 1537 on, begins a third.
    cliff = next(cliff for cliff in check.cliffs if cliff.at == 1536)
    assert said[1600].startswith(
        f"▼ +{100 * (cliff.ratio - 1):.0f} % time in gemm: 128x256 tile on 108 SMs: 2 to 3 waves"
    )
    assert not [
        n for n, words in said.items() if "▼" in words and n not in {c.next for c in check.cliffs}
    ]
    console = recording(200)
    console.print(drawn(sizes_table(rows, check)))
    assert said[1600] in console.export_text()
    assert {row["axes"]["n"]: row["words"] for row in rows_to_json(rows, check)} == said


def test_an_assumed_tile_is_called_so_and_dropped_where_the_steps_speak_against_it() -> None:
    gemms = along("n", (1024, 2056), Gemm(4096, 1, 4096))
    run = run_of(GPU, records_of(GPU, gemms, noise=0.005, seed=1))
    spec = run.info.device
    check = check_run(run, rules=())
    (_, row) = rows_of(points_of(run.records, spec))
    assert row_words(row, check) == "gemm: wave 3 of 3 is 67 % full: 11 % idle (128x256 assumed)"
    # Time that grows with n alone: whatever makes it, it is no tile of 256 columns.
    smooth = SimulatedGpu(108, Tile(128, 16))
    gemms = along("n", range(4096, 8193, 128), Gemm(4096, 1, 4096))
    run = run_of(smooth, records_of(smooth, gemms, noise=0.002, seed=1))
    check = check_run(run, rules=())
    (period,) = check.periods
    assert TileCandidate(128, 256, 108) not in period.recovered.plausible
    row = rows_of(points_of(run.records, spec))[1]
    assert "assumed" not in row_words(row, check)


def test_measured_points_are_not_idle_where_they_compute() -> None:
    spec = GPU.spec()
    gemm = Gemm(2305, 3072, 4096, dtype="bf16")
    peak_us = gemm.flops / (spec.peak_tflops["bf16"] * 1e6)

    def words(peak_share: float, *, blocks_per_sm: int | None) -> str:
        launch = Launch("made up", tile=Tile(128, 256), blocks_per_sm=blocks_per_sm)
        (record,) = records_of(GPU, [({"m": gemm.m}, gemm)], noise=0.0, seed=1)
        taken = measurement([peak_us / peak_share] * 10)
        record = replace(record, launch=launch, outcome=Measured(taken, Grade("A")))
        run = run_of(GPU, [record])
        (row,) = rows_of(points_of(run.records, spec))
        return row_words(row, check_run(run, rules=()))

    pads = "gemm: m = 2305 pads to 2432: 5.2 % idle"
    assert words(0.5, blocks_per_sm=1) == "gemm: wave 3 of 3 is 11 % full: 30 % idle"
    assert (
        words(0.8, blocks_per_sm=1)
        == words(0.5, blocks_per_sm=2)
        == words(0.5, blocks_per_sm=None)
        == pads
    )
    assert words(0.97, blocks_per_sm=1) == ""


def test_a_row_that_lacks_an_op_says_so_and_has_no_sum() -> None:
    records = [
        replace(record, places=(replace(record.places[0], op=op),), key=f"{i}{number}".zfill(16))
        for i, op in enumerate(("qkv", "proj"))
        for number, record in enumerate(
            records_of(
                GPU, along("n", (1024, 1280, 1536, 1792), Gemm(4096, 1, 4096)), noise=0.005, seed=i
            )
        )
    ]
    left_out = next(
        r for r in records if r.places[0].op == "proj" and r.places[0].axes["n"] == 1536
    )
    run = run_of(GPU, [r for r in records if r is not left_out])
    spec = run.info.device
    check = check_run(run, rules=())
    rows = rows_of(points_of(run.records, spec))
    assert {row.axes["n"]: row.missing for row in rows if row.missing} == {1536: ("proj",)}
    torn = next(row for row in rows if row.missing)
    table = sizes_table(rows, check)
    assert table.head[1:6] == (">ops", ">time", ">TFLOP/s", ">GB/s", ">of peak")
    assert table.rows[rows.index(torn)][1:6] == ("1 of 2", "-", "-", "-", "")
    assert row_words(torn, check).startswith("no sum, not measured here: proj")
    told = {row["axes"]["n"]: row for row in rows_to_json(rows, check)}
    assert (told[1536]["missing_ops"], told[1536]["latency_us"]) == (["proj"], None)
    assert told[1792]["missing_ops"] == []
    assert told[1792]["latency_us"] > 0
    # Nor is it held against its neighbours.
    (curve,) = curves_of_rows(rows, "n")
    assert [row.axes["n"] for row in curve] == [1024, 1280, 1792]


def test_attention_in_three_kernels_makes_a_layer_whole() -> None:
    spec = GPU.spec()
    (record,) = records_of(GPU, along("n", (1024,), Gemm(4096, 1, 4096)), noise=0.005, seed=1)
    (point,) = points_of([record], spec)
    fused = [replace(point, axes={"n": 1}, op=op) for op in ("qkv", "attention")]
    unfused = [
        replace(point, axes={"n": 2}, op=op) for op in ("qkv", "scores", "softmax", "context")
    ]
    torn = [replace(point, axes={"n": 3}, op=op) for op in ("qkv", "scores")]
    assert [row.missing for row in layer_rows([*fused, *unfused, *torn])] == [
        (),
        (),
        ("attention",),
    ]


def _point(op: str, us: float, grade: str = "A", count: int = 1) -> Point:
    work = Gemm(256, 256, 256)
    return Point(
        op, {"tp": 1}, op, count, "torch.mm", work, None, us, us, us, 1.0, 1.0, 0.5, Grade(grade, ("made up",)), 10,
        0.0, None,
    )  # fmt: skip


def test_a_row_is_one_layer_with_logits_apart() -> None:
    gemms = along("n", (1024, 2048), Gemm(4096, 1, 4096))
    check = check_run(
        run_of(GPU, records_of(GPU, gemms, noise=0.005, seed=1)),
        rules=(),
    )
    (row,) = rows_of([_point("qkv", 10.0), _point("proj", 5.0), _point("logits", 100.0, "C")])
    assert (row.latency_us, row.logits_us, row.grade.letter) == (15.0, 100.0, "C")
    assert (
        ops_line([row])
        == "a row sums, of one layer, qkv + proj (torch.mm); logits, once per model, are not in it"
    )
    console = recording(200)
    console.print(drawn(sizes_table([row], check)))
    header, line = console.export_text().splitlines()[:2]
    assert header.split()[:4] == ["tp", "ops", "time", "logits"]
    assert line.split()[2:6] == ["15.0", "µs", "100", "µs"]
    (alone,) = rows_of([_point("logits", 100.0)])
    assert (alone.latency_us, alone.logits_us) == (100.0, None)
