"""Runs the command `sweep` on this machine's device (`run`) or on a Ray cluster (`run_on_ray`).

`dry_run` lists the points of a sweep and estimates the time, without measuring. `measure` is also
used by `check --experiment`.
"""

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quantbench import device
from quantbench.cli.devices import device_lines
from quantbench.cli.output import (
    Lines,
    Result,
    StyledLine,
    check_folder,
    output,
    progress_bar,
    say,
    show,
)
from quantbench.cli.sweep_options import SweepArguments, assumed_of, budget_of, options_on
from quantbench.cli.sweep_print import (
    left_out,
    measuring_s,
    plan_lines,
    refine_of,
    result,
    show_progress,
)
from quantbench.cluster.cards import card_lines, compare_devices
from quantbench.cluster.ray_cluster import connected
from quantbench.cluster.ray_sweep import ClusterRun, ClusterSweep
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError, StoreError
from quantbench.latency.op_times import roofline_us
from quantbench.providers import catalog
from quantbench.store.folder import Run, read_run
from quantbench.store.record import Failed, Measured
from quantbench.store.run import read_run_info
from quantbench.sweep.child import WorkerProcess, refusal
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.plan import Plan
from quantbench.sweep.runner import Finished
from quantbench.sweep.session import SweepSession, resumed_options
from quantbench.timing.grade import INTERPRETED
from quantbench.units import latency

# Maximum number of points that --dry-run prints. --json has all.
_MOST_PLANNED_LINES = 40


def dry_run(arguments: SweepArguments, gpu: str) -> Result:
    """Lists the points in the order of measurement, with the estimated time.

    gpu: name of the GPU to plan for; "" for this machine's device.
    """
    spec = device.lookup(gpu) if gpu else device.current()
    options = options_on(arguments, spec)
    catalog.require_found(options.providers)
    sys.path.insert(0, str(Path.cwd()))  # where a worker looks for user-defined providers
    options = replace(options, tiles=catalog.declared_tiles(options.providers))
    axes, plan = plan_sweep(options, spec)
    assumed = assumed_of(arguments, options, plan, spec)
    points = []
    for p in plan.points:
        place = {"key": p.key, "provider": p.provider, "workload": str(p.workload)}
        points.append({**place, "estimate_s": p.estimate_s, "places": p.places})
    answer = {
        "device": spec.name,
        "assumed": assumed,
        "axes": {axis.dim: axis.values for axis in axes},
        "estimate_s": plan.estimate_s,
        "points": points,
        "left_out": left_out(plan),
    }
    # The lines are made before the first is printed, so that an error in a provider comes first.
    lines = _dry_run_lines(plan, spec, assumed, here=not gpu, by_op=bool(options.works))
    return Result(answer, list(lines))


def _dry_run_lines(
    plan: Plan, spec: DeviceSpec, assumed: Sequence[str], *, here: bool, by_op: bool
) -> Lines:
    """Yields lines on the plan, and one line with the roofline time for each of the first points.

    here: whether the plan is for this machine's device. Only then can the providers tell which
        points they support.
    by_op: as in `plan_lines`.
    """
    yield f"plan for {spec.name}"
    if assumed:
        yield f"assumed: {', '.join(assumed)}"
    yield from plan_lines(plan, by_op=by_op)
    if here:
        make = cache(catalog.make)
        reasons = [make(point.provider).unsupported(point.workload, spec) for point in plan.points]
        refused = [reason for reason in reasons if reason is not None]
        if refused:
            some = f"{len(refused)} of {len(reasons)}" if None in reasons else "all"
            yield f"{some} would be skipped here, the first because {refused[0]}"
    shown = plan.points[:_MOST_PLANNED_LINES]
    widest = max((len(point.provider) for point in shown), default=0)
    for point in shown:
        about = latency(roofline_us(point.workload, spec))
        yield f"  {point.provider:<{widest}}  {point.workload}  about {about} by the spec sheet"
    if len(plan.points) > _MOST_PLANNED_LINES:
        yield f"  … and {len(plan.points) - _MOST_PLANNED_LINES} more (--json prints all)"


def run(arguments: SweepArguments, results: Path, resume: Path | None, *, as_json: bool) -> Result:
    """Runs a new sweep, or finishes an earlier one, on this machine's device.

    results: folder in which the run folder is created.
    resume: folder of the run to finish; None for a new sweep.
    """
    start_s = time.monotonic()
    console = output(stderr=as_json)
    stop_on_sigterm()
    if resume is None:
        providers = arguments.providers
        catalog.require_found(providers)
        check_folder("--results", results)
        connect = partial(WorkerProcess, [name for name in providers if ":" in name])
        session = SweepSession.new(partial(options_on, arguments), results, connect)
        earlier_s = 0.0
    else:
        earlier_s = measuring_s(read_run_info(resume))
        session = SweepSession.resume(resume, WorkerProcess, budget_of(arguments))
    with session:
        assumed: tuple[str, ...] = ()
        if resume is None:
            assumed = assumed_of(arguments, session.options, session.plan, session.hello.device)
        finished = measure(console, session, assumed)
    measured = read_run(session.folder)
    lines, answer = result(measured, finished, time.monotonic() - start_s, earlier_s=earlier_s)
    return Result({**answer, "assumed": assumed}, lines, exit_code=_failed(measured))


def _failed(run: Run) -> bool:
    """Returns whether the command must end with exit code 1.

    A run has failed if a result was wrong, if no time was accepted, or if a provider has failed
    points but no accepted time. Times from Triton's interpreter have the grade "rejected" but count
    as accepted here, because the interpreter serves only to check results.
    """
    accepted = set()
    failed = set()
    for record in run.records:
        outcome = record.outcome
        if record.role != "point":
            continue
        if isinstance(outcome, Failed):
            if outcome.error == "wrong_result":
                return True
            failed.add(record.provider)
        elif isinstance(outcome, Measured):
            grade = outcome.grade
            if grade.letter != "rejected" or INTERPRETED in grade.reasons:
                accepted.add(record.provider)
    return not accepted or not failed <= accepted


def stop_on_sigterm() -> None:
    """Makes SIGTERM, which schedulers send to end a job, stop a sweep like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def measure(console: Console, session: SweepSession, assumed: Sequence[str] = ()) -> Finished:
    """Prints device, assumptions and plan, measures the sweep, and returns how it ended.

    The run folder is printed first, on standard error. If the sweep is stopped, the command to
    continue it is printed.

    assumed: descriptions of assumed values.
    Raises MeasurementError if nothing was measured.
    """
    say(output(stderr=True), f"run: {session.folder}")
    show(console, device_lines(session.hello.device, session.hello.state, session.hello.limits))
    if assumed:
        say(console, f"assumed: {', '.join(assumed)}")
    counts = {"already": len(session.done), "retried": session.num_retried}
    show(console, plan_lines(session.plan, **counts, by_op=bool(session.options.works)))
    if session.interpreted:
        interpreter = "triton's interpreter checks results; its times are those of no kernel."
        say(console, f"TRITON_INTERPRET is set: {interpreter}")
    try:
        with progress_bar(console) as bar:
            more = None
            if session.options.refine:
                more = refine_of(session.options, session.hello.device)
            finished = session.run(partial(show_progress, bar), more=more)
    except KeyboardInterrupt:
        say(console, f"\nstopped; {_kept(session)}")
        raise
    except StoreError:  # for example a full disk: the error names the file, this line names the run
        say(console, _kept(session))
        raise
    if session.num_records:
        return finished
    if finished.how == "failed":
        raise refusal("sweep", finished.reason)
    early = "the budget ended before the first point did"
    raise MeasurementError("sweep", early, "a longer --budget")


def _kept(session: SweepSession) -> str:
    """Returns a text with the command that continues or reports the run.

    If nothing was measured, the text says so instead.
    """
    if not session.num_records:
        return "nothing was measured"
    missing = session.plan.without(session.done).total
    if not missing:
        kept = f"every point is measured and kept in {session.folder}/"
        return f"{kept}; report it: quantbench report {session.folder}"
    return f"everything measured is kept. Go on with: quantbench sweep --resume {session.folder}"


# --- a cluster ------------------------------------------------------------------------------------


def run_on_ray(
    arguments: SweepArguments, results: Path, resume: Path | None, *, as_json: bool
) -> Result:
    """Runs a new sweep on a Ray cluster, or finishes an earlier run.

    A new sweep creates one run per device kind.

    results: folder in which the run folders are created.
    resume: folder of the run to finish; None for a new sweep.
    """
    start_s = time.monotonic()
    console = output(stderr=as_json)
    budget_s = budget_of(arguments)
    earlier_s = 0.0 if resume is None else measuring_s(read_run_info(resume))

    def of_device(spec: DeviceSpec) -> SweepOptions:
        if resume is not None:
            return resumed_options(resume, budget_s)
        return options_on(arguments, spec)

    names = arguments.providers
    if resume is not None:
        names = resumed_options(resume, budget_s).providers
    catalog.require_found(names)
    own = [name for name in names if ":" in name]
    with connected(catalog.local_modules(own)) as ray:
        stop_on_sigterm()  # after Ray has set its own handler
        sweep = ClusterSweep(ray, of_device, results, resume, own, partial(say, console))
        assumed: dict[Path, tuple[str, ...]] = {}
        for run in sweep.start():
            assumed[run.folder] = ()  # a resumed run has no new assumptions
            if resume is None:
                assumed[run.folder] = assumed_of(arguments, run.options, run.plan, run.spec)
            _show_run(console, run, assumed[run.folder])
        try:
            with progress_bar(console) as bar:
                sweep.watch(partial(show_progress, bar))
        except KeyboardInterrupt:
            say(console, "stopped; everything measured is kept. Go on with:")
            for run in sweep.runs:
                say(console, f"  quantbench sweep --on ray --resume {run.folder}")
            raise
    wall_s = time.monotonic() - start_s
    answers = []
    said: list[StyledLine | Table] = []
    failed = False
    for run in sweep.runs:
        measured = read_run(run.folder)
        devices = len(run.devices)
        failed = failed or _failed(measured)
        lines, answer = result(measured, run.finished, wall_s, devices=devices, earlier_s=earlier_s)
        cards = compare_devices(measured.records)
        of_run = {"assumed": assumed[run.folder], "devices": devices, "cards": cards}
        answers.append({**answer, **of_run})
        said += [*lines, *card_lines(cards)]
    return Result({"runs": answers}, said, exit_code=failed)


def _show_run(console: Console, run: ClusterRun, assumed: Sequence[str]) -> None:
    """Prints the devices, folder, assumptions and plan of one run on a cluster."""
    say(console, f"{', '.join(run.devices)}: {run.spec.name}, kept in {run.folder}/")
    if assumed:
        say(console, f"  assumed: {', '.join(assumed)}")
    by_op = bool(run.options.works)
    devices = len(run.devices)
    show(console, plan_lines(run.plan, already=run.already, devices=devices, by_op=by_op))
