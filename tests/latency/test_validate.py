"""The contests: who learns from what, how it is judged, and how the tables are written."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, MeasurementError, StoreError, UnsupportedError
from quantbench.latency.tables import GemmTable
from tools.accuracy import aiconfigurator_engine, formats
from tools.accuracy import heuristics as heuristics_child
from tools.accuracy.contests import (
    Answer,
    Contest,
    Contestant,
    Step,
    gaussian_process,
    ideal_us,
    log_interpolation,
    roofline,
    run_contests,
)
from tools.accuracy.gemm import Absent, engine, heuristics
from tools.accuracy.page import conclusion, markdown
from tools.accuracy.scoring import ErrorSummary, Line, Split, cells, over_seeds
from tools.accuracy.tables import PackagedTable
from tools.guide.markers import write_between

A100 = lookup("a100-sxm4-80gb")
PAGE = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")


def table(gpu: str = "nowhere") -> GemmTable:
    """Products on a made-up A100 at 60 % of the roofline, with a 30 % step after m = 128 and m =
    256.
    """
    ms = [1, 64, 65, 128, 129, 256, 257, 512]
    grid = sorted(
        (m, n, k)
        for m in ms
        for n in (1024, 2048, 3072, 4096, 5120)
        for k in (1024, 2048, 4096, 8192)
    )
    m, n, k = np.array(grid).T
    ideal = ideal_us(A100, "bf16", m, n, k)
    latency_us = 3 + ideal / 0.6 * np.where(m > 256, 1.69, np.where(m > 128, 1.3, 1.0))
    return GemmTable(m, n, k, latency_us, "bf16", gpu)


def contest(protocol: str = "sites") -> Contest:
    return Contest(A100, table(), protocol)


def fixed(name: str, factor: float, train_rows: int | None = 20) -> Contestant:
    """Predicts the measured time times a factor."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        measured = contest.table.latency_us[split.test]
        return Answer(measured * factor, measured * 0.9, measured * 1.1, fit_s=1.0, predict_s=0.5)

    return Contestant(name, train_rows, answer)


def judged(
    *contestants: Contestant, seeds: tuple[int, ...] = (0, 1), protocol: str = "sites"
) -> list[Line]:
    return list(run_contests([(contest(protocol), contestants)], seeds, lambda step: None))


def test_scores_of_a_known_answer() -> None:
    (found,) = judged(fixed("ten percent over", 1.1))
    assert (found.errors.median_pct, found.errors.p95_pct) == pytest.approx((10, 10))
    assert (found.coverage, found.cliff_recall, found.cliff_precision) == (1.0, 1.0, 1.0)
    assert (found.train_rows, found.seeds, found.fit_s) == (20, 2, 1.0)
    assert found.shapes_per_s == pytest.approx(80 / 0.5)  # half of 20 sites with 8 rows each


def test_baselines_learn_from_the_training_rows_only() -> None:
    seen: list[set[int]] = []

    def spy(contest: Contest, split: Split, seed: int) -> Answer:
        seen.append(set(split.train.tolist()))
        assert not set(split.train.tolist()) & set(split.test.tolist())
        return Answer(contest.table.latency_us[split.test])

    found = judged(
        roofline(), log_interpolation(40), gaussian_process(40), Contestant("spy", 40, spy)
    )
    assert len(seen) == 2
    assert all(len(rows) == 40 for rows in seen)
    assert seen[0] != seen[1]
    errors = {entry.model: entry.errors.median_pct for entry in found}
    assert errors["Gaussian process on log efficiency"] < errors["spec-sheet roofline"]
    assert errors["spec-sheet roofline"] > 30


def test_progress_adds_up_and_who_learns_nothing_runs_once() -> None:
    steps: list[Step] = []
    contests = [(contest(), [roofline(), fixed("twice", 1.0), fixed("all", 1.0, train_rows=None)])]
    lines = list(run_contests(contests, (0, 1, 2), steps.append))
    assert [step.done for step in steps] == [0, 1, 2, 3, 4]
    assert {step.total for step in steps} == {5}
    assert "a100-sxm4-80gb, sites: twice, seed 2" in [step.text for step in steps]
    assert [entry.train_rows for entry in lines] == [None, 20, 80]


def test_rows_without_an_answer_are_counted_not_forgiven() -> None:
    def half(contest: Contest, split: Split, seed: int) -> Answer:
        latency_us = contest.table.latency_us[split.test].copy()
        latency_us[::2] = np.nan
        return Answer(latency_us)

    def none(contest: Contest, split: Split, seed: int) -> Answer:
        return Answer(np.full(len(split.test), np.nan))

    (found,) = judged(Contestant("half", 20, half))
    assert found.unanswered == pytest.approx(0.5)
    assert "(no answer to 50 %)" in cells(found)[2]
    assert found.cliff_recall is None
    with pytest.raises(InputError, match=r"none answered none of 80 rows; expected at least one"):
        judged(Contestant("none", 20, none))


def test_absent_contestants_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aiconfigurator_engine, heuristics_child):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    absent = [
        one for one in (heuristics(contest()), engine(contest(), 20)) if isinstance(one, Absent)
    ]
    assert [entry.reason for entry in absent] == [
        "the package nvidia-matmul-heuristics is not installed",
        "the package aiconfigurator-core is not installed",
    ]
    text = markdown([], absent)
    assert "- a100-sxm4-80gb: nvidia-matmul-heuristics is left out: the package" in text


def test_a_child_that_fails_is_one_line() -> None:
    with pytest.raises(
        MeasurementError, match=r"quantbench.no_such_child ended with 1: .*no_such_child"
    ):
        aiconfigurator_engine.ask_child("quantbench.no_such_child", {})


def test_roofline_by_hand_and_its_refusal() -> None:
    m, n, k = (np.array([size]) for size in (4096, 4096, 4096))
    assert ideal_us(A100, "bf16", m, n, k)[0] == pytest.approx(2 * 4096**3 / 312e6)
    thin = ideal_us(A100, "bf16", np.array([1]), n, k)[0]
    assert thin == pytest.approx(2 * (4096 + 4096**2 + 4096) / A100.memory_gb_per_s / 1e3)
    with pytest.raises(UnsupportedError, match=r"roofline: fp8 on a100-sxm4-80gb; expected one of"):
        ideal_us(A100, "fp8", m, n, k)


SUMMARY = ErrorSummary(100, 4.551, 6.52, 19.04)


BARE = Line("a100-sxm4-80gb", "sites", "ours", 200, 1, SUMMARY)


def test_a_busy_moment_moves_no_time() -> None:
    rates = (40_000.0, 9_000.0, 41_000.0)
    found = over_seeds([replace(BARE, fit_s=400_000.0 / rate, shapes_per_s=rate) for rate in rates])
    assert found.seeds == 3
    assert (found.shapes_per_s, found.fit_s) == (40_000.0, 10.0)
    assert over_seeds([BARE]) == BARE


def test_markdown_of_a_line() -> None:
    found = replace(
        BARE,
        coverage=0.905,
        cliff_recall=0.80,
        cliff_precision=0.75,
        fit_s=1.234,
        shapes_per_s=23456.0,
    )
    text = markdown([found], [])
    assert "### a100-sxm4-80gb" in text
    assert "| ours | 200 | 4.55 / 6.5 / 19.0 | 90 % | 0.80 / 0.75 | 1.2 | 23,000 |" in text
    assert "compute rows" not in text  # nobody fills that column
    assert text.startswith("**Held-out sites: half of the (n, k) pairs are the test")
    assert found.to_json()["errors"]["median_pct"] == 4.551


def test_writing_between_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.md"
    path.write_text("before\n<!-- gemm:begin -->\nold\n<!-- gemm:end -->\nafter\n")
    write_between(path, "gemm", "new\n")
    write_between(path, "gemm", "newer\n")
    assert path.read_text() == "before\n<!-- gemm:begin -->\nnewer\n<!-- gemm:end -->\nafter\n"
    with pytest.raises(
        StoreError, match=r"without one <!-- attention:begin --> and one <!-- attention:end -->"
    ):
        write_between(path, "attention", "new\n")
    with pytest.raises(StoreError, match=r"gone.md \(No such file or directory\)"):
        write_between(tmp_path / "gone.md", "gemm", "new\n")


def test_the_docs_have_every_marker_that_is_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for name in ("lines", "closer", "gemm", "attention"):
        assert text.count(f"<!-- {name}:begin -->") == 1
        assert text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")


def test_scores_of_formats_are_kept_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, key = tmp_path / "work", ("a100-sxm4-80gb", "bf16", "sglang")
    read: list[tuple[str, ...]] = []

    def made_up(*key: str, **named: str) -> PackagedTable:
        read.append((*key, *named.values()))
        origin = dict.fromkeys(("file", "sha256", "package", "system", "framework", "device"), "")
        return PackagedTable(**vars(table()), **origin, version="0.5.10")

    monkeypatch.setattr(formats, "read_packaged", made_up)
    monkeypatch.setattr(formats, "KEYS", (key,))
    monkeypatch.setattr(formats, "CLOSER", (key,))
    monkeypatch.setattr(formats, "_WIDE", (fixed("unfitted", 1.5, 0), fixed("ours", 1.1)))
    monkeypatch.setattr(formats, "_CLOSE", (fixed("ours", 1.1),))
    formats.judge(work, [key], lambda text: None)
    assert "| bf16 | **SGLang 0.5.10** | 50 | 10.00 / 10.0 / 10.0 | 100 % |" in formats.lines_table(
        work
    )
    assert "| its rows | 20 | 3 | 10.00 / 10.0 / 10.0 | 100 % |" in formats.closer_table(work)
    formats.judge(work, [key], lambda text: pytest.fail("computed again"))
    assert read == [key]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda c: heuristics(c), lambda c: engine(c, 40)])
def test_foreign_contestants_answer(make: Callable[[Contest], Contestant | Absent]) -> None:
    real = Contest(A100, table("a100-sxm4-80gb"), "sites")
    contestant = make(real)
    if isinstance(contestant, Absent):
        pytest.skip(contestant.reason)
    (found,) = list(run_contests([(real, [contestant])], (0,), lambda step: None))
    assert 0 < found.errors.median_pct < 200


def test_the_page_begins_with_the_conclusion_from_its_tables() -> None:
    head, _, rest = PAGE.partition("<!-- conclusion:begin -->\n")
    assert head.count("\n") <= 3
    assert rest.partition("<!-- conclusion:end -->")[0] == conclusion(PAGE)


def test_the_conclusion_follows_from_the_tables() -> None:
    lines = PAGE.partition("<!-- lines:begin -->")[2].partition("<!-- lines:end -->")[0]
    worse = re.sub(r"\| ([\d.]+) / ", r"| 9\1 / ", lines)
    assert conclusion(PAGE.replace(lines, worse)) != conclusion(PAGE)
