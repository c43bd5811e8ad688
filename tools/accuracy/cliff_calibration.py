"""Calibrates cliff forecasts: `python -m tools.accuracy.cliff_calibration` (needs the extra `tables`; takes minutes).

Prints, for every architecture family, the maximum-likelihood values for the other families' tables, to be copied into
`gemm.cliffs`. Models are fitted to 200 rows of half of the training sites and forecast on the other half, so no test
row of the accuracy tables is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.latency.contests import Contest, fit
from quantbench.latency.families import family
from quantbench.latency.gemm.cliffs import Calibration
from quantbench.latency.scoring import cliff_pairs, held_out_sites, rises
from tools.accuracy.tables import SHIPPED_GPUS, read_packaged

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ROWS = 200
SEEDS = range(8)
_START = Calibration(share=0.9, spread=1.0, noise=0.06)


@dataclass(frozen=True)
class Rises:
    """Rises of one device, (pairs,) each. rise, deviation: over the trees. is_cliff: whether measured as a cliff."""

    rise: FloatArray
    deviation: FloatArray
    is_cliff: BoolArray


def inner_rises(gpu: str, seeds: Sequence[int] = SEEDS) -> Rises:
    """Returns the rises of a device's inner test sites, concatenated over seeds."""
    contest = Contest(lookup(gpu), read_packaged(gpu), "sites")
    pool = np.sort(contest.split(None, 0).train)
    found = []
    for seed in seeds:
        inner = held_out_sites(contest.table.n[pool], contest.table.k[pool], ROWS, seed)
        rows = pool[inner.test]
        model = fit(contest, pool[inner.train], seed)
        pairs = low, _ = cliff_pairs(*contest.shapes(rows))
        rise, deviation = model.ensemble.rise(*(x.astype(np.float64) for x in contest.shapes(rows[low])))
        found.append((rise, deviation, rises(contest.table.latency_us[rows], pairs)))
    rise, deviation, is_cliff = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Rises(rise, deviation, is_cliff)


def calibrate(families: Mapping[str, Sequence[Rises]]) -> Calibration:
    """Returns the maximum-likelihood calibration, with equal weight for families and for devices of a family."""
    from scipy.optimize import minimize

    def unlikely(logs: FloatArray) -> float:
        candidate = Calibration(*np.exp(logs))
        of_family = [np.mean([_cross_entropy(candidate, one) for one in group]) for group in families.values()]
        return float(np.mean(of_family))

    start = np.log([_START.share, _START.spread, _START.noise])
    found = minimize(unlikely, start, method="Nelder-Mead", options={"maxiter": 2000, "xatol": 1e-4, "fatol": 1e-8})
    return Calibration(*(round(float(x), 3) for x in np.exp(found.x)))


def _cross_entropy(calibration: Calibration, of: Rises) -> float:
    probability = np.clip(calibration.probability(of.rise, of.deviation), 1e-6, 1.0 - 1e-6)
    return float(-np.mean(np.log(np.where(of.is_cliff, probability, 1.0 - probability))))


def main() -> None:
    """Prints the calibration without each family's tables, and that of all tables."""
    of_family: dict[str, list[Rises]] = {}
    for gpu in SHIPPED_GPUS:
        of_family.setdefault(family(lookup(gpu)), []).append(inner_rises(gpu))
    for left_out in (*of_family, "none"):
        print(f"without {left_out}: {calibrate({k: v for k, v in of_family.items() if k != left_out})}", flush=True)


if __name__ == "__main__":
    main()
