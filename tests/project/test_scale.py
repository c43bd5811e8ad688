"""Tables of many rows: work that must grow with the rows and no faster, counted rather than
timed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator import SimulatedGpu, along, records_of

from quantbench.analysis import curves as curve_fits
from quantbench.analysis.curves import LEAST_ERROR, curves_of, fit_curves
from quantbench.analysis.periods import find_periods
from quantbench.analysis.step_detection import find_pieces
from quantbench.analysis.summary import points_of
from quantbench.latency.gemm.training import Effort
from quantbench.launch import Tile
from quantbench.profile import fit as profile_fit
from quantbench.profile.table import Table
from quantbench.store.record import record_from_json, record_to_json
from quantbench.workload import Gemm

GPU = SimulatedGpu(108, Tile(128, 256))


def test_curves_with_sizes_of_their_own_are_fitted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counted(log_size, log_time, sigma):  # type: ignore[no-untyped-def]
        calls.append(len(log_time))
        return find_pieces(log_size, log_time, sigma)

    monkeypatch.setattr(curve_fits, "find_pieces", counted)
    numbers = {}
    for count in (20, 40):
        curves = []
        for i in range(count):
            points = along("m", range(512 + 8 * i, 2048, 160)[:8], Gemm(m=1, n=4096, k=64))
            curves += curves_of(
                points_of(records_of(GPU, points, noise=0.002, seed=i), GPU.spec()), "m"
            )
        calls.clear()
        fitted = fit_curves(curves, LEAST_ERROR)
        assert len(fitted) == count
        numbers[count] = (len(calls), sum(calls))
    assert numbers[40][0] == numbers[20][0]  # as many calls, however many curves
    assert numbers[40][1] == 2 * numbers[20][1]


@pytest.mark.slow
def test_a_curve_of_thousands_of_sizes_is_fitted_whole() -> None:
    sizes = range(32, 32 * 1601, 32)
    records = records_of(GPU, along("m", sizes, Gemm(m=1, n=4096, k=4096)), noise=0.002, seed=0)
    (one,) = fit_curves(curves_of(points_of(records, GPU.spec()), "m"), LEAST_ERROR)
    assert (len(one.fit.levels), len(one.fit.trend)) == (len(sizes), len(sizes) - 1)
    rises = {sizes[b.index + 1] for b in one.fit.breaks if b.log_jump > 0.03}
    waves = {
        size for size in sizes if -(-size // 128) * 16 > 108 and _waves(size) > _waves(size - 32)
    }
    early = {size for size in waves if _waves(size) <= 20}  # higher steps than 4 %
    assert len(rises & early) >= 0.9 * len(early)
    (period,) = find_periods((one,), GPU.spec())
    assert period.num_curves > 1  # its parts


def _waves(m: int) -> int:
    return -(-(-(-m // 128) * 16) // 108)


def test_equal_states_and_grades_of_a_file_are_kept_once(tmp_path: Path) -> None:
    records = records_of(GPU, along("m", (128, 256), Gemm(m=1, n=4096, k=4096)), noise=0.0, seed=0)
    first, second = (
        record_from_json(json.loads(json.dumps(record_to_json(record)))) for record in records
    )
    assert [first, second] == list(records)
    assert first.outcome.measurement.state_before is second.outcome.measurement.state_before  # type: ignore[union-attr]
    assert first.outcome.grade is second.outcome.grade  # type: ignore[union-attr]


def test_the_model_of_a_large_table_is_fitted_to_a_bounded_number_of_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, int] = {}

    def fitted(
        device: object, m: Any, *rest: object, effort: Effort | None, **options: object
    ) -> str:
        asked.update(fitted=len(m), trees=(effort or Effort()).growth.trees)
        return "model"

    monkeypatch.setattr(profile_fit.GemmModel, "fit", fitted)
    for rows, expected in ((1500, (1500, 24)), (40_000, (8000, 10))):
        m = np.arange(1, rows + 1)
        columns = {
            "m": m, "n": np.full(rows, 64), "k": np.full(rows, 64), "batch": np.ones(rows, dtype=np.int64),
            "dtype": ["bf16"] * rows, "layout": ["nn"] * rows, "provider": ["torch"] * rows, "kernel": [""] * rows,
            "block_m": 0 * m, "block_n": 0 * m, "split_k": 0 * m, "latency_us": m * 1.0,
            "low_us": m * 1.0, "high_us": m * 1.0, "grade": ["C"] * rows, "origin": ["imported"] * rows,
        }  # fmt: skip
        profile_fit._product(GPU.spec(), Table.of("gemm", columns), "bf16", "", True, 0)
        assert (asked["fitted"], asked["trees"]) == expected
