"""Blind spots: the consumer's straight lines, the choice of rows, and the experiment on held-out rows."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_profile import gemm_row, known_profile, table
from typer.testing import CliRunner

from quantbench.cli.profile import profile as command
from quantbench.errors import InputError, StoreError
from quantbench.profile import blindspots_report as blindspots_table
from quantbench.profile.aiconfigurator_engine import engine, engine_missing
from quantbench.profile.blindspots import (
    MeasuredProducts,
    Site,
    choose,
    fewest_between,
    interpolated_us,
    places_between,
    replay,
    sorted_table,
    straight_lines,
    through_rows,
)
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


@pytest.mark.slow
def test_lines_are_the_engine_s_own() -> None:
    missing = engine_missing()
    if missing is not None:
        pytest.skip(missing)
    rows_m = np.array([1, 2, 128, 129, 1000, 4096])
    rows_us = np.array([26.5, 26.25, 37.0, 40.5, 201.0, 549.0])
    asked = np.array([1, 2, 3, 64, 127, 128, 129, 130, 999, 1001, 2500, 4095, 4096])
    four = np.full(len(asked), 4096)
    given_rows = {"m": rows_m.tolist(), "n": [4096] * 6, "k": [4096] * 6, "latency_ms": (rows_us / 1e3).tolist()}
    where = {"system": "a100_sxm", "backend": "vllm", "version": "quantbench"}
    answer = engine(where, given_rows, asked, four, four)
    assert interpolated_us(asked, rows_m, rows_us) == pytest.approx(answer.latency_us, rel=1e-9)


def test_nothing_is_said_beyond_the_rows() -> None:
    assert np.isnan(interpolated_us(np.array([1, 5]), np.array([2, 4]), np.array([1.0, 2.0]))).all()


def test_a_line_across_a_cliff_is_as_wrong_as_arithmetic_says() -> None:
    # One wave up to m = 384 (3 × 32 tiles of 108), two from 385 on: 69 and 133 µs.
    site = site_of(np.array([256, 384, 385, 512]), np.array([256, 512]))
    assert site.expected_us.tolist() == [69.0, 69.0, 133.0, 133.0]
    assert site.errors().tolist() == pytest.approx([0.0, 101 / 69 - 1, (69 + 64 * 129 / 256) / 133 - 1, 0.0])


def test_both_sides_of_the_cliff_are_the_fewest_rows() -> None:
    m = np.array([256, 320, 384, 385, 448, 512])
    us = np.array([69.0, 69.0, 69.0, 133.0, 133.0, 133.0])
    assert fewest_between(m, us, 0.01) == [2, 3]
    # A loose bound needs one side only, a very loose one none.
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


@pytest.mark.parametrize("target", ["p95", "max"])
@pytest.mark.parametrize("bound", [0.02, 0.05, 0.2])
def test_the_bound_is_kept_after_the_choice(target: str, bound: float) -> None:
    sites = [site_of(places_between(POWERS), POWERS, n=n, k=k) for n in (512, 4096, 12288) for k in (512, 4096)]
    found = choose(sites, bound, target)
    reached = np.percentile(found.after, 95) if target == "p95" else found.after.max()
    before = np.percentile(found.before, 95) if target == "p95" else found.before.max()
    assert reached <= bound + 1e-9 < before
    assert all(m not in POWERS for m, _, _ in found.rows)


def test_the_95th_percentile_takes_fewer_rows_than_the_largest_error() -> None:
    sites = [site_of(places_between(POWERS), POWERS, n=n) for n in (512, 4096, 12288)]
    assert 0 < len(choose(sites, 0.05, "p95").rows) < len(choose(sites, 0.05, "max").rows)


def test_a_straight_table_needs_nothing() -> None:
    m = np.arange(1, 65)
    site = Site(512, 512, m, 2.0 + m / 3.0, np.isin(m, [1, 64]))
    found = choose([site], 0.01)
    assert found.rows == []
    assert found.after.max() < 1e-12


def measured(noise: float = 0.0) -> MeasuredProducts:
    """A made table of cliffs: powers of two, and one past the edges between them."""
    m = np.unique(np.concatenate([POWERS, 128 * np.arange(1, 33), 128 * np.arange(1, 33) + 1]))
    sites = [(n, k) for n in (1024, 2048, 4096, 12288) for k in (1024, 4096)]
    sizes = [(x, n, k) for n, k in sites for x in m.tolist()]
    all_m, all_n, all_k = (np.array(values) for values in zip(*sizes, strict=True))
    us = np.concatenate([staircase_us(m, n, k) for n, k in sites])
    us = us * np.exp(np.random.default_rng(1).normal(0.0, noise, len(us)))
    return sorted_table(all_m, all_n, all_k, us)


def truth(of: MeasuredProducts):  # type: ignore[no-untyped-def]
    """A model that knows the staircase, and nothing of the noise."""
    times = np.array([staircase_us(np.array([m]), n, k)[0] for m, n, k in zip(of.m, of.n, of.k, strict=True)])
    return lambda thin: (times, len(thin.m))


def test_chosen_rows_beat_random_ones_on_rows_that_neither_has() -> None:
    found = replay(measured(0.01), truth(measured()), straight_lines, 0.05)
    thin, at_random, chosen, modelled = found.lines
    assert [line.rows - thin.rows for line in (at_random, chosen)] == [found.added, found.added] != [0, 0]
    assert chosen.unseen.p95_pct < 0.5 * at_random.unseen.p95_pct
    assert chosen.at_cliffs.p95_pct < 0.5 * at_random.at_cliffs.p95_pct
    assert thin.unseen.rows == at_random.unseen.rows == chosen.unseen.rows > 20
    # Here the model knows all but the noise, so that its rows do as well as measured ones.
    assert modelled.rows == chosen.rows
    assert modelled.unseen.p95_pct < 0.5 * at_random.unseen.p95_pct


def test_held_out_times_are_not_looked_at_when_rows_are_chosen() -> None:
    """Times of rows off the grid do not change which rows are taken."""
    table_one = measured()
    other_us = table_one.latency_us.copy()
    other_us[~table_one.thin] *= np.random.default_rng(0).uniform(0.3, 3.0, int((~table_one.thin).sum()))
    table_two = MeasuredProducts(table_one.m, table_one.n, table_one.k, other_us)
    taken = []

    def remember(rows, queries):  # type: ignore[no-untyped-def]
        taken.append(sorted(zip(*(part.tolist() for part in rows[:3]), strict=True)))
        return straight_lines(rows, queries)

    for one in (table_one, table_two):
        replay(one, truth(table_one), remember, 0.05, seeds=(0,))
    assert len(taken) == 8
    assert taken[:4] == taken[4:]


def test_a_table_of_powers_of_two_alone_cannot_be_held_out() -> None:
    of = measured()
    thin = MeasuredProducts(of.m[of.thin], of.n[of.thin], of.k[of.thin], of.latency_us[of.thin])
    with pytest.raises(InputError, match=r"rows on powers of two in m; expected some on and some off"):
        replay(thin, truth(thin), straight_lines, 0.05)


def test_a_shape_that_is_there_twice_is_refused() -> None:
    with pytest.raises(InputError, match="1 shapes that are there twice; expected one row per shape"):
        sorted_table(np.array([8, 8]), np.array([8, 8]), np.array([8, 8]), np.array([1.0, 2.0]))


def stair_profile() -> Profile:
    of = measured()
    sizes = zip(of.m.tolist(), of.n.tolist(), of.k.tolist(), of.latency_us.tolist(), strict=True)
    return known_profile({"gemm": table("gemm", [gemm_row(*size) for size in sizes])})


class _Stairs:
    """In the place of a fitted model, which takes seconds."""

    rows = 123

    class _Answer:
        def __init__(self, latency_us: np.ndarray) -> None:
            self.latency_us = latency_us

    def predict(self, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> _Answer:
        m, n, k = (np.asarray(x) for x in (m, n, k))
        return self._Answer(np.array([staircase_us(np.array([a]), b, c)[0] for a, b, c in zip(m, n, k, strict=True)]))


@pytest.fixture
def stairs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(blindspots_table, "fit", lambda *_, **__: _Stairs())
    thin = measured()
    rows = [
        gemm_row(*size)
        for size in zip(thin.m.tolist(), thin.n.tolist(), thin.k.tolist(), thin.latency_us.tolist(), strict=True)
        if size[0] & (size[0] - 1) == 0
    ]
    path = tmp_path / "profile.json"
    known_profile({"gemm": table("gemm", rows)}).save(path)
    return path


def test_the_command_finds_the_cliffs_and_writes_rows_that_sweep_reads(stairs_file: Path) -> None:
    extra = stairs_file.with_name("new") / "extra.csv"
    words = ["blindspots", str(stairs_file), "--for", "aiconfigurator", "--bound", "2%", "--of", "max"]
    done = CliRunner().invoke(command, [*words, "--shapes", str(extra), "--json"], catch_exceptions=False)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["after"]["max"] <= 0.02 < found["before"]["max"]
    assert found["spots"][0]["error"] == pytest.approx(max((s["error"] for s in found["spots"]), key=abs))
    listed = {(row["m"], row["n"], row["k"]) for row in found["add"]}
    assert {(m, n, k) for m, n, k, _ in read_shapes(extra)} == listed
    assert {(384, 4096, 4096), (385, 4096, 4096)} <= listed
    plain = CliRunner().invoke(command, words, catch_exceptions=False).stdout
    assert "expected error as it is: median" in plain
    assert f"with {len(listed):,} more rows" in plain


def test_the_experiment_is_written_between_the_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blindspots_table, "fit", lambda *_, **__: _Stairs())
    monkeypatch.setattr(blindspots_table, "engine_missing", lambda: "not asked here")
    stair_profile().save(tmp_path / "profile.json")
    docs = tmp_path / "exporting.md"
    docs.write_text("before\n<!-- blindspots:begin -->\nold\n<!-- blindspots:end -->\nafter\n")
    words = ["blindspots", str(tmp_path / "profile.json"), "--for", "aiconfigurator", "--held-out", "--docs", str(docs)]
    done = CliRunner().invoke(command, [*words, "--of", "max"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    text = docs.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "rows chosen |" in text
    assert "straight lines in m" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for", "vidur"], "--for = 'vidur'; expected one of aiconfigurator"),
        (["--for", "aiconfigurator", "--bound", "5"], "'5'; expected a percentage"),
        (["--for", "aiconfigurator", "--bound", "500%"], "expected a percentage between 0% and 100%"),
        (["--for", "aiconfigurator", "--of", "mean"], "--of = 'mean'; expected one of p95, max"),
        (["--for", "aiconfigurator", "--rows", "3"], "--rows = 3; expected an integer from 20 to 20000"),
        (["--for", "aiconfigurator", "--docs", "x.md"], "--docs without --held-out"),
        (["--for", "aiconfigurator", "--held-out", "--shapes", "x.csv"], "--shapes with --held-out"),
    ],
)
def test_wrong_use_is_one_clear_line(words: list[str], said: str, stairs_file: Path) -> None:
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(command, ["blindspots", str(stairs_file), *words], catch_exceptions=False)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_without_products_is_one_clear_line(tmp_path: Path) -> None:
    known_profile({}).save(tmp_path / "empty.json")
    with pytest.raises(InputError, match="a profile without unbatched products; expected measured products"):
        CliRunner().invoke(
            command, ["blindspots", str(tmp_path / "empty.json"), "--for", "aiconfigurator"], catch_exceptions=False
        )
    with pytest.raises(StoreError):
        CliRunner().invoke(
            command, ["blindspots", str(tmp_path / "absent"), "--for", "aiconfigurator"], catch_exceptions=False
        )


@pytest.mark.slow
def test_a_fitted_model_finds_the_cliffs_of_a_made_table() -> None:
    """The whole way once, with a real fit: no figure of the model is given."""
    found = blindspots_table.find(stair_profile(), "aiconfigurator", 0.05, "p95", 200)
    assert found.model_rows == 200
    assert found.num_rows == len(measured().m)
    assert np.percentile(found.choice.after, 95) <= 0.05 + 1e-9
    assert found.spots[0].low < found.spots[0].m < found.spots[0].high


def test_a_profile_s_own_model_is_asked_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from quantbench.latency.gemm.model import GemmModel
    from quantbench.profile.models import Models

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was fitted")

    monkeypatch.setattr(blindspots_table, "fit", never)
    model = replace(GemmModel.best("a100-sxm4-80gb"), rows=77)
    own = replace(stair_profile(), models=Models(gemm=(model,)))
    assert blindspots_table.find(own, "aiconfigurator", 0.05, "p95", 200, own_model=True).model_rows == 77
    with pytest.raises(AssertionError, match="a model was fitted"):
        blindspots_table.find(own, "aiconfigurator", 0.05, "p95", 200)
