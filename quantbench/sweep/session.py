"""A whole sweep from the outside: options to plan, plan to folder, folder to a finished run; and resuming one."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from quantbench.device import default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError
from quantbench.providers.catalog import expand
from quantbench.stats import median
from quantbench.store.codec import build
from quantbench.store.folder import RunWriter
from quantbench.store.record import Measured, Record
from quantbench.store.run import RunInfo, read_run_info
from quantbench.sweep.axes import Axis, parse_axis
from quantbench.sweep.child import Asked
from quantbench.sweep.edges import with_edges
from quantbench.sweep.plan import Plan, build_plan
from quantbench.sweep.runner import Finished, Progress, Sweep
from quantbench.sweep.shapes import DEFAULT_VALUES, Held, check_axes, with_defaults
from quantbench.timing.options import TimingOptions

Connect = Callable[[], Asked]

#: variables of the environment that change what is measured; kept in run.json
ENVIRONMENT = (
    "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTORCH_CUDA_ALLOC_CONF", "QUANTBENCH_DEVICE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET",
)  # fmt: skip


@dataclass(frozen=True)
class SweepOptions:
    """Everything that was asked for; with the device it makes the plan, the same one each time.

    dims: texts as given, `hidden` or `hidden=1024:4096`. budget_s: seconds for the whole sweep; None for no bound.
    limit_s: seconds after which a point counts as hanging; None for a limit from its estimate.
    """

    dims: tuple[str, ...]
    held: Held = field(default_factory=Held)
    providers: tuple[str, ...] = ("torch",)
    timing: TimingOptions = field(default_factory=TimingOptions)
    skip_impossible: bool = False
    budget_s: float | None = None
    limit_s: float | None = None


def options_to_json(options: SweepOptions) -> dict[str, Any]:
    """The options as run.json keeps them."""
    return asdict(options)


def options_from_json(data: object) -> SweepOptions:
    """What `options_to_json` wrote."""
    if not isinstance(data, dict):
        raise InputError("options", repr(data)[:80], "a JSON object")
    values = dict(data)
    values["held"] = build(Held, values.get("held"), tuples=("ops",))
    values["timing"] = build(TimingOptions, values.get("timing"))
    return build(SweepOptions, values, tuples=("dims", "providers"))


def plan_sweep(options: SweepOptions, spec: DeviceSpec) -> tuple[tuple[Axis, ...], Plan]:
    """Axes with their edges, and the plan, for a device."""
    held = with_defaults(options.held, spec.kind, default_dtype(spec))
    defaulted = []
    axes = []
    for text in options.dims:
        dim, given, values = text.partition("=")
        if not given and dim in DEFAULT_VALUES[spec.kind]:
            values = DEFAULT_VALUES[spec.kind][dim]
            defaulted.append(dim)
        axes.append(parse_axis(f"{dim}={values}"))
    check_axes(tuple(axes))
    edged = with_edges(tuple(axes), held, spec)
    plan = build_plan(
        edged,
        held,
        expand(options.providers),
        options.timing,
        spec,
        # A range that nobody typed, or that edges were added to, may hold sizes that cannot be; a typed one may not.
        skip_impossible=options.skip_impossible or bool(defaulted) or any(axis.edges for axis in axes),
        budget_s=options.budget_s,
    )
    return edged, plan


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
            info = RunInfo(
                run_id=new_run_id(axes, datetime.now(UTC), results / device.name),
                device=device,
                state=worker.hello.state,
                software=worker.hello.software,
                axes={axis.dim: list(axis.values) for axis in axes},
                options=options_to_json(options),
                seed=options.timing.seed,
                environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                started=now_text(),
            )
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
    def done(self) -> frozenset[str]:
        """Keys of the points that the folder already holds."""
        return frozenset(record.key for record in self._records if record.role == "point")

    def run(self, on_progress: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic) -> Finished:
        """Measure what is missing; run.json says how it ended, also after Ctrl-C (which is raised on)."""
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


def new_run_id(axes: tuple[Axis, ...], now: datetime, folder: Path) -> str:
    """`2026-11-20T134500-hidden`, with a number behind it while the folder has one of that name.

    >>> from datetime import datetime
    >>> new_run_id((Axis("tp", (1, 2)),), datetime(2026, 11, 20, 13, 45), Path("/nonexistent"))
    '2026-11-20T134500-tp'
    """
    base = f"{now:%Y-%m-%dT%H%M%S}-" + "-".join(axis.dim for axis in axes)
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return next(name for name in names if not (folder / name).exists())


def now_text() -> str:
    """The time as run.json keeps it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _first_reference_us(records: tuple[Record, ...]) -> float | None:
    for record in records:
        if record.role == "reference" and isinstance(record.outcome, Measured):
            return median(record.outcome.measurement.samples_us)
    return None
