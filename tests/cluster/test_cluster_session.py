"""A cluster made of literals: devices that answer, crash, vanish, come back, or are of another kind. Real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from sweep_doubles import A100, STATE, measured

from quantbench.cluster.cards import card_lines, compare_cards
from quantbench.cluster.lane import DeviceLostError
from quantbench.cluster.session import ClusterSweep
from quantbench.errors import InputError, MeasurementError, StoreError
from quantbench.store.folder import Run, RunWriter, read_run
from quantbench.store.record import Failed, Measured
from quantbench.sweep.axes import Held
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.sweep.options import SweepOptions
from quantbench.timing.options import TimingOptions

POINTS = 41
OPTIONS = SweepOptions(dims=("n=1024:3584:64",), held=Held(m=1024, k=1024), providers=("torch.mm",))
H100 = replace(A100, name="h100-test", compute_capability=(9, 0))
Answer = Callable[["FakeHost", Request], Reply]


@dataclass
class FakeHost:
    """A device that answers by a function, and may be gone for good."""

    name: str
    answer: Answer = lambda host, request: measured(100.0)
    hello: Hello = field(default_factory=lambda: Hello(A100, STATE, {"torch": "2.11.0"}))
    gone: bool = False
    connections: int = 0
    asked: list[Request] = field(default_factory=list)
    turn: threading.Barrier | None = None

    @property
    def label(self) -> str:
        return self.name

    def connect(self, tick: Callable[[], None]) -> FakeHost:
        if self.gone:
            raise DeviceLostError(self.name, "its node has left the cluster")
        self.connections += 1
        return self

    def begin(self, timing: TimingOptions) -> None:
        pass

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        tick()
        if self.turn is not None:
            try:
                self.turn.wait(timeout=0.05)  # devices take turns, so that none does all of the work
            except threading.BrokenBarrierError:
                self.turn.reset()
        self.asked.append(request)
        return self.answer(self, request)

    def close(self) -> None:
        pass


def hosts_of(count: int, answer: Answer = lambda host, request: measured(100.0), **changes: object) -> list[FakeHost]:
    turn = threading.Barrier(count)
    return [FakeHost(f"GPU {n} on node1", answer, turn=turn, **changes) for n in range(count)]  # type: ignore[arg-type]


@dataclass
class Bench:
    results: Path
    notes: list[str] = field(default_factory=list)
    options: SweepOptions = OPTIONS

    def run(self, hosts: list[FakeHost], **options: object) -> list[Run]:
        sweep = ClusterSweep(
            hosts, lambda spec: self.options, self.results, **options,  # type: ignore[arg-type]
            on_note=self.notes.append, pause=lambda seconds: None,
        )  # fmt: skip
        return [read_run(lane.writer.folder) for lane in sweep.run()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)
    assert not [t for t in threading.enumerate() if t.name.startswith("device")]


def point_keys(run: Run) -> list[str]:
    return [record.key for record in run.records if record.role == "point"]


def assert_whole(run: Run) -> None:
    """Every point of the plan, none twice."""
    keys = point_keys(run)
    assert len(keys) == len(set(keys)) == POINTS


def test_the_plan_is_spread_over_all_devices_into_one_run(bench: Bench) -> None:
    hosts = hosts_of(4)
    (run,) = bench.run(hosts)
    assert_whole(run)
    assert run.info.how_ended == "complete"
    assert run.info.device.name == "a100-test"
    shares = {host.name: sum(r.source == host.name and r.role == "point" for r in run.records) for host in hosts}
    assert all(share >= 3 for share in shares.values())
    assert bench.notes == []


def test_each_device_measures_the_same_references(bench: Bench) -> None:
    hosts = hosts_of(4)
    (run,) = bench.run(hosts)
    of_host = {
        host.name: {r.key for r in run.records if r.role == "reference" and r.source == host.name} for host in hosts
    }
    assert len({frozenset(keys) for keys in of_host.values()}) == 1
    assert len(of_host["GPU 0 on node1"]) == 3


def test_the_reference_is_repeated_as_often_as_in_a_sweep_of_one_device(bench: Bench) -> None:
    (run,) = bench.run(hosts_of(1))
    repeats = sum(r.role == "reference" for r in run.records)
    assert repeats == 2 * 3 + POINTS // 10  # three references at the beginning and end, one of them every ten points


def test_a_slow_card_is_named_and_its_points_are_trusted_less(bench: Bench) -> None:
    hosts = hosts_of(4)
    hosts[2].answer = lambda host, request: measured(107.0)
    (run,) = bench.run(hosts)
    assert card_lines(compare_cards(run.records)) == ("GPU 2 on node1 is 7 % slower, clock 1410 of 1410 MHz",)
    graded = [(r.source, r.outcome.grade) for r in run.records if r.role == "point" and isinstance(r.outcome, Measured)]
    of_slow = [grade for source, grade in graded if source == "GPU 2 on node1"][1:]
    assert of_slow
    assert all(any("7.0% slower" in reason for reason in grade.reasons) for grade in of_slow)
    assert {grade.letter for source, grade in graded if source != "GPU 2 on node1"} == {"A"}


@pytest.mark.slow
def test_a_lost_device_costs_the_point_in_flight_which_is_run_again(bench: Bench) -> None:
    lost: list[Request] = []

    def answer(host: FakeHost, request: Request) -> Reply:
        if host.name == "GPU 1 on node1" and len(host.asked) > 6:
            host.gone = True
            lost.append(request)
            raise DeviceLostError(host.name, "its node has died")
        return measured(100.0)

    (run,) = bench.run(hosts_of(3, answer))
    assert len(lost) == 1
    assert_whole(run)
    assert all(isinstance(r.outcome, Measured) for r in run.records)
    assert run.info.how_ended == "complete"
    assert bench.notes[0] == "GPU 1 on node1 was lost: its node has died"


def test_a_device_that_comes_back_is_used_again(bench: Bench) -> None:
    def answer(host: FakeHost, request: Request) -> Reply:
        if len(host.asked) == 8:
            raise DeviceLostError(host.name, "its actor was killed")
        return measured(100.0)

    (host,) = hosts = hosts_of(1, answer)
    (run,) = bench.run(hosts)
    assert host.connections == 2
    assert_whole(run)
    assert run.info.how_ended == "complete"


def test_when_all_devices_are_lost_the_run_says_so_and_can_be_resumed(bench: Bench) -> None:
    def answer(host: FakeHost, request: Request) -> Reply:
        if len(host.asked) > 8:
            host.gone = True
            raise DeviceLostError(host.name, "its node has died")
        return measured(100.0)

    (run,) = bench.run(hosts_of(2, answer))
    assert run.info.how_ended == "failed"
    assert 0 < len(point_keys(run)) < POINTS
    (again,) = bench.run(hosts_of(2), resume=run.folder)
    assert again.folder == run.folder
    assert point_keys(again)[: len(point_keys(run))] == point_keys(run)
    assert_whole(again)
    assert again.info.how_ended == "complete"


def test_a_worker_that_dies_over_a_point_costs_nothing_when_another_measures_it(bench: Bench) -> None:
    def answer(host: FakeHost, request: Request) -> Reply:
        if host.name == "GPU 0 on node1" and len(host.asked) == 9:
            raise WorkerLostError("crash", "killed by SIGKILL")
        return measured(100.0)

    (run,) = bench.run(hosts_of(2, answer))
    assert_whole(run)
    assert all(isinstance(r.outcome, Measured) for r in run.records if r.role == "point")


def test_a_point_that_kills_every_worker_is_recorded_as_that(bench: Bench) -> None:
    def answer(host: FakeHost, request: Request) -> Reply:
        if request.workload.n == 1024 + 64 * 5:  # type: ignore[union-attr]
            raise WorkerLostError("crash", "killed by SIGSEGV")
        return measured(100.0)

    hosts = hosts_of(3, answer)
    (run,) = bench.run(hosts)
    assert_whole(run)
    failed = [r for r in run.records if r.role == "point" and not isinstance(r.outcome, Measured)]
    assert [r.outcome for r in failed] == [Failed("crash", "killed by SIGSEGV")]


def test_devices_of_two_kinds_make_two_runs(bench: Bench) -> None:
    hosts = hosts_of(4)
    for host in hosts[2:]:
        host.hello = replace(host.hello, device=H100)
    runs = bench.run(hosts)
    assert {run.info.device.name for run in runs} == {"a100-test", "h100-test"}
    for run in runs:
        assert_whole(run)


def test_devices_with_other_software_are_not_mixed_into_one_run(bench: Bench) -> None:
    hosts = hosts_of(2)
    hosts[1].hello = replace(hosts[1].hello, software={"torch": "2.12.0"})
    runs = bench.run(hosts)
    assert {run.info.software["torch"] for run in runs} == {"2.11.0", "2.12.0"}
    assert len({run.folder for run in runs}) == 2


def test_machines_that_differ_in_their_kernel_alone_share_a_run(bench: Bench) -> None:
    hosts = hosts_of(2)
    hosts[1].hello = replace(hosts[1].hello, software={"torch": "2.11.0", "os": "Linux-6.8"})
    assert len(bench.run(hosts)) == 1


def test_on_resuming_devices_of_another_kind_take_no_part(bench: Bench) -> None:
    (run,) = bench.run(hosts_of(1))
    hosts = hosts_of(2)
    hosts[1].hello = replace(hosts[1].hello, device=H100)
    (again,) = bench.run(hosts, resume=run.folder)
    assert again.folder == run.folder
    assert hosts[1].asked == []
    assert bench.notes == ["GPU 1 on node1 takes no part: it is a h100-test, the run is of a100-test"]


def test_a_cluster_without_a_device_that_answers_says_why(bench: Bench) -> None:
    with pytest.raises(MeasurementError, match="GPU 0 on node1: its node has left the cluster"):
        bench.run(hosts_of(1, gone=True))
    assert list(bench.results.iterdir()) == []


def test_what_is_wrong_with_the_options_is_said_and_leaves_no_folder(bench: Bench) -> None:
    bench.options = replace(OPTIONS, dims=("hidden=100",), held=Held(heads=3))
    with pytest.raises(InputError, match="hidden = 100 with heads = 3"):
        bench.run(hosts_of(2))
    assert list(bench.results.iterdir()) == []


def test_ctrl_c_keeps_everything_and_resuming_measures_the_rest(bench: Bench) -> None:
    def stop(lanes: object) -> None:
        for lane in lanes:  # type: ignore[attr-defined]
            if lane.queue.settled > 5:
                raise KeyboardInterrupt

    def slowly(host: FakeHost, request: Request) -> Reply:
        threading.Event().wait(0.02)
        return measured(100.0)

    sweep = ClusterSweep(hosts_of(2, slowly), lambda spec: OPTIONS, bench.results, on_progress=stop)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    (lane,) = sweep.lanes.values()
    run = read_run(lane.writer.folder)
    assert run.info.how_ended == "interrupted"
    assert 5 < len(point_keys(run)) < POINTS
    (again,) = bench.run(hosts_of(3), resume=run.folder)
    assert_whole(again)


def test_a_full_disk_stops_all_devices_and_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunWriter.append
    written = []

    def full(self: RunWriter, record: object) -> None:
        written.append(record)
        if len(written) > 10:
            raise StoreError("write record", "records.jsonl (No space left on device)", "room on the disk")
        append(self, record)  # type: ignore[arg-type]

    monkeypatch.setattr(RunWriter, "append", full)
    with pytest.raises(StoreError, match="No space left on device"):
        bench.run(hosts_of(3))
    (folder,) = bench.results.glob("*/*")
    assert len(read_run(folder).records) == 10
    assert read_run(folder).info.how_ended == "interrupted"


def test_time_that_runs_out_ends_the_run_with_what_it_has(bench: Bench) -> None:
    now = [0.0]

    def takes_a_second(host: FakeHost, request: Request) -> Reply:
        now[0] += 1.0
        return measured(100.0)

    bench.options = replace(OPTIONS, budget_s=12.0)
    sweep = ClusterSweep(
        hosts_of(2, takes_a_second), lambda spec: bench.options, bench.results,
        clock=lambda: now[0], pause=lambda seconds: None,
    )  # fmt: skip
    (lane,) = sweep.run()
    run = read_run(lane.writer.folder)
    assert run.info.how_ended == "budget"
    assert 0 < len(point_keys(run)) < POINTS
    assert run.info.options["budget_s"] == 24.0  # of two devices' time


def test_points_beyond_the_plan_are_asked_for_once_all_of_it_is_measured(bench: Bench) -> None:
    from quantbench.sweep.options import plan_sweep

    beyond = plan_sweep(replace(OPTIONS, dims=("n=8192,8256",)), A100)[1].points
    (run,) = bench.run(hosts_of(3), make_more=lambda options, spec: lambda records: beyond)
    keys = point_keys(run)
    assert set(keys[-2:]) == {point.key for point in beyond}
    assert len(keys) == len(set(keys)) == POINTS + 2
