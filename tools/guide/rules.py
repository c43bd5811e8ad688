"""Builds the table of rules of thumb in docs/choosing-shapes.md: a verdict and an effect per rule and GPU.

Entry points: `rules_table` (used by `page`) and `effect_of`, which computes the median effect, its interval and the
verdict from time ratios (rule broken over rule kept). `analysis.rules` tests the rules on quantbench's own runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantbench.analysis.significance import rank_test
from quantbench.analysis.staircase import EXPLAINS_LITTLE, EXPLAINS_MUCH
from quantbench.stats import median, median_interval
from quantbench.units import percent
from tools.guide.evidence import FEW_TOKENS, MANY_TOKENS, GpuResults, GuideResults
from tools.guide.markers import table

CONFIRMED, REFUTED, INCONCLUSIVE, NOT_TESTED = "CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED"
# Smallest effect that is worth a rule. Larger than for quantbench's own runs, which repeat better than these tables
# (`rule_verdicts.MARGIN`).
WORTH = 0.02
# Fewer pairs than this give no effect.
_FEWEST = 10


@dataclass(frozen=True)
class Effect:
    """Effect of breaking a rule: time with the rule broken over time with it kept, minus 1.

    median: median over `pairs` pairs of shapes.
    low, high: 95 % interval of the median.
    """

    median: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """CONFIRMED if the whole interval is above WORTH, REFUTED if it is below, else INCONCLUSIVE."""
        if self.low > WORTH:
            return CONFIRMED
        return REFUTED if self.high < WORTH else INCONCLUSIVE


def effect_of(ratios: Sequence[float]) -> Effect | None:
    """Computes the effect from time ratios, broken over kept; None for fewer than ten."""
    if len(ratios) < _FEWEST:
        return None
    interval = median_interval(ratios)
    return Effect(median(ratios) - 1, interval.low - 1, interval.high - 1, len(ratios))


_WIDTH_SEQ = 4096
_TP, _TP_TOKENS = 8, 2048


@dataclass(frozen=True)
class RuleRow:
    """One row of the table.

    judge: returns the verdict and effect on one GPU as text.
    instead: recommended action.
    """

    name: str
    judge: Callable[[GpuResults], str]
    instead: str


def rules_table(found: GuideResults) -> str:
    """Builds the Markdown table: one row per rule, one column per GPU."""
    rows = [[rule.name, *(rule.judge(of) for of in found.gpus.values()), rule.instead] for rule in RULES]
    return table(["rule", *found.gpus, "what to do"], rows, numeric=False)


def words(effect: Effect | None) -> str:
    """Formats an effect: `CONFIRMED: 30 % (27 % to 33 %)`."""
    if effect is None:
        return NOT_TESTED
    return f"{effect.verdict}: {_signed(effect.median)} ({_signed(effect.low)} to {_signed(effect.high)})"


def _signed(share: float) -> str:
    return percent(share).replace("-", "−")


def _edge(m: int) -> Callable[[GpuResults], str]:
    return lambda of: words(effect_of(of.edges.step(m).ratios))


def _one_tile(of: GpuResults) -> str:
    best = of.edges.fits[0].correlation
    explained = best**2  # share of the variance, compared with the limits of `check`
    verdict = CONFIRMED if explained >= EXPLAINS_MUCH else REFUTED if explained < EXPLAINS_LITTLE else INCONCLUSIVE
    return f"{verdict}: correlation {best:.2f}"


def _narrow_heads(of: GpuResults) -> str:
    widths = [w for w in of.widths if (w.head_dim, w.seq) == (64, _WIDTH_SEQ)]
    return words(effect_of([1 / ratio for ratio in widths[0].ratios])) if widths else NOT_TESTED


def _fours(of: GpuResults) -> str:
    """Compares the two groups by a rank test, because their shapes differ."""
    if of.fours is None:
        return NOT_TESTED
    test = rank_test([1 / r for r in of.fours.on], [1 / r for r in of.fours.off], WORTH)
    if test.low is None or test.high is None:
        return NOT_TESTED
    return words(Effect(test.ratio - 1, test.low - 1, test.high - 1, len(of.fours.off)))


def _split(column: bool) -> Callable[[GpuResults], str]:
    def judge(of: GpuResults) -> str:
        own = [p for p in of.prices if (p.column, p.tp, p.tokens) == (column, _TP, _TP_TOKENS)]
        return words(effect_of(own[0].ratios)) if own else NOT_TESTED

    return judge


_MORE_TOKENS = "more tokens, or a smaller tp"

RULES = (
    RuleRow("n, hidden, ffn, vocab % 128", lambda of: NOT_TESTED, "keep it: padding up to it is cheap"),
    RuleRow(
        "hidden % number of SMs",
        lambda of: f"{REFUTED} by counting",
        "drop it; count tiles and waves of each product",
    ),
    RuleRow("tokens not one past a multiple of 128", _edge(128), "keep m on multiples of 256"),
    RuleRow("tokens not one past a multiple of 256", _edge(256), "keep m on multiples of 256"),
    RuleRow("the waves of one tile predict the cliffs", _one_tile, "where refuted: measure, do not compute"),
    RuleRow("head_dim % 8", lambda of: NOT_TESTED, "keep it without exception: see the search on A100s below"),
    RuleRow("heads of 128 rather than 64", _narrow_heads, "128, or 256"),
    RuleRow("(heads / tp × MBS) % 4", _fours, "drop it with fused attention; keep it with Megatron's fused softmax"),
    RuleRow(f"tp {_TP} costs what splits n (at {_TP_TOKENS} tokens)", _split(True), _MORE_TOKENS),
    RuleRow(f"tp {_TP} costs what splits k (at {_TP_TOKENS} tokens)", _split(False), _MORE_TOKENS),
    RuleRow(
        f"{MANY_TOKENS} tokens at once are faster than {FEW_TOKENS}",
        lambda of: words(effect_of(of.few_tokens)),
        "choose MBS for memory and pipeline, not for these products",
    ),
)
