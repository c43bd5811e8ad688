"""What `quantbench check` found, as tables for people and as plain objects for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantbench.analysis.check import Check
from quantbench.analysis.cliffs import Cliff, CommonCliff
from quantbench.analysis.periods import Period, explanation_words
from quantbench.analysis.rules import Verdict, rule_named
from quantbench.store.record import Measured
from quantbench.units import percent

if TYPE_CHECKING:
    from rich.table import Table

# The largest cliffs are shown; --json has them all.
_MOST_CLIFFS = 20
_MOST_SAME = 8
# Records of so many comparisons stand for a verdict; a table has thousands.
_MOST_EVIDENCE = 200

_VERDICT_STYLE = {"CONFIRMED": "green", "REFUTED": "red", "INCONCLUSIVE": "yellow"}


def head_lines(found: Check) -> list[str]:
    """Number of points, curves and cliffs, and the causes of the cliffs."""
    records = [record for record in found.run.records if record.role == "point"]
    missing = sum(not isinstance(record.outcome, Measured) for record in records)
    lines = [f"{counted(found.num_points, 'measured point')}" + (f", {missing} skipped or failed" if missing else "")]
    if not found.num_curves:
        lines.append("no two neighbouring sizes are close enough to detect a step between them")
        return lines
    noise = "" if found.noise is None else f"; standard error of a point ±{percent(found.noise)}"
    lines[0] += f", {counted(found.num_curves, 'curve')} with close neighbours{noise}"
    if not found.cliffs:
        lines.append("no cliff: the time does not jump by 3 % or more above its trend and the noise anywhere")
    else:
        kinds = Counter(cliff.cause.kind for cliff in found.cliffs)
        causes = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        falls = f"{counted(len(found.falls), 'place')} where a larger size is faster"
        lines.append(f"{counted(len(found.cliffs), 'cliff')} ({causes}); {falls}")
    return lines


def counted(number: int, what: str) -> str:
    """`1 point`, `2,000 points`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cliff_table(found: Check) -> Table | None:
    """Cliffs that many curves share if there are many curves, else the largest cliffs; None without cliffs."""
    return _common_table(found) if found.common else _single_table(found) if found.cliffs else None


def _table(title: str, *columns: str, right: int) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        last = i == len(columns) - 1
        table.add_column(name, justify="right" if i < right else "left", no_wrap=not last, overflow="fold")
    return table


def _common_table(found: Check) -> Table:
    several = len({(c.op, c.provider, c.variant) for c in found.common}) > 1
    waves = any(c.stepping for c in found.common)
    names = (
        "size",
        "time",
        "curves",
        *(("with a new wave", "without") if waves else ()),
        "significant cliffs by cause",
    )
    table = _table("cliffs: median over all compute-bound curves", *names, right=len(names) - 1)
    for c in found.common[:_MOST_CLIFFS]:
        split = (_ratio_of(c.stepping), _ratio_of(c.level)) if waves else ()
        which = f" of {c.provider} {c.variant}" if several else ""
        table.add_row(
            f"{_axis(c.axis)} = {c.at} to {c.next}", f"{c.ratio:.2f}x ({c.low:.2f} to {c.high:.2f})",
            str(c.num_curves), *split, c.cause_words + which,
        )  # fmt: skip
    return table


def _ratio_of(part: tuple[float, int] | None) -> str:
    return "" if part is None else f"{part[0]:.2f}x of {part[1]}"


def _single_table(found: Check) -> Table:
    more = len(found.cliffs) - _MOST_CLIFFS
    title = "cliffs" if more <= 0 else f"the {_MOST_CLIFFS} largest cliffs ({more:,} more in --json)"
    table = _table(title, "size", "time", "op", "why", right=2)
    for cliff in found.cliffs[:_MOST_CLIFFS]:
        held = "".join(f", {_axis(name)} = {value}" for name, value in cliff.held.items())
        source = "" if cliff.cause.evidence == "identity" else f" ({cliff.cause.evidence})"
        table.add_row(
            f"{_axis(cliff.axis)} = {cliff.at} to {cliff.next}{held}",
            f"{cliff.ratio:.2f}x ({cliff.low:.2f} to {cliff.high:.2f})",
            f"{cliff.op} {cliff.provider}",
            f"{cliff.cause.kind}: {cliff.cause.words}{source}",
        )
    return table


def _axis(name: str) -> str:
    return name.replace("_", "-")


def period_lines(found: Check) -> list[str]:
    """One sentence for each family of curves: the tile that explains its steps, if any."""
    several = len(found.periods) > 1
    return [(f"{p.op} {p.provider} {p.variant}: " if several else "") + _period_words(p) for p in found.periods]


def _period_words(period: Period) -> str:
    r = period.recovered
    spaced = "" if period.spacing is None else f", a step every {period.spacing:.4g} of {_axis(period.axis)}"
    match r.verdict:
        case "clear":
            same = [explanation_words(e, period.sm_count) for e in r.best if e != period.chosen]
            listed = "; ".join(same[:_MOST_SAME]) + ("; …" if len(same) > _MOST_SAME else "")
            other = f"; the same staircase: {listed}" if same else ""
            sure = f"explains {percent(r.explained)} of the variation around the trend, {period.sure_words}"
            return f"the steps match a {period.tile_words} ({sure}){spaced}{other}"
        case "no waves":
            return "no waves: the times do not rise in the steps of any tile"
        case "no single tile":
            best = explanation_words(r.best[0], period.sm_count)
            share = f"{percent(r.explained)} of the variation around the trend"
            return f"no single tile explains the steps: the best, a {best}, explains {share}"
        case _:
            likely = "; ".join(explanation_words(e, period.sm_count) for e in (r.best[0], *r.rivals)[:_MOST_SAME])
            return f"several tiles may explain the steps{spaced}: {likely}"


def rule_table(found: Check) -> Table | None:
    """The rules that the run tests, with their verdicts; None where it tests none (see `untested_lines`)."""
    from rich.text import Text

    tested = [verdict for verdict in found.rules if verdict.verdict != "NOT TESTED"]
    if not tested:
        return None

    table = _table(
        "rules: time per unit of work, rule broken / rule kept", "rule", "verdict", "effect", "pairs",
        "what the rule says, and why it was (not) confirmed", right=0,
    )  # fmt: skip
    for verdict in tested:
        rule = rule_named(verdict.rule)
        table.add_row(
            rule.id,
            Text(verdict.verdict, style=_VERDICT_STYLE[verdict.verdict]),
            "" if verdict.effect is None else f"{verdict.effect:.3f}x ({verdict.low:.3f} to {verdict.high:.3f})",
            f"{verdict.num_pairs:,}" if verdict.num_pairs else "",
            f"{rule.predicate}: {rule.claim}{_behind(verdict)}",
        )
    return table


def _behind(verdict: Verdict) -> str:
    if verdict.reason:
        return f" ({verdict.reason})"
    return "" if verdict.predicted is None else f" (tiles and waves alone: {verdict.predicted:.3f}x)"


def check_to_json(found: Check) -> dict[str, Any]:
    """The whole check as JSON objects."""
    info = found.run.info
    return {
        "run": str(found.run.folder), "device": info.device.name, "origin": info.origin, "source": info.source,
        "points": found.num_points, "curves": found.num_curves, "noise": found.noise,
        "cliffs": [cliff_to_json(cliff) for cliff in found.cliffs],
        "falls": [cliff_to_json(cliff) for cliff in found.falls],
        "common": [_common_to_json(common) for common in found.common],
        "period": None if found.period is None else _period_to_json(found.period),
        "periods": [_period_to_json(period) for period in found.periods],
        "rules": [_verdict_to_json(verdict) for verdict in found.rules],
    }  # fmt: skip


def cliff_to_json(cliff: Cliff) -> dict[str, Any]:
    """One jump of the time; `ratio` with the trend taken out, `rate_ratio` as a person sees it."""
    return {
        "axis": cliff.axis, "at": cliff.at, "next": cliff.next, "ratio": cliff.ratio, "low": cliff.low,
        "high": cliff.high, "cause": cliff.cause.kind, "why": cliff.cause.words, "evidence": cliff.cause.evidence,
        "op": cliff.op, "provider": cliff.provider, "variant": cliff.variant, "held": dict(cliff.held),
        "first": cliff.first, "last": cliff.last, "rate_ratio": cliff.rate_ratio,
        "keys": [cliff.before.key, cliff.after.key],
    }  # fmt: skip


def _common_to_json(common: CommonCliff) -> dict[str, Any]:
    data = asdict(common)
    for name in ("stepping", "level"):
        part = data.pop(name)
        data[f"{name}_ratio"], data[f"{name}_curves"] = part or (None, 0)
    return {**data, "cause": common.cause, "causes": dict(common.causes)}


def _period_to_json(period: Period) -> dict[str, Any]:
    r, chosen = period.recovered, period.chosen
    per_sm = None if chosen is None else chosen.per_sm(period.sm_count)
    # Where the SMs were not used, one block on each is as good a reading as any.
    sm_count = None if chosen is None else period.sm_count if per_sm else chosen.resident_blocks
    return {
        "axis": period.axis, "op": period.op, "provider": period.provider, "variant": period.variant,
        "verdict": r.verdict, "tile": None if chosen is None else f"{chosen.block_m}x{chosen.block_n}",
        "sm_count": sm_count, "blocks_per_sm": None if chosen is None else per_sm or 1,
        "resident_blocks": None if chosen is None else chosen.resident_blocks,
        "confidence": r.confidence, "explained": r.explained, "spacing": period.spacing,
        "spacing_error": period.spacing_error, "curves": period.num_curves,
        "same": [asdict(explanation) for explanation in r.best],
        "rivals": [asdict(explanation) for explanation in r.rivals],
    }  # fmt: skip


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    rule = rule_named(verdict.rule)
    return {
        "id": rule.id, "predicate": rule.predicate, "claim": rule.claim, "verdict": verdict.verdict,
        "effect": verdict.effect, "low": verdict.low, "high": verdict.high, "pairs": verdict.num_pairs,
        "predicted": verdict.predicted, "evidence": list(verdict.evidence[:_MOST_EVIDENCE]),
        "evidence_total": len(verdict.evidence), "reason": verdict.reason,
    }  # fmt: skip
