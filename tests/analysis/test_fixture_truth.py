"""The comparison of fixture and sweep: turns until a ratio is known, and its table in a page."""

from collections.abc import Sequence
from pathlib import Path

import fixture_truth
import pytest


def measured(
    monkeypatch: pytest.MonkeyPatch, folder: Path, noisy: int
) -> dict[int, dict[str, object]]:
    """Rows by size, of a fixture that takes 1 % longer than the sweep and is off by 30 % now and
    then at one size.
    """
    calls: list[list[int]] = []

    def fixture(once: Path, dtype: str, kind: str, sizes: Sequence[int]) -> dict[int, float]:
        calls.append(list(sizes))
        off = 1.3 if len(calls) % 2 else 1.0
        return {n: 1.01 * n * (off if n == noisy else 1.0) for n in sizes}

    def sweep(once: Path, dtype: str, kind: str, sizes: Sequence[int]) -> dict[int, float]:
        assert once.is_dir()
        return {n: float(n) for n in sizes if n != 768 and (n != 640 or once.name != "2")}

    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setattr(fixture_truth, "_by_fixture", fixture)
    monkeypatch.setattr(fixture_truth, "_by_sweep", sweep)
    return {row["n"]: row for row in fixture_truth.measure(folder)["rows"]}


def test_only_sizes_that_are_not_known_get_more_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewest, most = fixture_truth.TURNS["cpu"]
    rows = measured(monkeypatch, tmp_path, noisy=256)
    assert rows[128]["ratio"] == pytest.approx(1.01)
    assert {n: len(row["sweep_us"]) for n, row in rows.items()} == {
        128: fewest,
        256: most,
        384: fewest,
        512: fewest,
        640: fewest - 1,
    }  # type: ignore[arg-type]
    assert rows[256]["low"] == pytest.approx(1.01)
    assert rows[256]["high"] == pytest.approx(1.313)
