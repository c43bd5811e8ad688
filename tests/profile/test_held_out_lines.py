"""The experiment behind the table of docs/exporting.md: chosen rows against random ones on held-out
rows.
"""

from dataclasses import replace

import numpy as np
import pytest
from known_profile import gemm_row, known_profile, table
from test_blindspots import stair_rows

from quantbench.errors import InputError
from quantbench.profile.linear_interpolation import interpolated_us
from tools.accuracy.aiconfigurator_engine import engine
from tools.accuracy.held_out_lines import held_out, is_thin, measured_products, straight_lines
from tools.accuracy.tables import GemmTable


@pytest.mark.slow
def test_lines_are_the_engine_s_own() -> None:
    pytest.importorskip("aiconfigurator_core")
    m, us = np.array([1, 2, 128, 129, 4096]), np.array([26.5, 26.25, 37.0, 40.5, 549.0])
    asked = np.array([1, 2, 3, 127, 128, 129, 130, 2500, 4095, 4096])
    same = np.full(len(m), 4096)
    four = np.full(len(asked), 4096)
    rows = GemmTable("a100-sxm4-80gb", "bf16", {"m": m, "n": same, "k": same}, us)
    queries = replace(rows, sizes={"m": asked, "n": four, "k": four}, latency_us=0.0 * asked)
    answer = engine(("a100_sxm", "vllm", "quantbench"), rows, queries)
    assert interpolated_us(asked, m, us) == pytest.approx(answer.latency_us, rel=1e-9)


def measured(noise: float) -> GemmTable:
    profile = known_profile({"gemm": table("gemm", [gemm_row(*row) for row in stair_rows()])})
    found = measured_products(profile)
    assert found.dtype == "bf16"
    factor = np.exp(np.random.default_rng(1).normal(0.0, noise, len(found)))
    return replace(found, latency_us=found.latency_us * factor)


def p95(line: list[str], column: int) -> float:
    return float(line[column].split(" / ")[1])


def test_chosen_rows_beat_random_ones_on_rows_that_neither_has() -> None:
    exact = measured(0.0)
    head, thin, at_random, chosen, modelled = held_out(
        measured(0.01), exact.latency_us, straight_lines
    )
    assert head[2].startswith("rows in none of the tables (")
    assert int(thin[1]) < int(at_random[1]) == int(chosen[1]) == int(modelled[1])
    for column in (2, 4):
        assert p95(chosen, column) < 0.5 * p95(at_random, column)
    # Here the model knows all but the noise, so that its rows do as well as measured ones.
    assert p95(modelled, 2) < 0.5 * p95(at_random, 2)


def test_held_out_times_are_not_looked_at_when_rows_are_chosen() -> None:
    """Times of rows off the grid do not change which rows are taken."""
    one = measured(0.0)
    other_us = one.latency_us.copy()
    thin = is_thin(one)
    other_us[~thin] *= np.random.default_rng(0).uniform(0.3, 3.0, int((~thin).sum()))
    taken: list[list[int]] = []

    def remember(rows: GemmTable, queries: GemmTable) -> np.ndarray:
        taken.append(rows.sizes["m"].tolist())
        return straight_lines(rows, queries)

    for products in (one, replace(one, latency_us=other_us)):
        held_out(products, one.latency_us, remember)
    half = len(taken) // 2
    assert taken[:half] == taken[half:]


def test_a_table_of_powers_of_two_alone_cannot_be_held_out() -> None:
    thin = measured(0.0).take(is_thin(measured(0.0)))
    with pytest.raises(
        InputError, match=r"rows on powers of two in m; expected some on and some off"
    ):
        held_out(thin, thin.latency_us, straight_lines)
