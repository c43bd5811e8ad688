"""Which device measures which point: given out once, given out again when a device or its worker was lost.

No threads and no clock of its own; a lock lets the devices' threads share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock

from quantbench.store.record import Record
from quantbench.sweep.plan import PlanPoint
from quantbench.sweep.runner import More

# A point whose device was lost so often is the likelier cause of it (it may be what brings the node down).
_MOST_DEVICES_LOST = 3


@dataclass
class _Waiting:
    """A point that nobody measures now. tried: devices whose worker it ended. failed: what was last seen of it."""

    point: PlanPoint
    tried: set[str] = field(default_factory=set)
    failed: Record | None = None
    devices_lost: int = 0


class PointQueue:
    """The points of a plan that are still to be measured, shared by the devices that have joined.

    keep: what is done with a record that is final. more: asks for points beyond the plan when it is all measured.
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
            if not self._waiting and not self._in_flight:
                self._ask_for_more()
            found = next((one for one in self._waiting if member not in one.tried), None)
            if found is None:
                return None
            self._waiting.remove(found)
            self._in_flight[member] = found
            return found.point

    def settle(self, member: str, record: Record, *, elsewhere: bool = False) -> None:
        """The outcome of the point that the device has in hand. elsewhere: its worker was lost over it, so it is not
        final while there is another device that has not tried it."""
        with self._lock:
            point = self._in_flight.pop(member)
            point.failed = record
            point.tried.add(member)
            if elsewhere and self._members - point.tried:
                self._waiting.insert(0, point)
            else:
                self._settle(record)

    def lost(self, member: str, failed: Callable[[PlanPoint], Record]) -> None:
        """The device is gone, and what it had in hand is for others to measure. failed: the record of a point that has
        taken too many devices with it."""
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
        """The device takes no more points; those that only it could still have tried keep the outcome they had."""
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

    def _ask_for_more(self) -> None:
        if self._more is None:
            return
        fresh = [point for point in self._more(self.records) if point.key not in self._seen]
        self._seen |= {point.key for point in fresh}
        self._waiting = [_Waiting(point) for point in fresh]
        self.total += len(fresh)
