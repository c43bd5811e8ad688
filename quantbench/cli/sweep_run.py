"""What `quantbench sweep` does and says, in order: device, plan, progress, result, where it is, what comes next."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from quantbench.analysis.check import check_run
from quantbench.analysis.summary import points_of, rows_of
from quantbench.cli.check_output import cliff_to_json
from quantbench.cli.console import output, say, say_warning
from quantbench.cli.devices import say_device
from quantbench.cli.edge_output import edge_lines, edges_to_json
from quantbench.cli.sweep_options import SweepArguments, assumed_words, given_words, sweep_options
from quantbench.cli.unnamed import unnamed_line
from quantbench.cli.writable import check_folder
from quantbench.device import default_attention, default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, MeasurementError, StoreError
from quantbench.latency.roofline import roofline_us
from quantbench.providers.catalog import expand, require_found
from quantbench.report.shape_comparison import (
    compare_shapes,
    comparison_lines,
    comparison_sentence,
    comparison_table,
    comparison_to_json,
)
from quantbench.report.sweep_result import ops_line, rows_to_json, sweep_table, trust_lines
from quantbench.store.folder import Run, read_run
from quantbench.store.record import Measured
from quantbench.store.run import RunInfo, read_run_info
from quantbench.sweep.axes import parse_axis
from quantbench.sweep.child import WorkerProcess
from quantbench.sweep.options import SweepOptions, options_from_json, plan_sweep
from quantbench.sweep.plan import Plan
from quantbench.sweep.refine import Refine
from quantbench.sweep.runner import Finished
from quantbench.sweep.runner import Progress as SweepProgress
from quantbench.sweep.session import SweepSession, resumed_options
from quantbench.sweep.shapes import check_axes, with_defaults
from quantbench.units import duration, latency, parse_duration_s, percent

# Phases that are the measurement itself; everything else is the harness.
_MEASUREMENT_PHASES = ("inputs", "warm-up", "measuring")
# Where the output is no terminal, a line of progress is printed at most this often.
_PLAIN_PROGRESS_EVERY_S = 15.0
_MOST_PLANNED_LINES = 40


def dry_run(arguments: SweepArguments, gpu: str, *, as_json: bool) -> None:
    """Print what would be measured, in order, and how long it would take."""
    from quantbench import device

    spec = device.lookup(gpu) if gpu else device.current()
    options = sweep_options(arguments, spec.kind)
    axes, plan = plan_sweep(options, spec)
    assumed = assumed_of(arguments, options, plan, spec)
    if as_json:
        points = [
            {
                "key": p.key, "provider": p.provider, "workload": str(p.workload), "estimate_s": p.estimate_s,
                "places": [{"axes": place.axes, "op": place.op, "count": place.count} for place in p.places],
            }
            for p in plan.points
        ]  # fmt: skip
        axis_values = {axis.dim: list(axis.values) for axis in axes}
        print_json(
            {
                "device": spec.name, "assumed": list(assumed), "axes": axis_values, "estimate_s": plan.estimate_s,
                "points": points,
            }
        )  # fmt: skip
        return
    console = output()
    say(console, f"plan for {spec.name}")
    if assumed:
        say(console, f"assumed: {', '.join(assumed)}")
    say_plan(console, plan)
    if not gpu:
        say_refused(console, plan, spec)
    shown = plan.points[:_MOST_PLANNED_LINES]
    widest = max((len(point.provider) for point in shown), default=0)
    for point in shown:
        estimate = latency(roofline_us(point.workload, spec))
        say(console, f"  {point.provider:<{widest}}  {point.workload}  about {estimate}")
    if len(plan.points) > _MOST_PLANNED_LINES:
        console.print(f"  … and {len(plan.points) - _MOST_PLANNED_LINES} more (--json prints all)")


def assumed_of(arguments: SweepArguments, options: SweepOptions, plan: Plan, spec: DeviceSpec) -> tuple[str, ...]:
    """What of a plan was not typed, in words."""
    held = with_defaults(options.held, spec.kind, default_dtype(spec), default_attention(spec))
    ops = {place.op.partition(".")[0] for point in plan.points for place in point.places}
    return assumed_words(arguments, held, ops, spec)


def say_refused(console: Console, plan: Plan, spec: DeviceSpec) -> None:
    """How many points of a plan would be skipped here, and why the first one; nothing where all would run."""
    from quantbench.providers import catalog

    makers = {name: catalog.make(name) for name in {point.provider for point in plan.points}}
    reasons = [makers[point.provider].unsupported(point.workload, spec) for point in plan.points]
    refused = [reason for reason in reasons if reason is not None]
    if refused:
        some = f"{len(refused)} of {len(reasons)}" if len(refused) < len(reasons) else "all"
        say(console, f"{some} would be skipped here, the first because {refused[0]}")


def run(
    arguments: SweepArguments, results: Path, resume: Path | None, gpu: str, *, as_json: bool, start_s: float
) -> None:
    """Run a new sweep, or finish the one in the folder `resume`. start_s: when the command began, monotonic clock."""
    check_words(arguments, resume, gpu)
    providers = [name.strip() for name in arguments.provider.split(",")]
    if resume is None:
        require_found(providers)
        check_folder("--results", results)
    console = output(stderr=as_json)
    # A scheduler that ends a job sends SIGTERM: the same clean stop as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    earlier_s = 0.0 if resume is None else measuring_s(read_run_info(resume))
    if resume is None:
        connect = partial(WorkerProcess, [name for name in providers if ":" in name])
        session = SweepSession.new(lambda spec: sweep_options(arguments, spec.kind), results, connect, start_s)
    else:
        session = SweepSession.resume(resume, WorkerProcess, budget_of(arguments), start_s)
    with session:
        assumed = () if resume else assumed_of(arguments, session.options, session.plan, session.hello.device)
        finished = measure(console, session, assumed)
    if not session.num_records:
        raise MeasurementError("sweep", "the budget ended before the first point did", "a longer --budget")
    measured = read_run(session.folder)
    told = say_result(console, measured, finished, time.monotonic() - start_s, as_json=as_json, earlier_s=earlier_s)
    if as_json:
        print_json({**told, "assumed": list(assumed)})
    if not any(isinstance(record.outcome, Measured) for record in measured.records if record.role == "point"):
        raise typer.Exit(1)  # the records say why, and a script must notice


def measuring_s(info: RunInfo) -> float:
    """Seconds that the measurement itself took, over all sittings of a run."""
    return sum(info.phases_s.get(name, 0.0) for name in _MEASUREMENT_PHASES)


def check_words(arguments: SweepArguments, resume: Path | None, gpu: str) -> None:
    """What is wrong with the words is said before a worker is started."""
    if gpu:
        raise InputError("sweep", f"--gpu {gpu} without --dry-run", "a sweep of the device at hand, or --dry-run")
    if resume is not None and (arguments.dims or arguments.shapes):
        raise InputError(
            "sweep",
            f"--resume {resume} with --dim or --shapes",
            "the run's own points: --resume, with --budget at most",
        )
    if resume is None:
        options = sweep_options(arguments, "cuda")
        expand(options.providers)
        if options.dims:
            check_axes(tuple(parse_axis(dim if "=" in dim else f"{dim}=1") for dim in options.dims))
        return
    if given := [word for word in given_words(arguments) if word != "--budget"]:
        expected = "the run's own options: --resume, with --budget at most"
        raise InputError("sweep", f"--resume {resume} with {given[0]}", expected)
    resumed_options(resume, budget_of(arguments))


def budget_of(arguments: SweepArguments) -> float | None:
    """The budget of a resumed run in seconds: what was typed, else none."""
    return None if arguments.budget in ("", "none") else parse_duration_s("--budget", arguments.budget)


def measure(console: Console, session: SweepSession, assumed: Sequence[str] = ()) -> Finished:
    """Say what was assumed and what will be measured, measure it, and say what to do when stopped."""
    say_device(console, session.hello.device, session.hello.state)
    if assumed:
        say(console, f"assumed: {', '.join(assumed)}")
    say_plan(console, session.plan, already=len(session.done))
    if session.interpreted:
        console.print("TRITON_INTERPRET is set: triton's interpreter checks results; its times are those of no kernel.")
    try:
        with progress_shown(console) as show:
            more = refinement(session.options, session.hello.device)
            return session.run(show, more=more)
    except KeyboardInterrupt:
        say(console, f"\nstopped; {_kept(session)}")
        raise
    except StoreError:  # a full disk: its own line names the file, this one the run
        say(console, _kept(session))
        raise


def _kept(session: SweepSession) -> str:
    """Where what was measured lies, and how to go on."""
    if not session.num_records:
        return "nothing was measured"
    missing = session.plan.without(session.done).total
    if not missing:
        return f"every point is measured and kept in {session.folder}/; report it: quantbench report {session.folder}"
    return f"everything measured is kept. Go on with: quantbench sweep --resume {session.folder}"


def refinement(options: SweepOptions, spec: DeviceSpec) -> Refine | None:
    """What bisects to every edge, where that was asked for."""
    if not options.refine:
        return None
    from quantbench.analysis.check import refine_of

    return refine_of(options, spec)


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


@contextmanager
def progress_shown(console: Console) -> Iterator[Callable[[SweepProgress], None]]:
    """A bar on a terminal; now and then a line where there is none."""
    if not console.is_terminal:
        last_s = [time.monotonic()]

        def line(progress: SweepProgress) -> None:
            if time.monotonic() - last_s[0] >= _PLAIN_PROGRESS_EVERY_S:
                last_s[0] = time.monotonic()
                left = "" if progress.left_s is None else f", {duration(progress.left_s)} left"
                print(f"{progress.done} of {progress.total} points{left}", file=console.file, flush=True)

        yield line
        return
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("sweep", total=None, left="", now="")

        def update(progress: SweepProgress) -> None:
            left = "" if progress.left_s is None else f"{duration(progress.left_s)} left"
            bar.update(task, total=progress.total, completed=progress.done, left=left, now=progress.current)

        yield update


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
    from collections import Counter

    from quantbench.store.record import Failed, Measured, Skipped

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


def print_json(data: dict[str, Any]) -> None:
    """One JSON value on the standard output."""
    json.dump(data, sys.stdout, indent=1)
    print()
