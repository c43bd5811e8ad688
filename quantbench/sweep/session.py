"""Runs a sweep on one device from its options to a finished run folder (`SweepSession`).

A session either starts a new run or resumes an unfinished run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.measurement import Measurement
from quantbench.store.environment import relevant_environment
from quantbench.store.folder import Run, RunWriter
from quantbench.store.record import Failed, Measured, Record
from quantbench.store.run import RunInfo, now_text, read_run_info
from quantbench.sweep.axes import Axis
from quantbench.sweep.child import WorkerClient
from quantbench.sweep.messages import Hello
from quantbench.sweep.options import SweepOptions, options_from_json, options_to_json, plan_sweep
from quantbench.sweep.plan import Plan
from quantbench.sweep.runner import Finished, NextPoints, Progress, Sweep, SweepJob

Connect = Callable[[], WorkerClient]


class SweepSession:
    """A sweep that writes its records to one run folder.

    `new` or `resume` creates a session, which is used as a context manager.

    worker: running worker, whose `hello` describes the device. It is also the first to measure.
    connect: function that starts another worker.
    plan: plan of the missing points.
    writer: writer for the run folder.
    """

    def __init__(
        self,
        worker: WorkerClient,
        connect: Connect,
        options: SweepOptions,
        plan: Plan,
        writer: RunWriter,
    ) -> None:
        self.hello = worker.hello
        self.options = options
        self.plan = plan
        self.folder = writer.folder
        self.finished: Finished | None = None
        self.num_retried = 0
        self._worker: WorkerClient | None = worker
        self._connect = connect
        self._writer = writer
        self._records: tuple[Record, ...] = ()

    @classmethod
    def new(
        cls, make_options: Callable[[DeviceSpec], SweepOptions], results: Path, connect: Connect
    ) -> SweepSession:
        """Starts a worker, builds the plan for its device and creates the run folder.

        make_options: function that returns the options for a device. The default dtype and budget
            depend on the device, which only the worker knows.
        results: folder of all runs, in which the run folder is created.
        connect: function that starts a worker.
        """
        worker = connect()
        try:
            device = worker.hello.device
            options = replace(make_options(device), tiles=worker.hello.tiles)
            options.timing.require_device(device.kind)
            worker.begin(options.timing)  # it allocates the flush buffer while the plan is made
            axes, plan = plan_sweep(options, device)
            info = new_run_info(worker.hello, options, axes, results)
            return cls(worker, connect, options, plan, RunWriter.create(results, info))
        except BaseException:
            worker.close()
            raise

    @classmethod
    def resume(cls, folder: Path, connect: Connect, budget_s: float | None = None) -> SweepSession:
        """Reopens a run to measure its missing points with the run's options.

        Points that have failed once are measured again.

        connect: function that starts a worker.
        budget_s: time for this session in s, regardless of earlier sessions; None for no limit.
        Raises StoreError if the folder cannot be resumed, or if the device has another name than
        the run's device.
        """
        options = resumed_options(folder, budget_s)
        writer, run = RunWriter.resume(folder)
        worker: WorkerClient | None = None
        try:
            worker = connect()
            device = worker.hello.device
            if device.name != run.info.device.name:
                raise StoreError(
                    "resume",
                    f"this device is {device.name}",
                    f"{run.info.device.name}, as in {folder}",
                )
            worker.begin(options.timing)
            records = records_to_keep(run)
            _, plan = plan_sweep(options, device, point_keys(records))
            session = cls(worker, connect, options, plan, writer)
            session._records = records
            session.num_retried = len(run.records) - len(records)
            return session
        except BaseException:
            writer.close()
            if worker is not None:
                worker.close()
            raise

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter may run some of the points.

        Times in the interpreter are not kernel times.
        """
        providers = {point.provider.partition(".")[0] for point in self.plan.points}
        return interpreter_runs() and providers != {"torch"}

    @property
    def num_records(self) -> int:
        """Number of records in the run folder. `close` removes a new folder without records."""
        return self._writer.count

    @property
    def done(self) -> frozenset[str]:
        """Keys of the points that have an outcome: measured, skipped, or failed."""
        return point_keys(self._records)

    def run(
        self,
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
        more: NextPoints | None = None,
    ) -> Finished:
        """Measures the missing points, and writes to the run folder how the sweep ended.

        After an error or Ctrl-C, the run is marked as interrupted and the exception is raised
        again.

        clock: function that returns the time, in s.
        more: function that selects points beyond the plan, such as `refine.Refine`.
        """
        job = SweepJob(
            self.plan,
            self._writer.info.run_id,
            self.hello.device,
            self.options.timing,
            done=self.done,
            budget_s=self.options.budget_s,
            limit_s=self.options.limit_s,
            first_reference=first_reference(self._records, self.plan),
            interpreter=self.interpreted,
        )
        sweep = Sweep(
            job,
            self._next_worker,
            self._writer.append,
            clock,
            on_progress,
            more,
            records=list(self._records),
        )
        try:
            self.finished = sweep.run()
        except BaseException:
            self._records = tuple(sweep.records)
            # The first error is reported, even if the disk is too full to update run.json.
            with suppress(StoreError):
                self._writer.end("interrupted", sweep.phases_s)
            raise
        self._records = tuple(sweep.records)
        self._writer.end(self.finished.how, sweep.phases_s)
        return self.finished

    def close(self) -> None:
        """Releases the run folder, and ends the first worker if it is unused.

        A new folder without records is removed.
        """
        self._writer.remove_if_empty()
        self._writer.close()
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> SweepSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_worker(self) -> WorkerClient:
        """Returns the first worker if it is unused, else a new one."""
        worker = self._worker
        self._worker = None
        if worker is None:
            worker = self._connect()
            worker.begin(self.options.timing)
        return worker


def interpreter_runs() -> bool:
    """Returns whether Triton kernels run in Triton's interpreter."""
    return relevant_environment().get("TRITON_INTERPRET") == "1"


def point_keys(records: Iterable[Record]) -> frozenset[str]:
    """Returns the keys of all points in the records, without reference points."""
    return frozenset(record.key for record in records if record.role == "point")


def new_run_info(
    hello: Hello, options: SweepOptions, axes: tuple[Axis, ...], results: Path
) -> RunInfo:
    """Builds the `RunInfo` of a sweep that starts now.

    The run id consists of the UTC time and the axes, such as `2026-11-20T134500-hidden`. A number
    is appended if the device already has a run of that name.

    axes: axes with the values to measure.
    results: folder of all runs.
    """
    device = hello.device
    what = "-".join(text.partition("=")[0] for text in options.dims) or "shapes"
    base = f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}-{what}"
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return RunInfo(
        run_id=next(name for name in names if not os.path.exists(results / device.name / name)),
        device=device,
        state=hello.state,
        software=hello.software,
        axes={axis.dim: list(axis.values) for axis in axes},
        options=options_to_json(options),
        seed=options.timing.seed,
        environment=relevant_environment(),
        started=now_text(),
    )


def resumed_options(folder: Path, budget_s: float | None) -> SweepOptions:
    """Reads the options of a run to resume, and replaces their budget.

    Raises StoreError for a run without a single plan: if the run was imported or simulated, or
    merged from runs of different plans.
    """
    info = read_run_info(folder)
    if info.origin != "measured":
        what = f"{folder} is {info.origin}"
        if info.source:
            what += f" from {info.source}"
        raise StoreError("resume", what, "a run that `quantbench sweep` measured")
    if "merged" in info.options:
        raise StoreError(
            "resume", f"{folder} was merged from runs of different plans", "a run of one plan"
        )
    if "dims" not in info.options:
        raise StoreError(
            "resume", f"{folder} was not made by `quantbench sweep`", "a run that it measured"
        )
    return replace(options_from_json(info.options), budget_s=budget_s)


def records_to_keep(run: Run) -> tuple[Record, ...]:
    """Returns the records of a run that a resumed sweep keeps.

    The record of a point that has failed once is not kept, so that the point is measured again. The
    record of a point that has failed twice is kept.
    """

    def keep(record: Record) -> bool:
        failed = record.role == "point" and isinstance(record.outcome, Failed)
        return not failed or record.key in run.retried

    return tuple(filter(keep, run.records))


def first_reference(records: tuple[Record, ...], plan: Plan) -> Measurement | None:
    """Returns the first measurement of the plan's reference point; None if there is none."""
    if plan.reference is None:
        return None
    for record in records:
        is_reference = record.role == "reference" and record.key == plan.reference.key
        if is_reference and isinstance(record.outcome, Measured):
            return record.outcome.measurement
    return None
