"""A run interrupted again and again ends as one that never was: the same points, none twice, none
lost.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import record as made_record
from made_runs import run as made_run
from made_runs import write
from sweep_doubles import A100, OPTIONS, Bench, QuietWorker, measured, recording, steady

from quantbench.cli.output import show
from quantbench.cli.sweep_print import plan_lines, result
from quantbench.cli.sweep_run import measure
from quantbench.errors import StoreError, UnsupportedError
from quantbench.store.folder import RunWriter, read_run
from quantbench.store.record import Failed, Record
from quantbench.sweep.axes import Held
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.options import SweepOptions, plan_sweep, whole_plan
from quantbench.sweep.runner import Finished
from quantbench.sweep.session import SweepSession
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm, Workload


def answer_or_stop(chance: random.Random, share: float) -> Any:
    """Answers; now and then the user presses Ctrl-C, or the worker dies, instead."""

    def answer(request: Request) -> Reply:
        if chance.random() < share:
            raise chance.choice(
                [KeyboardInterrupt(), WorkerLostError("crash", "killed by SIGSEGV")]
            )
        return measured(100.0)

    return answer


def connect_with(bench: Bench) -> Any:
    def connect() -> QuietWorker:
        worker = QuietWorker(bench.answer, bench.clock)
        bench.workers.append(worker)
        return worker

    return connect


def new_session(
    bench: Bench, results: Path, options: SweepOptions = OPTIONS, connect: Any = None
) -> SweepSession:
    return SweepSession.new(lambda spec: options, results, connect or connect_with(bench))


def ended(session: SweepSession, bench: Bench) -> Finished:
    return session.run(lambda progress: None, clock=bench.clock)


@pytest.mark.slow
def test_fifty_interruptions_change_nothing(tmp_path: Path) -> None:
    whole = Bench(None)
    with new_session(whole, tmp_path / "whole") as session:
        ended(session, whole)
    expected = {r.key for r in read_run(session.folder).records if r.role == "point"}

    chance = random.Random(7)
    broken = Bench(None, answer_or_stop(chance, 0.3))
    connect = connect_with(broken)
    session = new_session(broken, tmp_path / "broken")
    stops = 0
    while True:
        with session:
            try:
                finished = ended(session, broken)
            except KeyboardInterrupt:
                stops += 1
                info = read_run(session.folder).info
                assert info.how_ended == "interrupted"
            else:
                break
        # Every other stop is a power cut as well: half a line at the end of the file.
        if stops % 2:
            with (session.folder / "records.jsonl").open("ab") as file:
                file.write(b'{"version": 1, "run_id": "')
        session = SweepSession.resume(session.folder, connect)
    assert finished.how == "complete"
    assert stops >= 10
    keys = [r.key for r in read_run(session.folder).records if r.role == "point"]
    assert len(keys) == len(set(keys))
    assert set(keys) == expected
    assert all(worker.closed for worker in broken.workers)


def test_resuming_on_another_device_is_refused(tmp_path: Path) -> None:
    bench = Bench(None)
    with new_session(bench, tmp_path) as session:
        ended(session, bench)

    def connect() -> QuietWorker:
        worker: QuietWorker = connect_with(bench)()
        worker.hello = replace(worker.hello, device=replace(worker.hello.device, name="b200-test"))
        return worker

    with pytest.raises(
        StoreError, match=r"^resume: this device is b200-test; expected a100-test, as in "
    ):
        SweepSession.resume(session.folder, connect)
    assert all(worker.closed for worker in bench.workers)


LAYERS = SweepOptions(
    dims=("hidden=1024:4096:64",), providers=("torch.mm", "triton.stream_k"), budget_s=30.0
)


def measured_in(folder: Path) -> set[str]:
    return {r.key for r in read_run(folder).records if r.role == "point"}


@pytest.mark.slow
def test_resuming_finishes_all_of_the_plan_or_takes_a_budget(tmp_path: Path) -> None:
    bench = Bench(None)
    connect = connect_with(bench)
    with new_session(bench, tmp_path, LAYERS) as session:
        assert ended(session, bench).how == "budget"
    first = measured_in(session.folder)
    every = {p.key for p in whole_plan(LAYERS, session.hello.device)[1].points}
    assert 0 < len(first) < 0.2 * len(every)
    with SweepSession.resume(session.folder, connect, budget_s=60.0) as more:
        assert len(more.plan.points) + len(
            {p.key for g in more.plan.left_out for p in g.points}
        ) <= len(every)
        assert not {p.key for p in more.plan.points} & first
        start_s = bench.clock.now_s
        assert ended(more, bench).how == "budget"
        assert 30.0 <= bench.clock.now_s - start_s <= 1.2 * 60.0
    second = measured_in(session.folder)
    assert first < second < every
    with SweepSession.resume(session.folder, connect) as rest:
        assert {p.key for p in rest.plan.points} == every - second
        assert ended(rest, bench).how == "complete"
    run = read_run(session.folder)
    assert measured_in(session.folder) == every
    assert (run.info.how_ended, run.info.options["budget_s"]) == ("complete", 30.0)


def test_a_point_that_failed_is_tried_once_more_and_then_no_more(tmp_path: Path) -> None:
    plan = plan_sweep(OPTIONS, A100)[1]
    once, twice = [p.workload for p in plan.points if p != plan.reference][:2]
    lost: list[Workload] = []

    def answer(request: Request) -> Reply:
        if request.workload in (once, twice) and (request.workload == twice or once not in lost):
            lost.append(request.workload)
            raise WorkerLostError("crash", "killed by SIGSEGV")
        return measured(100.0)

    bench = Bench(None, answer)
    connect = connect_with(bench)
    with new_session(bench, tmp_path) as session:
        assert ended(session, bench).how == "complete"
    with SweepSession.resume(session.folder, connect) as again:
        assert {p.workload for p in again.plan.points} == {once, twice}
        console = recording()
        measure(console, again)
    assert "2 points that failed are tried again" in console.export_text()
    run = read_run(session.folder)
    failed = [r.workload for r in run.records if isinstance(r.outcome, Failed)]
    assert (failed, run.warnings) == ([twice], ())
    assert {r.key for r in run.records} == {p.key for p in plan.points}
    with SweepSession.resume(session.folder, connect) as third:
        assert third.plan.points == ()
    assert sorted(map(str, lost)) == sorted(map(str, (once, twice, twice)))


def test_parts_are_the_same_with_a_budget_and_without() -> None:
    options = replace(LAYERS, budget_s=20.0)
    parts = [plan_sweep(replace(options, shard=(part, 3)), A100)[1] for part in (1, 2, 3)]
    again = [
        plan_sweep(replace(options, shard=(part, 3), budget_s=None), A100)[1] for part in (1, 2, 3)
    ]
    for one, other in zip(parts, again, strict=True):
        assert {p.key for g in (*one.groups, *one.left_out) for p in g.points} == {
            p.key for p in other.points
        }
    every = {p.key for p in whole_plan(options, A100)[1].points}
    assert set().union(*({p.key for p in plan.points} for plan in again)) == every


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"origin": "imported", "source": "times.csv"},
            "is imported from times.csv; expected a run that",
        ),
        ({"origin": "simulated"}, "is simulated; expected a run that `quantbench sweep` measured"),
        (
            {"origin": "measured", "options": {"merged": []}},
            "was merged from runs of different plans",
        ),
        (
            {"origin": "measured", "options": {"sizes": [1]}},
            "was not made by `quantbench sweep`",
        ),
    ],
)
def test_a_run_without_a_plan_is_not_resumed(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    made = write(tmp_path, made_run([made_record(Gemm(64, 64, 64), (1.0,), {"n": 64})], **changes))
    with pytest.raises(StoreError, match=f"^resume: .*{re.escape(message)}"):
        SweepSession.resume(made, lambda: pytest.fail("no worker is needed to refuse this"))


def test_a_start_that_fails_leaves_no_run(tmp_path: Path) -> None:
    def stop(request: Request) -> Reply:
        raise KeyboardInterrupt

    bench = Bench(None, stop)
    results = tmp_path / "results"
    session = new_session(bench, results)
    with pytest.raises(KeyboardInterrupt), session:
        ended(session, bench)
    assert list(tmp_path.iterdir()) == []


def test_a_timing_mode_that_the_device_has_not_is_refused_before_there_is_a_run(
    tmp_path: Path,
) -> None:
    options = replace(OPTIONS, timing=TimingOptions(mode="graph"))

    def connect() -> QuietWorker:
        worker = QuietWorker(steady, lambda: 0.0)
        worker.hello = replace(worker.hello, device=replace(worker.hello.device, kind="cpu"))
        return worker

    with pytest.raises(UnsupportedError, match="mode = 'graph' on a processor"):
        SweepSession.new(lambda spec: options, tmp_path, connect)
    assert list(tmp_path.iterdir()) == []


def test_after_a_full_disk_it_is_said_where_the_run_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(None)

    def full(*_: object) -> None:
        raise StoreError(
            "write run",
            "run.json (No space left on device)",
            "a results folder that can be written",
        )

    console = recording()
    with new_session(bench, tmp_path) as session:
        monkeypatch.setattr(
            RunWriter, "update", full
        )  # every point is measured: only run.json finds no room
        with pytest.raises(StoreError, match="No space left on device"):
            measure(console, session)
    said = console.export_text()
    assert (
        f"every point is measured and kept in {session.folder}/; report it: quantbench report"
        in said
    )
    monkeypatch.undo()
    append = RunWriter.append
    written = []

    def full_after_ten(self: RunWriter, record: Record) -> None:
        written.append(record)
        if len(written) > 10:
            full()
        append(self, record)

    monkeypatch.setattr(RunWriter, "append", full_after_ten)
    session = new_session(bench, tmp_path / "b")
    with pytest.raises(StoreError, match="No space left on device"), session:
        measure(console, session)
    said = console.export_text()
    assert (
        f"everything measured is kept. Go on with: quantbench sweep --resume {session.folder}"
        in said
    )
    assert len(read_run(session.folder).records) == 10


def test_a_picture_that_finds_no_room_takes_nothing_of_the_run_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreError(
            "picture", "efficiency-n.png (No space left on device)", "a file that can be written"
        )

    monkeypatch.setattr("quantbench.report.sweep_result.figure", full)
    bench = Bench(None)
    with new_session(bench, tmp_path) as session:
        finished = ended(session, bench)
    console = recording()
    show(console, result(read_run(session.folder), finished, 1.0)[0])
    said = console.export_text()
    assert "no picture: picture: efficiency-n.png (No space left on device)" in said
    assert f"kept in {session.folder}/" in said


def test_the_plan_says_what_a_budget_leaves_out() -> None:
    options = replace(LAYERS, held=Held(direction="both"))
    _, plan = plan_sweep(options, A100)
    console = recording(2000)
    show(console, plan_lines(plan))
    show(console, plan_lines(whole_plan(options, A100)[1]))
    selected, rest, whole = console.export_text().splitlines()
    assert re.fullmatch(rf"{len(plan.points)} of {plan.total} points selected, about .*", selected)
    assert re.search(r"\d+ sizes within hidden \d+\.\.\d+ of mlp_down, mlp_up, proj, qkv", rest)
    assert "hidden 1024..4096 of mlp_down.dgrad, mlp_down.wgrad, " in rest
    assert whole.startswith(f"{plan.total:,} points, about ")
