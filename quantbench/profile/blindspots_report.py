"""Finds the blind spots of a planner's GEMM table, and formats them and `replay` results as JSON, text or Markdown.

Entry points: `find`, which returns `Blindspots`; `measured_products`, `thin_model` and `consumer_of` (one of
`CONSUMERS`), which prepare a replay; the formats `summary`, `spot_line`, `found_to_json`, `replay_to_json`,
`replay_table` and `replay_markdown`; `write_between`, which replaces the part of a document between `around_markers`.
Used by the command `profile`; `tools.accuracy` and `tools.evidence` use `write_between`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.errors import InputError, StoreError, require_choice
from quantbench.files import read_text, reason
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import system_of
from quantbench.profile.aiconfigurator_engine import engine, engine_missing
from quantbench.profile.blindspots import (
    Choice,
    Consumer,
    FloatArray,
    IntArray,
    MeasuredProducts,
    Replay,
    Site,
    choose,
    sites_between,
    sorted_table,
    straight_lines,
)
from quantbench.profile.exporters.options import Exported, ExportOptions, dtype_of, products
from quantbench.profile.profile import Profile
from quantbench.units import latency, percent

#: planners whose interpolation is implemented
CONSUMERS = ("aiconfigurator",)
_WHO = "profile blindspots"


@dataclass(frozen=True)
class Spot:
    """Size m with the largest interpolation error between two neighbouring rows of one (n, k).

    low, high: m of the two rows.
    interpolated_us: the planner's time at m.
    expected_us: the model's time at m.
    """

    n: int
    k: int
    low: int
    m: int
    high: int
    interpolated_us: float
    expected_us: float

    @property
    def error(self) -> float:
        return self.interpolated_us / self.expected_us - 1.0


@dataclass(frozen=True)
class Blindspots:
    """Result of `find` for a table of `num_rows` GEMMs.

    choice: rows to add, with the errors before and after.
    spots: one per gap, largest error first.
    model_rows: rows that the model was fitted to.
    """

    choice: Choice
    spots: tuple[Spot, ...]
    num_rows: int
    dtype: str
    model_rows: int


def measured_products(profile: Profile, consumer: str) -> tuple[MeasuredProducts, str]:
    """Returns (rows of the planner's table, their dtype)."""
    require_choice(_WHO, "--for", consumer, CONSUMERS)
    dtype = dtype_of(profile, ExportOptions())
    table = products(profile, ExportOptions(dtype=dtype), Exported())
    if not len(table):
        raise InputError(_WHO, "a profile without unbatched products", "measured products of one dtype")
    return sorted_table(table["m"], table["n"], table["k"], table["latency_us"]), dtype


def find(
    profile: Profile, consumer: str, bound: float, target: str, most_rows: int, *, own_model: bool = False
) -> Blindspots:
    """Finds the blind spots between the profile's rows.

    bound, target: see `blindspots.choose`.
    most_rows: most rows to fit the model to.
    own_model: use the profile's model if it has one.
    """
    table, dtype = measured_products(profile, consumer)
    own = profile.models.product(dtype) if own_model else None
    model = own or fit(profile, table, dtype, most_rows, prior="auto")
    sites = sites_between(table, lambda m, n, k: model.predict(m, n, k).latency_us)
    if not sites:
        raise InputError(_WHO, "no (n, k) with two sizes of m", "a run with m swept (--dim m, or a public table)")
    choice = choose(sites, bound, target)
    spots = sorted((spot for site in sites for spot in _spots(site)), key=lambda spot: -abs(spot.error))
    return Blindspots(choice, tuple(spots), len(table.m), dtype, model.rows)


def fit(profile: Profile, table: MeasuredProducts, dtype: str, most_rows: int, *, prior: str) -> GemmModel:
    """Fits a model to at most `most_rows` of the rows, drawn at random (seed 0). prior: see `GemmModel.fit`."""
    count = len(table.m)
    drawn = np.arange(count)
    if count > most_rows:
        drawn = np.sort(np.random.default_rng(0).choice(count, most_rows, replace=False))
    return GemmModel.fit(
        profile.device, table.m[drawn], table.n[drawn], table.k[drawn], table.latency_us[drawn], dtype=dtype,
        prior=prior,
    )  # fmt: skip


def thin_model(
    profile: Profile, table: MeasuredProducts, dtype: str, most_rows: int, thin: MeasuredProducts
) -> tuple[FloatArray, int]:
    """Returns the `model_us` of `replay`: a model of the rows `thin`, with a prior that excludes this GPU's family."""
    model = fit(profile, thin, dtype, most_rows, prior="family-out")
    return np.asarray(model.predict(table.m, table.n, table.k).latency_us, dtype=np.float64), model.rows


def consumer_of(device: str, dtype: str) -> tuple[Consumer, str]:
    """Returns (aiconfigurator's engine, or `straight_lines` if it is not installed or lacks the device or dtype;
    a description). The engine clamps times to the roofline of its system, so another system's data cannot stand in."""
    system = system_of(device)
    if engine_missing() is not None or system == device or dtype not in ("bf16", "fp16"):
        return straight_lines, "straight lines in m at each (n, k), as aiconfigurator's engine draws them"

    def ask(
        rows: tuple[IntArray, IntArray, IntArray, FloatArray], queries: tuple[IntArray, IntArray, IntArray]
    ) -> FloatArray:
        m, n, k, us = rows
        given = {"m": m.tolist(), "n": n.tolist(), "k": k.tolist(), "latency_ms": (us / 1e3).tolist()}
        where = {"system": system, "backend": "vllm", "version": "quantbench"}
        return engine(where, given, *queries).latency_us

    return ask, f"aiconfigurator-core {version('aiconfigurator-core')}, asked through its own engine"


def _spots(site: Site) -> list[Spot]:
    errors = site.errors()
    rows = np.flatnonzero(site.in_table)
    found = []
    for low, high in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        if high - low < 2:
            continue
        at = low + int(np.argmax(np.abs(errors[low : high + 1])))
        expected_us = float(site.expected_us[at])
        found.append(Spot(site.n, site.k, int(site.m[low]), int(site.m[at]), int(site.m[high]),
                          expected_us * (1.0 + float(errors[at])), expected_us))  # fmt: skip
    return found


def summary(errors: FloatArray) -> dict[str, float]:
    """Returns the median, 95th percentile and maximum of |error|, as ratios; zeros if there are no places."""
    if not len(errors):
        return {"median": 0.0, "p95": 0.0, "max": 0.0}
    middle, p95 = np.percentile(errors, [50, 95])
    return {"median": float(middle), "p95": float(p95), "max": float(errors.max())}


def found_to_json(found: Blindspots, bound: float, target: str, most_spots: int) -> dict[str, Any]:
    """Returns the result of `find` as a JSON object, with the `most_spots` worst spots."""
    return {
        "dtype": found.dtype,
        "rows": found.num_rows,
        "places": len(found.choice.before),
        "model_rows": found.model_rows,
        "bound": bound,
        "target": target,
        "before": summary(found.choice.before),
        "after": summary(found.choice.after),
        "add": [{"m": m, "n": n, "k": k} for m, n, k in found.choice.rows],
        "spots": [
            {"m": s.m, "n": s.n, "k": s.k, "between": [s.low, s.high], "interpolated_us": s.interpolated_us,
             "expected_us": s.expected_us, "error": s.error}
            for s in found.spots[:most_spots]
        ],
    }  # fmt: skip


def spot_line(spot: Spot) -> str:
    off = f"{percent(abs(spot.error))} too {'low' if spot.error < 0 else 'high'}"
    said = f"{latency(spot.interpolated_us)} between m = {spot.low} and {spot.high}"
    return f"m = {spot.m}, n = {spot.n}, k = {spot.k}: {said}, expected {latency(spot.expected_us)}: {off}"


def replay_to_json(found: Replay, consumer: str, bound: float, num_rows: int) -> dict[str, Any]:
    """Returns the result of `replay` of a table of `num_rows` as a JSON object, with errors in percent."""
    return {
        "consumer": consumer,
        "bound_pct": 100 * bound,
        "rows": num_rows,
        "added": found.added,
        "model_rows": found.model_rows,
        "tables": [
            {"name": line.name, "rows": line.rows,
             **{part: vars(getattr(line, part)) for part in ("unseen", "large", "at_cliffs")}}
            for line in found.lines
        ],
    }  # fmt: skip


def replay_table(found: Replay) -> list[tuple[str, ...]]:
    """Formats the result of `replay` as a header and rows; errors are median / p95 in percent, with the number of rows
    behind them in the header."""
    columns = ("rows in none of the tables", "of them m ≥ 128 and n, k ≥ 1024", "both sides of measured cliffs")
    parts = [(line.unseen, line.large, line.at_cliffs) for line in found.lines]
    counts = (f"{name} ({part.rows:,})" for name, part in zip(columns, parts[0], strict=True))
    table = [("rows of the table", "rows", *counts)]
    for line, own in zip(found.lines, parts, strict=True):
        shown = (f"{part.median_pct:.1f} / {part.p95_pct:.1f}" if part.rows else "–" for part in own)
        table.append((line.name, f"{line.rows:,}", *shown))
    return table


def replay_markdown(found: Replay, consumer: str, bound: float, origins: Sequence[str]) -> str:
    """Formats the result of `replay` as a Markdown table, followed by its sources."""
    header, *rows = (f"| {' | '.join(cells)} |" for cells in replay_table(found))
    fitted = f"model fitted to {found.model_rows:,} rows of the powers of two, started from other GPU families"
    sources = (f"Interpolated by {consumer}", f"Bound for the expected error: {percent(bound)}; {fitted}")
    listed = (f"- {source}." for source in (*sources, *origins))
    return "\n".join((header, "|---|---:|---:|---:|---:|", *rows, "", *listed, ""))


def write_between(path: Path, name: str, text: str) -> None:
    """Replaces the text of `path` between `<!-- name:begin -->` and `<!-- name:end -->`."""
    head, tail = around_markers(path, name)
    path.write_text(f"{head}<!-- {name}:begin -->\n{text}<!-- {name}:end -->{tail}", encoding="utf-8")


def around_markers(path: Path, name: str) -> tuple[str, str]:
    """Returns the text before and after the two markers. Raises StoreError if the file lacks them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        content = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError("validate", f"--docs {path} ({reason(error)})", f"a file with {begin} in it") from None
    if content.count(begin) != 1 or content.count(end) != 1 or content.index(end) < content.index(begin):
        raise StoreError("validate", f"--docs {path} without one {begin} and one {end} after it", "both, in this order")
    head, rest = content.split(begin)
    return head, rest.split(end)[1]
