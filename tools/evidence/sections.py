"""Formats the sections of the evidence page as Markdown: timer, cost, kernels, predictions and rules.

Entry points: the `*_section` functions. Used by `write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.analysis.check import RunCheck
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.gemm.training import Effort
from quantbench.units import latency
from quantbench.workload import Gemm, Softmax, Workload

Table = dict[str, Any]
# Differences between timers are given in percent from this time on and in microseconds below it.
_SHORT_US = 20.0
_OURS = "quantbench"
#: warm-up of the GPU by mamf-finder before its first shape (stas00/ml-engineering, mamf-finder.py: `warmup` of 30 s)
MAMF_START_S = 30.0
#: number of shapes that this warm-up is shared by
MAMF_SHAPES = 50
# A point should cost at most this fraction of one of mamf-finder's.
_TIMES_CHEAPER = 5.0


def timer_section(table: Table) -> list[str]:
    """Formats medians per kernel and method, then our difference from each other method and our spread over repeats."""
    rows = table["rows"]
    methods = list(dict.fromkeys(name for row in rows for name in row["medians_us"]))
    lines = ["| kernel | " + " | ".join(methods) + " |", "|---|" + "---:|" * len(methods)]
    for row in rows:
        cells = [_median_text(row["medians_us"].get(name)) for name in methods]
        lines.append(f"| {row['workload']} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append("Medians of one repeat's median each; `–` where a method gave no figure.")
    lines.append("")
    for ours in (name for name in methods if name.startswith(_OURS)):
        lines += [f"- {ours}: {sentence}" for sentence in _agreement(rows, ours, methods)]
    return lines


def _agreement(rows: Sequence[Table], ours: str, methods: Sequence[str]) -> list[str]:
    said = []
    for other in methods:
        if other.startswith(_OURS):
            continue
        pairs = [
            (float(np.median(row["medians_us"][ours])), float(np.median(row["medians_us"][other])))
            for row in rows
            if row["medians_us"].get(ours) and row["medians_us"].get(other)
        ]
        long = [abs(mine / its - 1) for mine, its in pairs if its >= _SHORT_US]
        short_us = [abs(mine - its) for mine, its in pairs if its < _SHORT_US]
        parts = []
        if long:
            parts.append(
                f"at most {_percent(max(long))} (median {_percent(float(np.median(long)))}) from {_SHORT_US:g} µs on"
            )
        if short_us:
            parts.append(f"at most {max(short_us):.2f} µs below")
        if parts:
            said.append(f"differs from {other} by " + ", ".join(parts))
    spreads = [_spread(row["medians_us"][ours]) for row in rows if len(row["medians_us"].get(ours, ())) > 1]
    if spreads:
        said.append(
            f"repeats spread by at most {_percent(max(spreads))} (median {_percent(float(np.median(spreads)))})"
        )
    return said


def cost_section(table: Table) -> list[str]:
    """Formats seconds on the device and in total per point and the spread over the repeats for each method, then
    whether the target for the cost is met."""
    rows = table["rows"]
    methods = list(dict.fromkeys(name for row in rows for name in row["wall_s"]))
    lines = [
        "| method | device held, s a point | in all, s a point | spread of repeats, median | 95 % of points under |",
        "|---|---:|---:|---:|---:|",
    ]
    prepare_s = float(np.mean([row["prepare_s"] for row in rows]))
    held_s: dict[str, float] = {}
    middle: dict[str, float] = {}
    for name in methods:
        held_s[name] = float(np.mean([np.mean(row["wall_s"][name]) for row in rows]))
        spreads = [_spread(row["medians_us"][name]) for row in rows if len(row["medians_us"].get(name, ())) > 1]
        middle[name], high = np.quantile(spreads, (0.5, 0.95)).tolist() if spreads else (np.nan, np.nan)
        cells = f"{held_s[name]:.3f} | {held_s[name] + prepare_s:.3f} | {_percent(middle[name])} | {_percent(high)}"
        lines.append(f"| {name} | {cells} |")
    lines += ["", f"{len(rows)} shapes, {table['repeats']} repeats each; making the inputs is the same for all."]
    if "mamf" in methods and _OURS in methods:
        its_s = held_s["mamf"] + MAMF_START_S / MAMF_SHAPES
        ratio = its_s / held_s[_OURS]
        met = ratio >= _TIMES_CHEAPER and middle[_OURS] <= middle["mamf"]
        lines += [
            "",
            f"mamf-finder also heats the card for {MAMF_START_S:g} s first, which is not run here: "
            f"{MAMF_START_S / MAMF_SHAPES:.2f} s for each of {MAMF_SHAPES} points. With it, a point takes "
            f"{its_s:.3f} s, and {held_s[_OURS]:.3f} s with our timer: {ratio:.1f} times cheaper, at a spread of "
            f"{_percent(middle[_OURS])} against {_percent(middle['mamf'])}. "
            f"Target, {_TIMES_CHEAPER:g} times cheaper at no larger a spread: {'met' if met else 'missed'}.",
        ]
    return lines


def _percent(share: float) -> str:
    """Formats a share with two decimals, because the target is half a percent; `–` if it is not known."""
    return "–" if np.isnan(share) else f"{100 * share:.2f} %"


def _spread(medians_us: Sequence[float]) -> float:
    """Returns the largest over the smallest repeat, minus 1."""
    return max(medians_us) / min(medians_us) - 1


def _median_text(medians_us: Sequence[float] | None) -> str:
    return latency(float(np.median(medians_us))) if medians_us else "–"


_OUR_PROVIDER = "triton."


def kernel_section(points: Sequence[Point], copy_gb_per_s: float | None) -> list[str]:
    """Formats the library's time over ours (above 1: ours is faster) for each kind of work, provider and library."""
    by_work: dict[Workload, dict[str, float]] = {}
    for point in points:
        by_work.setdefault(point.workload, {})[point.provider] = point.latency_us
    ratios: dict[tuple[str, str, str], list[float]] = {}
    worst: dict[tuple[str, str, str], Workload] = {}
    for work, times_us in by_work.items():
        libraries = {name: us for name, us in times_us.items() if not name.startswith(_OUR_PROVIDER)}
        if len(libraries) > 1:
            libraries["the fastest of them"] = min(libraries.values())
        for ours, our_us in times_us.items():
            if not ours.startswith(_OUR_PROVIDER):
                continue
            for library, its_us in libraries.items():
                key = (_title(work), ours, library)
                ratio = its_us / our_us
                if key not in ratios or ratio < min(ratios[key]):
                    worst[key] = work
                ratios.setdefault(key, []).append(ratio)
    if not ratios:
        return ["No workload of these runs was measured with one of our kernels and with a library's."]
    lines = [
        "| work | ours | against | shapes | geometric mean | worst | where |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for key in sorted(ratios):
        title, ours, library = key
        values = np.array(ratios[key])
        mean = float(np.exp(np.log(values).mean()))
        where = f"{worst[key]} ({latency(by_work[worst[key]][ours])})"
        lines.append(f"| {title} | {ours} | {library} | {len(values)} | {mean:.2f} | {values.min():.2f} | {where} |")
    if copy_gb_per_s is not None:
        lines += ["", *_bandwidth_lines(points, copy_gb_per_s)]
    return lines


def _bandwidth_lines(points: Sequence[Point], copy_gb_per_s: float) -> list[str]:
    softmaxes = [point for point in points if isinstance(point.workload, Softmax)]
    lines = [f"A copy moves {copy_gb_per_s:.0f} GB/s on this device. Softmax, bytes that must be moved over that:", ""]
    for provider in sorted({point.provider for point in softmaxes}):
        shares = sorted(point.gb_per_s / copy_gb_per_s for point in softmaxes if point.provider == provider)
        lines.append(
            f"- {provider}: {shares[0]:.2f} to {shares[-1]:.2f}, median {float(np.median(shares)):.2f}"
            f" of {len(shares)} shapes"
        )
    return lines if softmaxes else lines[:1]


def _title(work: Workload) -> str:
    direction = getattr(work, "direction", "")
    return f"{work.kind} {direction}".strip()


FITTED_ROWS = 200
SEEDS = (0, 1, 2)
# Minimum number of test rows for a 95th percentile.
_FEWEST_TESTED = 100

FloatArray = npt.NDArray[np.float64]


def prediction_section(
    points: Sequence[Point], device: DeviceSpec, seeds: Sequence[int] = SEEDS, effort: Effort | None = None
) -> list[str]:
    """Formats median and 95th percentile of |predicted / measured − 1| over the test rows.

    seeds: seeds of the random splits into training and test rows.
    effort: effort of each fit; None for the default.
    """
    rows = [point for point in points if isinstance(point.workload, Gemm) and point.workload.batch == 1]
    if len(rows) < FITTED_ROWS + _FEWEST_TESTED:
        return [
            f"{len(rows)} products were measured; fitting {FITTED_ROWS} and testing on at least {_FEWEST_TESTED}"
            " others needs more."
        ]
    work = [point.workload for point in rows]
    m, n, k = (np.array([getattr(gemm, name) for gemm in work], dtype=float) for name in "mnk")
    measured_us = np.array([point.latency_us for point in rows])
    dtype = work[0].dtype
    errors: list[FloatArray] = []
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(rows))
        fitted, tested = order[:FITTED_ROWS], order[FITTED_ROWS:]
        model = GemmModel.fit(
            device, m[fitted], n[fitted], k[fitted], measured_us[fitted], dtype=dtype, prior="family-out", seed=seed,
            effort=effort,
        )  # fmt: skip
        predicted_us = model.predict(m[tested], n[tested], k[tested]).latency_us
        errors.append(np.abs(predicted_us / measured_us[tested] - 1))
    lines = ["| model | rows fitted | median | 95th percentile |", "|---|---:|---:|---:|"]
    lines.append(_line("fitted here", FITTED_ROWS, errors))
    public = shipped_model(device.name, dtype)
    if public is not None:
        errors_of_it = np.abs(public.predict(m, n, k).latency_us / measured_us - 1)
        lines.append(_line("fitted on the public table of this GPU", public.rows, [errors_of_it]))
    lines += [
        "",
        f"{len(rows)} random products in {dtype}; means over the seeds {', '.join(map(str, seeds))}.",
    ]
    return lines


def _line(title: str, fitted: int, errors: Sequence[FloatArray]) -> str:
    median, high = (100 * float(np.mean([np.quantile(each, q) for each in errors])) for q in (0.5, 0.95))
    return f"| {title} | {fitted:,} | {median:.2f} % | {high:.1f} % |"


_MOST_CLIFFS = 12


def rule_section(found: RunCheck) -> list[str]:
    """Formats a table of verdicts, then the largest cliffs."""
    lines = [
        "Time per unit of work where a rule is broken over where it is kept, with its 95 % interval.",
        "",
        "| rule | says | verdict | effect | pairs |",
        "|---|---|---|---:|---:|",
    ]
    for verdict in sorted(found.rules, key=lambda v: v.verdict == "NOT TESTED"):
        effect = "–"
        if verdict.effect is not None:
            effect = f"{verdict.effect:.3f} ({verdict.low:.3f} to {verdict.high:.3f})"
        words = verdict.reason if verdict.verdict == "NOT TESTED" else f"{verdict.predicate}: {verdict.claim}"
        lines.append(f"| {verdict.rule} | {words} | {verdict.verdict} | {effect} | {verdict.num_pairs or '–'} |")
    lines += [
        "",
        f"{len(found.cliffs)} cliffs on {found.num_curves} curves" + ("; the largest:" if found.cliffs else "."),
    ]
    lines.append("")
    for cliff in found.cliffs[:_MOST_CLIFFS]:
        held = "".join(f", {name} = {value}" for name, value in cliff.held.items())
        lines.append(
            f"- {cliff.op} {cliff.provider}, {cliff.axis} = {cliff.at} to {cliff.next}{held}:"
            f" {cliff.ratio:.2f}x ({cliff.low:.2f} to {cliff.high:.2f}), {cliff.cause.kind}: {cliff.cause.words}"
        )
    return lines
