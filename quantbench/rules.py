"""Defines rules about sizes, and verdicts on them that a run gives and a profile stores."""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice

VERDICTS = ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED")


@dataclass(frozen=True)
class Rule:
    """A rule about sizes.

    id: short name, which no other rule has.
    statement: the rule as a condition.
    claim: what keeping the rule gains, or what breaking it costs.
    sources: documents, threads and source files that state the rule.
    """

    id: str
    statement: str
    claim: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Verdict on one rule of thumb.

    rule, predicate, claim: id of the rule, its condition, and the benefit that it claims.
    verdict: one of VERDICTS.
    effect: ratio of the times per unit of work with the rule broken and with the rule kept. It is
        the median over the pairs, or the mean if there are few.
    low, high: 95 % interval of the effect.
    num_pairs: number of pairs.
    predicted: median effect computed from tiles and waves alone; None if a tile is unknown.
    evidence: keys of the first records compared, in the order of the pairs.
    evidence_total: number of records compared.
    reason: why the rule was not tested, or why the verdict is inconclusive; otherwise empty.
    """

    rule: str
    predicate: str
    claim: str
    verdict: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    predicted: float | None = None
    evidence: tuple[str, ...] = ()
    evidence_total: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        require_choice(f"finding {self.rule}", "verdict", self.verdict, VERDICTS)
        for name in ("effect", "low", "high", "predicted"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(
                    f"finding {self.rule}", f"{name} = {value!r}", "a finite ratio above 0, or null"
                )
