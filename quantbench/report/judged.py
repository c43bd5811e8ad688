"""What the check of a run found, as parts of its report: what makes the steps, steps that shapes share, the rules."""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.analysis.check import Check
from quantbench.analysis.common_cliffs import CommonCliff
from quantbench.analysis.periods import Period, explanation_words
from quantbench.analysis.rule_verdicts import VERDICTS, Verdict
from quantbench.analysis.rules import RULES, untested_lines
from quantbench.device.spec import DeviceSpec
from quantbench.report.content import Section, Table
from quantbench.report.words import printable
from quantbench.units import percent

# Explanations that make the same staircase, named in one line.
_MOST_ALIKE = 3
_MOST_COMMON = 24


def steps_section(check: Check) -> Section | None:
    """What makes the steps, and where many shapes step together; None where there is nothing to say of either."""
    lines = [period_words(period) for period in check.periods]
    if check.falls:
        lines.append(
            f"at {len(check.falls)} places the time falls where the size grows: another kernel is better there"
        )
    table = common_table(check.common)
    if not lines and table is None:
        return None
    note = "" if table is None else "Sizes after which the time jumps: median over many shapes, with its 95 % interval."
    return Section("steps", "Causes of the steps", note, table=table, lines=tuple(lines))


def period_words(period: Period) -> str:
    """`m, gemm bf16 nt by torch.mm: 128x256 tile on 108 SMs explains the steps (…)`."""
    recovered = period.recovered
    what = period.variant if period.variant.startswith(f"{period.op} ") else f"{period.op} ({period.variant})"
    where = printable(f"{period.axis.replace('_', '-')}, {what} by {period.provider}")
    accounts = f"explains {percent(recovered.explained)} of the variation around the trend"
    if recovered.verdict == "no waves":
        return f"{where}: the times show no waves"
    if recovered.verdict == "no single tile":
        return f"{where}: no single tile explains the steps; the best {accounts}"
    named = period.tile_words or explanation_words(recovered.best[0], period.sm_count)
    alike = [words for e in recovered.best if (words := explanation_words(e, period.sm_count)) != named]
    same = ""
    if alike:
        more = f" and {len(alike) - _MOST_ALIKE} more" if len(alike) > _MOST_ALIKE else ""
        same = f"; the same staircase: {', '.join(alike[:_MOST_ALIKE])}{more}"
    sure = f"{period.sure_words}, {accounts}"
    if recovered.verdict == "clear":
        return f"{where}: {named} explains the steps ({sure}{same})"
    return f"{where}: several tiles may explain the steps; the most likely is {named} ({sure}{same})"


def common_table(common: Sequence[CommonCliff]) -> Table | None:
    """The sizes that many shapes step at, the largest step first."""
    if not common:
        return None
    several = len({(one.op, one.provider, one.variant) for one in common}) > 1
    rows = []
    for one in common[:_MOST_COMMON]:
        which = f" of {one.provider} {one.variant}" if several else ""
        rows.append((
            one.axis.replace("_", "-"), f"{one.at} → {one.next}", str(one.num_curves),
            f"+{percent(one.ratio - 1)} ({percent(one.low - 1)} to {percent(one.high - 1)})",
            _group(one.stepping), _group(one.level), printable(one.cause_words + which),
        ))  # fmt: skip
    head = ("axis", "between", "shapes", "time", "with a new wave", "without", "significant cliffs by cause")
    return Table(head, tuple(rows), frozenset({2}))


def _group(group: tuple[float, int] | None) -> str:
    if group is None:
        return "–"
    ratio, shapes = group
    return f"{'+' if ratio >= 1 else '−'}{percent(abs(ratio - 1))} ({shapes})"


def rules_section(verdicts: Sequence[Verdict], spec: DeviceSpec) -> Section | None:
    """Verdicts on the rules of thumb; rules that the run does not test are named below."""
    if not verdicts:
        return None
    rules = {rule.id: rule for rule in RULES}
    tested = sorted((v for v in verdicts if v.num_pairs), key=lambda v: VERDICTS.index(v.verdict))
    rows = tuple(
        (rules[v.rule].predicate, v.verdict, _effect(v), str(v.num_pairs), v.reason or rules[v.rule].claim)
        for v in tested
    )
    head = ("rule", "verdict", "breaking it costs", "pairs", "claim, or why there is no verdict")
    table = Table(head, rows, frozenset({3}), whole=frozenset({1})) if rows else None
    note = "From pairs of points that differ only in the rule's condition; cost in time per unit of work."
    lines = tuple(untested_lines(verdicts, spec))
    return Section("rules", "Rules of thumb, tested", note if rows else "", table=table, lines=lines)


def _effect(verdict: Verdict) -> str:
    if verdict.effect is None or verdict.low is None or verdict.high is None:
        return "–"
    text = f"{_signed(verdict.effect)} ({_signed(verdict.low)} to {_signed(verdict.high)})"
    return text if verdict.predicted is None else f"{text}; tiles and waves alone: {_signed(verdict.predicted)}"


def _signed(ratio: float) -> str:
    text = percent(ratio - 1).replace("-", "−")
    return "0.0 %" if text == "−0.0 %" else text
