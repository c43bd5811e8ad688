"""Builds the sections of a report that consist of text and tables.

There are sections on the causes of the steps in time, the rules of thumb, the quality of the
measurements, all measured sizes, and how the run was measured.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from quantbench.analysis.check import RunCheck
from quantbench.analysis.jumps import CommonCliff
from quantbench.analysis.periods import Period
from quantbench.analysis.rules import untested_lines
from quantbench.analysis.summary import LayerRow
from quantbench.device.spec import DeviceSpec
from quantbench.errors import printable
from quantbench.measurement import GRADES
from quantbench.report.content import Section, Table
from quantbench.report.op_curves import cost_words
from quantbench.report.sweep_result import ops_line, sizes_table
from quantbench.report.terminal import filled
from quantbench.rules import VERDICTS, Verdict
from quantbench.store.differences import CONSTANTS, flattened
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Record, Skipped
from quantbench.units import dashed, duration, percent, signed_percent

# Maximum number of further tiles that one line names because they give the same staircase, the
# steps in time over size that a tile's waves cause.
_MOST_ALIKE = 3
# Without a clear result, a tile is named only if its probability and the fraction of the variation
# that it explains are at least this.
_LEAST = 0.5
# Maximum number of rows in the table of steps that many shapes share.
_MOST_COMMON = 24
_VERDICT_STYLE = {"CONFIRMED": "green", "REFUTED": "red", "INCONCLUSIVE": "yellow"}


def steps_section(check: RunCheck) -> Section | None:
    """Builds the section on the causes of the steps, with a table of steps that many shapes share.

    Returns None if the run has neither a known cause nor a shared step.
    """
    lines = [*check.padding, *map(period_words, check.periods)]
    if check.falls:
        places = f"at {len(check.falls)} places the time falls where the size grows"
        lines.append(f"{places}: another kernel is better there")
    table = _common_table(check.common)
    if not lines and table is None:
        return None
    note = ""
    if table is not None:
        note = "Sizes after which the time jumps: median over many shapes, with its 95 % interval."
    return Section("steps", "Causes of the steps", note, table=table, lines=tuple(lines))


def period_words(period: Period) -> str:
    """Formats which tile explains the steps of a family of curves, and with what certainty.

    A family is the curves of one op, dtype and provider along an axis.

    Example: `m, gemm bf16 nt by torch.mm: 128x256 tile on 108 SMs explains the steps (…)`.
    """
    recovered = period.recovered
    what = period.variant
    if not what.startswith(f"{period.op} "):
        what = f"{period.op} ({what})"
    where = printable(f"{dashed(period.axis)}, {what} by {period.provider}")
    accounts = f"explains {percent(recovered.explained)} of the variation around the trend"
    if recovered.reason == "no waves":
        return f"{where}: the times show no waves"
    doubtful = min(recovered.confidence, recovered.explained) < _LEAST
    if recovered.reason == "no single tile" or (doubtful and not period.clear):
        return (
            f"{where}: no single tile explains the steps; the best, {period.sure_words}, {accounts}"
        )
    best = sorted(recovered.best, key=lambda one: one.tile != period.declared)
    explanations = list(map(period.words_of, best))
    named = period.tile_words or explanations[0]
    alike = [words for words in explanations if words != named]
    sure = f"{period.sure_words}, {accounts}"
    if period.spacing is not None:
        sure += f"; a step every {period.spacing:.4g} of {dashed(period.axis)}"
    if alike:
        more = f" and {len(alike) - _MOST_ALIKE} more" if len(alike) > _MOST_ALIKE else ""
        sure += f"; the same staircase: {', '.join(alike[:_MOST_ALIKE])}{more}"
    if period.declared is not None and not period.fits_declared:
        return f"{where}: declared {period.declared}; the steps fit {named} ({sure})"
    if period.clear:
        return f"{where}: {named} explains the steps ({sure})"
    return f"{where}: several tiles may explain the steps; the most likely is {named} ({sure})"


def _common_table(common: Sequence[CommonCliff]) -> Table | None:
    """Builds the table of steps that many shapes share; None if there are none.

    common: shared steps, largest first.
    """
    several = len({(one.provider, one.variant) for one in common}) > 1
    lines = []
    for one in common[:_MOST_COMMON]:
        cause = one.cause_words
        if several:
            cause += f" of {one.provider} {one.variant}"
        cells = {
            "op": one.op,
            "axis": dashed(one.axis),
            "between": f"{one.at} → {one.next}",
            ">shapes": str(one.num_curves),
            "time": cost_words(one),
            "with a new wave": _group_words(one.stepping),
            "without": _group_words(one.level),
            "significant cliffs by cause": printable(cause),
        }
        lines.append(cells)
    return Table(*filled(lines)) if lines else None


def _group_words(group: tuple[float, int] | None) -> str:
    """Formats the relative change in time in a group of curves, and the number of curves.

    group: median ratio of the times, and number of curves; None if the group is empty.
    """
    return "–" if group is None else f"{signed_percent(group[0] - 1)} ({group[1]})"


def rules_section(verdicts: Sequence[Verdict], spec: DeviceSpec) -> Section | None:
    """Builds the section with the verdicts on the rules of thumb, and a list of untested rules.

    Returns None if there are no verdicts.
    """
    if not verdicts:
        return None
    rows = []
    for one in sorted(verdicts, key=lambda one: VERDICTS.index(one.verdict)):
        if one.num_pairs:
            pairs = str(one.num_pairs)
            verdict = Text(one.verdict, style=_VERDICT_STYLE[one.verdict])
            rows.append((one.predicate, verdict, _effect(one), pairs, one.reason or one.claim))
    table = None
    note = ""
    if rows:
        cost = "breaking it costs"
        head = ("rule", "verdict", cost, ">pairs", "claim, or why there is no verdict")
        table = Table(head, tuple(rows), whole=frozenset({1}))
        note = "From pairs of points that differ only in the rule's condition"
        note += "; cost in time per unit of work."
    lines = tuple(untested_lines(verdicts, spec))
    return Section("rules", "Rules of thumb, tested", note, table=table, lines=lines)


def _effect(verdict: Verdict) -> str:
    """Formats the cost of breaking a rule with its interval, and the cost from tiles and waves."""
    if verdict.effect is None or verdict.low is None or verdict.high is None:
        return "–"
    text = f"{_change(verdict.effect)} ({_change(verdict.low)} to {_change(verdict.high)})"
    if verdict.predicted is not None:
        text += f"; tiles and waves alone: {_change(verdict.predicted)}"
    return text


def _change(ratio: float) -> str:
    """Formats a ratio of times as a relative change, with 0.0 % in place of −0.0 %."""
    text = percent(ratio - 1).replace("-", "−")
    return "0.0 %" if text == "−0.0 %" else text


# Maximum number of rows in the table of all sizes; records.jsonl has all of them.
_MOST_ROWS = 400
# Maximum number of reasons for bad grades, skipped and failed points.
_MOST_REASONS = 14
# Maximum number of characters of a reason, so that a wrong result keeps its error and its bound.
_LONGEST_REASON = 400
# Numbers in reasons. Reasons that differ only in their numbers are counted together.
_FIGURE = re.compile(r"[-+±]?\d+(?:\.\d+)?")
_GRADE_WORDS = {
    "A": "steady, cold as asked, clock steady",
    "B": "one condition not met",
    "C": "several conditions not met, or one badly; all imported figures",
    "D": "unreliable; see the reasons",
    "rejected": "impossible: faster than the hardware; or a time of Triton's interpreter",
}


def trust_section(run: Run) -> Section:
    """Builds the section on the quality of the measurements.

    The section shows the number of points by grade, the reasons for bad grades, skipped and failed
    points, and the ranges of clock, temperature and power.
    """
    points: Counter[str] = Counter()
    for record in run.records:
        if record.role == "point" and isinstance(record.outcome, Measured):
            points[record.outcome.grade.letter] += 1
    rows = [(one, str(points[one]), _GRADE_WORDS[one]) for one in GRADES if points[one]]
    return Section(
        "trust",
        "Quality of the measurements",
        state_words(run.records),
        table=Table(("trust", ">points", "meaning"), tuple(rows)) if rows else None,
        lines=tuple(trust_lines(run)),
    )


def trust_lines(run: Run) -> list[str]:
    """Counts the points below grade A, the skipped points and the failed points by reason.

    Reasons that differ only in their numbers are counted together. The most frequent reasons come
    first.
    """
    number: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for record in run.records:
        if record.role != "point":
            continue
        match record.outcome:
            case Measured(_, grade):
                if grade.letter == "A":
                    continue
                outcome = f"trust {grade.letter}"
                why = grade.reasons[0]
            case Skipped(why):
                outcome = "skipped"
            case Failed(error, message):
                outcome = "failed"
                why = f"{error}: {message}"
        words = printable(f"{outcome}, {record.provider}: {why}", _LONGEST_REASON)
        kind = _FIGURE.sub("#", words)
        number[kind] += 1
        examples[kind] = words
    lines = [f"{times} × {examples[kind]}" for kind, times in number.most_common(_MOST_REASONS)]
    if len(number) > _MOST_REASONS:
        lines.append(f"{len(number) - _MOST_REASONS} more reasons are in records.jsonl")
    return lines


def state_words(records: Sequence[Record]) -> str:
    """Formats the ranges of the device's SM clock, temperature and power during the run.

    The range of the reference point's time relative to its first time is added. Returns "" if no
    value is known.
    """
    seen: dict[str, list[float | None]] = defaultdict(list)
    first_us: dict[str, float] = {}  # by key: a run on many devices has several references
    for record in sorted(records, key=lambda r: r.elapsed_s):
        if not isinstance(record.outcome, Measured):
            continue
        measurement = record.outcome.measurement
        after = measurement.state_after
        seen["SM clock {} MHz"] += measurement.clocks_mhz or [after.sm_clock_mhz]
        seen["temperature {} °C"].append(after.temperature_c)
        seen["power {} W"].append(after.power_w)
        if record.role == "reference":
            us = measurement.stated.latency_us
            first = first_us.setdefault(record.key, us)
            seen["reference point {} % against its first time"].append(100 * (us / first - 1))
    words = []
    for template, values in seen.items():
        known = [value for value in values if value is not None]
        if known:
            ends = dict.fromkeys(f"{round(end, 1) + 0:g}" for end in (min(known), max(known)))
            words.append(template.format(" to ".join(ends)))
    return "; ".join(words)


def sizes_section(rows: Sequence[LayerRow], check: RunCheck) -> Section:
    """Builds the folded section of all sizes, with one row per grid point and provider.

    At most _MOST_ROWS rows are shown.
    """
    notes = [ops_line(rows)]
    if len(rows) > _MOST_ROWS:
        shown = f"the first {_MOST_ROWS} of {len(rows)} sizes"
        notes.append(f"{shown}; all of them are in records.jsonl")
    table = sizes_table(rows[:_MOST_ROWS], check)
    return Section("sizes", "All sizes", "; ".join(notes), table=table, folded=True)


def how_section(run: Run) -> Section:
    """Builds the folded section with the information for repeating the run.

    The section lists options, software versions, environment variables and device constants.
    """
    info = run.info
    device = info.device
    items: dict[str, Any] = {
        "folder": run.folder,
        "run": info.run_id,
        "started": info.started,
        "ended": f"{info.ended or 'not yet'} ({info.how_ended})",
    }
    if info.source:
        items["source"] = info.source
    for name, version in info.software.items():
        items[f"version of {name}"] = version
    for name, value in info.environment.items():
        items[f"environment {name}"] = value
    for name, value in flattened(info.options).items():
        items[f"option {name}"] = value
    for name, seconds in info.phases_s.items():
        items[f"seconds of {name}"] = f"{seconds:.1f}"
    constants = flattened({name: getattr(device, name) for name in CONSTANTS})
    for name, value in constants.items():
        source = device.source.get(name) or device.source.get(name.partition(".")[0])
        items[f"device {name}"] = value if source is None else f"{value} ({source})"
    rows = tuple((printable(name), printable(str(value), 300)) for name, value in items.items())
    return Section("how", "How it was measured", table=Table(("item", "value"), rows), folded=True)


def facts_of(run: Run) -> tuple[tuple[str, str], ...]:
    """Returns (name, value) pairs for the foot of the page: number of points and duration."""
    kinds: Counter[str] = Counter()
    elapsed_s = 0.0
    for record in run.records:
        kinds[type(record.outcome).__name__.lower()] += record.role == "point"
        elapsed_s = max(elapsed_s, record.elapsed_s)
    counts = ", ".join(f"{kinds[k]} {k}" for k in ("measured", "skipped", "failed") if kinds[k])
    facts = [("points", counts or "none")]
    if elapsed_s > 0:
        facts.append(("took", duration(elapsed_s)))
    return tuple(facts)
