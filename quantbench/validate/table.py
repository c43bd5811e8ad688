"""Accuracy lines as Markdown for docs/accuracy.md, as a table for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from quantbench.errors import StoreError
from quantbench.files import read_text, reason
from quantbench.latency.protocol import ErrorSummary
from quantbench.units import percent
from quantbench.validate.cliff_levels import LEVELS, CliffLevels
from quantbench.validate.scores import PROTOCOLS, Absent, Line

#: whose probabilities of cliffs have a table of their own
_JUDGED_BY_LEVEL = "ours"
_COLUMNS = (
    "model", "rows learned from", "all rows", "compute rows", "90 % interval covers", "cliffs found / true",
    "forecasts found / true", "fit, s", "shapes/s",
)  # fmt: skip


def cells(entry: Line) -> tuple[str, ...]:
    """One line as text, in the order of the columns. Errors are median / mean / p95 in percent."""
    return (
        entry.model,
        _rows(entry.train_rows),
        _errors(entry.errors) + ("" if entry.unanswered == 0 else f" (no answer to {percent(entry.unanswered)})"),
        "–" if entry.compute is None else _errors(entry.compute),
        "–" if entry.coverage is None else percent(entry.coverage),
        _shares(entry.cliff_recall, entry.cliff_precision),
        _shares(entry.forecast_recall, entry.forecast_precision),
        "–" if not entry.fit_s or entry.fit_s < 5e-4 else f"{entry.fit_s:.2g}",
        "–" if entry.shapes_per_s is None else _two_digits(entry.shapes_per_s),
    )


def _rows(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _errors(errors: ErrorSummary) -> str:
    return f"{errors.median_pct:.2f} / {errors.mean_pct:.1f} / {errors.p95_pct:.1f}"


def _shares(found: float | None, true: float | None) -> str:
    return "–" if found is None else f"{found:.2f} / " + ("–" if true is None else f"{true:.2f}")


def _two_digits(value: float) -> str:
    digits = max(0, len(str(int(value))) - 2)
    return f"{round(value, -digits):,.0f}"


def terminal_table(lines: Sequence[Line]) -> Table:
    """Every line, for the terminal."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("gpu", "protocol", *_COLUMNS):
        table.add_column(name, justify="left" if name in ("gpu", "protocol", "model") else "right")
    for entry in lines:
        table.add_row(entry.gpu, entry.protocol, *cells(entry))
    return table


def markdown(lines: Sequence[Line], absent: Sequence[Absent], origins: Sequence[str] = ()) -> str:
    """One section per protocol and device, then who could not take part, then `origins`: what it was made from."""
    parts = []
    for protocol, meaning in PROTOCOLS.items():
        of_protocol = [entry for entry in lines if entry.protocol == protocol]
        if not of_protocol:
            continue
        parts.append(f"**{meaning[0].upper()}{meaning[1:]}.**\n")
        for gpu in dict.fromkeys(entry.gpu for entry in of_protocol):
            parts.append(f"### {gpu}\n")
            parts.append(_section([entry for entry in of_protocol if entry.gpu == gpu]))
    levels = [
        (e.gpu, e.train_rows, e.cliff_levels)
        for e in lines
        if e.cliff_levels is not None and e.model == _JUDGED_BY_LEVEL and e.protocol == "sites"
    ]
    if levels:
        parts.append(
            f"**Cliffs found / true, by the probability from which on they are forecast ({_JUDGED_BY_LEVEL}).**\n"
        )
        parts.append(levels_table(levels))
    parts += [f"- {a.gpu}: {a.model} is left out: {a.reason}." for a in absent]
    parts += [f"- {origin}." for origin in origins]
    return "\n".join(parts).rstrip() + "\n"


def _section(lines: Sequence[Line]) -> str:
    rows = [cells(entry) for entry in lines]
    # A column that nobody fills says nothing.
    kept = [i for i in range(len(_COLUMNS)) if any(row[i] != "–" for row in rows)]
    header = "| " + " | ".join(_COLUMNS[i] for i in kept) + " |"
    rule = "|" + "|".join("---" if _COLUMNS[i] == "model" else "---:" for i in kept) + "|"
    body = ["| " + " | ".join(row[i] for i in kept) + " |" for row in rows]
    return "\n".join([header, rule, *body]) + "\n"


def levels_table(rows: Sequence[tuple[str, int | None, CliffLevels]]) -> str:
    """Markdown of (GPU, rows learned from, levels)."""
    header = ["gpu", "rows learned from", "cliffs expected / measured", *(f"P ≥ {level:.2f}" for level in LEVELS)]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for gpu, learned, levels in rows:
        both = f"{percent(levels.expected)} / {percent(levels.measured)}"
        shares = [_shares(found, true) for found, true in zip(levels.found, levels.true, strict=True)]
        lines.append("| " + " | ".join([gpu, _rows(learned), both, *shares]) + " |")
    return "\n".join(lines) + "\n"


def lines_to_json(lines: Sequence[Line], absent: Sequence[Absent]) -> dict[str, Any]:
    """Everything as plain objects."""
    return {
        "lines": [entry.to_json() for entry in lines],
        "absent": [{"gpu": a.gpu, "model": a.model, "reason": a.reason} for a in absent],
    }


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands in `path` between `<!-- name:begin -->` and `<!-- name:end -->`."""
    head, tail = around_markers(path, name)
    path.write_text(f"{head}<!-- {name}:begin -->\n{text}<!-- {name}:end -->{tail}", encoding="utf-8")


def around_markers(path: Path, name: str) -> tuple[str, str]:
    """What stands before and behind the two markers. Raises StoreError for a file without them: ask it before the work
    whose result is to stand there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        content = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError("validate", f"--docs {path} ({reason(error)})", f"a file with {begin} in it") from None
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(end) < content.index(begin):
        raise StoreError("validate", f"--docs {path} without one {begin} and one {end} after it", "both, in this order")
    head, rest = content.split(begin)
    return head, rest.split(end)[1]
