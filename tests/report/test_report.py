"""The report's page: what it says first, that it needs nothing beside it, that nothing in a file
can speak in it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused, run_json
from commands import run as run_command
from made_runs import (
    SPEC,
    STATE,
    measurement,
    record,
    reference,
    run,
    samples,
    staircase,
    stairs,
    write,
)
from page_checker import Checker, checked

from quantbench.analysis.check import check_run
from quantbench.analysis.neighbours import BadSize, bad_sizes_on, curves_of_rows, rows_by_dtype
from quantbench.analysis.summary import LayerRow, layer_rows, points_of, providers_run_different_ops
from quantbench.device.spec import DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Grade
from quantbench.report.page import write_report
from quantbench.report.sections import trust_lines
from quantbench.report.source import parse_where, points_where
from quantbench.store.folder import Run
from quantbench.store.record import Failed, GridPosition, Measured, Record, Skipped
from quantbench.workload import Gemm


def charts(page: Checker) -> list[dict[str, Any]]:
    return [json.loads(value or "") for _, name, value in page.attributes if name == "data-chart"]


def report(made: Run, folder: Path) -> Checker:
    return checked(write_report(made, folder).page)


def rows_of(made: Sequence[Record]) -> tuple[LayerRow, ...]:
    return rows_by_dtype(points_of(run(made).records, SPEC))


def bad_sizes_of(made: Sequence[Record]) -> tuple[BadSize, ...]:
    return bad_sizes_on(curves_of_rows(rows_of(made), "n"), "n")


def steady(us: float, seed: int) -> tuple[float, ...]:
    return samples(us, noise=0.002, count=20, seed=seed)


def table_of_m_and_n() -> list[Record]:
    """One row more than 256 costs 40 % at every n."""
    times = {256: 0.01, 257: 0.014}
    return [
        record(Gemm(m, n, 1024), steady(us_per_n * n, m + n), {"m": m, "n": n})
        for n in range(1024, 1024 + 64 * 14, 64)
        for m, us_per_n in times.items()
    ]


def test_a_name_that_ends_in_html_is_the_page_itself(tmp_path: Path) -> None:
    made = run(stairs((1024, 1088)))
    alone = write_report(made, tmp_path / "pages" / "x.html")
    assert alone.page == tmp_path / "pages" / "x.html"
    assert [path.name for path in alone.page.parent.iterdir()] == ["x.html"]
    # A folder of such a name stays one.
    (tmp_path / "y.html").mkdir()
    assert write_report(made, tmp_path / "y.html").page == tmp_path / "y.html" / "report.html"


# --- what is bad beside its neighbours ---------------------------------------------------------------------------


def test_a_size_past_a_wave_edge_loses_against_the_edge() -> None:
    bad = bad_sizes_of(stairs(range(2048, 6144, 64)))
    worst = bad[0]
    # One wave more for 64 columns more: 3 / 2 waves times 3328 / 3392 of the work.
    assert (worst.size, worst.better.axes["n"]) == (3392, 3328)
    assert worst.loss == pytest.approx(1 - (203 / 303) * (3392 / 3328), abs=0.005)
    assert worst.low < worst.loss < worst.high
    # Up to 10 % more columns ride in the same wave.
    assert worst.up_to == 3712
    assert {b.better.axes["n"] for b in bad} == {3328, 5120}


def test_noise_alone_makes_no_bad_size() -> None:
    flat = [
        record(
            Gemm(2048, n, 4096), samples(100.0 * n / 2048, noise=0.01, count=20, seed=n), {"n": n}
        )
        for n in range(2048, 4096, 64)
    ]
    assert bad_sizes_of(flat) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how_ended", "said"),
    [
        ("complete", ""),
        ("budget", "STOPPED BY ITS BUDGET Points that it did not reach are missing"),
        ("interrupted", "NOT FINISHED This run is interrupted"),
    ],
)
def test_what_a_run_lacks_is_said_first(tmp_path: Path, how_ended: str, said: str) -> None:
    text = report(run(stairs((1024, 1088, 1152)), how_ended=how_ended), tmp_path).text
    assert said in text
    assert bool(said) == ("STOPPED" in text or "NOT FINISHED" in text)


def test_a_row_that_lacks_a_failed_op_is_not_held_against_whole_ones() -> None:
    made = []
    for n in (1024, 1088, 1152):
        made.append(record(Gemm(512, n, 512), (100.0,) * 6 + (100.5,), {"n": n}, op="qkv"))
        if n != 1024:
            made.append(record(Gemm(512, n, 1024), (200.0,) * 6 + (200.5,), {"n": n}, op="proj"))
    assert bad_sizes_of(made) == ()


def test_formats_of_one_table_are_not_mixed() -> None:
    made = [
        record(Gemm(512, n, 512, dtype=dtype), (us - 0.1, *(us,) * 5, us + 0.1), {"n": n})
        for n in (1024, 1088)
        for dtype, us in (("bf16", 100.0), ("fp16", 50.0))
    ]
    assert [(row.axes["n"], row.latency_us) for row in rows_of(made)] == [
        (1024, 100),
        (1088, 100),
        (1024, 50),
        (1088, 50),
    ]


# --- the page ----------------------------------------------------------------------------------------------------


def test_the_first_words_answer_and_simulated_figures_are_labelled(tmp_path: Path) -> None:
    written = write_report(run(stairs(range(2048, 6144, 64))), tmp_path / "out")
    page = checked(written.page)
    answer = "the worst, 3392, loses 32 % against 3328"
    assert answer in written.lead.sentence
    assert page.text.index("SIMULATED") < page.text.index(answer)
    assert "3328, or 3968 for the same 303 µs" in page.text
    assert "wave 3 of 3 is 7.4 % full: 31 % idle" in page.text
    lead, of_op = charts(page)
    assert [line["name"] for line in lead["lines"]] == ["torch.mm"]
    assert [mark["label"] for mark in lead["marks"] if mark["x"] == 3392] == ["−32 %"]
    assert [mark["label"] for mark in of_op["marks"]] == ["1", "2"]
    assert [dot["x"] for dot in of_op["lines"][0]["dots"]] == list(range(2048, 6144, 64))
    assert page.text.count("NOTHING MEASURED") == 0


def test_imported_figures_are_labelled_with_their_source(tmp_path: Path) -> None:
    unknown = DeviceState(note="imported: the device's state was not recorded")
    made = []
    for n in range(2048, 4096, 64):
        figure = measurement(
            (staircase(n),), clocks_mhz=(), state_before=unknown, state_after=unknown
        )
        outcome = Measured(figure, Grade("C", ("imported: one mean of a few runs",)))
        made.append(
            record(
                Gemm(2048, n, 4096),
                outcome,
                {"n": n},
                origin="imported",
                source="a table of nobody",
            )
        )
    text = report(run(made, origin="imported", source="a table of nobody"), tmp_path).text
    assert "IMPORTED Measured by others, not on this machine: a table of nobody" in text
    # Single figures have no interval, and none is shown.
    assert "32 % (" not in text


def test_a_run_without_any_record(tmp_path: Path) -> None:
    folder = write(tmp_path, run([]))
    run_command(f"report {folder}", code=2)
    text = checked(folder / "report.html").text
    assert "NOTHING MEASURED" in text
    assert "Which sizes to avoid" not in text


def test_a_wrong_result_keeps_its_error_and_its_bound() -> None:
    message = f"{'check ' * 15}relative error 0.1; expected at most 0.001{' source' * 13}"
    wrong = record(Gemm(8, 8, 8), Failed("wrong_result", message), {"n": 8})
    (line,) = trust_lines(run([wrong]))
    assert message in line


def test_a_run_full_of_failures_says_why(tmp_path: Path) -> None:
    made = [
        record(Gemm(8, n, 8), Failed("crash", "killed by SIGSEGV"), {"n": n}) for n in range(1, 30)
    ]
    made += [
        record(Gemm(8, n, 8), Skipped("fp8 needs a newer GPU"), {"n": n}) for n in range(30, 33)
    ]
    text = report(run(made, how_ended="interrupted"), tmp_path).text
    assert "NOTHING MEASURED" in text
    assert "29 × failed, torch.mm: crash: killed by SIGSEGV" in text
    assert "3 × skipped, torch.mm: fp8 needs a newer GPU" in text
    assert "NOT FINISHED This run is interrupted" in text


def test_rejected_figures_are_counted_and_not_drawn(tmp_path: Path) -> None:
    made = stairs((1024, 1088, 1152))
    assert isinstance(made[1].outcome, Measured)
    grade = Grade("rejected", ("faster than the hardware's peak: 400 TFLOP/s",))
    made[1] = replace(made[1], outcome=replace(made[1].outcome, grade=grade))
    text = report(run(made), tmp_path).text
    assert "impossible: faster than the hardware" in text
    assert "1088 →" not in text


@pytest.mark.slow
def test_ops_of_several_providers_are_one_layer(tmp_path: Path) -> None:
    # The unfused three are slower than attention in one kernel, and of the two who compute it only
    # the faster counts.
    times = {
        ("qkv", "mm"): (100.0, 100.0), ("scores", "mm"): (90.0, 90.0), ("softmax", "eager"): (80.0, 80.0),
        ("context", "mm"): (90.0, 90.0), ("attention", "flash"): (50.0, 80.0), ("attention", "math"): (70.0, 70.0),
    }  # fmt: skip
    made = [
        record(
            Gemm(512, n, 1024),
            steady(us[i], n),
            {"n": n},
            op=op,
            provider=provider,
        )
        for (op, provider), us in times.items()
        for i, n in enumerate((1024, 1088))
    ]
    points = points_of(made, SPEC)
    assert providers_run_different_ops(points)
    first, second = layer_rows(points)
    assert [(p.op, p.provider) for p in first.points] == [("qkv", "mm"), ("attention", "flash")]
    assert [(p.op, p.provider) for p in second.points] == [("qkv", "mm"), ("attention", "math")]
    assert first.latency_us == pytest.approx(150, rel=0.01)
    assert not providers_run_different_ops([p for p in points if p.op == "attention"])
    assert "n: 1088 is" not in report(run(made), tmp_path).text


def test_a_product_that_an_axis_does_not_change_is_named_and_not_drawn(tmp_path: Path) -> None:
    made = [
        record(Gemm(512, 1024, 1024), steady(100, 1), {"heads": 8}, op="proj"),
        *(record(Gemm(512, 64 * h, 1024), steady(9 * h, h), {"heads": h}, op="scores")
          for h in (8, 16)),
    ]  # fmt: skip
    places = (GridPosition({"heads": 8}, "proj"), GridPosition({"heads": 16}, "proj"))
    made[0] = replace(made[0], places=places)
    page = write_report(run(made), tmp_path)
    assert "proj: the same product at every heads" in page.page.read_text()
    assert [chart["axis"] for chart in charts(checked(page.page))] == ["heads"] * 2


@pytest.mark.slow
def test_two_axes_have_a_map_and_many_curves_are_told_together(tmp_path: Path) -> None:
    written = write_report(run(table_of_m_and_n()), tmp_path)
    assert written.lead.sentence == (
        "m: the worst size is 257: 14 of 14 shapes lose there, median 28 %"
    )
    page = checked(written.page)
    assert "Rate of gemm over n and m" in page.text
    assert "img" in page.tags


@pytest.mark.slow
def test_the_check_speaks_on_the_page(tmp_path: Path) -> None:
    launch = Launch("ampere_gemm_128x256", tile=Tile(128, 256), blocks_per_sm=1)
    text = report(run(stairs(range(1024, 8192, 64), launch=launch)), tmp_path).text
    assert "n, gemm bf16 nn by torch.mm: 128x256 tile on 108 SMs explains the steps" in text
    assert (
        "128x256 tile on 108 SMs: 2 to 3 waves, the last 7.4 % full (by the kernel that ran)"
        in text
    )
    assert "tiles % (SM count × blocks per SM) == 0" in text
    assert "rules not tested: hidden-128, " in text
    assert (
        text.index("use instead") < text.index("explains the steps") < text.index("Efficiency over")
    )


def test_an_assumed_tile_is_no_cause(tmp_path: Path) -> None:
    # Times that no tile explains, and no kernel recorded: the page must not say "wave 3 of 3".
    rng = np.random.default_rng(5)
    made = [
        record(
            Gemm(2048, n, 4096),
            steady(n / 20 * rng.choice((1.0, 1.25)), n),
            {"n": n},
        )
        for n in range(1024, 4096, 64)
    ]
    written = write_report(run(made), tmp_path)
    assert len(written.lead.rows) > 3
    assert not any("wave" in row.why or "pads" in row.why for row in written.lead.rows)


@pytest.mark.slow
def test_the_device_through_the_run(tmp_path: Path) -> None:
    made = [reference(50.0 * (1 + 0.01 * i), elapsed_s=60.0 * i) for i in range(4)]
    for i, n in enumerate((1024, 1088, 1152)):
        hot = replace(STATE, temperature_c=50.0 + i, power_w=300.0 + i)
        seen = measurement(
            (100.0, 100.1, 100.2), clocks_mhz=(1410.0, 1395.0, 1400.0 - i), state_after=hot
        )
        made.append(
            record(Gemm(8, n, 8), Measured(seen, Grade("A")), {"n": n}, elapsed_s=30.0 + 60 * i)
        )
    written = write_report(run(made), tmp_path)
    text = checked(written.page).text
    assert (
        "SM clock 1395 to 1410 MHz; temperature 50 to 52 °C; power 300 to 302 W; "
        "reference point 0 to 3 % against its first time" in text
    )


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_writes_into_the_run_or_elsewhere(tmp_path: Path) -> None:
    folder = write(tmp_path, run(stairs(range(2048, 6144, 64)), "one"))
    said = run_command(f"report {folder}")
    assert "SIMULATED DATA" in said
    assert "the worst, 3392, loses 32 % against 3328" in said
    checked(folder / "report.html")
    written = run_json(f"report {folder} -o {tmp_path / 'elsewhere'}")
    assert written["page"] == str(tmp_path / "elsewhere" / "report.html")
    assert "loses 32 %" in written["answer"]


def test_what_is_no_single_run_is_refused(tmp_path: Path) -> None:
    one = write(tmp_path, run(stairs((1024,)), "one"))
    two = write(tmp_path, run(stairs((1024,)), "two", device=replace(SPEC, name="h100-test")))
    assert run_json(f"check {one.parent}")["run"] == str(one)
    assert refused(f"report {tmp_path}").value == f"{tmp_path} holds 2 runs"
    assert refused(f"report {one} -o /dev/null/x").value == "/dev/null/x (Not a directory)"
    mixed = (one / "records.jsonl").read_text() + (two / "records.jsonl").read_text()
    (one / "records.jsonl").write_text(mixed)
    assert refused(f"report {one}").value == f"{one} has records of two"


@pytest.mark.slow
def test_one_shape_of_a_table_is_shown_with_what_the_whole_table_tells(tmp_path: Path) -> None:
    made = run(table_of_m_and_n())
    whole = write_report(made, tmp_path)
    one = write_report(made, tmp_path / "one", {"n": 1088})
    assert whole.lead.several
    assert one.lead.sentence.startswith(
        "m: 1 of 2 sizes lose against a smaller size within 10 %; the worst, 257, loses 28"
    )
    assert "a100-test: m at n = 1088" in checked(one.page).text
    assert [row.details for row in one.lead.rows] == [""]  # n is in the title


@pytest.mark.parametrize(
    ("words", "value", "expected"),
    [
        ("n=1000", "n=1000", "1024, 1088"),
        ("hidden=8", "hidden=8", "n"),
        ("n", "'n'", "n=5120"),
        ("n=-1", "'n=-1'", "n=5120"),
    ],
)
def test_a_shape_that_is_not_there_is_refused_with_what_is(
    words: str, value: str, expected: str
) -> None:
    points = points_of(stairs((1024, 1088)), SPEC)
    with pytest.raises(InputError) as error:
        points_where(points, parse_where([words]))
    assert (error.value.operation, error.value.value) == ("--where", value)
    assert error.value.expected.endswith(expected)


# --- causes of bad sizes ---------------------------------------------------------------------------------------------
_BIG = Launch("a", tile=Tile(128, 256), blocks_per_sm=1)
_FREE = Launch("a", tile=Tile(128, 256))  # how many blocks an SM holds is not known
_SMALL = Launch("b", tile=Tile(64, 64), blocks_per_sm=1)


@pytest.mark.parametrize(
    ("better", "slow", "launches", "kind"),
    [
        (Gemm(2048, 3328, 4096), Gemm(2048, 3584, 4096), (_BIG, _BIG), "wave edge"),
        (Gemm(1152, 3072, 4096), Gemm(1024, 3072, 4096), (_BIG, _FREE), "fewer blocks than SMs"),
        (Gemm(512, 512, 64), Gemm(512, 520, 64), (_BIG, _SMALL), "kernel change"),
        (Gemm(512, 512, 64), Gemm(512, 520, 64), (None, None), "unexplained"),
    ],
)
def test_a_cause_is_counted_by_its_kind(
    better: Gemm, slow: Gemm, launches: tuple[Launch | None, Launch | None], kind: str
) -> None:
    made = [
        record(work, (1000.0 + i,), {"n": 1000 + i}, launch=launch)
        for i, (work, launch) in enumerate(zip((better, slow), launches, strict=True))
    ]
    before, after = rows_of(made)
    bad = BadSize("n", after, before, 0.3, None, None, None, after.points[0], before.points[0])
    cause = replace(check_run(run(made), rules=()), cliffs=(), periods=()).explain(bad)
    assert cause.kind == kind
