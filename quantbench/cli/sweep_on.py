"""`quantbench sweep --on ray`: the same sweep on every device of a cluster, one run per kind of device."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from quantbench.cli.output import output, print_json, progress_bar, say
from quantbench.cli.sweep_options import SweepArguments, assumed_of, budget_of, check_words, sweep_options
from quantbench.cli.sweep_print import measuring_s, refinement, say_plan, say_result, show_progress
from quantbench.cluster.cards import card_lines, compare_cards
from quantbench.cluster.lane import Host, Lane
from quantbench.cluster.ray_pool import RayPool
from quantbench.cluster.session import ClusterSweep
from quantbench.device.spec import DeviceSpec
from quantbench.errors import require_choice
from quantbench.store.folder import read_run
from quantbench.store.run import read_run_info
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.runner import More, Progress
from quantbench.sweep.session import adaptive_more

WHERE = ("ray",)


def run(arguments: SweepArguments, on: str, results: Path, resume: Path | None, gpu: str, *, as_json: bool) -> None:
    """Run a new sweep over the cluster, or finish the one in the folder `resume` there."""
    require_choice("sweep", "--on", on, WHERE)
    check_words(arguments, resume, gpu)
    start_s = time.monotonic()
    console = output(stderr=as_json)
    budget_s = budget_of(arguments)
    earlier_s = 0.0 if resume is None else measuring_s(read_run_info(resume))
    with RayPool() as pool:
        # A scheduler that ends a job sends SIGTERM: the same clean stop as Ctrl-C. Ray sets one of its own.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        lanes = _measure(console, pool.hosts(), arguments, results, resume, budget_s)
    wall_s = time.monotonic() - start_s
    told = []
    for lane in lanes:
        measured = read_run(lane.writer.folder)
        devices = len(lane.members)
        result = say_result(
            console, measured, lane.finished, wall_s, as_json=as_json, devices=devices, earlier_s=earlier_s
        )
        cards = compare_cards(measured.records)
        result["assumed"] = [] if resume else list(_assumed(lane, arguments))
        told.append({**result, "devices": devices, "cards": [{**asdict(card), "slow": card.slow} for card in cards]})
        if not as_json:
            for line in card_lines(cards):
                say(console, line)
    if as_json:
        print_json({"runs": told})


def _assumed(lane: Lane, arguments: SweepArguments) -> tuple[str, ...]:
    return assumed_of(arguments, sweep_options(arguments, lane.spec.kind), lane.plan, lane.spec)


def _measure(
    console: Console,
    hosts: Sequence[Host],
    arguments: SweepArguments,
    results: Path,
    resume: Path | None,
    budget_s: float | None,
) -> tuple[Lane, ...]:
    assumed = None if resume else arguments  # nothing is assumed for a run that is resumed
    say(console, f"Ray: {_counted(hosts)}")
    shown: set[str] = set()
    with progress_bar(console) as show:
        sweep = ClusterSweep(
            hosts,
            lambda spec: sweep_options(arguments, spec.kind),
            results,
            _more,
            resume,
            budget_s,
            on_note=lambda text: say(console, text),
            on_progress=lambda lanes: _show(console, lanes, shown, partial(show_progress, show), assumed),
        )
        try:
            return sweep.run()
        except KeyboardInterrupt:
            say(console, "stopped; everything measured is kept. Go on with:")
            for lane in sweep.lanes.values():
                if lane.writer.count:
                    say(console, f"  quantbench sweep --on ray --resume {lane.writer.folder}")
            raise


def _show(
    console: Console,
    lanes: Sequence[Lane],
    shown: set[str],
    show: Callable[[Progress], None],
    arguments: SweepArguments | None,
) -> None:
    """Each run's plan once, and how far all of them are together."""
    for lane in lanes:
        run_id = lane.writer.info.run_id
        if run_id not in shown:
            shown.add(run_id)
            say(console, f"{lane.spec.name}: kept in {lane.writer.folder}/")
            if arguments is not None and (assumed := _assumed(lane, arguments)):
                say(console, f"  assumed: {', '.join(assumed)}")
            done = {record.key for record in lane.records if record.role == "point"}
            say_plan(console, lane.plan.without(done), already=len(done), devices=lane.expected_members)
    parts = [lane.progress() for lane in lanes]
    if parts:
        show(
            Progress(
                total=sum(part.total for part in parts),
                done=sum(part.done for part in parts),
                current=" and ".join(part.current for part in parts),
                elapsed_s=max(part.elapsed_s for part in parts),
                left_s=max((part.left_s for part in parts if part.left_s is not None), default=None),
            )
        )


def _counted(hosts: Sequence[Host]) -> str:
    """`8 devices on 2 machines`."""
    machines = Counter(host.name.partition(" on ")[2] for host in hosts)
    return f"{len(hosts)} device{'s' if len(hosts) > 1 else ''} on {', '.join(sorted(machines))}"


def _more(options: SweepOptions, spec: DeviceSpec) -> More | None:
    return refinement(options, spec) or adaptive_more(options, spec)
