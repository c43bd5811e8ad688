"""Rows of the public A100 table that a profile does not hold: what it says of them, beside straight
lines.
"""

from dataclasses import replace
from functools import cache

import made_profiles as made
import numpy as np
import pytest

pytest.importorskip("aiconfigurator_core", reason="needs the extra `tables`")

from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import Effort
from quantbench.profile import Profile, Table
from quantbench.profile.models import Models
from tools.accuracy.tables import GemmTable, read_packaged

SITES = 120
ROWS = 2000


@cache
def public() -> tuple[GemmTable, np.ndarray, np.ndarray]:
    """(the table, rows at powers of two of m, all other rows of the same n and k)."""
    table = read_packaged("a100_sxm")
    m, n, k = table.shapes
    site = n * 2**20 + k
    chosen = np.random.default_rng(4).permutation(np.unique(site))[:SITES]
    here = np.isin(site, chosen)
    round_m = (m & (m - 1)) == 0
    return table, np.flatnonzero(here & round_m), np.flatnonzero(here & ~round_m)


@cache
def profile() -> Profile:
    """Of the rows at powers of two alone: its table, and a model fitted to them from other
    families' prior.
    """
    table, rows, _ = public()
    few = np.random.default_rng(0).permutation(rows)[:ROWS]
    seen = table.take(few)
    light = Effort(members=1, rows_first=300)
    model = GemmModel.fit(
        made.A100, *seen.shapes, seen.latency_us, prior="family-out", effort=light
    )
    columns = {name: np.repeat(text, len(rows)) for name, text in made.IMPORTED.items()}
    columns |= {name: size[rows] for name, size in table.sizes.items()}
    columns["latency_us"] = table.latency_us[rows]
    columns |= dict.fromkeys(("low_us", "high_us"), columns["latency_us"])
    columns |= dict.fromkeys(("block_m", "block_n", "split_k"), np.zeros(len(rows), dtype=int))
    tables = {"gemm": Table.of("gemm", {**columns, "batch": np.ones(len(rows), dtype=int)})}
    return replace(made.profile(), tables=tables, models=Models((model,)), cliffs=())


@pytest.mark.slow
def test_between_powers_of_two_it_is_closer_than_straight_lines_and_its_interval_holds() -> None:
    table, rows, held = public()
    m, n, k = table.shapes
    found = profile().gemm(m[held], n[held], k[held])
    between = found.source == "interpolated"
    assert between.mean() > 0.95
    true = table.latency_us[held]
    straight = np.empty(len(held))
    site = n * 2**20 + k
    for one in np.unique(site[held]):
        mine, theirs = rows[site[rows] == one], site[held] == one
        straight[theirs] = np.interp(m[held][theirs], m[mine], table.latency_us[mine])
    error, line_error = (
        np.abs(found.latency_us / true - 1)[between],
        np.abs(straight / true - 1)[between],
    )
    assert np.median(error) < 0.05
    assert np.median(error) < 0.85 * np.median(line_error)
    assert np.quantile(error, 0.9) < 0.75 * np.quantile(line_error, 0.9)
    inside = (found.low_us <= true) & (true <= found.high_us)
    assert 0.8 < inside[between].mean() < 0.97
