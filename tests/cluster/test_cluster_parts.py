"""The parts of a plan and their one writer, in this process: devices made of literals that answer,
or are lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sweep_doubles import A100, OPTIONS, STATE, Clock, QuietWorker, measured, steady

from quantbench.cluster.cards import card_lines, compare_devices, reference_set
from quantbench.cluster.ray_cluster import device_count
from quantbench.cluster.ray_sweep import Writer, measure_part
from quantbench.errors import MeasurementError, UnsupportedError
from quantbench.store.folder import Run, RunWriter, read_run
from quantbench.store.record import Measured
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.runner import Finished, SweepJob
from quantbench.sweep.session import new_run_info

POINTS = {point.key for point in plan_sweep(OPTIONS, A100)[1].points}
HELLO = Hello(A100, STATE, {"torch": "2.13.0"})


class LostDeviceError(Exception):
    """Stands for the end of an actor."""


@dataclass
class Cluster:
    """A run in `results` and its writer."""

    results: Path
    parts: int = 2
    options: SweepOptions = OPTIONS

    def __post_init__(self) -> None:
        with RunWriter.create(
            self.results, new_run_info(HELLO, self.options, (), self.results)
        ) as created:
            self.folder = created.folder
        self.writer = Writer(self.folder, self.options.budget_s)

    def measure(
        self, number: int, answer: Callable[[Request], Reply] = steady, label: str = ""
    ) -> Finished:
        worker = QuietWorker(answer, Clock(), HELLO)
        return self.measure_with(worker, number, label or f"GPU {number}")

    def measure_with(self, worker: QuietWorker, number: int, label: str) -> Finished:
        whole = plan_sweep(replace(self.options, budget_s=None), A100)[1]
        job = SweepJob(
            replace(whole, groups=whole.groups[number - 1 :: self.parts]),
            self.folder.name,
            A100,
            self.options.timing,
            more_references=reference_set(whole),
        )
        return measure_part(
            number, job, label, lambda: worker, self.writer.begin, self.writer.append
        )

    def run(self) -> Run:
        self.writer.end("complete")
        return read_run(self.folder)


def keys(run: Run) -> list[str]:
    return [record.key for record in run.records if record.role == "point"]


def test_parts_make_one_run_with_every_point_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, parts=4)
    assert {cluster.measure(number).how for number in (1, 2, 3, 4)} == {"complete"}
    run = cluster.run()
    assert len(keys(run)) == len(POINTS)
    assert set(keys(run)) == POINTS
    references = {r.source: {o.key for o in run.records if (o.role, o.source) == ("reference", r.source)}
                  for r in run.records}  # fmt: skip
    assert len({frozenset(found) for found in references.values()}) == 1
    assert all(len(found) == 3 for found in references.values())


def test_a_lost_device_costs_the_point_under_way(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    left = [12]

    def answer(request: Request) -> Reply:
        left[0] -= 1
        if left[0] == 0:
            raise LostDeviceError
        return measured(100.0)

    with pytest.raises(LostDeviceError):
        cluster.measure(1, answer)
    stored = cluster.writer.progress()[1].total()
    assert 0 < stored < 12
    cluster.measure(2)
    cluster.measure(1, label="GPU 7")
    assert cluster.writer.progress()[2] == [
        "the device of part 1 was lost; GPU 7 measures what is left of it"
    ]
    run = cluster.run()
    assert sorted(keys(run)) == sorted(POINTS)
    assert sum(r.source == "GPU 1" for r in run.records if r.role == "point") == stored


def test_a_device_that_was_given_up_stores_nothing_more(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.writer.begin(1, "GPU 0")
    cluster.measure(1)
    record = next(r for r in read_run(cluster.folder).records if r.role == "point")
    with pytest.raises(MeasurementError) as caught:
        cluster.writer.append(1, replace(record, source="GPU 0"))
    assert caught.value.value == "a record of part 1 by GPU 0"
    cluster.run()


def test_a_resumed_run_measures_what_is_missing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.measure(1)
    before = cluster.run()
    cluster.writer = Writer(cluster.folder)
    cluster.parts = 3  # as many devices as there are this time
    for number in (1, 2, 3):
        cluster.measure(number)
    after = cluster.run()
    assert set(keys(before)) < POINTS
    assert sorted(keys(after)) == sorted(POINTS)


def test_a_part_on_a_device_of_another_kind_measures_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    other = replace(HELLO, device=replace(A100, name="h100-test"))
    worker = QuietWorker(steady, Clock(), other)
    ended = cluster.measure_with(worker, 1, "GPU 0")
    assert (ended.how, worker.asked, worker.closed) == ("failed", [], True)
    assert keys(cluster.run()) == []


def test_a_slow_card_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, parts=4)
    for number in (1, 2, 3):
        cluster.measure(number)
    cluster.measure(4, lambda request: measured(107.0))
    run = cluster.run()
    assert card_lines(compare_devices(run.records)) == (
        "GPU 4 is 7 % slower, clock 1410 of 1410 MHz",
    )
    assert all(isinstance(r.outcome, Measured) for r in run.records)


def node(alive: bool = True, **resources: float) -> dict[str, object]:
    return {"Alive": alive, "Resources": resources}


def test_every_gpu_of_the_nodes_that_are_there_and_one_cpu_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QUANTBENCH_DEVICE", raising=False)
    nodes = [node(GPU=8.0, CPU=64.0), node(GPU=4.0, CPU=64.0), node(alive=False, GPU=8.0)]
    assert device_count(nodes, {"GPU": 12.0}) == 12
    assert device_count(nodes, {"GPU": 5.0}) == 5
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    assert device_count(nodes, {"CPU": 128.0}) == 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("GPU", "every GPU of the cluster is in use"),
        ("CPU", "the cluster has no GPU (nodes: 1)"),
    ],
)
def test_no_device_is_waited_for(kind: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANTBENCH_DEVICE", raising=False)
    with pytest.raises(UnsupportedError) as caught:
        device_count([node(**{kind: 8.0})], {})
    assert caught.value.value == value
