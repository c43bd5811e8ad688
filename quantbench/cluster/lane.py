"""One run of a cluster sweep: all devices of one kind measure one plan into one folder.

`Lane` runs each device's part in that device's thread; its `PointQueue` gives out every point once, and again after
its device or worker was lost. `Host` and `ClusterWorker` are what a cluster must provide (`ray_pool` does, and tests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median_low
from threading import RLock
from typing import Protocol

from quantbench.cluster.cards import reference_set
from quantbench.device.spec import DeviceSpec
from quantbench.errors import QuantbenchError
from quantbench.stats import median
from quantbench.store.folder import RunWriter
from quantbench.store.record import Failed, Measured, Record
from quantbench.sweep.child import Asked
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import Plan, PlanPoint
from quantbench.sweep.runner import Finished, More, Progress, Sweep

# Failures after which a point is tried once more, on another device: the device may be their cause.
_TRIED_ELSEWHERE = ("crash", "timeout")
# A point whose device was lost this often is the likelier cause of it.
_MOST_DEVICES_LOST = 3
# How often a device that has nothing to do looks again whether another one was lost.
_IDLE_S = 0.2

Tick = Callable[[], None]


class DeviceLostError(QuantbenchError):
    """A device no longer answers: its node, its process or its driver is gone. Its current point is not to blame."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__("cluster", f"{who} was lost ({reason})", "a device that answers")
        self.who = who
        self.reason = reason


class ClusterWorker(Asked, Protocol):
    """The worker process of one device. label: `GPU 5 on node3`, shown and stored in the records it makes."""

    label: str


class Host(Protocol):
    """One device of the cluster. name: which it is, before it has answered."""

    name: str

    def connect(self, tick: Tick) -> ClusterWorker:
        """Start its worker, again after it was lost. `tick` is called while waiting. Raises DeviceLostError."""


@dataclass
class _Waiting:
    """A point without a final record. tried: devices whose worker it ended. failed: its last record."""

    point: PlanPoint
    tried: set[str] = field(default_factory=set)
    failed: Record | None = None
    devices_lost: int = 0


class PointQueue:
    """The points of a plan that are still to be measured, shared by the threads of the devices that have joined.

    keep: stores a final record.
    records: what was measured before.
    more: asks for points beyond the plan when all of it is measured.
    """

    def __init__(
        self,
        points: Sequence[PlanPoint],
        keep: Callable[[Record], None],
        *,
        records: Sequence[Record] = (),
        more: More | None = None,
    ) -> None:
        self.records = list(records)
        self.total = len(points)
        self.settled = 0
        self._keep = keep
        self._more = more
        self._waiting = [_Waiting(point) for point in points]
        self._in_flight: dict[str, _Waiting] = {}
        self._members: set[str] = set()
        self._seen = {point.key for point in points} | {r.key for r in self.records if r.role == "point"}
        self._lock = RLock()

    @property
    def left(self) -> int:
        """Points without a final record."""
        with self._lock:
            return len(self._waiting) + len(self._in_flight)

    def join(self, member: str) -> None:
        """A device that will take points."""
        with self._lock:
            self._members.add(member)

    def take(self, member: str) -> PlanPoint | None:
        """A point for this device, one that its worker has not been lost to; None where there is none for it now."""
        with self._lock:
            if not self._waiting and not self._in_flight and self._more is not None:
                fresh = [point for point in self._more(self.records) if point.key not in self._seen]
                self._seen |= {point.key for point in fresh}
                self._waiting = [_Waiting(point) for point in fresh]
                self.total += len(fresh)
            found = next((one for one in self._waiting if member not in one.tried), None)
            if found is None:
                return None
            self._waiting.remove(found)
            self._in_flight[member] = found
            return found.point

    def settle(self, member: str, record: Record, *, elsewhere: bool = False) -> None:
        """Take the record of the device's current point.

        elsewhere: its worker was lost over it, so the record is not final while another device has not tried it.
        """
        with self._lock:
            point = self._in_flight.pop(member)
            point.failed = record
            point.tried.add(member)
            if elsewhere and self._members - point.tried:
                self._waiting.insert(0, point)
            else:
                self._settle(record)

    def lost(self, member: str, failed: Callable[[PlanPoint], Record]) -> None:
        """The device is gone; its current point goes back to the others.

        failed: makes the record of a point over which too many devices were lost.
        """
        with self._lock:
            point = self._in_flight.pop(member, None)
            if point is not None:
                point.devices_lost += 1
                if point.devices_lost >= _MOST_DEVICES_LOST:
                    self._settle(failed(point.point))
                else:
                    self._waiting.insert(0, point)
            self.leave(member)

    def leave(self, member: str) -> None:
        """The device takes no more points. Points that no other device may try keep their last record."""
        with self._lock:
            self._members.discard(member)
            for point in list(self._waiting):
                if point.failed is not None and not self._members - point.tried:
                    self._waiting.remove(point)
                    self._settle(point.failed)

    def note(self, record: Record) -> None:
        """Keep a record that is no point of the plan, such as a repetition of the reference."""
        with self._lock:
            self._keep(record)
            self.records.append(record)

    def _settle(self, record: Record) -> None:
        self._keep(record)
        self.records.append(record)
        self.settled += 1


@dataclass
class Lane:
    """A run, the points that are left of it, and what its devices have in common.

    clock: seconds, of any origin.
    budget_s: wall seconds for all; None for no bound.
    expected_members: devices there were when the plan was laid out; members: those that measured.
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
    expected_members: int = 1
    phases_s: Counter[str] = field(default_factory=Counter)
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

    def measure(self, worker: ClusterWorker, tick: Tick) -> Finished:
        """Measure on this device until nothing is left for it.

        tick: called a few times a second; what it raises ends the device's part.
        Raises DeviceLostError; the device's current point is then given to another one.
        """
        label = worker.label
        self.members.add(label)
        self.queue.join(label)
        # A worker that died is replaced beside the device; asking it again is all that is needed here.
        connected = _Kept(worker)

        def following(records: object) -> tuple[PlanPoint, ...]:
            """The next point for this device. Waits while others are measuring points: one of them may be lost."""
            with self._lock:
                # Drift is taken against the usual device, so that a slow device's points are trusted less.
                first_us = self._first_reference_us.values()
                sweep.first_reference_us = median_low(first_us) if first_us else None
            while (point := self.queue.take(label)) is None:
                if not self.queue.left or (self.budget_s is not None and self.clock() - self._start_s > self.budget_s):
                    return ()
                tick()
                self.pause(_IDLE_S)
            return (point,)

        def lost_everywhere(point: PlanPoint) -> Record:
            return Record(
                run_id=self.writer.info.run_id, key=point.key, workload=point.workload, provider=point.provider,
                outcome=Failed("crash", "its device was lost each time it was tried"), places=point.places,
                source=label, elapsed_s=self.clock() - self._start_s,
            )  # fmt: skip

        sweep = Sweep(
            plan=Plan((), self.plan.reference),
            run_id=self.writer.info.run_id,
            spec=self.spec,
            timing=self.options.timing,
            done=frozenset(),
            connect=lambda: connected,
            writer=_Part(partial(self.keep, label=label)),
            clock=self.clock,
            on_progress=lambda progress: tick(),
            budget_s=None if self.budget_s is None else self.budget_s - (self.clock() - self._start_s),
            limit_s=self.options.limit_s,
            more=following,
            interpreter=self.writer.info.environment.get("TRITON_INTERPRET") == "1",
            more_references=reference_set(self.plan),
        )
        try:
            ending = sweep.run()
        except DeviceLostError:
            self.queue.lost(label, lost_everywhere)
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
        """Keep a record, with the device that made it and the time by the run's clock."""
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


@dataclass
class _Part:
    """Where one device's sweep writes."""

    append: Callable[[Record], None]


class _Kept:
    """A worker that its host begins and ends, not the sweep that asks it."""

    def __init__(self, worker: Asked) -> None:
        self.hello = worker.hello
        self.ask = worker.ask

    def begin(self, timing: object) -> None:
        pass

    def close(self) -> None:
        pass
