"""Builds the report's text and table sections: causes of steps, rules of thumb, trust, all sizes,
and method.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quantbench.analysis.check import RunCheck
from quantbench.analysis.jumps import CommonCliff
from quantbench.analysis.periods import Period
from quantbench.analysis.rules import untested_lines
from quantbench.analysis.summary import LayerRow, floor_lines
from quantbench.device.spec import DeviceSpec
from quantbench.errors import printable
from quantbench.measurement import GRADES, Grade
from quantbench.report.content import Section, Table
from quantbench.report.op_curves import cost_words
from quantbench.report.source import dashed
from quantbench.report.sweep_result import ops_line, sizes_table
from quantbench.rules import VERDICTS, Verdict
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Skipped
from quantbench.units import duration, percent, signed_percent

# Maximum number of equivalent explanations named in one line, and of rows in the table of common
# steps.
_MOST_ALIKE = 3
_MOST_COMMON = 24


def steps_section(check: RunCheck) -> Section | None:
    """Builds the section on the causes of the steps and the steps that many shapes share; None
    without either.
    """
    lines = [*check.padding, *(period_words(period) for period in check.periods)]
    if check.falls:
        places = f"at {len(check.falls)} places the time falls where the size grows"
        lines.append(f"{places}: another kernel is better there")
    table = _common_table(check.common)
    if not lines and table is None:
        return None
    note = (
        ""
        if table is None
        else "Sizes after which the time jumps: median over many shapes, with its 95 % interval."
    )
    return Section("steps", "Causes of the steps", note, table=table, lines=tuple(lines))


def period_words(period: Period) -> str:
    """Formats `m, gemm bf16 nt by torch.mm: 128x256 tile on 108 SMs explains the steps (…)`."""
    recovered = period.recovered
    what = (
        period.variant
        if period.variant.startswith(f"{period.op} ")
        else f"{period.op} ({period.variant})"
    )
    where = printable(f"{dashed(period.axis)}, {what} by {period.provider}")
    accounts = f"explains {percent(recovered.explained)} of the variation around the trend"
    if recovered.reason == "no waves":
        return f"{where}: the times show no waves"
    if recovered.reason == "no single tile":
        return f"{where}: no single tile explains the steps; the best {accounts}"
    explanations = list(map(period.words_of, recovered.best))
    named = period.tile_words or explanations[0]
    alike = [words for words in explanations if words != named]
    sure = f"{period.sure_words}, {accounts}"
    if period.spacing is not None:
        sure += f"; a step every {period.spacing:.4g} of {dashed(period.axis)}"
    if alike:
        more = f" and {len(alike) - _MOST_ALIKE} more" if len(alike) > _MOST_ALIKE else ""
        sure += f"; the same staircase: {', '.join(alike[:_MOST_ALIKE])}{more}"
    if period.clear:
        return f"{where}: {named} explains the steps ({sure})"
    return f"{where}: several tiles may explain the steps; the most likely is {named} ({sure})"


def _common_table(common: Sequence[CommonCliff]) -> Table | None:
    """Builds the table of the steps that many shapes share, largest first; None without any."""
    several = len({(one.provider, one.variant) for one in common}) > 1
    rows = []
    for one in common[:_MOST_COMMON]:
        groups = [
            "–" if group is None else f"{signed_percent(group[0] - 1)} ({group[1]})"
            for group in (one.stepping, one.level)
        ]
        cause = one.cause_words + (f" of {one.provider} {one.variant}" if several else "")
        rows.append(
            (
                one.op,
                dashed(one.axis),
                f"{one.at} → {one.next}",
                str(one.num_curves),
                cost_words(one),
                *groups,
                printable(cause),
            )
        )
    head = (
        "op",
        "axis",
        "between",
        ">shapes",
        "time",
        "with a new wave",
        "without",
        "significant cliffs by cause",
    )
    return Table(head, tuple(rows)) if rows else None


def rules_section(verdicts: Sequence[Verdict], spec: DeviceSpec) -> Section | None:
    """Builds the section of verdicts on the rules of thumb, with the untested rules listed; None
    without any.
    """
    if not verdicts:
        return None
    tested = sorted((v for v in verdicts if v.num_pairs), key=lambda v: VERDICTS.index(v.verdict))
    rows = tuple(
        (v.predicate, v.verdict, _effect(v), str(v.num_pairs), v.reason or v.claim) for v in tested
    )
    head = ("rule", "verdict", "breaking it costs", ">pairs", "claim, or why there is no verdict")
    table = Table(head, rows, whole=frozenset({1})) if rows else None
    note = "From pairs of points that differ only in the rule's condition; cost in time per unit of work."
    lines = tuple(untested_lines(verdicts, spec))
    return Section(
        "rules", "Rules of thumb, tested", note if rows else "", table=table, lines=lines
    )


def _effect(verdict: Verdict) -> str:
    if verdict.effect is None or verdict.low is None or verdict.high is None:
        return "–"
    text = f"{_change(verdict.effect)} ({_change(verdict.low)} to {_change(verdict.high)})"
    return (
        text
        if verdict.predicted is None
        else f"{text}; tiles and waves alone: {_change(verdict.predicted)}"
    )


def _change(ratio: float) -> str:
    text = percent(ratio - 1).replace("-", "−")
    return "0.0 %" if text == "−0.0 %" else text


# Maximum number of rows in the table of all sizes; records.jsonl has all of them.
_MOST_ROWS = 400
_MOST_REASONS = 14
_MOST_KINDS = 3
# Reasons that differ only in their numbers are counted together.
_FIGURE = re.compile(r"[-+±]?\d+(?:\.\d+)?")
_CONSTANTS = ("sm_count", "sm_clock_mhz", "l2_bytes", "memory_bytes", "memory_gb_per_s")
_GRADE_WORDS = {
    "A": "steady, cold as asked, clock steady",
    "B": "one condition not met",
    "C": "several conditions not met, or one badly; all imported figures",
    "D": "unreliable; see the reasons",
    "rejected": "impossible: faster than the hardware; or a time of Triton's interpreter",
}


def trust_section(run: Run) -> Section:
    """Builds the section of trust grades with their most frequent reasons, and of skipped and
    failed points.
    """
    grades: dict[str, list[Grade]] = {letter: [] for letter in GRADES}
    examples: dict[str, str] = {}
    other: Counter[str] = Counter()
    for record in run.records:
        if record.role != "point":
            continue
        match record.outcome:
            case Measured(_, grade):
                grades[grade.letter].append(grade)
                examples |= {_FIGURE.sub("#", reason): reason for reason in grade.reasons}
            case Skipped(reason):
                other[f"skipped, {record.provider}: {printable(reason)}"] += 1
            case Failed(kind, message):
                other[f"failed, {record.provider}: {kind}: {printable(message)}"] += 1
    rows = []
    for letter, alike in grades.items():
        kinds = Counter(_FIGURE.sub("#", reason) for grade in alike for reason in grade.reasons)
        usual = [
            (printable(examples[kind]), times) for kind, times in kinds.most_common(_MOST_KINDS)
        ]
        why = "; ".join(
            f"{reason} ({times} points)" if times > 1 else reason for reason, times in usual
        )
        if alike:
            rows.append((letter, str(len(alike)), _GRADE_WORDS[letter], why))
    lines = [f"{number} × {reason}" for reason, number in other.most_common(_MOST_REASONS)]
    if len(other) > _MOST_REASONS:
        lines.append(f"{len(other) - _MOST_REASONS} more reasons are in records.jsonl")
    table = Table(("trust", ">points", "meaning", "mostly because"), tuple(rows)) if rows else None
    return Section("trust", "Quality of the measurements", table=table, lines=tuple(lines))


def sizes_section(rows: Sequence[LayerRow], check: RunCheck) -> Section:
    """Builds the folded section with one row per place and provider (at most 400)."""
    notes = [
        ops_line(rows),
        *floor_lines((point.latency_us, point) for row in rows for point in row.points),
    ]
    if len(rows) > _MOST_ROWS:
        notes.append(
            f"the first {_MOST_ROWS} of {len(rows)} sizes; all of them are in records.jsonl"
        )
    return Section(
        "sizes",
        "All sizes",
        "; ".join(notes),
        table=sizes_table(rows[:_MOST_ROWS], check),
        folded=True,
    )


def how_section(run: Run) -> Section:
    """Builds the folded section with options, versions and device constants, so that the run can be
    repeated.
    """
    info, device = run.info, run.info.device
    rows: list[tuple[str, Any]] = [
        ("folder", run.folder),
        ("run", info.run_id),
        ("started", info.started),
    ]
    rows.append(("ended", f"{info.ended or 'not yet'} ({info.how_ended})"))
    if info.source:
        rows.append(("source", info.source))
    rows += [(f"version of {name}", value) for name, value in info.software.items()]
    rows += [(f"environment {name}", value) for name, value in info.environment.items()]
    for name, value in info.options.items():
        inner = (
            {f"{name}.{key}": v for key, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        rows += [(f"option {option}", v) for option, v in inner.items()]
    rows += [(f"seconds of {name}", f"{seconds:.1f}") for name, seconds in info.phases_s.items()]
    constants: dict[str, Any] = {name: getattr(device, name) for name in _CONSTANTS}
    constants |= {f"peak_tflops.{dtype}": peak for dtype, peak in device.peak_tflops.items()}
    for name, value in constants.items():
        source = device.source.get(name) or device.source.get(name.partition(".")[0])
        rows.append((f"device {name}", value if source is None else f"{value} ({source})"))
    shown = tuple((printable(name), printable(str(value), 300)) for name, value in rows)
    return Section("how", "How it was measured", table=Table(("item", "value"), shown), folded=True)


def facts_of(run: Run) -> tuple[tuple[str, str], ...]:
    """Returns (name, value) pairs for the foot of the page: points and duration; `how_section` has
    all else.
    """
    points = [r for r in run.records if r.role == "point"]
    kinds = Counter(type(r.outcome).__name__.lower() for r in points)
    counts = ", ".join(f"{kinds[k]} {k}" for k in ("measured", "skipped", "failed") if kinds[k])
    elapsed_s = max((r.elapsed_s for r in run.records), default=0.0)
    took = (("took", duration(elapsed_s)),) if elapsed_s > 0 else ()
    return ("points", counts or "none"), *took
