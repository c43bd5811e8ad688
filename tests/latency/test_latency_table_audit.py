"""GEMM times that no hardware explains: what is flagged, with which evidence, and what a fit makes of it."""

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.latency.gemm.inputs import machine_of
from quantbench.latency.gemm.member import Growth
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.table_audit import REASONS, Unexplained, audit
from quantbench.latency.gemm.training import Effort

GPU = "a100-sxm4-80gb"
PEAK = machine_of(lookup(GPU), "bf16").flop_per_us


def table() -> tuple[list[np.ndarray], np.ndarray]:
    """m, n, k, batch and µs of products on a GPU with waves of 128 × 256 tiles: steps of up to 1.9x."""
    m, n, k = (x.ravel() for x in np.meshgrid([16, 128, 129, 256, 257], [512, 4096, 8192], [512, 4096]))
    waves = np.ceil(np.ceil(m / 128) * np.ceil(n / 256) / 108)
    return [m, n, k, np.ones_like(m)], 5.0 + waves * (k / 512 + 0.1) * 10.0


def flagged(sizes: list[np.ndarray], us: np.ndarray, **also: object) -> list[Unexplained]:
    return audit(sizes, us, PEAK, **{"group": np.zeros(len(us), dtype=int)} | also)  # type: ignore[arg-type]


def test_steps_at_wave_edges_are_explained() -> None:
    sizes, us = table()
    assert us.max() > 5 * us.min()
    assert flagged(sizes, us) == []


@pytest.mark.parametrize(("factor", "reason"), [(8.0, REASONS[2]), (1e-3, REASONS[0])])
def test_a_row_that_is_far_off_is_flagged_with_its_evidence(factor: float, reason: str) -> None:
    sizes, us = table()
    row = 17 if factor > 1 else int(np.argmax(us))
    us[row] *= factor
    (one,) = flagged(sizes, us)
    assert (one.row, one.reason) == (row, reason)
    assert f"{us[row]:.1f} µs" in one.words or "of the peak rate" in one.words


def test_one_time_that_is_too_short_does_not_flag_the_others() -> None:
    sizes, us = table()
    row = int(np.flatnonzero((sizes[0] == 257) & (sizes[1] == 512) & (sizes[2] == 4096))[0])
    us[row] = us.min() / 2.5
    (one,) = flagged(sizes, us)
    assert (one.row, one.reason) == (row, "faster than smaller products")


def test_groups_are_not_compared_and_another_method_is_named() -> None:
    sizes, us = table()
    us[3] *= 8
    assert flagged(sizes, us, group=np.arange(len(us)) == 3) == []
    us[3] /= 8
    (one,) = flagged(sizes, us, methods=["graph" if row == 3 else "events" for row in range(len(us))])
    assert (one.row, one.words) == (3, "timed as graph, most rows as events")


def test_a_fit_sets_them_aside_and_says_so() -> None:
    sizes, us = table()
    us[[3, 5]] *= 20
    quick = Effort(members=1, growth=Growth(trees=2))
    model = GemmModel.fit(GPU, sizes[0], sizes[1], sizes[2], us, prior="none", effort=quick)
    assert model.rows == len(us) - 2
    assert model.provenance["set_aside"]["reasons"] == {"slower than larger products": 2}
