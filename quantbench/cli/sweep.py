"""`quantbench sweep`: time real work over hidden sizes, heads, sequence lengths, … on the device at hand."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quantbench import device
from quantbench.cli import sweep_on
from quantbench.cli.devices import say_device
from quantbench.cli.options import AsJson, grouped
from quantbench.cli.output import check_folder, output, print_json, progress_bar, say
from quantbench.cli.sweep_options import SweepArguments, assumed_of, budget_of, check_words, sweep_options
from quantbench.cli.sweep_print import measuring_s, refinement, say_plan, say_result, show_progress
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError, StoreError
from quantbench.latency.op_times import roofline_us
from quantbench.providers import catalog
from quantbench.store.folder import read_run
from quantbench.store.record import Measured
from quantbench.store.run import read_run_info
from quantbench.sweep.child import WorkerProcess
from quantbench.sweep.options import plan_sweep
from quantbench.sweep.plan import Plan
from quantbench.sweep.runner import Finished
from quantbench.sweep.session import SweepSession
from quantbench.units import latency

_RUN = "Run"
_MOST_PLANNED_LINES = 40


@grouped
def sweep(
    arguments: SweepArguments,
    on: Annotated[
        str, typer.Option(help="ray: measure on every GPU of a Ray cluster, one run per kind.", rich_help_panel=_RUN)
    ] = "",
    results: Annotated[Path, typer.Option(help="Folder that holds the runs.", rich_help_panel=_RUN)] = Path("results"),
    resume: Annotated[
        Path | None, typer.Option(help="Folder of an unfinished run to finish.", rich_help_panel=_RUN)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the points and the estimated time; measure nothing.", rich_help_panel=_RUN)
    ] = False,
    gpu: Annotated[str, typer.Option(help="GPU to plan for, with --dry-run.", rich_help_panel=_RUN)] = "",
    as_json: AsJson = False,
) -> None:
    """Time real matmuls, softmax and attention on the device at hand, and keep every sample."""
    if dry_run:
        _dry_run(arguments, gpu, as_json=as_json)
    elif on:
        sweep_on.run(arguments, on, results, resume, gpu, as_json=as_json)
    else:
        _run(arguments, results, resume, gpu, as_json=as_json)


def _dry_run(arguments: SweepArguments, gpu: str, *, as_json: bool) -> None:
    """Print what would be measured, in order, and how long it would take."""
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
        _say_refused(console, plan, spec)
    shown = plan.points[:_MOST_PLANNED_LINES]
    widest = max((len(point.provider) for point in shown), default=0)
    for point in shown:
        estimate = latency(roofline_us(point.workload, spec))
        say(console, f"  {point.provider:<{widest}}  {point.workload}  about {estimate}")
    if len(plan.points) > _MOST_PLANNED_LINES:
        console.print(f"  … and {len(plan.points) - _MOST_PLANNED_LINES} more (--json prints all)")


def _say_refused(console: Console, plan: Plan, spec: DeviceSpec) -> None:
    """How many points of a plan would be skipped here, and why the first one; nothing where all would run."""
    makers = {name: catalog.make(name) for name in {point.provider for point in plan.points}}
    reasons = [makers[point.provider].unsupported(point.workload, spec) for point in plan.points]
    refused = [reason for reason in reasons if reason is not None]
    if refused:
        some = f"{len(refused)} of {len(reasons)}" if len(refused) < len(reasons) else "all"
        say(console, f"{some} would be skipped here, the first because {refused[0]}")


def _run(arguments: SweepArguments, results: Path, resume: Path | None, gpu: str, *, as_json: bool) -> None:
    """Run a new sweep, or finish the one in the folder `resume`."""
    start_s = time.monotonic()
    check_words(arguments, resume, gpu)
    providers = [name.strip() for name in arguments.provider.split(",")]
    if resume is None:
        catalog.require_found(providers)
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


def measure(console: Console, session: SweepSession, assumed: Sequence[str] = ()) -> Finished:
    """Say what was assumed and what will be measured, measure it, and say what to do when stopped."""
    say_device(console, session.hello.device, session.hello.state)
    if assumed:
        say(console, f"assumed: {', '.join(assumed)}")
    say_plan(console, session.plan, already=len(session.done))
    if session.interpreted:
        console.print("TRITON_INTERPRET is set: triton's interpreter checks results; its times are those of no kernel.")
    try:
        with progress_bar(console) as show:
            more = refinement(session.options, session.hello.device)
            return session.run(partial(show_progress, show), more=more)
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
