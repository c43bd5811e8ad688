"""Measures a sweep, and prints its plan, its progress and its result.

Entry points: `run` (the device at hand), `run_on_ray` (every GPU of a Ray cluster) and `dry_run` (prints the plan
only), used by the command `sweep`; `measure` and `stop_on_sigterm`, used by the command `check` for its experiments.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from quantbench import device
from quantbench.analysis.check import check_run, refine_of
from quantbench.analysis.summary import Point, points_of, rows_of
from quantbench.cli.devices import device_lines
from quantbench.cli.output import StyledLine, check_folder, output, print_result, progress_bar, say, show, warning
from quantbench.cli.sweep import SweepArguments, assumed_of, budget_of, sweep_options
from quantbench.cluster.cards import card_lines, compare_cards
from quantbench.cluster.lane import Lane
from quantbench.cluster.ray_pool import RayPool
from quantbench.cluster.session import ClusterSweep
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError, StoreError
from quantbench.latency.op_times import roofline_us
from quantbench.providers import catalog
from quantbench.report.shape_comparison import (
    compare_shapes,
    comparison_lines,
    comparison_sentence,
    comparison_table,
    comparison_to_json,
)
from quantbench.report.sweep_result import cliff_to_json, draw_run, ops_line, rows_to_json, sweep_table, trust_lines
from quantbench.store.folder import Run, read_run
from quantbench.store.record import Failed, Measured, Skipped
from quantbench.store.run import RunInfo, read_run_info
from quantbench.sweep.child import WorkerProcess
from quantbench.sweep.options import SweepOptions, options_from_json, plan_sweep
from quantbench.sweep.plan import Plan
from quantbench.sweep.refine import Edge, PlacedGap
from quantbench.sweep.runner import Finished, More, Progress
from quantbench.sweep.session import SweepSession, adaptive_more
from quantbench.units import duration, latency, percent

_MOST_PLANNED_LINES = 40
# Phases that count as measurement; all others are overhead of the harness.
_MEASUREMENT_PHASES = ("inputs", "warm-up", "measuring")
_KERNEL_NAMES = "QUANTBENCH_KERNEL_NAMES"


def dry_run(arguments: SweepArguments, gpu: str, *, as_json: bool) -> None:
    """Prints the points in the order of measurement, and the estimated time."""
    spec = device.lookup(gpu) if gpu else device.current()
    options = sweep_options(arguments, spec.kind)
    axes, plan = plan_sweep(options, spec)
    assumed = assumed_of(arguments, options, plan, spec)
    points = [
        {
            "key": p.key, "provider": p.provider, "workload": str(p.workload), "estimate_s": p.estimate_s,
            "places": [{"axes": place.axes, "op": place.op, "count": place.count} for place in p.places],
        }
        for p in plan.points
    ]  # fmt: skip
    answer = {
        "device": spec.name, "assumed": assumed, "axes": {axis.dim: axis.values for axis in axes},
        "estimate_s": plan.estimate_s, "points": points,
    }  # fmt: skip
    # A list, so that a provider that cannot be loaded is reported before anything is printed.
    print_result(as_json, lambda: answer, list(_dry_run_lines(plan, spec, assumed, here=not gpu)))


def _dry_run_lines(plan: Plan, spec: DeviceSpec, assumed: Sequence[str], *, here: bool) -> Iterator[StyledLine]:
    """here: whether the plan is for the device at hand, so that its providers can be asked what they support."""
    yield f"plan for {spec.name}"
    if assumed:
        yield f"assumed: {', '.join(assumed)}"
    yield from plan_lines(plan)
    if here:
        makers = {name: catalog.make(name) for name in {point.provider for point in plan.points}}
        reasons = [makers[point.provider].unsupported(point.workload, spec) for point in plan.points]
        refused = [reason for reason in reasons if reason is not None]
        if refused:
            some = f"{len(refused)} of {len(reasons)}" if len(refused) < len(reasons) else "all"
            yield f"{some} would be skipped here, the first because {refused[0]}"
    shown = plan.points[:_MOST_PLANNED_LINES]
    widest = max((len(point.provider) for point in shown), default=0)
    for point in shown:
        yield f"  {point.provider:<{widest}}  {point.workload}  about {latency(roofline_us(point.workload, spec))}"
    if len(plan.points) > _MOST_PLANNED_LINES:
        yield f"  … and {len(plan.points) - _MOST_PLANNED_LINES} more (--json prints all)"


def run(arguments: SweepArguments, results: Path, resume: Path | None, *, as_json: bool) -> None:
    """Runs a new sweep, or finishes the one in the folder `resume`."""
    start_s = time.monotonic()
    if resume is None:
        providers = [name.strip() for name in arguments.provider.split(",")]
        catalog.require_found(providers)
        check_folder("--results", results)
    console = output(stderr=as_json)
    stop_on_sigterm()
    if resume is None:
        connect = partial(WorkerProcess, [name for name in providers if ":" in name])
        session = SweepSession.new(lambda spec: sweep_options(arguments, spec.kind), results, connect, start_s)
        earlier_s = 0.0
    else:
        earlier_s = measuring_s(read_run_info(resume))
        session = SweepSession.resume(resume, WorkerProcess, budget_of(arguments), start_s)
    with session:
        assumed = () if resume else assumed_of(arguments, session.options, session.plan, session.hello.device)
        finished = measure(console, session, assumed)
    if not session.num_records:
        raise MeasurementError("sweep", "the budget ended before the first point did", "a longer --budget")
    measured = read_run(session.folder)
    lines, answer = result(measured, finished, time.monotonic() - start_s, earlier_s=earlier_s)
    print_result(as_json, lambda: {**answer, "assumed": assumed}, lines)
    if not any(isinstance(record.outcome, Measured) for record in measured.records if record.role == "point"):
        raise typer.Exit(1)  # nothing was measured, which a script must notice; the records have the reasons


def stop_on_sigterm() -> None:
    """Makes SIGTERM, which a scheduler sends to end a job, stop as cleanly as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def measure(console: Console, session: SweepSession, assumed: Sequence[str] = ()) -> Finished:
    """Prints device, assumptions and plan, and measures. When stopped, prints how to continue."""
    show(console, device_lines(session.hello.device, session.hello.state))
    if assumed:
        say(console, f"assumed: {', '.join(assumed)}")
    show(console, plan_lines(session.plan, already=len(session.done)))
    if session.interpreted:
        say(console, "TRITON_INTERPRET is set: triton's interpreter checks results; its times are those of no kernel.")
    try:
        with progress_bar(console) as bar:
            more = refine_of(session.options, session.hello.device) if session.options.refine else None
            return session.run(partial(show_progress, bar), more=more)
    except KeyboardInterrupt:
        say(console, f"\nstopped; {_kept(session)}")
        raise
    except StoreError:  # a full disk: the error names the file, this line the run
        say(console, _kept(session))
        raise


def _kept(session: SweepSession) -> str:
    """Says where the records are, and how to continue."""
    if not session.num_records:
        return "nothing was measured"
    missing = session.plan.without(session.done).total
    if not missing:
        return f"every point is measured and kept in {session.folder}/; report it: quantbench report {session.folder}"
    return f"everything measured is kept. Go on with: quantbench sweep --resume {session.folder}"


# --- a cluster -------------------------------------------------------------------------------------------------------


def run_on_ray(arguments: SweepArguments, results: Path, resume: Path | None, *, as_json: bool) -> None:
    """Runs a new sweep on the cluster, one run per kind of device, or finishes the one in the folder `resume`."""
    start_s = time.monotonic()
    console = output(stderr=as_json)
    budget_s = budget_of(arguments)
    earlier_s = 0.0 if resume is None else measuring_s(read_run_info(resume))

    def assumed(lane: Lane) -> tuple[str, ...]:
        """Lists the assumptions; a resumed run has no new ones."""
        return () if resume else assumed_of(arguments, sweep_options(arguments, lane.spec.kind), lane.plan, lane.spec)

    def more(options: SweepOptions, spec: DeviceSpec) -> More | None:
        return refine_of(options, spec) if options.refine else adaptive_more(options, spec)

    with RayPool() as pool:
        stop_on_sigterm()  # after Ray has set its own handler
        sweep = ClusterSweep(
            pool.hosts(), lambda spec: sweep_options(arguments, spec.kind), results, more, resume, budget_s,
            on_note=lambda text: say(console, text),
        )  # fmt: skip
        lanes = _measure_lanes(console, sweep, assumed)
    wall_s = time.monotonic() - start_s
    told, said = [], []
    for lane in lanes:
        measured, devices = read_run(lane.writer.folder), len(lane.members)
        lines, answer = result(measured, lane.finished, wall_s, devices=devices, earlier_s=earlier_s)
        cards = compare_cards(measured.records)
        of_cards = [{**asdict(card), "slow": card.slow} for card in cards]
        told.append({**answer, "assumed": assumed(lane), "devices": devices, "cards": of_cards})
        said += [*lines, *card_lines(cards)]
    print_result(as_json, lambda: {"runs": told}, said)


def _measure_lanes(console: Console, sweep: ClusterSweep, assumed: Callable[[Lane], Sequence[str]]) -> tuple[Lane, ...]:
    machines = {host.name.partition(" on ")[2] for host in sweep.hosts}
    count = len(sweep.hosts)
    say(console, f"Ray: {count} device{'s' if count > 1 else ''} on {', '.join(sorted(machines))}")
    shown: set[str] = set()
    with progress_bar(console) as bar:

        def show_lanes(lanes: Sequence[Lane]) -> None:
            """Shows each run's plan once, and the joint progress."""
            for lane in lanes:
                if lane.writer.info.run_id not in shown:
                    shown.add(lane.writer.info.run_id)
                    show(console, _lane_lines(lane, assumed(lane)))
            if lanes:
                show_progress(bar, _together([lane.progress() for lane in lanes]))

        sweep.on_progress = show_lanes
        try:
            return sweep.run()
        except KeyboardInterrupt:
            say(console, "stopped; everything measured is kept. Go on with:")
            for lane in sweep.lanes.values():
                if lane.writer.count:
                    say(console, f"  quantbench sweep --on ray --resume {lane.writer.folder}")
            raise


def _lane_lines(lane: Lane, assumed: Sequence[str]) -> Iterator[str]:
    yield f"{lane.spec.name}: kept in {lane.writer.folder}/"
    if assumed:
        yield f"  assumed: {', '.join(assumed)}"
    done = {record.key for record in lane.records if record.role == "point"}
    yield from plan_lines(lane.plan.without(done), already=len(done), devices=lane.expected_members)


def _together(parts: Sequence[Progress]) -> Progress:
    return Progress(
        total=sum(part.total for part in parts),
        done=sum(part.done for part in parts),
        current=" and ".join(part.current for part in parts),
        elapsed_s=max(part.elapsed_s for part in parts),
        left_s=max((part.left_s for part in parts if part.left_s is not None), default=None),
    )


# --- output ----------------------------------------------------------------------------------------------------------


def plan_lines(plan: Plan, *, already: int = 0, devices: int = 1) -> Iterator[str]:
    """Yields the number of points, the estimated time, and what is left out. already: points measured before `plan`."""
    selected = len(plan.points)
    counted = f"{selected} point{'' if selected == 1 else 's'}"
    text = f"{selected} of {plan.total} points selected" if plan.left_out else counted
    text += f", about {duration(plan.estimate_s / devices)}"
    if devices > 1:
        text += f" on {devices} devices"
    if already:
        text += f"; {already} more {'is' if already == 1 else 'are'} measured already"
    yield text + ("; `--budget none` runs all" if plan.left_out else "")
    if plan.impossible:
        yield f"{len(plan.impossible)} sizes are left out, the first because {plan.impossible[0]}"


def show_progress(show: Callable[..., None], progress: Progress) -> None:
    """Shows the progress of a sweep. show: function that `progress_bar` yields."""
    left = "" if progress.left_s is None else f", {duration(progress.left_s)} left"
    show(progress.done, progress.total, f"{progress.done} of {progress.total} points{left}", progress.current)


def result(
    run: Run, finished: Finished, wall_s: float, *, devices: int = 1, earlier_s: float = 0.0
) -> tuple[list[StyledLine | Table], dict[str, Any]]:
    """Formats the result of a run as lines and tables, and as a JSON object. Draws the run's plot.

    wall_s: duration of this session, seconds.
    devices: number of devices that measured the run together.
    earlier_s: measuring time of earlier sessions of the run, seconds.
    """
    spec, listed = run.info.device, bool(run.info.options.get("shapes") or run.info.options.get("models"))
    points = points_of(run.records, spec)
    rows = rows_of(points)
    check = check_run(run, rules=())
    options = options_from_json(run.info.options)
    comparison = compare_shapes(points, options.models) if options.models and points else None
    refine = refine_of(options, spec) if options.refine and not listed else None
    edges = () if refine is None else refine.edges(run.records)

    lines: list[StyledLine | Table] = [""]
    if comparison is not None:
        lines += [comparison_table(comparison), comparison_sentence(comparison), *comparison_lines(comparison)]
    elif rows:
        lines += [ops_line(rows), sweep_table(rows, check, spec)]
    else:
        lines.append("nothing was measured")
    lines += [*trust_lines(rows), *_not_measured_lines(run)]
    if run.info.origin == "measured" and (unnamed := unnamed_line(points, spec, run.info.environment)):
        lines.append(unnamed)
    if refine is not None:
        lines += [_edge_line(*edge) for edge in edges] or ["no step of 5 % or more was found to bisect to"]
    picture = None
    if points and not listed:  # a list of shapes has no axis to draw along
        axis = max(run.info.axes, key=lambda dim: len(run.info.axes[dim]))
        try:
            picture = draw_run(run, check, axis.replace("-", "_"))
        except StoreError as error:  # a full disk: the run itself is complete, and its folder must still be printed
            lines.append(warning(f"no picture: {error}"))
    overhead_share = 1 - (measuring_s(run.info) - earlier_s) / (wall_s * devices)
    lines += [warning(text) for text in run.warnings]
    reason = f" ({finished.reason})" if finished.reason else ""
    lines.append(
        f"{finished.how} in {duration(wall_s)}; the harness itself took {percent(overhead_share)} of it{reason}"
    )
    lines.append(f"kept in {run.folder}/ (run.json, records.jsonl)")
    if picture is not None:
        lines.append(f"picture: {picture}")
    if finished.how == "budget":
        lines.append(f"the rest: quantbench sweep --resume {run.folder}")
    edges_to_json = [
        {**{name: getattr(placed, name) for name in ("axis", "op", "provider", "held")},
         **{name: getattr(edge, name) for name in ("low", "high", "ratio", "exact")}}
        for placed, edge in edges
    ]  # fmt: skip
    answer = {
        "run": str(run.folder), "device": spec.name, "how_ended": finished.how,
        "rows": rows_to_json(rows, check, spec), "cliffs": [cliff_to_json(cliff) for cliff in check.cliffs],
        "edges": edges_to_json, "picture": None if picture is None else str(picture),
        "wall_s": wall_s, "overhead_share": overhead_share,
        **({} if comparison is None else {"shapes": comparison_to_json(comparison)}),
    }  # fmt: skip
    return lines, answer


def _not_measured_lines(run: Run) -> list[str]:
    """Counts skipped, failed and rejected points by reason."""
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
    return [f"{number} × {reason}" for reason, number in reasons.most_common()]


def _edge_line(placed: PlacedGap, edge: Edge) -> str:
    """Formats an edge: `edge in gemm (torch.mm): n = 3328 to 3336, 1.34 times the time`."""
    held = "".join(f", {name.replace('_', '-')} = {value}" for name, value in placed.held.items())
    return (
        f"edge in {placed.op} ({placed.provider}): {placed.axis.replace('_', '-')} = {edge.low} to {edge.high}"
        f"{held}, {edge.ratio:.2f} times the time{'' if edge.exact else ' (not bisected to the end)'}"
    )


def unnamed_line(points: Sequence[Point], spec: DeviceSpec, environment: dict[str, str]) -> str | None:
    """Counts the GPU points without kernel name and names a remedy; None if there are none or names were switched off.

    environment: environment variables of the run.
    """
    way = environment.get(_KERNEL_NAMES, "apart").strip().lower()
    missing = sum(point.launch is None for point in points)
    if spec.kind != "cuda" or way == "off" or not missing:
        return None
    line = f"{missing} of {len(points)} points have no kernel name, so their causes cannot be determined"
    return line if way == "here" else f"{line}; where one process alone may use the GPU, set {_KERNEL_NAMES}=here"


def measuring_s(info: RunInfo) -> float:
    """Returns the measuring time over all sessions of a run, seconds."""
    return sum(info.phases_s.get(name, 0.0) for name in _MEASUREMENT_PHASES)
