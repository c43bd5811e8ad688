"""The share of the interval at which cliffs are forecast best: `python -m quantbench.validate.cliff_margin`.

For every architecture family, the mean F1 over the other families' tables decides. Models learn from 200 rows of half
of the training sites and forecast on the other half, so that no pair of the accuracy tables is looked at. Minutes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.latency.gemm_cliffs import forecast
from quantbench.latency.gemm_prior import family
from quantbench.latency.protocol import SEEDS, cliff_pairs, held_out_sites, score_forecast
from quantbench.latency.tables import SYSTEMS, read_table
from quantbench.validate.gemm_runner import Contest
from quantbench.validate.ours import answer_of, fit

FloatArray = npt.NDArray[np.float64]

ROWS = 200
MARGINS = np.round(np.arange(0.0, 0.81, 0.05), 2)


def f1_by_margin(gpu: str) -> FloatArray:
    """F1 of the forecasts on a device's inner sites, (margins,), the mean over seeds."""
    contest = Contest(lookup(gpu), read_table(gpu), "sites")
    pool = np.sort(contest.split(None, 0).train)
    scores = []
    for seed in SEEDS:
        inner = held_out_sites(contest.table.n[pool], contest.table.k[pool], ROWS, seed)
        rows = pool[inner.test]
        model = fit(contest, pool[inner.train], seed)
        answer = answer_of(model, contest, rows, fit_s=0.0)
        assert answer.half_width is not None
        assert answer.alone_us is not None
        pairs = low, high = cliff_pairs(*contest.shapes(rows))
        rise = np.log(answer.latency_us[high] / answer.latency_us[low])
        alone = np.log(answer.alone_us[high] / answer.alone_us[low])
        half = 0.5 * (answer.half_width[low] + answer.half_width[high])
        measured = contest.table.latency_us[rows]
        found = [
            score_forecast(forecast(rise, alone, half, margin=float(margin)), measured, pairs) for margin in MARGINS
        ]
        scores.append([2.0 * f.recall * f.precision / max(f.recall + f.precision, 1e-9) for f in found])
    return np.asarray(np.mean(scores, axis=0))


def main() -> None:
    """Print the best margin of each family, from the others' tables, and of all of them."""
    of_family: dict[str, list[FloatArray]] = {}
    for gpu in sorted(SYSTEMS):
        of_family.setdefault(family(lookup(gpu)), []).append(f1_by_margin(gpu))
    means = {name: np.mean(curves, axis=0) for name, curves in of_family.items()}
    for left_out in (*means, "none"):
        curve = np.mean([mean for name, mean in means.items() if name != left_out], axis=0)
        print(f"without {left_out}: margin {MARGINS[curve.argmax()]:.2f}, mean F1 {curve.max():.3f}")
        print("   " + "  ".join(f"{margin:.2f}: {f1:.3f}" for margin, f1 in zip(MARGINS, curve, strict=True)))


if __name__ == "__main__":
    main()
