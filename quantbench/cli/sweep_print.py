"""Formats the plan (`plan_lines`), the progress and the result (`result`) of a sweep.

The module also draws the plot of a run, and builds the bisection of --refine (`refine_of`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rich.table import Table

from quantbench.analysis.check import check_run, fit_all
from quantbench.analysis.curves import repeatability
from quantbench.analysis.jumps import find_gaps, jumps_of
from quantbench.analysis.summary import floor_lines, points_of, rows_of
from quantbench.cli.output import StyledLine, encoded, warning
from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.report.sections import trust_lines
from quantbench.report.shape_comparison import (
    compare_shapes,
    comparison_section,
    comparison_sentence,
)
from quantbench.report.sweep_result import (
    draw_run,
    ops_line,
    rows_to_json,
    sizes_table,
)
from quantbench.report.terminal import drawn, section_lines
from quantbench.store.folder import Run
from quantbench.store.record import Failed, GridPosition, Measured, Record
from quantbench.store.run import RunInfo
from quantbench.sweep.options import SweepOptions, options_from_json, plan_sweep
from quantbench.sweep.plan import Group, Plan
from quantbench.sweep.refine import AxisGap, Edge, Refine
from quantbench.sweep.runner import Finished, Progress
from quantbench.units import axis_words, counted, dashed, duration, percent
from quantbench.workload import Attention, Workload

# Phases whose time counts as measuring. The rest of the wall time is overhead of the harness.
_MEASUREMENT_PHASES = ("inputs", "warm-up", "measuring")
_KERNEL_NAMES = "QUANTBENCH_KERNEL_NAMES"


def plan_lines(
    plan: Plan, *, already: int = 0, retried: int = 0, devices: int = 1, by_op: bool = False
) -> Iterator[str]:
    """Yields lines with the number of points, the estimated time, and the sizes left out.

    already: number of points that were measured before `plan` was made.
    retried: number of points in `plan` that failed before.
    devices: number of devices that share the points.
    by_op: whether to count the points by op instead of listing the sizes left out.
    """
    text = counted(len(plan.points), "point")
    if plan.left_out:
        text = f"{len(plan.points)} of {plan.total} points selected"
    text += f", about {duration(plan.estimate_s / devices)}"
    if devices > 1:
        text += f" on {devices} devices"
    if already:
        text += f"; {already} more {_are(already)} measured already"
    if any(":" in point.provider for point in plan.points):
        text += " (user-defined providers are assumed to take as long as torch's)"
    yield text
    if by_op:
        yield f"by op: {counts_by_op(point.workload for point in plan.points)}"
    elif plan.left_out:
        places = "; ".join(map(str, left_out(plan)))
        yield f"left out for the budget: {places} (`--budget none` runs all)"
    if retried:
        yield f"{counted(retried, 'point')} that failed {_are(retried)} tried again"
    if plan.impossible:
        sizes = counted(len(plan.impossible), "size")
        yield f"left out at {sizes}, the first: {plan.impossible[0]}"


def counts_by_op(works: Iterable[Workload]) -> str:
    """Formats the number of workloads by op and dtype: `products bf16: 40, prompts bf16: 12`."""
    counts: Counter[str] = Counter()
    for work in works:
        name = "products"
        if isinstance(work, Attention):
            name = "prompts" if work.causal else "decoding"
        counts[f"{name} {work.dtype}"] += 1
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


@dataclass(frozen=True)
class LeftOut:
    """A range of sizes along an axis, some or all of which the budget leaves out.

    low, high: smallest and largest size that is left out.
    sizes: number of grid points that are left out.
    whole: whether every size from low to high is left out.
    ops: labels of the ops that are not measured at the left-out sizes.
    """

    axis: str
    low: int
    high: int
    sizes: int
    whole: bool
    ops: tuple[str, ...]

    def __str__(self) -> str:
        some = "" if self.whole else f"{self.sizes} sizes within "
        return f"{some}{self.axis} {self.low}..{self.high} of {', '.join(self.ops)}"


def left_out(plan: Plan) -> list[LeftOut]:
    """Returns the ranges of sizes that the budget leaves out of a plan.

    All ranges are along one axis: the axis with the most left-out values.
    """
    missing = _places(plan.left_out)
    kept = _places(plan.groups)
    if not missing:
        return []
    axis = max(missing[0].axes, key=lambda name: len({place.axes[name] for place in missing}))
    ops_of: dict[tuple[int, int, int, bool], list[str]] = {}
    for op in sorted({place.op for place in missing}):
        places = {tuple(p.axes.items()): p.axes[axis] for p in missing if p.op == op}
        low = min(places.values())
        high = max(places.values())
        whole = not any(p.op == op and low <= p.axes[axis] <= high for p in kept)
        ops_of.setdefault((low, high, len(places), whole), []).append(op)
    return [LeftOut(dashed(axis), *range_, tuple(ops)) for range_, ops in ops_of.items()]


def _places(groups: Sequence[Group]) -> list[GridPosition]:
    """Returns the grid positions of all points in the groups."""
    points = chain.from_iterable(group.points for group in groups)
    return list(chain.from_iterable(point.places for point in points))


def show_progress(show: Callable[..., None], progress: Progress) -> None:
    """Displays the progress of a sweep.

    show: the function that `progress_bar` yields.
    """
    text = f"{progress.done} of {progress.total} points"
    if progress.left_s is not None:
        text += f", {duration(progress.left_s)} left"
    show(progress.done, progress.total, text, progress.current)


def result(
    run: Run, finished: Finished, wall_s: float, *, devices: int = 1, earlier_s: float = 0.0
) -> tuple[list[StyledLine | Table], dict[str, Any]]:
    """Draws the plot of a run, and returns the run's result as text and as a JSON object.

    finished: how the sweep ended.
    wall_s: duration of this session, in s.
    devices: number of devices that measured the run together.
    earlier_s: measuring time of the run's earlier sessions, in s.
    """
    spec = run.info.device
    points = points_of(run.records, spec)
    rows = rows_of(points)
    check = check_run(run, rules=())
    options = options_from_json(run.info.options)
    listed = bool(options.shapes or options.models or options.works)
    extra: dict[str, Any] = {}

    lines: list[StyledLine | Table] = [""]
    if options.models and points:
        comparison = compare_shapes(points, options.models)
        extra["shapes"] = comparison
        section = comparison_section(comparison)
        lines += section_lines(section, fold=("shape", "library"))
        lines.append(comparison_sentence(comparison))
    elif rows and options.works:
        lines.append(f"measured: {counts_by_op(point.workload for point in points)}")
    elif rows:
        lines += [ops_line(rows), drawn(sizes_table(rows, check), narrowest=20), *check.padding]
    else:
        lines.append("nothing was measured")
    lines += floor_lines((p.latency_us, p) for p in points)
    lines += [*trust_lines(run), _checked_line(run), *naming_lines(run)]
    edges = []
    if options.refine and not listed:
        found = refine_of(options, spec).edges(run.records)
        for placed, edge in found:
            lines.append(_edge_line(placed, edge))
            place = {"axis": placed.axis, "op": placed.op, "provider": placed.provider}
            edges.append({**place, "held": placed.held, **encoded(edge)})
        if not found:
            lines.append("no step of 5 % or more was found to bisect to")
    picture = None
    if points and not listed:  # a list of shapes has no axis to draw along
        axis = max(run.info.axes, key=lambda dim: len(run.info.axes[dim]))
        try:
            picture = draw_run(run, check, axis.replace("-", "_"))
        except StoreError as error:  # a full disk; the run itself is complete
            lines.append(warning(f"no picture: {error}"))
    # Several devices measure at the same time. Their total measuring time is therefore compared
    # with the wall time multiplied by the number of devices.
    overhead_share = 1 - (measuring_s(run.info) - earlier_s) / (wall_s * devices)
    lines += map(warning, run.warnings)
    reason = f" ({finished.reason})" if finished.reason else ""
    lines.append(
        f"{finished.how} in {duration(wall_s)}; the harness itself took "
        f"{percent(overhead_share)} of it{reason}"
    )
    lines.append(f"kept in {run.folder}/ (run.json, records.jsonl)")
    if picture is not None:
        lines.append(f"picture: {picture}")
    if finished.how == "budget":
        lines.append(f"the rest: quantbench sweep --resume {run.folder}")
    if options.export:
        lines.append(f"next: quantbench profile export {run.folder} {options.export}")
    answer = {
        "run": run.folder,
        "device": spec.name,
        "how_ended": finished.how,
        "rows": rows_to_json(rows, check),
        "cliffs": check.cliffs,
        "edges": edges,
        "picture": picture,
        "wall_s": wall_s,
        "overhead_share": overhead_share,
        "phases_s": run.info.phases_s,
        **extra,
    }
    return lines, answer


def refine_of(options: SweepOptions, spec: DeviceSpec) -> Refine:
    """Builds the bisection of --refine, which finds the sizes at which the time jumps.

    options: options of the sweep, with the axes of the coarse grid.
    """

    def find(records: Sequence[Record]) -> tuple[AxisGap, ...]:
        return find_gaps(jumps_of(fit_all(points_of(records, spec), repeatability(records))))

    axes, _ = plan_sweep(options, spec)
    return Refine(options, axes, spec, find)


def _checked_line(run: Run) -> str:
    """Formats how many points agreed with a reference, and how many had a wrong result."""
    points = [record for record in run.records if record.role == "point"]
    right = sum(record.check is not None for record in points)
    wrong = 0
    for record in points:
        if isinstance(record.outcome, Failed) and record.outcome.error == "wrong_result":
            wrong += 1
    return f"results compared with a reference: {right} right, {wrong} wrong"


def _edge_line(placed: AxisGap, edge: Edge) -> str:
    """Formats an edge: `edge in gemm (torch.mm): n = 3328 to 3336, 1.34 times the time`."""
    places = axis_words({placed.axis: f"{edge.low} to {edge.high}", **placed.held}, " = ")
    ratio = f"{edge.ratio:.2f} times the time"
    if not edge.exact:
        ratio += " (not bisected to the end)"
    return f"edge in {placed.op} ({placed.provider}): {', '.join([*places, ratio])}"


def naming_lines(run: Run) -> Iterator[str]:
    """Yields a line with the number of points without a kernel name in a run on a GPU.

    Yields nothing if every point has a kernel name, or if kernel names were switched off.
    """
    way = run.info.environment.get(_KERNEL_NAMES, "apart").strip().lower()
    if run.info.device.kind == "cpu" or run.info.origin != "measured" or way == "off":
        return
    points = [r for r in run.records if r.role == "point" and isinstance(r.outcome, Measured)]
    unnamed = [record.phases_s for record in points if record.launch is None]
    if not unnamed:
        return
    unasked = sum(bool(phases) and "identify" not in phases for phases in unnamed)
    text = f"{len(unnamed)} of {len(points)} points have no kernel name"
    text += ", so their causes cannot be determined"
    if unasked:
        text += f" ({unasked} were not asked for it, as that took more than half of the timing)"
    yield text


def measuring_s(info: RunInfo) -> float:
    """Returns the total measuring time over all sessions of a run, in s."""
    return sum(info.phases_s.get(name, 0.0) for name in _MEASUREMENT_PHASES)
