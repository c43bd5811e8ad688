"""One run of a cluster sweep: all devices of one kind work off one plan into one folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median_low
from threading import RLock

from quantbench.cluster.cards import reference_set
from quantbench.cluster.members import ClusterWorker, DeviceLostError
from quantbench.cluster.queue import PointQueue
from quantbench.device.spec import DeviceSpec
from quantbench.stats import median
from quantbench.store.folder import RunWriter
from quantbench.store.record import Failed, Measured, Record
from quantbench.sweep.child import Asked
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import Plan, PlanPoint
from quantbench.sweep.runner import Finished, More, Progress, Sweep

# Failures after which a point is tried once more, on another device: they may be the device's doing.
_TRIED_ELSEWHERE = ("crash", "timeout")
# How often a device that has nothing to do looks again whether another one was lost.
_IDLE_S = 0.2


@dataclass
class Lane:
    """A run, the points that are left of it, and what its devices have in common.

    clock: seconds, of any origin. budget_s: wall seconds for all; None for no bound. expected_members: devices there
    were when the plan was laid out; members: those that measured.
    """

    spec: DeviceSpec
    options: SweepOptions
    plan: Plan
    writer: RunWriter
    clock: Callable[[], float]
    pause: Callable[[float], None]
    budget_s: float | None = None
    more: More | None = None
    records: tuple[Record, ...] = ()
    phases_s: Counter[str] = field(default_factory=Counter)
    expected_members: int = 1
    endings: list[Finished] = field(default_factory=list)
    members: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        done = {record.key for record in self.records if record.role == "point"}
        todo = [point for point in self.plan.points if point.key not in done]
        self.queue = PointQueue(todo, self.writer.append, records=self.records, more=self.more)
        self._start_s = self.clock()
        self._lock = RLock()
        self._first_reference_us: dict[str, float] = {}
        for record in self.records:
            self._note_reference(record)

    @property
    def finished(self) -> Finished:
        """How it ended, once no device works on it any more."""
        if not self.queue.left:
            return Finished("budget" if self.plan.left_out else "complete")
        if any(ending.how == "budget" for ending in self.endings):
            return Finished("budget")
        return Finished("failed", f"{self.queue.left} points are left, and no device to measure them")

    def measure(self, worker: ClusterWorker, tick: Callable[[], None]) -> Finished:
        """Measure on this device until nothing is left for it. Raises DeviceLostError; what it had in hand is then
        given to another one. tick: called a few times a second; what it raises ends the device's part."""
        label = worker.label
        self.members.add(label)
        self.queue.join(label)
        # A worker that died is replaced beside the device; asking it again is all that is needed here.
        connected = _Kept(worker)

        def following() -> tuple[PlanPoint, ...]:
            # Drift is told against the usual card, so that a slow card's points are trusted less.
            sweep.first_reference_us = self._usual_reference_us()
            return self._next(label, tick)

        sweep = Sweep(
            plan=Plan((), self.plan.reference),
            run_id=self.writer.info.run_id,
            spec=self.spec,
            timing=self.options.timing,
            done=frozenset(),
            connect=lambda: connected,
            writer=_Part(self, label),
            clock=self.clock,
            on_progress=lambda progress: tick(),
            budget_s=None if self.budget_s is None else self.budget_s - (self.clock() - self._start_s),
            limit_s=self.options.limit_s,
            more=lambda records: following(),
            interpreter=self.writer.info.environment.get("TRITON_INTERPRET") == "1",
            more_references=reference_set(self.plan),
        )
        try:
            ending = sweep.run()
        except DeviceLostError:
            self.queue.lost(label, lambda point: self._took_devices_with_it(point, label))
            raise
        finally:
            with self._lock:
                self.phases_s.update(sweep.phases_s)
        self.queue.leave(label)
        with self._lock:
            self.endings.append(ending)
        return ending

    def progress(self) -> Progress:
        """How far the run is, over all of its devices."""
        queue = self.queue
        elapsed_s = self.clock() - self._start_s
        counts = Counter(type(r.outcome).__name__ for r in queue.records[len(self.records) :] if r.role == "point")
        left_s = elapsed_s / queue.settled * queue.left if queue.settled else None
        if left_s is not None and self.budget_s is not None:
            left_s = min(left_s, max(0.0, self.budget_s - elapsed_s))
        return Progress(
            total=queue.total, done=queue.settled, current=f"{len(self.members)} devices", elapsed_s=elapsed_s,
            left_s=left_s, measured=counts["Measured"], skipped=counts["Skipped"], failed=counts["Failed"],
        )  # fmt: skip

    def keep(self, record: Record, label: str) -> None:
        """Take in a record of this device: who made it, and when by the run's clock."""
        record = replace(record, source=label, elapsed_s=self.clock() - self._start_s)
        if record.role == "reference":
            self.queue.note(record)
            self._note_reference(record)
            return
        lost = isinstance(record.outcome, Failed) and record.outcome.kind in _TRIED_ELSEWHERE
        self.queue.settle(label, record, elsewhere=lost)

    def _note_reference(self, record: Record) -> None:
        reference = self.plan.reference
        if reference is None or (record.role, record.key) != ("reference", reference.key):
            return
        if isinstance(record.outcome, Measured):
            with self._lock:
                self._first_reference_us.setdefault(record.source, median(record.outcome.measurement.samples_us))

    def _next(self, label: str, tick: Callable[[], None]) -> tuple[PlanPoint, ...]:
        """The next point for this device. While others still have points in hand it waits: one of them may be lost."""
        while (point := self.queue.take(label)) is None:
            if not self.queue.left or self._out_of_time():
                return ()
            tick()
            self.pause(_IDLE_S)
        return (point,)

    def _out_of_time(self) -> bool:
        return self.budget_s is not None and self.clock() - self._start_s > self.budget_s

    def _usual_reference_us(self) -> float | None:
        """The reference's first time on the usual one of the devices that have measured it; None before that."""
        with self._lock:
            return median_low(self._first_reference_us.values()) if self._first_reference_us else None

    def _took_devices_with_it(self, point: PlanPoint, label: str) -> Record:
        return Record(
            run_id=self.writer.info.run_id, key=point.key, workload=point.workload, provider=point.provider,
            outcome=Failed("crash", "its device was lost each time it was tried"), places=point.places,
            source=label, elapsed_s=self.clock() - self._start_s,
        )  # fmt: skip


@dataclass
class _Part:
    """Where one device's sweep writes."""

    lane: Lane
    label: str

    def append(self, record: Record) -> None:
        self.lane.keep(record, self.label)


class _Kept:
    """A worker that outlives the sweep's wish to end it."""

    def __init__(self, worker: Asked) -> None:
        self._worker = worker
        self.hello = worker.hello

    def begin(self, timing: object) -> None:
        """Done already, by whoever connected."""

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        return self._worker.ask(request, limit_s, tick)

    def close(self) -> None:
        """Its host ends it."""
