"""A whole sweep from the outside: options to plan, plan to folder, folder to a finished run; and resuming one."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.stats import median
from quantbench.store.environment import relevant_environment
from quantbench.store.folder import RunWriter
from quantbench.store.record import Measured, Record
from quantbench.store.run import RunInfo, now_text, read_run_info
from quantbench.sweep.adaptive import LeastSure
from quantbench.sweep.axes import Axis
from quantbench.sweep.child import Asked
from quantbench.sweep.messages import Hello
from quantbench.sweep.options import SweepOptions, options_from_json, options_to_json, plan_sweep, whole_plan
from quantbench.sweep.plan import Plan
from quantbench.sweep.runner import Finished, More, Progress, Sweep

Connect = Callable[[], Asked]


class SweepSession:
    """One sweep into one folder: `new` or `resume`, then `run`.

    The worker that was started to learn what device there is goes on to measure. Use as a context manager.
    """

    def __init__(self, worker: Asked, connect: Connect, options: SweepOptions, plan: Plan, writer: RunWriter) -> None:
        self.hello = worker.hello
        self.options = options
        self.plan = plan
        self.folder = writer.folder
        self.finished: Finished | None = None
        self._worker: Asked | None = worker
        self._connect = connect
        self._writer = writer
        self._records: tuple[Record, ...] = ()

    @classmethod
    def new(cls, make_options: Callable[[DeviceSpec], SweepOptions], results: Path, connect: Connect) -> SweepSession:
        """Start a worker, lay out the plan for the device it finds, make the run's folder under `results`.

        make_options: the options for that device (its default precision and budget differ by kind).
        """
        worker = connect()
        try:
            device = worker.hello.device
            options = make_options(device)
            axes, plan = plan_sweep(options, device)
            adaptive_more(options, device)  # what it refuses is refused before there is a folder
            info = begun(worker.hello, options, axes, results)
            return cls(worker, connect, options, plan, RunWriter.create(results, info))
        except BaseException:
            worker.close()
            raise

    @classmethod
    def resume(cls, folder: Path, connect: Connect) -> SweepSession:
        """Reopen a run to measure what is missing, with the options it was started with and on the same device."""
        options = options_from_json(read_run_info(folder).options)
        writer, run = RunWriter.resume(folder)
        worker: Asked | None = None
        try:
            worker = connect()
            device = worker.hello.device
            if device.name != run.info.device.name:
                raise StoreError("resume", f"this device is {device.name}", f"{run.info.device.name}, as in {folder}")
            _, plan = plan_sweep(options, device)
            session = cls(worker, connect, options, plan, writer)
            session._records = run.records
            return session
        except BaseException:
            writer.close()
            if worker is not None:
                worker.close()
            raise

    @property
    def interpreted(self) -> bool:
        """Whether triton's interpreter runs some of the points: it checks results, and its times are no kernel's."""
        interpreter = relevant_environment().get("TRITON_INTERPRET") == "1"
        return interpreter and any(point.provider.startswith("triton.") for point in self.plan.points)

    @property
    def done(self) -> frozenset[str]:
        """Keys of the points that the folder already holds."""
        return frozenset(record.key for record in self._records if record.role == "point")

    def run(
        self,
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
        more: More | None = None,
    ) -> Finished:
        """Measure what is missing; run.json says how it ended, also after Ctrl-C (which is raised on).

        more: asks for points beyond the plan, such as a bisection to its edges.
        """
        sweep = Sweep(
            plan=self.plan,
            run_id=self._writer.info.run_id,
            spec=self.hello.device,
            timing=self.options.timing,
            done=self.done,
            connect=self._next_worker,
            writer=self._writer,
            clock=clock,
            on_progress=on_progress,
            budget_s=self.options.budget_s,
            limit_s=self.options.limit_s,
            first_reference_us=_first_reference_us(self._records),
            more=more or adaptive_more(self.options, self.hello.device),
            records=list(self._records),
            interpreter=self.interpreted,
        )
        try:
            self.finished = sweep.run()
        except BaseException:
            # What stopped the sweep is what the user must hear of; a disk too full for run.json too adds nothing.
            with suppress(StoreError):
                self._note_end("interrupted", sweep.phases_s)
            raise
        self._note_end(self.finished.how, sweep.phases_s)
        return self.finished

    def _note_end(self, how: str, phases_s: Counter[str]) -> None:
        total_s = Counter(self._writer.info.phases_s) + phases_s
        self._writer.update(replace(self._writer.info, ended=now_text(), how_ended=how, phases_s=dict(total_s)))

    def close(self) -> None:
        """Let go of the folder and of a worker that was never used."""
        self._writer.close()
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> SweepSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_worker(self) -> Asked:
        worker, self._worker = self._worker, None
        worker = worker or self._connect()
        worker.begin(self.options.timing)
        return worker


def begun(hello: Hello, options: SweepOptions, axes: tuple[Axis, ...], results: Path) -> RunInfo:
    """What run.json says of a sweep that begins now. axes: with the values that are measured; results: where runs are
    kept, so that the id is one that no run there has."""
    device = hello.device
    return RunInfo(
        run_id=new_run_id(_run_name(options), datetime.now(UTC), results / device.name),
        device=device,
        state=hello.state,
        software=hello.software,
        axes={axis.dim: list(axis.values) for axis in axes},
        options=options_to_json(options),
        seed=options.timing.seed,
        environment=relevant_environment(),
        started=now_text(),
    )


def _run_name(options: SweepOptions) -> str:
    """What the run is about, for its id: the dimensions varied, or `shapes`."""
    return "-".join(text.partition("=")[0] for text in options.dims) or "shapes"


def new_run_id(name: str, now: datetime, folder: Path) -> str:
    """`2026-11-20T134500-hidden`, with a number behind it while the folder has one of that name.

    >>> from datetime import datetime
    >>> new_run_id("tp", datetime(2026, 11, 20, 13, 45), Path("/nonexistent"))
    '2026-11-20T134500-tp'
    """
    base = f"{now:%Y-%m-%dT%H%M%S}-{name}"
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return next(name for name in names if not os.path.exists(folder / name))


def _first_reference_us(records: tuple[Record, ...]) -> float | None:
    for record in records:
        if record.role == "reference" and isinstance(record.outcome, Measured):
            return median(record.outcome.measurement.samples_us)
    return None


def adaptive_more(options: SweepOptions, device: DeviceSpec) -> More | None:
    """What asks for points beyond the plan: the choice of an adaptive sweep."""
    if not options.adaptive:
        return None
    return LeastSure(whole_plan(options, device)[1].points, device, options.points, options.timing.seed)
