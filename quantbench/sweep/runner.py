"""The loop of a sweep: ask for each missing point, grade it, write it down, keep an eye on drift and time.

Everything it touches is injected (workers, writer, clock, progress), so that resuming, drift, crashes and budgets are
tested with literals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError
from quantbench.stats import median
from quantbench.store.record import Failed, Measured, Outcome, Record, Skipped
from quantbench.sweep import naming
from quantbench.sweep.child import Asked, WorkerLostError
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.plan import REFERENCE_EVERY, Plan, PlanPoint
from quantbench.timing.grade import NO_CHECK, grade
from quantbench.timing.options import TimingOptions

# A point may take this many times its estimate, and never less than the floor, before its worker counts as hanging.
_LIMIT_FACTOR = 20
_LIMIT_FLOOR_S = 60.0
# A worker that cannot even start this often in a row will not start at all.
_MAX_LOST_IN_A_ROW = 5


class Writer(Protocol):
    """Where records go."""

    def append(self, record: Record) -> None:
        """Keep one record for good."""


@dataclass
class Progress:
    """How far a sweep is; handed to `on_progress` after each point and a few times a second in between."""

    total: int
    done: int = 0
    current: str = ""
    elapsed_s: float = 0.0
    left_s: float | None = None
    measured: int = 0
    skipped: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Finished:
    """How a sweep ended: `complete`, `budget` (time ran out) or `failed` (no worker would run any more: `reason`)."""

    how: str
    reason: str = ""


#: From all records of the run so far to the points to measure next; nothing ends the sweep. Bisecting to an edge and
#: choosing what a model is least sure of are both such a function.
More = Callable[[Sequence[Record]], Sequence[PlanPoint]]


@dataclass
class Sweep:
    """One pass over the points of a plan that are not in `done` yet, and then over those that `more` asks for.

    records: what the run held before, for `more`; the records of this pass are added to them. interpreter: triton's
    kernels run in its interpreter, so that their times are no kernel's. more_references: measured beside the plan's
    reference at the beginning and at the end, to compare this device with others.
    """

    plan: Plan
    run_id: str
    spec: DeviceSpec
    timing: TimingOptions
    done: frozenset[str]
    connect: Callable[[], Asked]
    writer: Writer
    clock: Callable[[], float]
    on_progress: Callable[[Progress], None] = lambda progress: None
    budget_s: float | None = None
    limit_s: float | None = None
    first_reference_us: float | None = None
    more: More | None = None
    records: list[Record] = field(default_factory=list)
    interpreter: bool = False
    more_references: tuple[PlanPoint, ...] = ()
    phases_s: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._todo = [point for point in self.plan.points if point.key not in self.done]
        self._start_s = self.clock()
        self._progress = Progress(total=len(self._todo))
        self._worker: Asked | None = None
        self._lost_in_a_row = 0
        self._last_reference_us = self.first_reference_us

    def run(self) -> Finished:
        """Measure what is missing. The worker is ended however this ends, Ctrl-C included."""
        try:
            for number, point in enumerate(self._points()):
                if self.budget_s is not None and number and self._elapsed_s() > self.budget_s:
                    return self._finished("budget")
                if self.plan.reference is not None and number % REFERENCE_EVERY == 0:
                    self._repeat_reference(self.plan.reference)
                if number == 0:
                    self._measure_more_references()
                self._measure(point)
                if self._lost_in_a_row >= _MAX_LOST_IN_A_ROW:
                    reason = f"{_MAX_LOST_IN_A_ROW} workers in a row were lost"
                    return self._finished("failed", reason)
            if self.plan.reference is not None and self._todo:
                self._repeat_reference(self.plan.reference)
                self._measure_more_references()
            return self._finished("complete")
        finally:
            self._end_worker()

    def _points(self) -> Iterator[PlanPoint]:
        """The plan's points, then those asked for in the light of what was measured; never one twice."""
        yield from self._todo
        seen = {point.key for point in self._todo} | self.done
        while self.more is not None:
            fresh = [point for point in self.more(self.records) if point.key not in seen]
            if not fresh:
                return
            seen |= {point.key for point in fresh}
            self._todo += fresh
            self._progress.total += len(fresh)
            yield from fresh

    def _measure(self, point: PlanPoint) -> None:
        self._progress.current = f"{point.provider} {point.workload}"
        self._tick()
        reply = self._ask(point)
        outcome = self._outcome(reply, point)
        self._append(point, outcome, reply, role="point")
        self._count(outcome)
        self._progress.done += 1
        self._tick()

    def _repeat_reference(self, point: PlanPoint) -> None:
        """Measure the reference point again; its ratio to the first time is the drift that points are graded by."""
        self._progress.current = f"reference {point.workload}"
        reply = self._ask(point)
        if reply.measurement is not None:
            self._last_reference_us = median(reply.measurement.samples_us)
            self.first_reference_us = self.first_reference_us or self._last_reference_us
        self._append(point, self._outcome(reply, point), reply, role="reference")

    def _measure_more_references(self) -> None:
        for point in self.more_references:
            self._progress.current = f"reference {point.workload}"
            reply = self._ask(point)
            self._append(point, self._outcome(reply, point), reply, role="reference")

    def _ask(self, point: PlanPoint) -> Reply:
        request = Request(point.workload, point.provider)
        limit_s = self.limit_s or max(_LIMIT_FLOOR_S, _LIMIT_FACTOR * point.estimate_s)
        if self.spec.kind == "cuda":
            limit_s += naming.LIMIT_S
        try:
            if self._worker is None:
                self._worker = self.connect()
            reply = self._worker.ask(request, limit_s, self._tick)
        except WorkerLostError as lost:
            self._end_worker()
            self._lost_in_a_row += 1
            return Reply(failed=(lost.kind, lost.message))
        except MeasurementError as refused:  # no device to start a worker on
            self._lost_in_a_row = _MAX_LOST_IN_A_ROW
            return Reply(failed=("error", str(refused)))
        self._lost_in_a_row = 0
        if reply.broken:
            self._end_worker()
        self.phases_s.update(reply.phases_s)
        return reply

    def _outcome(self, reply: Reply, point: PlanPoint) -> Outcome:
        if reply.measurement is not None:
            drift_ratio = None
            if self.first_reference_us is not None and self._last_reference_us is not None:
                drift_ratio = self._last_reference_us / self.first_reference_us
            work = point.workload
            verdict = grade(
                reply.measurement,
                flops=work.flops,
                min_bytes=work.min_bytes,
                spec=self.spec,
                dtype=work.dtype,
                drift_ratio=drift_ratio,
                options=self.timing,
                interpreted=self.interpreter and point.provider.startswith("triton."),
                unchecked="" if reply.checked else NO_CHECK,
            )
            return Measured(reply.measurement, verdict)
        if reply.skipped is not None:
            return Skipped(reply.skipped)
        kind, message = reply.failed or ("error", "the worker gave no outcome")
        return Failed(kind, message)

    def _append(self, point: PlanPoint, outcome: Outcome, reply: Reply, *, role: str) -> None:
        record = Record(
            run_id=self.run_id,
            key=point.key,
            workload=point.workload,
            provider=point.provider,
            outcome=outcome,
            launch=reply.launch,
            check=reply.checked,
            places=point.places if role == "point" else (),
            role=role,
            elapsed_s=self._elapsed_s(),
        )
        self.writer.append(record)
        self.records.append(record)

    def _count(self, outcome: Outcome) -> None:
        progress = self._progress
        progress.measured += isinstance(outcome, Measured)
        progress.skipped += isinstance(outcome, Skipped)
        progress.failed += isinstance(outcome, Failed)

    def _tick(self) -> None:
        """Tell how far it is; the time left is the estimate of what remains, scaled by how the estimates did so far."""
        progress = self._progress
        progress.elapsed_s = self._elapsed_s()
        done_s = sum(point.estimate_s for point in self._todo[: progress.done])
        left_s = sum(point.estimate_s for point in self._todo[progress.done :])
        if done_s > 0:
            left_s *= progress.elapsed_s / done_s
        if self.budget_s is not None:
            left_s = min(left_s, max(0.0, self.budget_s - progress.elapsed_s))
        progress.left_s = left_s
        self.on_progress(progress)

    def _elapsed_s(self) -> float:
        return self.clock() - self._start_s

    def _finished(self, how: str, reason: str = "") -> Finished:
        return Finished(how, reason)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
