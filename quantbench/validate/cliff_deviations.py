"""The standard deviations at which cliffs are forecast best: `python -m quantbench.validate.cliff_deviations`.

For every architecture family, the mean F1 over the other families' tables decides. Models learn from 200 rows of half
of the training sites and forecast on the other half, so that no pair of the accuracy tables is looked at. Minutes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.latency.gemm_cliffs import forecast
from quantbench.latency.gemm_prior import family
from quantbench.latency.protocol import cliff_pairs, held_out_sites, score_forecast
from quantbench.latency.tables import SYSTEMS, read_table
from quantbench.validate.gemm_runner import Contest
from quantbench.validate.ours import fit

FloatArray = npt.NDArray[np.float64]

ROWS = 200
# The curve is flat about its top: with three seeds its place there is chance.
SEEDS = range(8)
DEVIATIONS = np.round(np.arange(0.0, 2.01, 0.05), 2)


def f1_by_deviations(gpu: str) -> FloatArray:
    """F1 of the forecasts on a device's inner sites, (deviations,), the mean over seeds."""
    contest = Contest(lookup(gpu), read_table(gpu), "sites")
    pool = np.sort(contest.split(None, 0).train)
    scores = []
    for seed in SEEDS:
        inner = held_out_sites(contest.table.n[pool], contest.table.k[pool], ROWS, seed)
        rows = pool[inner.test]
        model = fit(contest, pool[inner.train], seed)
        pairs = low, _ = cliff_pairs(*contest.shapes(rows))
        rise, deviation = model.ensemble.rise(*(x.astype(np.float64) for x in contest.shapes(rows[low])))
        measured = contest.table.latency_us[rows]
        found = [
            score_forecast(forecast(rise, deviation, deviations=float(count)), measured, pairs) for count in DEVIATIONS
        ]
        scores.append([2.0 * f.recall * f.precision / max(f.recall + f.precision, 1e-9) for f in found])
    return np.asarray(np.mean(scores, axis=0))


def main() -> None:
    """Print the best count of each family, from the others' tables, and of all of them."""
    of_family: dict[str, list[FloatArray]] = {}
    for gpu in sorted(SYSTEMS):
        of_family.setdefault(family(lookup(gpu)), []).append(f1_by_deviations(gpu))
    means = {name: np.mean(curves, axis=0) for name, curves in of_family.items()}
    for left_out in (*means, "none"):
        curve = np.mean([mean for name, mean in means.items() if name != left_out], axis=0)
        print(f"without {left_out}: {DEVIATIONS[curve.argmax()]:.2f} standard deviations, mean F1 {curve.max():.3f}")
        print("   " + "  ".join(f"{count:.2f}: {f1:.3f}" for count, f1 in zip(DEVIATIONS, curve, strict=True)))


if __name__ == "__main__":
    main()
