"""Defines rules about sizes (`Rule`), and a run's verdicts on them (`Verdict`)."""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice

VERDICTS = ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED")


@dataclass(frozen=True)
class Rule:
    """Rule about sizes.

    id: short unique name.
    statement: the rule as a condition, such as `m % 8 == 0`.
    claim: benefit if the condition holds, or cost if it does not.
    sources: documents, threads and source files with the rule.
    """

    id: str
    statement: str
    claim: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Verdict on one rule of thumb, from pairs of records in a run. A profile stores verdicts.

    In each pair, one shape breaks the rule and the other keeps it.

    rule: id of the rule.
    predicate: condition of the rule.
    claim: benefit that the rule claims.
    verdict: one of VERDICTS.
    effect: time per unit of work of the shape that breaks the rule, divided by that of the shape
        that keeps it. This is the median over the pairs, or the mean if there are few pairs.
    low, high: 95 % interval of the effect.
    num_pairs: number of pairs.
    predicted: median effect that tiles and waves alone predict; None if a tile is unknown.
    evidence: keys of the first compared records, in the order of the pairs.
    evidence_total: number of compared records.
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
