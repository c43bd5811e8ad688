"""Blind spots: a planner's straight lines, and the fewest rows that mend them."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_profile import gemm_row, known_profile, table
from typer.testing import CliRunner

from quantbench.cli.profile import profile as command
from quantbench.errors import InputError
from quantbench.latency.gemm.model import GemmModel
from quantbench.profile.blindspots import find
from quantbench.profile.exporters.modelled import GemmTimes
from quantbench.profile.linear_interpolation import (
    Site,
    fewest_between,
    places_between,
    through_rows,
)
from quantbench.profile.models import Models
from quantbench.profile.profile import Profile
from quantbench.sweep.shape_file import read_shapes

SM_COUNT, BLOCK_M = 108, 128


def staircase_us(m: np.ndarray, n: int, k: int) -> np.ndarray:
    """Waves of 128 × 128 tiles, 108 at a time, a microsecond per 64 of k each, and a launch."""
    tiles = -(-m // BLOCK_M) * (-(-n // 128))
    return 5.0 + -(-tiles // SM_COUNT) * (k / 64.0)


def site_of(places: np.ndarray, rows: np.ndarray, n: int = 4096, k: int = 4096) -> Site:
    return Site(n, k, places, staircase_us(places, n, k), np.isin(places, rows))


POWERS = 2 ** np.arange(15)


def test_a_line_across_a_cliff_is_as_wrong_as_arithmetic_says() -> None:
    # One wave up to m = 384 (3 × 32 tiles of 108), two from 385 on: 69 and 133 µs.
    site = site_of(np.array([256, 384, 385, 512]), np.array([256, 512]))
    assert site.expected_us.tolist() == [69.0, 69.0, 133.0, 133.0]
    assert site.errors().tolist() == pytest.approx(
        [0.0, 101 / 69 - 1, (69 + 64 * 129 / 256) / 133 - 1, 0.0]
    )


def test_both_sides_of_the_cliff_are_the_fewest_rows() -> None:
    m = np.array([256, 320, 384, 385, 448, 512])
    us = np.array([69.0, 69.0, 69.0, 133.0, 133.0, 133.0])
    # A loose bound needs one side only, a very loose one none.
    assert fewest_between(m, us, 0.01) == [2, 3]
    assert len(fewest_between(m, us, 0.4)) == 1
    assert fewest_between(m, us, 0.6) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1.0, 100.0), min_size=2, max_size=8), st.sampled_from([0.02, 0.1, 0.3]))
def test_no_smaller_choice_keeps_the_bound(times: list[float], bound: float) -> None:
    """Held against every subset of the places."""
    us = np.array(times)
    m = np.arange(1, len(us) + 1)

    def fits(inner: tuple[int, ...], slack: float) -> bool:
        rows = [0, *inner, len(us) - 1]
        return bool((np.abs(np.interp(m, m[rows], us[rows]) / us - 1.0) <= bound + slack).all())

    found = fewest_between(m, us, bound)
    assert fits(tuple(found), 1e-7)
    for count in range(len(found)):
        assert not any(fits(inner, -1e-7) for inner in combinations(range(1, len(us) - 1), count))


def test_places_are_both_sides_of_edges_between_the_rows() -> None:
    assert places_between(np.array([100, 150])).tolist() == [100, 112, 113, 128, 129, 144, 145, 150]
    far = places_between(np.array([1024, 32768]))
    assert {1024, 32768, 2048, 2049} <= set(far.tolist())
    assert len(far) <= 66
    assert places_between(np.array([7, 8])).tolist() == [7, 8]


def test_the_model_goes_through_the_measured_rows() -> None:
    m = np.array([64, 96, 128, 129, 256])
    model = np.array([10.0, 10.0, 10.0, 20.0, 20.0])
    in_table = np.array([True, False, False, False, True])
    moved = through_rows(m, model, in_table, np.array([11.0, 24.0]))
    assert moved[[0, 4]].tolist() == [11.0, 24.0]
    # Between, the ratio goes from 1.1 to 1.2; the model's cliff stays.
    assert moved[3] / moved[2] == pytest.approx(2.0, rel=0.01)
    assert 11.0 < moved[1] < 12.0


def test_a_row_says_less_of_sizes_further_from_it() -> None:
    m = np.array([1, 4, 16, 64])
    in_table = m == 16
    moved = through_rows(m, np.full(4, 10.0), in_table, np.array([160.0]))
    assert moved == pytest.approx([20.0, 40.0, 160.0, 40.0])


@pytest.mark.parametrize("bound", [0.02, 0.05, 0.2])
def test_the_bound_is_kept_after_the_choice(bound: float) -> None:
    for n in (512, 4096, 12288):
        site = site_of(places_between(POWERS), POWERS, n=n)
        added = site.rows_to_add(bound)
        assert np.abs(site.errors(added)).max() <= bound + 1e-9 < np.abs(site.errors()).max()
        assert not (added & site.in_table).any()


def stair_rows() -> list[tuple[int, int, int, float]]:
    """A made table of cliffs: powers of two, and one past the edges between them."""
    m = np.unique(np.concatenate([POWERS, 128 * np.arange(1, 33), 128 * np.arange(1, 33) + 1]))
    sites = [(n, k) for n in (1024, 2048, 4096, 12288) for k in (1024, 4096)]
    return [
        (x, n, k, us)
        for n, k in sites
        for x, us in zip(m.tolist(), staircase_us(m, n, k).tolist(), strict=True)
    ]


def stair_profile(rows: list[tuple[int, int, int, float]]) -> Profile:
    return known_profile({"gemm": table("gemm", [gemm_row(*row) for row in rows])})


@pytest.fixture
def stairs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows at powers of two, and a model that knows the staircase."""

    def latency_us(self: GemmTimes, m: np.ndarray, n: int, k: int) -> np.ndarray:
        return staircase_us(np.asarray(m), n, k)

    monkeypatch.setattr(GemmTimes, "latency_us", latency_us)
    path = tmp_path / "profile.json"
    stair_profile([row for row in stair_rows() if row[0] & (row[0] - 1) == 0]).save(path)
    return path


def test_the_command_finds_the_cliffs_and_writes_rows_that_sweep_reads(stairs_file: Path) -> None:
    extra = stairs_file.with_name("new") / "extra.csv"
    words = ["blindspots", str(stairs_file)]
    done = CliRunner().invoke(
        command, [*words, "--shapes", str(extra), "--json"], catch_exceptions=False
    )
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["after"]["max"] <= 0.05 < found["before"]["max"]
    assert found["spots"][0]["error"] == pytest.approx(
        max((s["error"] for s in found["spots"]), key=abs)
    )
    listed = {(row["m"], row["n"], row["k"]) for row in found["add"]}
    assert {(m, n, k) for m, n, k, _ in read_shapes(extra)} == listed
    assert {(384, 4096, 4096), (385, 4096, 4096)} <= listed
    plain = CliRunner().invoke(command, words, catch_exceptions=False).stdout
    assert "expected error as it is: median" in plain
    assert f"with {len(listed):,} more rows" in plain


def test_a_profile_without_products_is_one_clear_line() -> None:
    with pytest.raises(InputError, match=r"no \(n, k\) with two sizes of m"):
        find(known_profile({}))


def test_a_profile_s_own_model_is_asked_where_it_has_one() -> None:
    whole = stair_profile(stair_rows())
    model = replace(GemmModel.best("a100-sxm4-80gb"), rows=77)
    own = replace(whole, models=Models(gemm=(model,)))
    found = find(own)
    assert found.num_rows == len(stair_rows())
    assert found.after.max() <= 0.05 + 1e-9
    assert found.spots[0].low < found.spots[0].m < found.spots[0].high
    assert "fitted to 77 rows of this profile;" in found.note
    assert "fitted to 77 shapes" not in find(whole).note
