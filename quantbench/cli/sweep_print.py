"""What `quantbench sweep` prints: the plan, the progress, and the result with its edges, causes and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from quantbench.analysis.check import check_run
from quantbench.analysis.summary import Point, points_of, rows_of
from quantbench.cli.output import say, say_warning
from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.report.shape_comparison import (
    compare_shapes,
    comparison_lines,
    comparison_sentence,
    comparison_table,
    comparison_to_json,
)
from quantbench.report.sweep_result import cliff_to_json, ops_line, rows_to_json, sweep_table, trust_lines
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Skipped
from quantbench.store.run import RunInfo
from quantbench.sweep.options import SweepOptions, options_from_json
from quantbench.sweep.plan import Plan
from quantbench.sweep.refine import Edge, PlacedGap, Refine
from quantbench.sweep.runner import Finished, Progress
from quantbench.units import duration, percent

Edges = Sequence[tuple[PlacedGap, Edge]]

# Phases that are the measurement itself; everything else is the harness.
_MEASUREMENT_PHASES = ("inputs", "warm-up", "measuring")
_KERNEL_NAMES = "QUANTBENCH_KERNEL_NAMES"


def say_plan(console: Console, plan: Plan, *, already: int = 0, devices: int = 1) -> None:
    """How much there is to measure, how long it takes, and what is left out. plan: without what is measured already."""
    selected, total = len(plan.points), plan.total
    chosen = f"{selected} of {total} points selected" if plan.left_out else _counted(selected)
    text = f"{chosen}, about {duration(plan.estimate_s / devices)}"
    if devices > 1:
        text += f" on {devices} devices"
    if already:
        text += f"; {already} more {'is' if already == 1 else 'are'} measured already"
    if plan.left_out:
        text += "; `--budget none` runs all"
    console.print(text, highlight=False)
    if plan.impossible:
        console.print(
            f"{len(plan.impossible)} sizes are left out, the first because {plan.impossible[0]}", highlight=False
        )


def _counted(number: int) -> str:
    return f"{number} point{'' if number == 1 else 's'}"


def show_progress(show: Callable[..., None], progress: Progress) -> None:
    """Show how far a sweep is. show: as `progress_bar` yields it."""
    left = "" if progress.left_s is None else f", {duration(progress.left_s)} left"
    show(progress.done, progress.total, f"{progress.done} of {progress.total} points{left}", progress.current)


def say_result(
    console: Console,
    run: Run,
    finished: Finished,
    wall_s: float,
    *,
    as_json: bool,
    devices: int = 1,
    earlier_s: float = 0.0,
) -> dict[str, Any]:
    """Say what came of a run, unless it is asked for as JSON, which is returned. devices: that measured it together.
    earlier_s: of measuring before this sitting, of which `wall_s` is."""
    spec = run.info.device
    points = points_of(run.records, spec)
    axis = _widest_axis(run)
    rows = rows_of(points, spec)
    check = check_run(run, rules=())
    models = options_from_json(run.info.options).models if run.info.options.get("models") else ()
    comparison = compare_shapes(points, models) if models and points else None
    if not as_json:
        console.print()
        if comparison is not None:
            console.print(comparison_table(comparison))
            for line in (comparison_sentence(comparison), *comparison_lines(comparison)):
                say(console, line)
        elif rows:
            say(console, ops_line(rows))
            console.print(sweep_table(rows, check, spec))
        else:
            console.print("nothing was measured")
        for line in trust_lines(rows):
            say(console, line)
        _say_not_measured(console, run)
        unnamed = unnamed_line(points, spec, run.info.environment) if run.info.origin == "measured" else None
        if unnamed is not None:
            say(console, unnamed)
    listed = run.info.options.get("shapes") or run.info.options.get("models")
    refine = None if listed else refinement(options_from_json(run.info.options), spec)
    edges = () if refine is None else refine.edges(run.records)
    if not as_json and refine is not None:
        for line in edge_lines(edges):
            say(console, line)
    picture = None
    if points and not listed:  # a list of shapes has no axis to draw along
        from quantbench.report.sweep_result import draw_run

        try:
            picture = draw_run(run, check, axis)
        except StoreError as error:  # a full disk: the run itself is whole, and where it lies must still be said
            say_warning(console, f"no picture: {error}")
    overhead_share = 1 - (measuring_s(run.info) - earlier_s) / (wall_s * devices)
    if as_json:
        return {
            "run": str(run.folder), "device": spec.name, "how_ended": finished.how,
            "rows": rows_to_json(rows, check, spec), "cliffs": [cliff_to_json(cliff) for cliff in check.cliffs],
            "edges": edges_to_json(edges), "picture": None if picture is None else str(picture),
            "wall_s": wall_s, "overhead_share": overhead_share,
            **({} if comparison is None else {"shapes": comparison_to_json(comparison)}),
        }  # fmt: skip
    for warning in run.warnings:
        say_warning(console, warning)
    console.print(
        f"{finished.how} in {duration(wall_s)}; the harness itself took {percent(overhead_share)} of it"
        + (f" ({finished.reason})" if finished.reason else "")
    )
    say(console, f"kept in {run.folder}/ (run.json, records.jsonl)")
    if picture is not None:
        say(console, f"picture: {picture}")
    if finished.how == "budget":
        say(console, f"the rest: quantbench sweep --resume {run.folder}")
    return {}


def _say_not_measured(console: Console, run: Run) -> None:
    """Skips and failures, grouped by reason: they are results as well."""
    reasons: Counter[str] = Counter()
    for record in run.records:
        if record.role != "point":
            continue
        match record.outcome:
            case Skipped(reason):
                reasons[f"skipped, {record.provider}: {reason}"] += 1
            case Failed(kind, message):
                reasons[f"failed, {record.provider}: {kind}: {message}"] += 1
            case Measured(_, grade) if grade.letter == "rejected":
                reasons[f"rejected, {record.provider}: {grade.reasons[0]}"] += 1
    for reason, number in reasons.most_common():
        say(console, f"{number} × {reason}")


def _widest_axis(run: Run) -> str:
    """The axis with the most values: the one to draw along."""
    return max(run.info.axes, key=lambda dim: len(run.info.axes[dim])).replace("-", "_")


def edge_lines(edges: Edges) -> list[str]:
    """One line an edge: `edge in gemm (torch.mm): n = 3328 to 3336, 1.34 times the time`."""
    if not edges:
        return ["no step of 5 % or more was found to bisect to"]
    lines = []
    for placed, edge in edges:
        held = "".join(f", {name.replace('_', '-')} = {value}" for name, value in placed.held.items())
        open_end = "" if edge.exact else " (not bisected to the end)"
        lines.append(
            f"edge in {placed.op} ({placed.provider}): {placed.axis.replace('_', '-')} = {edge.low} to {edge.high}"
            f"{held}, {edge.ratio:.2f} times the time{open_end}"
        )
    return lines


def edges_to_json(edges: Edges) -> list[dict[str, Any]]:
    """The edges as JSON objects."""
    return [
        {
            "axis": placed.axis, "op": placed.op, "provider": placed.provider, "held": dict(placed.held),
            "low": edge.low, "high": edge.high, "ratio": edge.ratio, "exact": edge.exact,
        }
        for placed, edge in edges
    ]  # fmt: skip


def unnamed_line(points: Sequence[Point], spec: DeviceSpec, environment: dict[str, str]) -> str | None:
    """A sentence where points measured on a GPU have no kernel's name that was wanted, with what may help; else None.

    environment: the variables of the run.
    """
    way = environment.get(_KERNEL_NAMES, "apart").strip().lower()
    missing = sum(point.launch is None for point in points)
    if spec.kind != "cuda" or way == "off" or not missing:
        return None
    line = f"{missing} of {len(points)} points have no kernel's name, so that causes which rest on it are not told"
    if way == "here":
        return line
    return f"{line}; where one process alone may use the GPU, set {_KERNEL_NAMES}=here"


def measuring_s(info: RunInfo) -> float:
    """Seconds that the measurement itself took, over all sittings of a run."""
    return sum(info.phases_s.get(name, 0.0) for name in _MEASUREMENT_PHASES)


def refinement(options: SweepOptions, spec: DeviceSpec) -> Refine | None:
    """What bisects to every edge, where that was asked for."""
    if not options.refine:
        return None
    from quantbench.analysis.check import refine_of

    return refine_of(options, spec)
