"""Runs the loop of a sweep: measures each missing point in a worker and stores a graded record.

The entry point is `Sweep.run`. The loop repeats the reference point to measure drift, and it keeps
to the time budget. Workers, writer, clock and progress are injected, so that tests of resuming,
drift, crashes and budgets need no device.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError
from quantbench.measurement import GRADES, Grade, Measurement
from quantbench.stats import median
from quantbench.store.record import Failed, Measured, Outcome, Record, Skipped
from quantbench.sweep import naming
from quantbench.sweep.child import WorkerClient, WorkerLostError
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.plan import Group, Plan, PlanPoint
from quantbench.timing.grade import NO_CHECK, Drift, drift_of, grade
from quantbench.timing.options import TimingOptions
from quantbench.workload import Workload

# A worker counts as hanging after _LIMIT_FACTOR times the point's estimated time, but not before
# _LIMIT_FLOOR_S seconds.
_LIMIT_FACTOR = 20
_LIMIT_FLOOR_S = 60.0
# The sweep fails if this many points in a row lose their worker (crash or timeout).
_MAX_LOST_IN_A_ROW = 5
# Multiple of the budget at which the point in progress is stopped. It remains for --resume.
_HARD_STOP = 1.2
# Fraction of the budget for the plan's groups if `Sweep.more` adds points after them.
_PLAN_BUDGET_FRACTION = 0.6
# Limit on the time to identify a kernel, as a fraction of the time for warm-up and sampling. If the
# median over the points so far exceeds the limit, only kernels of points with `PlanPoint.named` are
# identified.
_MAX_NAMING_FRACTION = 0.5
# Minimum number of points for this median. The first point also starts the profiler.
_NAMING_POINTS = 5
# Time in s added to both the elapsed and the estimated time, so that their ratio, the pace, starts
# near 1.
_ESTIMATE_WEIGHS_S = 0.1


@dataclass
class Progress:
    """Progress of a sweep, for the callback `on_progress`.

    The callback is called before and after each point, and a few times a second in between.

    total: number of points to measure.
    done: number of these points with an outcome.
    current: provider and workload of the point in progress.
    elapsed_s: time so far, in s.
    left_s: expected time left, in s; None before the first estimate.
    measured, skipped, failed: number of points by outcome.
    """

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
    """How a sweep ended.

    how: `complete` (no point of the plan is missing), `budget` (the time ran out) or `failed` (a
        worker cannot use the device, or too many workers in a row were lost).
    reason: why the sweep failed; "" if it did not fail.
    """

    how: str
    reason: str = ""


#: function that returns the points to measure next from all records of the run so far, such as
#: `refine.Refine`. When it returns no new points, the sweep continues with the rest of its plan.
NextPoints = Callable[[Sequence[Record]], Sequence[PlanPoint]]


class _OutOfTimeError(Exception):
    """The time budget is spent."""


class _NoWorkerError(Exception):
    """A worker cannot use the device, or too many workers in a row were lost."""


@dataclass(frozen=True)
class SweepJob:
    """Points for a sweep to measure on one device, with its time limits.

    done: keys of points that are already measured; the sweep measures the other points of the plan.
    budget_s: wall time for the sweep, in s; None for no limit. The time starts with the worker's
        first reply, so that the start of the worker is not counted. A group runs if it is expected
        to end in time. At least one group runs. At 1.2 times the budget, the point in progress is
        stopped.
    limit_s: time after which a point counts as hanging, in s; None to derive it from the point's
        estimate.
    first_reference: first measurement of the reference point in a resumed run; None in a new run.
    interpreter: whether Triton kernels run in Triton's interpreter, which makes their times
        meaningless.
    more_references: further reference points, which are measured only at the start and the end.
        They serve to compare devices.
    """

    plan: Plan
    run_id: str
    spec: DeviceSpec
    timing: TimingOptions
    done: frozenset[str] = frozenset()
    budget_s: float | None = None
    limit_s: float | None = None
    first_reference: Measurement | None = None
    interpreter: bool = False
    more_references: tuple[PlanPoint, ...] = ()


@dataclass
class Sweep:
    """Runs a job: first the plan, then the points that `more` returns, then the rest of the plan.

    If `more` is given, the plan may use only 60 % of the budget before the points from `more`.

    connect: function that starts a worker.
    append: function that stores a record. The record of a point may be stored again with a lower
        grade.
    clock: function that returns the time, in s.
    more: function that returns further points to measure from all records so far.
    records: records of the run so far. The sweep appends its records to this list.
    phases_s: total duration of each phase in s, by phase name.
    """

    job: SweepJob
    connect: Callable[[], WorkerClient]
    append: Callable[[Record], None]
    clock: Callable[[], float]
    on_progress: Callable[[Progress], None] = lambda progress: None
    more: NextPoints | None = None
    records: list[Record] = field(default_factory=list)
    phases_s: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._start_s = self.clock()
        self._ready = False
        self._seen = set(self.job.done)
        self._progress = Progress(total=0)
        self._set_remaining(self.job.plan.points)
        self._expected_s = 0.0  # sum of the estimates of what was measured
        self._begun = False
        self._worker: WorkerClient | None = None
        self._lost_in_a_row = 0
        self._naming_fractions: list[float] = []
        self._first_reference = self.job.first_reference
        self._drift: Drift | None = None
        # Indices in `records` of the points since the last measurement of the reference point.
        self._since_reference: list[int] = []

    def run(self) -> Finished:
        """Measures the missing points. Always ends the worker, even after Ctrl-C."""
        left_over = False
        try:
            for group in self._groups():
                for point in group.points:
                    if point.key not in self._seen:
                        self._measure(point)
            left_over = bool(self._missing())
            if self._progress.done and not left_over:
                self._measure_references()
        except _OutOfTimeError:
            left_over = True
        except _NoWorkerError as error:
            return Finished("failed", str(error))
        finally:
            self._end_worker()
        return Finished("budget" if left_over else "complete")

    def _groups(self) -> Iterator[Group]:
        """Yields the plan's groups, then each point from `more` as a group.

        The rest of the plan follows if time is left.
        """
        yield from self._in_time(1.0 if self.more is None else _PLAN_BUDGET_FRACTION)
        if self.more is None:
            return
        while fresh := [point for point in self.more(self.records) if point.key not in self._seen]:
            self._set_remaining(fresh)
            for point in fresh:
                self._begin()
                if self._expected_in_s((point,)) > self._left_s():
                    raise _OutOfTimeError
                yield Group((point,))
        yield from self._in_time(1.0)

    def _in_time(self, share: float) -> Iterator[Group]:
        """Yields the missing groups of the plan that fit into a fraction of the budget.

        A group that does not fit is skipped, and a later, shorter group may still be yielded. The
        sweep's first group is always yielded, so that at least one group runs.

        share: fraction of the budget, 0 to 1.
        """
        for group in self._missing():
            self._begin()
            if not self._progress.done or self._expected_in_s(group.points) <= self._left_s(share):
                yield group

    def _expected_in_s(self, points: Sequence[PlanPoint]) -> float:
        """Returns the expected time for the given points that are not measured yet, in s.

        The expected time is the sum of these points' estimates, multiplied by the pace.
        """
        estimate_s = sum(point.estimate_s for point in points if point.key not in self._seen)
        return estimate_s * self._pace

    @property
    def _pace(self) -> float:
        """Ratio of elapsed to estimated time for the points measured so far."""
        return (_ESTIMATE_WEIGHS_S + self._elapsed_s()) / (_ESTIMATE_WEIGHS_S + self._expected_s)

    def _missing(self) -> list[Group]:
        """Returns the groups of the plan that have a missing point, in the plan's order."""
        plan = self.job.plan.without(self._seen)
        return [*plan.groups, *plan.left_out]

    def _set_remaining(self, points: Sequence[PlanPoint]) -> None:
        """Sets the remaining points in the progress: the points that are not measured yet."""
        ahead = {point.key: point.estimate_s for point in points if point.key not in self._seen}
        self._remaining_s = sum(ahead.values())
        self._progress.total = self._progress.done + len(ahead)

    def _begin(self) -> None:
        """Measures the reference points once, before the first point. Their times set the pace."""
        if not self._begun:
            self._begun = True
            self._measure_references()

    def _measure_references(self) -> None:
        """Measures the plan's reference point and `more_references`."""
        for point in filter(None, (self.job.plan.reference, *self.job.more_references)):
            self._measure_reference(point)

    def _measure(self, point: PlanPoint) -> None:
        """Measures one point, stores its record and updates the progress.

        Repeats the reference point first if it is due.
        """
        done = self._progress.done
        reference = self.job.plan.reference
        if reference is not None and done and done % self.job.plan.reference_every == 0:
            self._measure_reference(reference)
        self._progress.current = f"{point.provider} {point.workload}"
        self._tick()
        shares = self._naming_fractions
        naming_takes_long = len(shares) >= _NAMING_POINTS and median(shares) > _MAX_NAMING_FRACTION
        reply = self._ask(point, name=point.named or not naming_takes_long)
        outcome = self._outcome(reply, point)
        self._append(point, outcome, reply, role="point")
        self._seen.add(point.key)
        progress = self._progress
        progress.measured += isinstance(outcome, Measured)
        progress.skipped += isinstance(outcome, Skipped)
        progress.failed += isinstance(outcome, Failed)
        progress.done += 1
        progress.total = max(progress.total, progress.done)
        self._remaining_s = max(0.0, self._remaining_s - point.estimate_s)
        self._tick()
        if self._lost_in_a_row >= _MAX_LOST_IN_A_ROW:
            assert isinstance(outcome, Failed)
            lost = f"{_MAX_LOST_IN_A_ROW} workers in a row were lost"
            raise _NoWorkerError(f"{lost}, the last {outcome.message}")

    def _measure_reference(self, point: PlanPoint) -> None:
        """Measures a reference point.

        If it is the plan's reference point, the change since its first measurement becomes the
        drift that grades use.
        """
        self._progress.current = f"reference {point.workload}"
        reply = self._ask(point)
        if reply.measurement is not None and point is self.job.plan.reference:
            self._first_reference = self._first_reference or reply.measurement
            self._drift = drift_of(self._first_reference, reply.measurement)
            self._grade_again()
        self._append(point, self._outcome(reply, point), reply, role="reference")

    def _grade_again(self) -> None:
        """Lowers the grades of points since the last reference measurement if there is drift."""
        if self._drift is not None and self._drift.off:
            for index in self._since_reference:
                self._lower_grade(index)
        self._since_reference.clear()

    def _lower_grade(self, index: int) -> None:
        """Grades a record again with the current drift, and stores it if the grade is lower."""
        record = self.records[index]
        if not isinstance(record.outcome, Measured):
            return
        measurement = record.outcome.measurement
        checked = record.check is not None
        lower = self._grade(measurement, record.workload, record.provider, checked=checked)
        if GRADES.index(lower.letter) > GRADES.index(record.outcome.grade.letter):
            self.records[index] = replace(record, outcome=Measured(measurement, lower))
            self.append(self.records[index])

    def _ask(self, point: PlanPoint, *, name: bool = False) -> Reply:
        """Sends a point to the worker and returns the reply.

        Starts a worker if none is running.

        name: whether to identify the kernel.
        """
        # The kernel of the first request is always identified, which also starts the profiler. The
        # budget's time starts only after that request.
        request = Request(point.workload, point.provider, name or not self._ready)
        limit_s = self.job.limit_s or max(_LIMIT_FLOOR_S, _LIMIT_FACTOR * point.estimate_s)
        if self.job.spec.kind == "cuda":
            limit_s += naming.LIMIT_S
        until_hard_stop_s = limit_s
        if self.job.budget_s is not None and self._ready:
            until_hard_stop_s = _HARD_STOP * self.job.budget_s - self._elapsed_s()
        if until_hard_stop_s <= 0:
            raise _OutOfTimeError
        try:
            if self._worker is None:
                self._worker = self.connect()
            reply = self._worker.ask(request, min(limit_s, until_hard_stop_s), self._tick)
        except WorkerLostError as lost:
            self._end_worker()
            if lost.kind == "timeout" and until_hard_stop_s < limit_s:
                raise _OutOfTimeError from None  # the point has no outcome and is left for --resume
            self._lost_in_a_row += 1
            return Reply(failed=(lost.kind, lost.message))
        # The worker cannot use the device, whatever the point, so the sweep ends.
        except MeasurementError as refused:
            raise _NoWorkerError(str(refused)) from None
        self._lost_in_a_row = 0
        if self._ready:
            self._expected_s += point.estimate_s
        else:
            self._ready = True
            self._start_s = self.clock()
        if reply.broken:
            self._end_worker()
        self.phases_s.update(reply.phases_s)
        if "identify" in reply.phases_s:
            timing_s = reply.phases_s.get("warm-up", 0.0) + reply.phases_s.get("measuring", 0.0)
            self._naming_fractions.append(reply.phases_s["identify"] / max(timing_s, 1e-9))
        return reply

    def _outcome(self, reply: Reply, point: PlanPoint) -> Outcome:
        """Converts a worker's reply to the outcome of a point, graded if it was measured."""
        if reply.measurement is not None:
            measured = reply.measurement
            checked = reply.checked is not None
            verdict = self._grade(measured, point.workload, point.provider, checked=checked)
            return Measured(measured, verdict)
        if reply.skipped is not None:
            return Skipped(reply.skipped)
        kind, message = reply.failed or ("error", "the worker gave no outcome")
        return Failed(kind, message)

    def _grade(
        self, measurement: Measurement, work: Workload, provider: str, *, checked: bool
    ) -> Grade:
        """Grades a measurement with the current drift."""
        return grade(
            measurement,
            flops=work.flops,
            min_bytes=work.min_bytes,
            spec=self.job.spec,
            dtype=work.dtype,
            drift=self._drift,
            options=self.job.timing,
            unchecked="" if checked else NO_CHECK,
            interpreted=self.job.interpreter and not provider.startswith("torch."),
        )

    def _append(self, point: PlanPoint, outcome: Outcome, reply: Reply, *, role: str) -> None:
        """Stores the record of a point or reference point.

        role: `point` or `reference`.
        """
        record = Record(
            run_id=self.job.run_id,
            key=point.key,
            workload=point.workload,
            provider=point.provider,
            outcome=outcome,
            launch=reply.launch,
            check=reply.checked,
            places=point.places if role == "point" else (),
            role=role,
            elapsed_s=self._elapsed_s(),
            phases_s=reply.phases_s,
        )
        self.append(record)
        if role == "point":
            self._since_reference.append(len(self.records))
        self.records.append(record)

    def _tick(self) -> None:
        """Reports the progress.

        The time left is the estimated time of the remaining points and of their reference
        repetitions, multiplied by the pace, and at most what is left of the budget.
        """
        progress = self._progress
        reference = self.job.plan.reference
        rest_s = self._remaining_s
        if reference is not None:
            left = progress.total - progress.done
            rest_s += reference.estimate_s * left / self.job.plan.reference_every
        progress.elapsed_s = self._elapsed_s()
        progress.left_s = min(self._pace * rest_s, max(0.0, self._left_s()))
        self.on_progress(progress)

    def _elapsed_s(self) -> float:
        """Returns the time since the worker's first reply, in s."""
        return self.clock() - self._start_s

    def _left_s(self, share: float = 1.0) -> float:
        """Returns the time until the fraction `share` of the budget is spent, in s."""
        return inf if self.job.budget_s is None else share * self.job.budget_s - self._elapsed_s()

    def _end_worker(self) -> None:
        """Ends the worker, if one is running. The next point starts a new worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
