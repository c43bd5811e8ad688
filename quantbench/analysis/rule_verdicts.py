"""From pairs to a verdict: is what a rule promises there, is it not, or can it not be told?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from scipy import special

from quantbench.analysis.rule_pairs import Found, Pair
from quantbench.stats import CONFIDENCE, median_interval

VERDICTS = ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED")

#: a rule that buys less than this is not worth following
MARGIN = 0.01
# From this number of pairs on their median has a distribution-free interval.
_MANY = 6
# Pairs that scatter by more than this many times their own errors differ among themselves.
_AT_ODDS = 2.0


@dataclass(frozen=True)
class Verdict:
    """verdict: one of VERDICTS. effect: time per unit of work where the rule is broken over where it is kept, in the
    middle of num_pairs pairs; low, high: its 95 % interval. predicted: what tiles and waves alone would make it, where
    the tiles are known. evidence: keys of the records compared, pair after pair. reason: why there is nothing to
    judge, or what stands in the way."""

    rule: str
    verdict: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    predicted: float | None = None
    evidence: tuple[str, ...] = ()
    reason: str = ""


def judge(rule: str, found: Found) -> Verdict:
    """CONFIRMED where the effect is surely above MARGIN, REFUTED where it is surely below, else INCONCLUSIVE."""
    if isinstance(found, str):
        return Verdict(rule, "NOT TESTED", reason=found)
    middle, low, high = _interval(found)
    least = log(1 + MARGIN)
    verdict = "CONFIRMED" if low > least else "REFUTED" if high < least else "INCONCLUSIVE"
    reason = "the interval holds both a gain worth having and none" if verdict == "INCONCLUSIVE" else ""
    predictions = [pair.predicted for pair in found if pair.predicted is not None]
    return Verdict(
        rule, verdict, exp(middle), exp(low), exp(high), len(found),
        exp(float(np.median(predictions))) if len(predictions) == len(found) else None,
        tuple(dict.fromkeys(key for pair in found for key in pair.keys)), reason,
    )  # fmt: skip


def _interval(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Middle and 95 % interval of the log effects: the median and order statistics of many pairs, else the mean with
    the pairs' own errors. Few pairs that differ by more than these: what all their intervals span where they agree
    about whether the effect is worth having, and differ only in its size; else the scatter of the pairs."""
    effects = np.array([pair.log_effect for pair in pairs])
    errors = np.array([pair.standard_error for pair in pairs])
    own = sqrt(float((errors**2).sum())) / len(pairs)
    if len(pairs) >= _MANY:
        interval = median_interval(effects)
        middle = float(np.median(effects))
        # Order statistics of equal effects would claim to be exact.
        reach = float(special.ndtri((1 + CONFIDENCE) / 2)) * own
        return middle, min(interval.low, middle - reach), max(interval.high, middle + reach)
    mean = float(effects.mean())
    reach = float(special.ndtri((1 + CONFIDENCE) / 2)) * own
    if len(pairs) > 1:
        scatter = float(effects.std(ddof=1))
        if scatter > _AT_ODDS * float(np.sqrt((errors**2).mean())):
            width = float(special.ndtri((1 + CONFIDENCE) / 2))
            lows, highs = effects - width * errors, effects + width * errors
            if lows.min() > log(1 + MARGIN) or highs.max() < log(1 + MARGIN):
                return mean, float(lows.min()), float(highs.max())
            reach = float(special.stdtrit(len(pairs) - 1, (1 + CONFIDENCE) / 2)) * scatter / sqrt(len(pairs))
    return mean, mean - reach, mean + reach
