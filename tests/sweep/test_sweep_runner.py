"""The loop of a sweep with a worker, a writer and a clock made of literals."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest
from made_runs import record
from sweep_doubles import A100, HELD, Bench, FakeWorker, measured, plan_of

from quantbench.errors import MeasurementError
from quantbench.latency.op_times import roofline_us
from quantbench.store.record import Failed, Measured, Record
from quantbench.sweep.axes import parse_axis
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.edges import parse_grid, predicted_edges
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.plan import Plan, PlanPoint, build_plan
from quantbench.sweep.session import first_reference
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm


@pytest.mark.parametrize(
    ("points", "at"),
    [
        (4, [0, 4, 6]),
        (8, [0, 4, 8, 11]),
        (13, [0, 5, 10, 15, 17]),
        (25, [0, 9, 18, 27, 29]),
        (35, [0, 11, 22, 33, 39]),
    ],
)
def test_every_point_is_measured_once_and_the_reference_now_and_then(
    points: int, at: list[int]
) -> None:
    bench = Bench(plan_of(points))
    assert bench.sweep().run().how == "complete"
    assert [r.key for r in bench.of_role("point")] == [p.key for p in bench.plan.points]
    references = bench.of_role("reference")
    assert [bench.records.index(r) for r in references] == at
    assert {r.workload for r in references} == {bench.plan.reference.workload}  # type: ignore[union-attr]
    assert len(bench.workers) == 1
    assert bench.workers[0].closed


@pytest.mark.parametrize(
    ("provider", "letter"), [("torch.mm", "A"), ("triton.data_parallel", "rejected")]
)
def test_only_what_the_interpreter_ran_is_marked(provider: str, letter: str) -> None:
    axis = parse_axis("n=1024:2048:64")
    plan = build_plan((axis,), HELD, (provider,), TimingOptions(), A100)
    bench = Bench(plan)
    bench.sweep(interpreter=True).run()
    assert {r.outcome.grade.letter for r in bench.of_role("point")} == {letter}  # type: ignore[union-attr]


def slower_after(requests: int) -> Callable[[Request], Reply]:
    """A device that slows down by 20 % before that many requests."""
    seen = []

    def answer(request: Request) -> Reply:
        seen.append(request)
        return measured(100.0 if len(seen) < requests else 120.0)

    return answer


def test_drift_of_the_reference_lowers_the_trust() -> None:
    # The device slows down by 20 % after the second repetition of the reference.
    bench = Bench(plan_of(25), slower_after(12))
    bench.sweep().run()
    before, after = bench.of_role("point")[0].outcome, bench.of_role("point")[-1].outcome
    assert before.grade.letter == "A"
    assert after.grade.letter != "A"
    assert any("drift" in reason or "reference" in reason for reason in after.grade.reasons)


def test_points_since_the_last_reference_are_graded_again() -> None:
    # The device slows down by 20 % in the middle between two repetitions of the reference.
    bench = Bench(plan_of(25), slower_after(15))
    sweep = bench.sweep()
    sweep.run()
    final = {record.key: record for record in sweep.records if record.role == "point"}
    letters = [final[point.key].outcome.grade.letter for point in bench.plan.points]  # type: ignore[union-attr]
    assert letters == ["A"] * 8 + ["C"] * 17  # the references are the requests 0, 9, 18 and 27
    assert len(bench.of_role("point")) == 25 + 8  # those of the second block are stored twice


def test_a_worker_whose_context_is_lost_is_replaced() -> None:
    plan = plan_of(4)
    bad = next(p.workload for p in plan.points if p != plan.reference)

    def answer(request: Request) -> Reply:
        if request.workload == bad:
            return Reply(
                failed=("illegal_access", "CUDA error: an illegal memory access"), broken=True
            )
        return measured(100.0)

    bench = Bench(plan, answer)
    assert bench.sweep().run().how == "complete"
    assert len(bench.workers) == 2
    assert all(worker.closed for worker in bench.workers)


def test_workers_that_never_start_end_the_sweep_with_what_was_recorded() -> None:
    bench = Bench(plan_of(20))

    refuse = Mock(side_effect=WorkerLostError("crash", "no driver"))
    finished = bench.sweep(connect=refuse).run()
    assert finished.how == "failed"
    assert finished.reason == "5 workers in a row were lost, the last no driver"
    assert len(bench.of_role("point")) < 20


def test_a_device_that_refuses_ends_the_sweep_at_once() -> None:
    bench = Bench(plan_of(20))

    error = MeasurementError("worker", "the GPU fell off the bus", "a device that can be measured")
    finished = bench.sweep(connect=Mock(side_effect=error)).run()
    assert finished.how == "failed"
    assert "the GPU fell off the bus" in finished.reason
    assert bench.records == []  # no point is at fault: --resume measures them


def test_a_wrong_result_fails_its_own_point_alone() -> None:
    def answer(request: Request) -> Reply:
        if request.workload.n == 1088:  # type: ignore[union-attr]
            return Reply(failed=("wrong_result", "check torch.mm: off by 2"))
        return measured(100.0)

    bench = Bench(plan_of(8), answer)
    bench.sweep().run()
    outcomes = [type(r.outcome) for r in bench.of_role("point")]
    assert (outcomes.count(Failed), outcomes.count(Measured)) == (1, 7)


def test_resuming_measures_what_is_missing_and_keeps_the_first_reference() -> None:
    plan = plan_of(10)
    done = frozenset(p.key for p in plan.points[:7])
    bench = Bench(plan, lambda request: measured(200.0))
    bench.sweep(done=done, first_reference=measured(100.0).measurement).run()
    assert [r.key for r in bench.of_role("point")] == [p.key for p in plan.points[7:]]
    outcome = bench.of_role("point")[0].outcome
    assert outcome.grade.letter != "A"  # twice as slow as when the run began


def test_resuming_a_finished_run_starts_no_worker() -> None:
    plan = plan_of(5)
    bench = Bench(plan, lambda request: measured(1.0))
    assert bench.sweep(done=frozenset(p.key for p in plan.points)).run().how == "complete"
    assert bench.workers == []
    assert bench.records == []


def test_more_points_are_measured_as_long_as_they_are_asked_for() -> None:
    plan, others = plan_of(4), plan_of(10)
    rest = [p for p in others.points if p.key not in {q.key for q in plan.points}]
    asked: list[int] = []

    def more(records: Sequence[Record]) -> Sequence[PlanPoint]:
        known = [r for r in records if r.role == "point"]
        asked.append(len(known))
        # Two at a time, and again one that has been measured already: it must not be measured
        # twice.
        return [*rest[len(known) - 4 : len(known) - 2], plan.points[0]]

    bench = Bench(plan)
    bench.sweep(more=more).run()
    keys = [r.key for r in bench.of_role("point")]
    assert set(keys) == {p.key for p in others.points}
    assert len(keys) == len(set(keys)) == 10
    assert asked == [4, 6, 8, 10]
    assert bench.progress[-1].total == bench.progress[-1].done == 10


def rows_of_ops(records: list[Record]) -> dict[int, set[tuple[str, str]]]:
    """Ops and providers by hidden size."""
    found: dict[int, set[tuple[str, str]]] = {}
    for one in records:
        for place in one.places:
            found.setdefault(place.axes["hidden"], set()).add((place.op, one.provider))
    return found


def layers_of(providers: tuple[str, ...] = ("torch.mm", "triton.stream_k")) -> Plan:
    held = replace(HELD, ops=("qkv", "proj", "mlp_up", "mlp_down"))
    return build_plan((parse_axis("hidden=1024:4096:64"),), held, providers, TimingOptions(), A100)


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [15.0, 40.0, 100.0])
@pytest.mark.parametrize("takes_s", [0.1, 1.0, 1.5])
def test_a_budget_is_kept_at_any_pace_and_rows_are_whole(budget_s: float, takes_s: float) -> None:
    plan = layers_of().within(budget_s)

    def answer(request: Request) -> Reply:
        bench.clock.now_s += takes_s - 1.0
        return measured(100.0)

    bench = Bench(plan, answer)
    ended = bench.sweep(budget_s=budget_s).run()
    every = 8 * len(range(1024, 4097, 64))
    measured_s = (every + every / 10) * takes_s
    assert ended.how == ("complete" if measured_s < 0.9 * budget_s else "budget")
    assert bench.clock.now_s <= 1.2 * budget_s + 2 * takes_s
    if ended.how == "budget":
        assert (
            bench.clock.now_s >= 0.6 * budget_s
        )  # time that is left is used, whatever was expected
    rows = rows_of_ops(bench.of_role("point"))
    assert len(rows) > 1 or budget_s < 20 * takes_s
    assert all(len(ops) == 8 for ops in rows.values())


@pytest.mark.parametrize(("start_s", "takes_s"), [(6.0, 0.3), (60.0, 0.3), (3.0, 0.6)])
def test_the_start_of_a_worker_takes_nothing_of_the_budget(start_s: float, takes_s: float) -> None:
    def answer(request: Request) -> Reply:
        bench.clock.now_s += (start_s if len(bench.workers[0].asked) == 1 else takes_s) - 1.0
        return measured(100.0)

    bench = Bench(layers_of().within(15.0), answer)
    assert bench.sweep(budget_s=15.0).run().how == "budget"
    assert len(bench.of_role("point")) >= 15.0 / (1.1 * takes_s) - 16  # a group has up to 16 points
    assert bench.clock.now_s <= start_s + 1.2 * 15.0
    assert all(len(ops) == 8 for ops in rows_of_ops(bench.of_role("point")).values())


@pytest.mark.parametrize(("identify_s", "every"), [(0.1, True), (0.4, False)])
def test_where_naming_takes_long_every_second_point_is_named_and_all_at_edges(
    identify_s: float, every: bool
) -> None:
    asked: dict[int, bool] = {}

    def answer(request: Request) -> Reply:
        asked.setdefault(request.workload.n, request.name)  # type: ignore[union-attr]
        phases_s = {"measuring": 0.5} | ({"identify": identify_s} if request.name else {})
        return replace(measured(100.0), phases_s=phases_s)

    grid = parse_grid(("n=1024:8192:512@edges",), HELD, A100)
    plan = build_plan(grid, HELD, ("torch.mm",), TimingOptions(), A100)
    bench = Bench(replace(plan, reference=None), answer)
    bench.sweep().run()
    sizes = sorted(asked)
    edges = predicted_edges(grid, 0, HELD, A100)
    unnamed = [n for n in sizes if not asked[n]]
    assert all(asked[side] for edge in edges for side in (edge, edge + 64) if side in asked)
    assert (unnamed == []) == every
    assert all(asked[n] for i, n in enumerate(sizes) if i % 2 == 0)
    assert all(("identify" in r.phases_s) == asked[r.workload.n] for r in bench.of_role("point"))  # type: ignore[union-attr]


def test_of_the_references_only_the_first_is_named_which_starts_the_profiler() -> None:
    bench = Bench(plan_of(12))
    bench.sweep().run()
    asked = bench.workers[0].asked
    references = [
        request.name
        for request, record in zip(asked, bench.records, strict=True)
        if record.role == "reference"
    ]
    assert references == [True, False, False, False]
    assert sum(request.name for request in asked) == 12 + 1


def test_what_takes_longer_at_larger_sizes_is_expected_to() -> None:
    # A machine that reaches a thousandth of the roofline: the estimate is off by that much until it
    # has been seen.
    plan = layers_of(("torch.mm",)).within(60.0)

    def answer(request: Request) -> Reply:
        run_us = 1000 * roofline_us(request.workload, A100)
        bench.clock.now_s += 14 * run_us / 1e6 - 1.0
        return measured(run_us)

    bench = Bench(plan, answer)
    assert bench.sweep(budget_s=60.0).run().how == "budget"
    assert bench.clock.now_s <= 1.2 * 60.0
    assert all(len(ops) == 4 for ops in rows_of_ops(bench.of_role("point")).values())


def test_a_point_that_would_outlast_the_budget_is_ended_and_left() -> None:
    def answer(request: Request) -> Reply:
        if len(bench.workers[0].asked) == 8:
            bench.clock.now_s = limits[-1] + 7.0
            raise WorkerLostError("timeout", "no answer")
        return measured(100.0)

    limits: list[float] = []

    class Limited(FakeWorker):
        def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
            limits.append(limit_s)
            return super().ask(request, limit_s, tick)

    bench = Bench(plan_of(25), answer)

    def connect() -> FakeWorker:
        bench.workers.append(Limited(answer, bench.clock))
        return bench.workers[-1]

    sweep = bench.sweep(connect=connect, budget_s=20.0)
    assert sweep.run().how == "budget"
    assert limits[1] == pytest.approx(1.2 * 20.0)
    assert limits[-1] == pytest.approx(1.2 * 20.0 - 6.0)
    assert (
        len(bench.of_role("point")) == 6
    )  # nothing is known of the seventh: it is left for --resume
    assert bench.workers[0].closed


def test_a_budget_leaves_time_for_the_points_that_follow() -> None:
    plan, others = plan_of(40), plan_of(60)
    rest = [p for p in others.points if p.key not in {q.key for q in plan.points}]

    def more(records: Sequence[Record]) -> Sequence[PlanPoint]:
        tried = {r.key for r in records}
        return [point for point in rest if point.key not in tried][:5]

    bench = Bench(plan)
    assert bench.sweep(budget_s=30.0, more=more).run().how == "budget"
    keys = {r.key for r in bench.of_role("point")}
    assert len(keys & {p.key for p in rest}) >= 5
    assert len(keys & {p.key for p in plan.points}) >= 10
    assert bench.clock.now_s <= 31.0


def test_the_reference_of_another_plan_tells_no_drift() -> None:
    records = [
        record(Gemm(64, 64, 64), (us,) * 20, {}, key=key, role="reference")
        for key, us in (("0" * 16, 50.0), ("1" * 16, 100.0))
    ]
    plan = plan_of(5)
    assert plan.reference is not None
    found = first_reference(
        tuple(records), replace(plan, reference=replace(plan.reference, key="1" * 16))
    )
    assert found.stated.latency_us == 100.0
    assert first_reference(tuple(records), plan) is None


def test_ctrl_c_ends_the_worker_and_is_raised_on() -> None:
    plan = plan_of(9)

    def answer(request: Request) -> Reply:
        if len(bench.workers[0].asked) == 4:
            raise KeyboardInterrupt
        return measured(100.0)

    bench = Bench(plan, answer)
    with pytest.raises(KeyboardInterrupt):
        bench.sweep().run()
    assert bench.workers[0].closed
    assert len(bench.records) == 3


def test_the_time_left_is_about_right_after_three_points() -> None:
    """Each answer takes a second, several times the estimate, and references come between."""
    bench = Bench(plan_of(40))
    assert bench.plan.estimate_s < 40 / 3
    bench.sweep().run()
    end_s = bench.clock.now_s
    for progress in bench.progress:
        if 3 <= progress.done < 30:
            left_s = end_s - 1 - progress.elapsed_s  # the first answer starts the clock
            assert 0.75 < progress.left_s / left_s < 1.3
