"""How far a run wanders by itself: what the samples of one point cannot show.

A sweep repeats one reference point every few points. Between two repetitions nothing was changed, so what moves there
(clock, temperature, where the memory lies) moves every other point as well, and no smaller change may be claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, hypot, log

from scipy import special

from quantbench.stats import CONFIDENCE, median, noise
from quantbench.store.folder import Run
from quantbench.store.record import Measured

# Fewer repetitions tell nothing about a spread.
_FEWEST = 4


@dataclass(frozen=True)
class Wander:
    """repeats_a, repeats_b: measurements of the reference point in each run. noise_a, noise_b: relative standard
    deviation of its medians, None where there are too few. allowance: the ratio − 1 that two runs without any change
    may differ by at the worst of all compared points. shift: the reference's ratio B / A, None where the runs have not
    the same one."""

    repeats_a: int
    repeats_b: int
    noise_a: float | None
    noise_b: float | None
    allowance: float
    shift: float | None


def wander(a: Run, b: Run, points: int) -> Wander:
    """The wander of two runs of which `points` points are compared."""
    ours, theirs = _references(a), _references(b)
    noise_a, noise_b = _noise(ours), _noise(theirs)
    common = ours.keys() & theirs.keys()
    shift = None
    if common:  # several, where many devices were compared by them
        shift = median([median(theirs[key]) / median(ours[key]) for key in common])
    # The quantile that the largest of so many undisturbed points stays below.
    z = float(special.ndtri(1 - (1 - CONFIDENCE) / 2 / max(points, 1)))
    allowance = exp(z * hypot(noise_a or 0.0, noise_b or 0.0)) - 1
    repeats_a, repeats_b = (sum(map(len, side.values())) for side in (ours, theirs))
    return Wander(repeats_a, repeats_b, noise_a, noise_b, allowance, shift)


def _references(run: Run) -> dict[str, list[float]]:
    """Medians of the reference point in the order they were taken, by key (there is one, as a rule)."""
    found: dict[str, list[float]] = {}
    for record in run.records:
        if record.role == "reference" and isinstance(record.outcome, Measured):
            found.setdefault(record.key, []).append(median(record.outcome.measurement.samples_us))
    return found


def _noise(medians_us: dict[str, list[float]]) -> float | None:
    """Of the logarithms, each against its own reference, so that it is relative."""
    ratios = [1 + log(us / median(of_key)) for of_key in medians_us.values() if len(of_key) > 1 for us in of_key]
    return noise(ratios) if len(ratios) >= _FEWEST else None
