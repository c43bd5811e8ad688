"""Formats profiles, query results and blind spots, for the terminal and as JSON.

The command `profile` prints with these functions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import exp
from typing import Any

import numpy as np
from rich.table import Table as RichTable
from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.output import encoded, plain_table
from quantbench.errors import printable
from quantbench.profile import Estimate, Profile, Table
from quantbench.profile.blindspots import Blindspots, Spot
from quantbench.profile.linear_interpolation import BOUND, FloatArray
from quantbench.profile.models import interval_words
from quantbench.profile.table import LAYOUTS
from quantbench.report.terminal import cliffs_table
from quantbench.store.typed import encode
from quantbench.units import latency, percent

# Maximum number of cliffs (sizes after which the time jumps) in the printed table. --json has all
# cliffs of the profile.
_MOST_CLIFFS = 10
_STYLES = {"measured": "green", "interpolated": "", "modelled": "yellow"}


def profile_lines(profile: Profile) -> Iterator[str | RichTable]:
    """Yields lines and tables that describe a profile on the terminal.

    They show the device, the measured rows, the models' accuracy, the largest cliffs, and the
    verdicts on rules of thumb.
    """
    yield device_line(profile.device)
    yield from map(printable, origin_lines(profile))
    measured = plain_table(("what", "provider", "rows", "grades", "sizes"), title="measured")
    for kind, words, provider, rows in _all_parts(profile):
        counts = sorted(Counter(rows["grade"].tolist()).items())
        grades = ", ".join(f"{count:,} {grade}" for grade, count in counts)
        measured.add_row(f"{kind} {words}", provider, f"{len(rows):,}", grades, _ranges(rows))
    if measured.rows:
        yield from ("", measured)
    yield ""
    yield from map(printable, model_lines(profile))
    if profile.cliffs:
        ordered = sorted(profile.cliffs, key=lambda cliff: (cliff.num_curves == 1, -cliff.ratio))
        more = profile.provenance.num_cliffs - len(ordered[:_MOST_CLIFFS])
        title = "cliffs"
        if more > 0:
            title = f"the worst cliffs ({more:,} more)"
        causes = [": ".join(filter(None, (c.cause, c.why))) for c in ordered]
        yield ""
        yield cliffs_table(list(zip(ordered, causes, strict=True))[:_MOST_CLIFFS], title)
    by_verdict: dict[str, list[str]] = {}
    for finding in profile.findings:
        effect = "" if finding.effect is None else f" ({finding.effect:.3f}x)"
        by_verdict.setdefault(finding.verdict, []).append(finding.rule + effect)
    for verdict, rules in sorted(by_verdict.items()):
        yield printable(f"{verdict}: {', '.join(rules)}")


def origin_lines(profile: Profile) -> list[str]:
    """Returns the profile's note, and one line for each run from which the profile was made."""
    found = []
    if profile.provenance.note:
        found.append(profile.provenance.note)
    for run in profile.provenance.runs:
        words = f"{run.origin} run {run.run_id}"
        if run.cache != "unknown":
            words += f", {run.cache} cache"
        words += f", {run.rows:,} of {run.records:,} records"
        if run.source:
            words += f": {run.source}"
        found.append(words)
    return found


def rows_line(profile: Profile) -> str:
    """Formats the number of rows in each table, without empty tables."""
    counts = [f"{len(table):,} of {kind}" for kind, table in profile.tables.items() if len(table)]
    return "rows: " + (", ".join(counts) or "none; all times come from the models")


def _all_parts(profile: Profile) -> Iterator[tuple[str, str, str, Table]]:
    """Splits each table of a profile by the table's keys that are not integers, such as dtype.

    Yields (kind of the table, key values as text, provider, rows) for each combination of key
    values.
    """
    masks = {True: "causal", False: "full"}
    for table in profile.tables.values():
        _, names = _key_names(table)
        keys = list(zip(*(table[name].tolist() for name in names), strict=True))
        for key in sorted(set(keys), key=str):
            rows = np.array([other == key for other in keys])
            # The provider is the last key.
            words = " ".join(masks.get(value, value) for value in key[:-1])
            yield table.kind, words, key[-1], table.where(rows)


def _key_names(table: Table) -> tuple[list[str], list[str]]:
    """Returns the names of a table's integer keys, and the names of its other keys."""
    layout = LAYOUTS[table.kind]
    # found[False] lists the integer keys, and found[True] the other keys.
    found: tuple[list[str], list[str]] = ([], [])
    for name in layout.keys:
        found[layout.columns[name] is not int].append(name)
    return found


def _ranges(rows: Table) -> str:
    """Formats the smallest and the largest value of each integer key: `m 1 to 8192, n 4096`."""
    names, _ = _key_names(rows)
    spans = []
    for name in names:
        low = rows[name].min()
        high = rows[name].max()
        spans.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    return ", ".join(spans)


def model_lines(profile: Profile) -> list[str]:
    """Returns one line for each model that predicts unmeasured shapes, with the model's error.

    A further line has the error of interpolation between measured GEMMs.
    """
    models = profile.models
    found = []
    for model in models.gemm:
        fitted = f"fitted to {model.rows:,} rows" if model.rows else model.note
        found.append(
            f"model of {model.library}'s {model.dtype} products: {fitted}; {interval_words(model)}"
        )
        held = model.provenance.get("held_out")
        if isinstance(held, dict) and "median_pct" in held:
            found[-1] += f"; median error {held['median_pct']:.1f} % on held-out rows"
    if len(profile.tables["gemm"]):
        error = profile.gemm_error
        if error is not None:
            found.append(
                "interpolation between measured products: "
                f"90 % within ±{percent(exp(error) - 1)} (leave-one-out)"
            )
    found += [other.note for other in (models.softmax, models.attention) if other is not None]
    return found or ["no models: times are known for measured shapes only"]


def answers_table(answers: Iterable[tuple[str, Estimate]]) -> RichTable:
    """Tabulates queried shapes with their times.

    answers: (shape as text, estimated time) of each query.
    """
    found = plain_table(("shape", "format", "time", "90 % interval", "source", "bound by", "note"))
    for shape, one in answers:
        interval = f"{latency(one.low_us)} to {latency(one.high_us)}"
        if one.low_us == one.high_us:
            interval = "a single figure"
        found.add_row(
            shape,
            one.format,
            latency(one.latency_us),
            interval,
            Text(one.source, style=_STYLES[one.source]),
            one.bound,
            one.note,
        )
    return found


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Converts the parts of a profile that `profile show` prints to a JSON object."""
    return {
        "device": profile.device.name,
        "software": profile.software,
        "provenance": profile.provenance,
        "tables": (
            {"kind": kind, "format": words, "provider": provider, "rows": len(rows)}
            for kind, words, provider, rows in _all_parts(profile)
        ),
        "models": model_lines(profile),
        "cliffs": encode(profile.cliffs),
        "findings": encode(profile.findings),
    }


def error_summary(errors: FloatArray) -> dict[str, float]:
    """Returns the median, 95th percentile and maximum of errors; zeros if there are none.

    errors: (sizes,) absolute values of relative errors.
    """
    if not len(errors):
        return {"median": 0.0, "p95": 0.0, "max": 0.0}
    middle, p95, largest = np.percentile(errors, [50, 95, 100]).tolist()
    return {"median": middle, "p95": p95, "max": largest}


def spot_line(spot: Spot) -> str:
    """Formats a blind spot (a size at which linear interpolation between rows is wrong).

    The line has the size, the interpolated time, the expected time and the error.
    """
    off = f"{percent(abs(spot.error))} too {'low' if spot.error < 0 else 'high'}"
    said = f"{latency(spot.interpolated_us)} between m = {spot.low} and {spot.high}"
    return (
        f"m = {spot.m}, n = {spot.n}, k = {spot.k}: {said}, "
        f"expected {latency(spot.expected_us)}: {off}"
    )


def blindspots_to_json(found: Blindspots, most_spots: int) -> dict[str, Any]:
    """Converts blind spots to a JSON object.

    most_spots: maximum number of single spots. The worst spots are kept.
    """
    return {
        "dtype": found.dtype,
        "rows": found.num_rows,
        "places": len(found.before),
        "bound": BOUND,
        "before": error_summary(found.before),
        "after": error_summary(found.after),
        "add": [{"m": m, "n": n, "k": k} for m, n, k in found.add],
        "spots": [{**encoded(spot), "error": spot.error} for spot in found.spots[:most_spots]],
        "note": found.note,
    }
