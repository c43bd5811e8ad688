"""Collectives: points, lock step, warnings, sessions with made-up ranks; and real ones, 2 and 4
over gloo.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from commands import ROOT, refused
from torch.utils._python_dispatch import TorchDispatchMode

from quantbench.cli.comm import CommOptions, libraries_to_stderr, row_to_json, spread_warnings
from quantbench.comm.session import (
    DEFAULT_OPS,
    CommSession,
    figures,
    parse_sizes,
    points,
    reference_point,
)
from quantbench.device import lookup
from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, MeasurementError, UnsupportedError
from quantbench.measurement import Grade
from quantbench.providers.collectives import TorchWork, _fill_pattern
from quantbench.store.folder import read_run
from quantbench.store.record import Failed, Measured, Record, Skipped, record_to_json
from quantbench.store.schema import schema
from quantbench.timing.lockstep import OUT_OF_MEMORY, Command, Leader, RankBatch, follow
from quantbench.timing.options import TimingOptions
from quantbench.workload import Collective

PATIENCE_S = 240
OPTIONS = TimingOptions(cache="hot", half_width=0.05, max_time_s=0.2, min_samples=5)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4KiB:64KiB", (4096, 16384, 65536)),
        ("1KiB:8KiB:x2", (1024, 2048, 4096, 8192)),
        ("1MB,65536,1 KiB", (1024, 65536, 1_000_000)),
        ("1.5KiB", (1536,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("big", "sizes such as 4KiB"),
        ("0", "sizes such as 4KiB"),
        ("8KiB:4KiB", "the smaller size first"),
        ("1:2:3:4", "from:to, from:to:xN or a list"),
        ("1:8:x1", "with N of at least 2"),
    ],
)
def test_sizes_that_are_none(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_sizes(text)


def test_points_are_whole_elements_for_each_rank_and_stand_once() -> None:
    found = points(
        ("all_reduce", "send_recv"), (1000, 1001, 4096), num_gpus=6, num_nodes=2, dtype="bf16"
    )
    assert [c.message_bytes for c in found] == [1008, 4104, 1008, 4104]
    assert {c.num_nodes for c in found} == {2}
    assert reference_point("gloo", found[0]).message_bytes % 12 == 0
    with pytest.raises(InputError, match="comm: op = 'gossip'"):
        points(("gossip",), (8,), num_gpus=2, num_nodes=1, dtype="bf16")


def test_figures_use_the_factors_of_nccl_tests() -> None:
    # doc/PERFORMANCE.md of nccl-tests: 2(n-1)/n for all_reduce, (n-1)/n for gathers and scatters, 1
    # for send_recv.
    factors = {
        "all_reduce": 1.75,
        "all_gather": 0.875,
        "reduce_scatter": 0.875,
        "all_to_all": 0.875,
        "send_recv": 1.0,
        "broadcast": 1.0,
    }
    for op, factor in factors.items():
        found = figures(Collective(op, 8 * 10**6, 8), 1000.0)
        assert found.algorithm_gb_per_s == pytest.approx(8.0)
        assert found.bus_gb_per_s == pytest.approx(8.0 * factor)


@dataclass
class LoneRanks:
    """A group whose other ranks answer what they are told to."""

    others: Sequence[object] = ()
    rank: int = 0
    script: list[Command | None] = field(default_factory=list)
    gathered: list[object] = field(default_factory=list)
    other_state: DeviceState = field(default_factory=DeviceState)

    @property
    def world_size(self) -> int:
        return 1 + len(self.others) if self.others else 2

    def broadcast(self, command: Command | None) -> Command | None:
        return self.script.pop(0) if self.rank else command

    def gather(self, value: object) -> list[object] | None:
        self.gathered.append(value)
        if self.rank:
            return None
        twice = value
        if isinstance(value, RankBatch):
            twice = replace(
                value, samples_us=tuple(2 * us for us in value.samples_us), state=self.other_state
            )
        others = self.others or [twice]
        return [value, *others]


@dataclass
class SteadyWork:
    """A collective whose time grows with its message: 10 µs and 1 µs a kilobyte, this rank; the
    other takes twice.
    """

    trouble: str = ""
    wrong: str = ""
    clock_s: float = 0.0
    asked: list[Collective] = field(default_factory=list)
    state: DeviceState = field(default_factory=DeviceState)
    launch_us: float = 0.0

    def allocate(self, collective: Collective) -> str:
        self.asked.append(collective)
        return self.trouble

    def check(self) -> str:
        return self.wrong

    def sample(self, count: int, runs: int) -> RankBatch:
        us = 10.0 + self.asked[-1].message_bytes / 1000
        self.clock_s += count * runs * 2 * us * 1e-6
        return RankBatch(tuple(us + 0.001 * i for i in range(count)), self.launch_us, self.state)


def plan(*sizes: int, ops: tuple[str, ...] = ("all_reduce",)) -> tuple[Collective, ...]:
    return points(ops, sizes, num_gpus=2, num_nodes=1, dtype="fp32")


def session(
    work: SteadyWork, ranks: LoneRanks, records: list[Record], backend: str = "gloo"
) -> CommSession:
    return CommSession(
        Leader(ranks, work), backend=backend, run_id="r", spec=lookup("h200-sxm-141gb"), state=DeviceState,
        options=OPTIONS, on_record=records.append, now=lambda: work.clock_s, pause=lambda s: None,
    )  # fmt: skip


def test_a_sample_is_the_slowest_ranks() -> None:
    point = Collective("all_reduce", 8000, 2, "fp32")
    leader = Leader(LoneRanks(), work := SteadyWork())
    assert leader.begin(point) is None
    assert leader.sample(3, 1).samples_us == pytest.approx([36.0, 36.002, 36.004])
    assert work.asked == [point]
    leader.stop()


def test_a_rank_that_answers_less_is_an_error() -> None:
    leader = Leader(LoneRanks(others=[RankBatch((1.0,))]), SteadyWork())
    leader._work.allocate(Collective("all_reduce", 8, 2, "fp32"))  # type: ignore[attr-defined]
    with pytest.raises(MeasurementError, match="3 samples from each rank"):
        leader.sample(3, 1)


def test_a_session_keeps_every_point_and_repeats_its_reference() -> None:
    records: list[Record] = []
    work = SteadyWork()
    run = session(work, LoneRanks(), records)
    run.run(plan(1000, 100_000, ops=("all_reduce", "all_gather")))
    roles = [r.role for r in records]
    assert roles == ["reference", "point", "point", "reference", "point", "point", "reference"]
    assert len(run.reference_us) == 3
    measured = [r for r in records if r.role == "point"]
    assert all(isinstance(r.outcome, Measured) for r in measured)
    row = row_to_json(measured[1])
    assert row["latency_us"] == pytest.approx(2 * 110.0, rel=1e-3)
    assert row["bus_gb_per_s"] == pytest.approx(100_000 / 220 / 1e3, rel=1e-3)
    assert measured[0].places[0].axes == {"message_bytes": 1000}
    assert {r.provider for r in records} == {"torch.gloo"}
    for record in records:
        jsonschema.validate(json.loads(json.dumps(record_to_json(record))), schema("record"))


def outcome_on_gpus(work: SteadyWork, ranks: LoneRanks, size: int = 90_000) -> Measured:
    """The outcome of a message between two GPUs; 90 KB take the slower one 200 µs."""
    records: list[Record] = []
    session(work, ranks, records, "nccl").run(plan(size))
    outcome = next(r for r in records if r.role == "point").outcome
    assert isinstance(outcome, Measured)
    return outcome


def test_short_collectives_are_put_together_on_a_gpu() -> None:
    found = outcome_on_gpus(SteadyWork(), LoneRanks(), 1000).measurement
    assert found.kernels_per_sample == 10  # 200 µs over the slowest rank's 22
    assert found.mode == "events"


def test_a_collective_between_quiet_gpus_is_graded_a() -> None:
    fast, slow = DeviceState(sm_clock_mhz=1980.0), DeviceState(sm_clock_mhz=1965.0)
    outcome = outcome_on_gpus(SteadyWork(state=fast), LoneRanks(other_state=slow))
    assert outcome.grade == Grade("A")
    assert set(outcome.measurement.clocks_mhz) == {1965.0}  # the slower rank's


def test_a_rank_that_throttles_or_tells_no_clock_costs_the_grade() -> None:
    state = DeviceState(sm_clock_mhz=1980.0)
    hot = replace(state, throttle_reasons=("hw_thermal",))
    assert outcome_on_gpus(SteadyWork(state=state), LoneRanks(other_state=hot)).grade.letter != "A"
    unknown = outcome_on_gpus(SteadyWork(state=state), LoneRanks())
    assert unknown.measurement.clocks_mhz == ()
    assert "the SM clock is not known" in unknown.grade.reasons


@pytest.mark.parametrize(("launch_us", "says"), [(12.0, False), (190.0, True)])
def test_a_time_of_launching_is_called_that(launch_us: float, says: bool) -> None:
    state = DeviceState(sm_clock_mhz=1980.0)
    work = SteadyWork(state=state, launch_us=launch_us)
    reasons = outcome_on_gpus(work, LoneRanks(other_state=state)).grade.reasons
    said = "launching takes the host 190 µs of it: it is no time of the links"
    assert (said in reasons) == says


@dataclass
class TwoRanks:
    """The second of two ranks, alone."""

    world_size: int = 2
    rank: int = 1
    backend: str = "nccl"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def barrier(self) -> None:
        pass


def test_launching_is_timed_before_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device takes 20 µs for a run and the host 5 µs to launch it, until 8 runs wait."""
    host_us = device_us = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_us = max(host_us, device_us)

        def elapsed_time(self, other: Event) -> float:
            return (other.at_us - self.at_us) / 1e3

    def run() -> None:
        nonlocal host_us, device_us
        host_us = max(host_us + 5.0, device_us - 8 * 20.0)
        device_us = max(host_us, device_us) + 20.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        "quantbench.providers.collectives.time.perf_counter_ns", lambda: int(host_us * 1e3)
    )
    work = TorchWork(TwoRanks(), lambda: DeviceState(sm_clock_mhz=1410.0))  # type: ignore[arg-type]
    work._run = run
    batch = work.sample(10, 4)
    assert batch.launch_us == pytest.approx(5.0)
    assert batch.samples_us[-1] == pytest.approx(20.0)
    assert batch.state.sm_clock_mhz == 1410.0


class Largest(TorchDispatchMode):
    """Remembers the largest tensor made, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"]
)
def test_checking_a_large_message_takes_no_memory_beyond_its_buffers(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are made and compared in 64 bits, which were eight times the message."""
    monkeypatch.setattr("quantbench.providers.collectives._CHUNK_ELEMENTS", 2**12, raising=False)
    message_bytes = 2**20
    work = TorchWork(TwoRanks())  # type: ignore[arg-type]
    with Largest() as largest:
        assert work.allocate(Collective(op, message_bytes, 2, "int8")) == ""
        work._run = lambda: None
        assert "elements are wrong" in work.check()
    assert largest.nbytes <= message_bytes


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
@pytest.mark.parametrize("world", [2, 63, 125, 1000])
def test_sums_are_right_for_any_number_of_ranks(world: int, dtype: str) -> None:
    """The ranks add up in the dtype of the message, one after another."""
    work = TorchWork(TwoRanks(world))  # type: ignore[arg-type]
    assert work.allocate(Collective("all_reduce", world * 64, world, dtype)) == ""
    parts = [torch.empty_like(work._output) for _ in range(world)]
    for rank, part in enumerate(parts):
        _fill_pattern(part, rank, world)
    work._run = lambda: work._output.copy_(sum(parts))
    assert work.check() == ""
    del parts[1]
    assert "elements are wrong" in work.check()


def test_a_result_that_is_not_a_number_is_wrong() -> None:
    work = TorchWork(TwoRanks())  # type: ignore[arg-type]
    assert work.allocate(Collective("broadcast", 64, 2, "fp32")) == ""
    work._run = lambda: work._output.copy_(
        torch.tensor([float("nan"), *(i % 5 for i in range(1, 16))])
    )
    assert work.check() == "1 of 16 elements are wrong"


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (SteadyWork(trouble="torch.distributed reduces no fp8: not supported"), Skipped),
        (SteadyWork(trouble=OUT_OF_MEMORY + "tried to allocate 1 GiB"), Failed),
        (SteadyWork(wrong="3 of 8 elements are wrong"), Failed),
        (SteadyWork(wrong="not supported by gloo: x"), Skipped),
    ],
)
def test_what_cannot_be_measured_is_kept_with_its_reason(work: SteadyWork, kind: type) -> None:
    records: list[Record] = []
    session(work, LoneRanks(), records).run(plan(8))
    assert all(isinstance(r.outcome, kind) for r in records)
    row = row_to_json(records[1])
    assert (work.trouble or work.wrong) in str(row.get("skipped", row.get("failed")))


def test_another_ranks_trouble_is_named() -> None:
    refused = Leader(LoneRanks(others=["no room"]), SteadyWork()).begin(
        Collective("all_reduce", 8, 2, "fp32")
    )
    assert refused.message == "no room (rank 1)"


def test_followers_do_as_they_are_told_until_they_are_let_go() -> None:
    point = Collective("all_to_all", 4096, 2, "fp32")
    work = SteadyWork()
    ranks = LoneRanks(
        rank=1, script=[("allocate", (point,)), ("check", ()), ("sample", (2, 1)), None]
    )
    follow(ranks, work)
    assert work.asked == [point]
    assert ranks.gathered[:2] == ["", ""]
    assert ranks.gathered[2].samples_us == pytest.approx([14.096, 14.097])  # type: ignore[attr-defined]


def test_scatter_and_drift_are_warned_of() -> None:
    quiet = {"op": "all_reduce", "message_bytes": 4096, "spread": 0.05}
    wide = {"op": "all_gather", "message_bytes": 65536, "spread": 0.31}
    assert spread_warnings([quiet], [100.0, 104.0]) == []
    assert spread_warnings([], []) == []
    scatter, drift = spread_warnings([quiet, wide], [100.0, 112.0, 101.0])
    assert scatter.startswith("1 of 2 points scatter by more than 10 %, the worst by 31 %")
    assert "(all_gather 64.0 KiB)" in scatter
    assert drift.startswith("The repeated point took 12 % longer")


def test_plans_by_backend() -> None:
    arguments = CommOptions()
    found = arguments.plan("nccl", 8, 1)
    assert {c.op for c in found} == set(DEFAULT_OPS)
    assert (max(c.message_bytes for c in found), found[0].dtype) == (2**30, "bf16")
    assert arguments.plan("gloo", 2, 1)[0].dtype == "fp32"
    one = CommOptions(op="all-gather", sizes="1KiB", dtype="int8").plan("gloo", 4, 2)
    assert one == (Collective("all_gather", 1024, 4, "int8", 2),)


@pytest.mark.parametrize(
    ("gpu", "gpus", "nccl", "expected"),
    [(None, 0, True, "gloo"), (0, 4, True, "nccl"), (0, 1, True, "4 ranks"), (0, 4, False, "NCCL")],
)
def test_gpus_are_not_left_out_silently(
    monkeypatch: pytest.MonkeyPatch, gpu: int | None, gpus: int, nccl: bool, expected: str
) -> None:
    """gloo, which runs on CPUs, is chosen only where there is no GPU."""
    from quantbench.providers import collectives

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(collectives, "gpu_index", lambda: gpu)
    monkeypatch.setattr(collectives.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(collectives.dist, "is_nccl_available", lambda: nccl)
    if expected in ("gloo", "nccl"):
        assert collectives.backend_here() == expected
    else:
        with pytest.raises(UnsupportedError, match=f"{expected}.*--backend gloo"):
            collectives.backend_here()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(
    ranks: int, results: Path, words: str, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch.distributed")
    environment = {
        **os.environ, "QUANTBENCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "NCCL_DEBUG": "WARN",
    }  # fmt: skip
    command = [
        *before, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", "-m", "quantbench", "comm", "--results", str(results), "--json", *words.split(),
    ]  # fmt: skip
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT,
    )


def test_lines_of_libraries_stay_out_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    with libraries_to_stderr():
        os.write(1, b"[Gloo] Rank 1 is connected\n")
    os.write(1, b"{}\n")
    assert capfd.readouterr() == ("{}\n", "[Gloo] Rank 1 is connected\n")


@pytest.mark.slow
def test_real_ranks_over_gloo(tmp_path: Path) -> None:
    ops = "all_reduce,all_gather,reduce_scatter,all_to_all,send_recv,broadcast"
    ranks = 3
    done = torchrun(ranks, tmp_path, f"--op {ops} --sizes 4KiB,64KiB --precision 50%")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["points"]) == 12
    for point in answer["points"]:
        # gloo lacks an operation in some releases of torch: that is a reason, not a figure.
        assert point["num_gpus"] == ranks
        assert "failed" not in point, point
        if "skipped" in point:
            assert "not supported" in point["skipped"]
            continue
        done_by = Collective(point["op"], point["message_bytes"], ranks)
        bus_gb_per_s = point["algorithm_gb_per_s"] * done_by.bus_bytes / done_by.message_bytes
        assert point["bus_gb_per_s"] == pytest.approx(bus_gb_per_s, rel=1e-3)
        assert point["samples"] >= 1
    assert sum("latency_us" in p for p in answer["points"]) >= 8
    assert len(answer["reference_us"]) == 7
    run = read_run(Path(answer["folder"]))
    assert run.info.how_ended == "complete"
    topology = run.info.options["topology"]
    assert (topology["world_size"], topology["num_nodes"]) == (ranks, 1)
    assert len(topology["ranks"]) == ranks
    assert run.info.environment["NCCL_DEBUG"] == "WARN"
    assert run.info.software["torch"]
    jsonschema.validate(json.loads((run.folder / "run.json").read_text()), schema("run"))


@pytest.mark.slow
def test_a_narrow_network_is_measured_as_narrow(tmp_path: Path) -> None:
    """Two ranks in a network namespace of their own whose loopback carries 100 Mbit/s."""
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        pytest.skip("unshare and tc are not installed")
    # A token bucket never passes a packet larger than its burst: the loopback's 64 KiB frames must
    # go first.
    narrow = "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate 100mbit burst 128kb latency 500ms"
    probe = subprocess.run(
        ["unshare", "-rn", "sh", "-c", narrow],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if probe.returncode:
        pytest.skip(
            f"no network namespace with limited bandwidth without privileges: {probe.stderr.strip()[:100]}"
        )
    before = ["unshare", "-rn", "sh", "-c", f'{narrow} && exec "$0" "$@"']
    words = "--op all_reduce --sizes 1MiB --precision 5%"
    done = torchrun(2, tmp_path, words, before=before)
    assert done.returncode == 0, done.stderr
    (point,) = json.loads(done.stdout)["points"]
    # 12.5 MB/s carry both directions of both ranks: nothing that is right can be above it.
    assert point["bus_gb_per_s"] < 0.0126


def test_without_torchrun_it_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    assert refused(f"comm --results {tmp_path}").expected.startswith("torchrun --nproc-per-node=N")
