"""Fills docs/evidence.md with what the runs of an H200 in results/ show.

Run it as `python -m tools.measure.page`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from math import hypot
from pathlib import Path
from textwrap import fill as wrap

import numpy as np

from quantbench.analysis.check import check_run
from quantbench.analysis.summary import Point, points_of
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.store.folder import Run, read_run
from quantbench.units import latency, percent
from quantbench.workload import Gemm, Softmax, Workload
from tools.guide.markers import fill, table
from tools.measure.figures import prediction_lines

PAGE = Path("docs/evidence.md")
_FOLDER = Path("results/h200-sxm-141gb")
#: runs of the page by name: folder, and the sweep
RUNS = {
    "first": ("2026-11-27T004718-hidden", "--dim hidden"),
    "hidden": ("2026-11-27T010823-hidden", "--dim hidden"),
    "n": (
        "2026-11-27T011007-n",
        "--dim n=3072:8192@edges -m 4096 -k 4096 --provider torch,triton.persistent@128x128",
    ),
    "m": ("2026-11-27T011056-m", "--dim m=256:4096:64 -n 8192 -k 8192 --refine"),
    "square": ("2026-11-27T011146-n", "--dim n=8192 -m 8192 -k 8192 --provider torch,triton"),
    "attention": (
        "2026-11-27T011207-heads-tp",
        "--dim heads=16,32,48,64,96,128 --dim tp=1,8 --hidden 6144 --ops attention",
    ),
    "softmax": (
        "2026-11-27T011257-heads-tp",
        "--dim heads=16,32,48,64,96,128 --dim tp=1,8 --hidden 6144 --ops softmax",
    ),
    "again": ("2026-11-27T011321-hidden", "--dim hidden=1024:8192:512"),
    "products": ("2026-11-27T011350-shapes", "--shapes shapes.csv --layout nt"),
}
_TILE = Tile(128, 128)
_OURS = "triton."


def points_in(run: Run) -> Sequence[Point]:
    return points_of(run.records, run.info.device)


def fold(text: str) -> str:
    return wrap(text, 118) + "\n"


def sweeps_table(runs: Mapping[str, Run]) -> str:
    """Returns a table of the runs: points, seconds, grades, and causes of cliffs."""
    rows = []
    for name, run in runs.items():
        points = points_in(run)
        seconds = _seconds(run.info.ended) - _seconds(run.info.started)
        grades = Counter(point.grade.letter for point in points)
        causes = Counter(cliff.cause.kind for cliff in check_run(run, rules=()).cliffs)
        rows.append(
            [
                f"`{RUNS[name][1]}`",
                str(len(points)),
                f"{seconds:.0f}",
                ", ".join(f"{grades[letter]} {letter}" for letter in "ABCD" if grades[letter]),
                ", ".join(f"{count} {cause}" for cause, count in causes.most_common()) or "–",
            ]
        )
    return table(["sweep", "points", "seconds", "trust", "cliffs by cause"], rows, words=5)


def _seconds(time: str | None) -> float:
    return datetime.fromisoformat(time or "").timestamp()


def edges_text(run: Run) -> str:
    """Returns how many computed wave edges of our kernel the times show, and a wave's time."""
    spec = run.info.device
    points = [p for p in points_in(run) if p.provider.startswith(_OURS) and p.axes["n"] % 64 == 0]
    waves = [
        quantize(p.workload, _TILE, spec.sm_count).num_waves
        for p in points
        if isinstance(p.workload, Gemm)
    ]
    rises = [b.low_us / a.high_us - 1 for a, b in pairwise(points)]
    edges = [late > early for early, late in pairwise(waves)]
    found = sum(edge and rise > 0 for edge, rise in zip(edges, rises, strict=True))
    other = sum(not edge and rise > 0 for edge, rise in zip(edges, rises, strict=True))
    each_us = np.divide([p.latency_us for p in points], waves)
    last = [late for late, edge in zip(each_us[1:], edges, strict=True) if edge]
    (period,) = [p for p in check_run(run, rules=()).periods if p.provider.startswith(_OURS)]
    explained = percent(period.recovered.explained)
    return fold(
        f"{found} of {sum(edges)} computed wave edges are steps in the measured times, and "
        f"{other} of the {len(edges) - sum(edges)} other neighbours. Just past an edge, a wave "
        f"takes {min(last):.1f} to {max(last):.1f} µs. `check`, which tries all tiles on the times "
        f"alone, finds a {period.tile_words}: {period.sure_words}, explains {explained} of the "
        "variation around the trend."
    )


def kernels_table(runs: Sequence[Run]) -> str:
    """Returns a table of our GEMM and attention kernels beside the fastest of the libraries'."""
    by_work: dict[Workload, dict[str, float]] = {}
    for run in runs:
        for point in points_in(run):
            by_work.setdefault(point.workload, {})[point.provider] = point.latency_us
    rows = []
    for work, times_us in by_work.items():
        ours = [us for name, us in times_us.items() if name.startswith(_OURS)]
        theirs = {name: us for name, us in times_us.items() if not name.startswith(_OURS)}
        if ours and theirs:
            best = min(theirs, key=theirs.__getitem__)
            share = f"{theirs[best] / ours[0]:.2f}"
            rows.append([str(work), best, latency(theirs[best]), latency(ours[0]), share])
    head = ["op", "fastest library", "its time", "ours", "its time / ours"]
    return table(head, sorted(rows), words=2)


def softmax_text(run: Run) -> str:
    """Returns the rates of our fused softmax, and how much faster it is than torch's operations."""
    rates: dict[str, list[float]] = {}
    for point in points_in(run):
        if isinstance(point.workload, Softmax):
            rates.setdefault(point.provider, []).append(point.gb_per_s)
    ours = rates["triton.fused"]
    times = np.divide(ours, rates["torch.eager"])
    return fold(
        f"The fused softmax moves {min(ours):,.0f} to {max(ours):,.0f} GB/s, of "
        f"{run.info.device.memory_gb_per_s:,.0f}, and takes 1/{min(times):.0f} to "
        f"1/{max(times):.0f} of the time of torch's separate operations (`torch.eager`)."
    )


def rules_table(runs: Mapping[str, Run]) -> str:
    """Returns the verdicts of the runs on the rules that they test."""
    rows = []
    for name, run in runs.items():
        for found in check_run(run).rules:
            if found.effect is not None and found.low is not None and found.high is not None:
                effect, low, high = (percent(x - 1) for x in (found.effect, found.low, found.high))
                cost = f"{effect} ({low} to {high})"
                rows.append([found.predicate, name, found.verdict, cost, str(found.num_pairs)])
    return table(["rule", "sweep", "verdict", "breaking it costs", "pairs"], rows, words=3)


def repeats_table(pairs: Mapping[str, tuple[Run, Run]]) -> str:
    """Returns how the times of the same points in two runs differ, by grade.

    pairs: the two runs, by what is between them.
    """
    rows = []
    for name, (first, second) in pairs.items():
        again = {point.key: point for point in points_in(second)}
        both = [(point, again[point.key]) for point in points_in(first) if point.key in again]
        for trust, letters in (("both A", "A"), ("all", "ABCD")):
            of = [(a, b) for a, b in both if {a.grade.letter, b.grade.letter} <= set(letters)]
            moved = np.array([abs(b.latency_us / a.latency_us - 1) for a, b in of])
            widths = [hypot(_half_width(a), _half_width(b)) for a, b in of]
            shares = [np.median(moved), np.quantile(moved, 0.95), np.mean(moved <= 0.01)]
            cells = map(percent, [*shares, np.mean(moved <= widths)])
            rows.append([name, trust, str(len(of)), *cells])
    head = ["between", "trust", "points", "median", "95th percentile"]
    return table([*head, "within 1 %", "within the intervals"], rows, words=2)


def _half_width(point: Point) -> float:
    return (point.high_us - point.low_us) / 2 / point.latency_us


def main() -> None:
    """Fills the page."""
    runs = {name: read_run(_FOLDER / folder) for name, (folder, _) in RUNS.items()}
    others = {name: runs[name] for name in ("hidden", "n", "m")}
    found = {
        "sweeps": sweeps_table(runs),
        "edges": edges_text(runs["n"]),
        "kernels": kernels_table([runs["square"], runs["attention"]]),
        "softmax": softmax_text(runs["softmax"]),
        "repeats": repeats_table(
            {
                "five minutes of work": (runs["hidden"], runs["again"]),
                "two machines": (runs["first"], runs["hidden"]),
            }
        ),
        "rules": rules_table({name: runs[name] for name in ("hidden", "n", "m")}),
        "predictions": "\n".join(prediction_lines(runs["products"], others)) + "\n",
    }
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
