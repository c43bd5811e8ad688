"""Who measures which point, with literals: given out once, given out again after a loss, settled once."""

from __future__ import annotations

from dataclasses import dataclass, field

from sweep_doubles import plan_of

from quantbench.cluster.lane import PointQueue
from quantbench.store.record import Failed, Record, Skipped
from quantbench.sweep.plan import PlanPoint

POINTS = plan_of(3).points


def record_of(point: PlanPoint, outcome: Failed | Skipped = Skipped("done")) -> Record:  # noqa: B008 - frozen
    return Record("run", point.key, point.workload, point.provider, outcome)


CRASH = Failed("crash", "killed by SIGSEGV")


@dataclass
class Kept:
    records: list[Record] = field(default_factory=list)

    def queue(self, points: tuple[PlanPoint, ...] = POINTS, *members: str, **options: object) -> PointQueue:
        queue = PointQueue(points, self.records.append, **options)  # type: ignore[arg-type]
        for member in members:
            queue.join(member)
        return queue

    @property
    def keys(self) -> list[str]:
        return [record.key for record in self.records]


def test_each_point_is_given_out_once_and_in_order() -> None:
    queue = Kept().queue(POINTS, "a", "b")
    assert [queue.take("a"), queue.take("b")] == [POINTS[0], POINTS[1]]
    queue.settle("a", record_of(POINTS[0]))
    assert queue.take("a") == POINTS[2]
    assert (queue.left, queue.settled, queue.total) == (2, 1, 3)


def test_what_a_lost_device_had_in_hand_is_measured_by_another() -> None:
    kept = Kept()
    queue = kept.queue(POINTS, "a", "b")
    queue.take("a")
    queue.take("b")
    queue.lost("a", record_of)
    queue.settle("b", record_of(POINTS[1]))
    assert queue.take("b") == POINTS[0]
    assert kept.keys == [POINTS[1].key]


def test_a_lost_device_that_comes_back_takes_its_point_again() -> None:
    queue = Kept().queue(POINTS, "a")
    queue.take("a")
    queue.lost("a", record_of)
    queue.join("a")
    assert queue.take("a") == POINTS[0]


def test_a_device_that_is_lost_with_nothing_in_hand_costs_nothing() -> None:
    queue = Kept().queue(POINTS, "a")
    queue.lost("a", record_of)
    assert queue.left == 3


def test_a_point_that_takes_three_devices_with_it_is_not_given_to_a_fourth() -> None:
    kept = Kept()
    queue = kept.queue(POINTS[:1], "a")
    for _ in range(3):
        queue.join("a")
        assert queue.take("a") == POINTS[0]
        queue.lost("a", lambda point: record_of(point, Failed("crash", "its device was lost")))
    queue.join("a")
    assert queue.take("a") is None
    assert [record.outcome for record in kept.records] == [Failed("crash", "its device was lost")]


def test_a_crash_is_tried_once_more_on_another_device() -> None:
    kept = Kept()
    queue = kept.queue(POINTS[:1], "a", "b")
    queue.take("a")
    queue.settle("a", record_of(POINTS[0], CRASH), elsewhere=True)
    assert kept.records == []
    assert queue.take("a") is None  # not by the same one
    assert queue.take("b") == POINTS[0]
    queue.settle("b", record_of(POINTS[0], CRASH), elsewhere=True)
    assert [record.outcome for record in kept.records] == [CRASH]
    assert queue.left == 0


def test_a_crash_on_a_second_device_is_final_if_there_are_more() -> None:
    kept = Kept()
    queue = kept.queue(POINTS[:1], "a", "b", "c")
    for member in ("a", "b"):
        assert queue.take(member) == POINTS[0]
        queue.settle(member, record_of(POINTS[0], CRASH), elsewhere=True)
    assert [record.outcome for record in kept.records] == [CRASH]
    assert queue.take("c") is None


def test_a_crash_on_the_only_device_is_the_points_outcome() -> None:
    kept = Kept()
    queue = kept.queue(POINTS[:1], "a")
    queue.take("a")
    queue.settle("a", record_of(POINTS[0], CRASH), elsewhere=True)
    assert [record.outcome for record in kept.records] == [CRASH]


def test_when_the_other_device_leaves_the_crash_stands() -> None:
    kept = Kept()
    queue = kept.queue(POINTS[:1], "a", "b")
    queue.take("a")
    queue.settle("a", record_of(POINTS[0], CRASH), elsewhere=True)
    queue.leave("b")
    assert [record.outcome for record in kept.records] == [CRASH]
    assert queue.left == 0


def test_more_points_are_asked_for_when_all_is_measured_and_never_one_twice() -> None:
    more_points = plan_of(5).points
    asked = []

    def more(records: object) -> tuple[PlanPoint, ...]:
        asked.append(len(records))  # type: ignore[arg-type]
        return more_points

    kept = Kept()
    queue = kept.queue(POINTS, "a", more=more)
    for _ in range(3):
        point = queue.take("a")
        assert point is not None
        queue.settle("a", record_of(point))
    fresh = {p.key for p in more_points} - {p.key for p in POINTS}
    for _ in fresh:
        point = queue.take("a")
        assert point is not None
        assert point.key in fresh
        queue.settle("a", record_of(point))
    assert queue.take("a") is None
    assert asked == [3, 3 + len(fresh)]
    assert len(kept.keys) == len(set(kept.keys)) == 3 + len(fresh)


def test_points_of_a_resumed_run_are_not_asked_for_again() -> None:
    queue = Kept().queue(POINTS[1:], "a", records=[record_of(POINTS[0])], more=lambda records: POINTS)
    for point in POINTS[1:]:
        assert queue.take("a") == point
        queue.settle("a", record_of(point))
    assert queue.take("a") is None
