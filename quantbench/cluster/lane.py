"""Runs one plan on all devices of one kind of a cluster, into one folder.

Entry points: `Lane`, whose `measure` is called in each device's thread; `DeviceLostError`; the protocols `Host` and
`ClusterWorker`, which `ray_pool` implements; `Tick`, a callback while waiting. Used by `session`, `ray_pool` and the
command `sweep`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from types import SimpleNamespace
from typing import Any, Protocol

from quantbench.cluster.cards import reference_set
from quantbench.device.spec import DeviceSpec
from quantbench.errors import QuantbenchError
from quantbench.measurement import Measurement
from quantbench.store.folder import RunWriter
from quantbench.store.record import Failed, Record
from quantbench.sweep.child import Asked
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import Plan, PlanPoint, reference_every
from quantbench.sweep.runner import Finished, More, Progress, Sweep
from quantbench.sweep.session import first_reference

# Failures after which a point is tried on the other devices: the device may be the cause.
_TRIED_ELSEWHERE = ("crash", "timeout")
# After losing its device this often, a point is recorded as failed: it is the likelier cause.
_MOST_DEVICES_LOST = 3
# Polling interval of an idle device, which takes over points of lost devices.
_IDLE_S = 0.2

Tick = Callable[[], None]


class DeviceLostError(QuantbenchError):
    """Error of a device that no longer answers because its node, process or driver is gone.

    who: name or label of the device.
    """

    def __init__(self, who: str, reason: str) -> None:
        super().__init__("cluster", f"{who} was lost ({reason})", "a device that answers")
        self.who = who
        self.reason = reason


class ClusterWorker(Asked, Protocol):
    """Interface of one device's worker. label: `GPU 5 on node3`, shown and stored in its records."""

    label: str


class Host(Protocol):
    """Interface of one device of the cluster. name: provisional name, used until the worker has sent its label."""

    name: str

    def connect(self, tick: Tick) -> ClusterWorker:
        """Starts or restarts the worker. `tick` is called while waiting. Raises DeviceLostError."""


@dataclass
class _Waiting:
    """A point without a final record. failed: record of its failure on the device `tried`; another tries it again."""

    point: PlanPoint
    tried: str = ""
    failed: Record | None = None
    devices_lost: int = 0


class PointQueue:
    """Thread-safe queue of a plan's missing points: again after the loss of a device, elsewhere after a crash.

    keep: function that stores a final record.
    records: records of an earlier part of the run.
    more: function that returns points beyond the plan when all of it is measured.
    """

    def __init__(
        self, points: Sequence[PlanPoint], keep: Callable[[Record], None], *, records: Sequence[Record] = (),
        more: More | None = None,
    ) -> None:  # fmt: skip
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
        with self._lock:
            return len(self._waiting) + len(self._in_flight)

    def join(self, member: str) -> None:
        """Registers a device that will take points."""
        with self._lock:
            self._members.add(member)

    def take(self, member: str) -> PlanPoint | None:
        """Takes a point that has not failed on this device; None if there is none at the moment."""
        with self._lock:
            if not self._waiting and not self._in_flight and self._more is not None:
                fresh = [point for point in self._more(self.records) if point.key not in self._seen]
                self._seen |= {point.key for point in fresh}
                self._waiting = [_Waiting(point) for point in fresh]
                self.total += len(fresh)
            found = next((one for one in self._waiting if one.tried != member), None)
            if found is None:
                return None
            self._waiting.remove(found)
            self._in_flight[member] = found
            return found.point

    def settle(self, member: str, record: Record, *, elsewhere: bool = False) -> None:
        """Stores the record of the device's current point.

        elsewhere: if true, the point failed in a way that the device may have caused; another device, if there is one,
            tries it once more.
        """
        with self._lock:
            point = self._in_flight.pop(member)
            if elsewhere and not point.tried and self._members - {member}:
                point.tried, point.failed = member, record
                self._waiting.insert(0, point)
            else:
                self._settle(record)

    def lost(self, member: str, failed: Callable[[PlanPoint], Record]) -> None:
        """Removes a lost device and puts its current point back.

        failed: function that makes the record of a point during which three devices were lost.
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
        """Removes a device. Points that failed on the only remaining device keep their record."""
        with self._lock:
            self._members.discard(member)
            for point in list(self._waiting):
                if point.failed is not None and self._members <= {point.tried}:
                    self._waiting.remove(point)
                    self._settle(point.failed)

    def note(self, record: Record) -> None:
        """Stores a record that is not a point of the plan, such as a repetition of the reference."""
        with self._lock:
            self._keep(record)
            self.records.append(record)

    def amend(self, record: Record) -> None:
        """Stores a point's record again, in place of the one before."""
        with self._lock:
            self._keep(record)
            points = (place for place, old in enumerate(self.records) if old.role == "point" and old.key == record.key)
            self.records[next(points)] = record

    def _settle(self, record: Record) -> None:
        self.note(record)
        self.settled += 1


@dataclass
class Lane:
    """One run of a cluster sweep, with its queue of points, shared by the threads of its devices.

    clock: monotonic time, seconds.
    pause: function that sleeps for a number of seconds.
    budget_s: wall seconds for the run; None for no limit.
    records: records of an earlier part of the run.
    expected_members: number of devices when the plan was made.
    members: labels of the devices that measured.
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
        self._first_references: dict[str, Measurement] = {}
        for record in self.records:
            self._note_reference(record)

    @property
    def finished(self) -> Finished:
        """Result of the run; call it when no device works on it any more."""
        if not self.queue.left:
            return Finished("budget" if self.plan.left_out else "complete")
        if any(ending.how == "budget" for ending in self.endings):
            return Finished("budget")
        return Finished("failed", f"{self.queue.left} points are left, and no device to measure them")

    def measure(self, worker: ClusterWorker, tick: Tick) -> Finished:
        """Measures points on this device until none is left for it.

        tick: function called a few times a second; an exception that it raises ends this call.
        Raises DeviceLostError after returning the device's current point to the queue.
        """
        label = worker.label
        self.members.add(label)
        self.queue.join(label)
        # The host replaces a worker that died, so the sweep only has to ask again.
        connected: Any = SimpleNamespace(hello=worker.hello, ask=worker.ask, close=lambda: None)

        def following(records: object) -> tuple[PlanPoint, ...]:
            """Returns the next point. Waits while other devices are measuring, because one of them may be lost."""
            with self._lock:
                # Drift is relative to the median device, so that a slow device's points get a lower grade.
                first = sorted(self._first_references.values(), key=lambda each: each.stated.latency_us)
                sweep.first_reference = first[(len(first) - 1) // 2] if first else None
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
            plan=Plan((), self.plan.reference), run_id=self.writer.info.run_id, spec=self.spec,
            reference_every=reference_every(len(self.plan.points) // self.expected_members),
            timing=self.options.timing, done=frozenset(), connect=lambda: connected,
            append=partial(self.keep, label=label), amend=partial(self.amend, label=label), clock=self.clock,
            on_progress=lambda progress: tick(),
            budget_s=None if self.budget_s is None else self.budget_s - (self.clock() - self._start_s),
            limit_s=self.options.limit_s, more=following,
            interpreter=self.writer.info.environment.get("TRITON_INTERPRET") == "1",
            more_references=reference_set(self.plan),
        )  # fmt: skip
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
        """Stores a record with the label of its device and the time since the start of the run."""
        record = replace(record, source=label, elapsed_s=self.clock() - self._start_s)
        if record.role == "reference":
            self.queue.note(record)
            self._note_reference(record)
            return
        lost = isinstance(record.outcome, Failed) and record.outcome.kind in _TRIED_ELSEWHERE
        self.queue.settle(label, record, elsewhere=lost)

    def amend(self, record: Record, label: str) -> None:
        """Stores the record of a point again, with a lower grade."""
        self.queue.amend(replace(record, source=label))

    def _note_reference(self, record: Record) -> None:
        first = first_reference((record,), self.plan)
        if first is not None:
            with self._lock:
                self._first_references.setdefault(record.source, first)
