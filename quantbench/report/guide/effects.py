"""What a rule is worth, with an interval over the shapes that it was tried on, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.stats import median, median_interval

CONFIRMED, REFUTED, INCONCLUSIVE, NOT_TESTED = "CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED"
# An effect below this is not worth a rule, however sure it is. More is asked than of runs of our own, which repeat
# better than these tables (`rule_verdicts.MARGIN`).
WORTH = 0.02
# Fewer pairs than this say nothing about all shapes.
_FEWEST = 10


@dataclass(frozen=True)
class Effect:
    """Time with the rule broken over time with it kept, less 1: median over `pairs` pairs of shapes; low,
    high: 95 % interval of the median."""

    middle: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """CONFIRMED where breaking the rule surely costs more than WORTH, REFUTED where it surely costs less."""
        if self.low > WORTH:
            return CONFIRMED
        return REFUTED if self.high < WORTH else INCONCLUSIVE


def effect_of(ratios: Sequence[float]) -> Effect | None:
    """The effect of ratios of times, broken over kept; None for too few."""
    if len(ratios) < _FEWEST:
        return None
    interval = median_interval(ratios)
    return Effect(median(ratios) - 1, interval.low - 1, interval.high - 1, len(ratios))
