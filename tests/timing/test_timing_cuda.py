"""What a graph holds, in what order launches are queued, and the timer on a device made of
literals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from made_devices import A100

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.timing import cuda_device
from quantbench.timing.cuda import CudaTimer, runs_in_graph
from quantbench.timing.cuda_samplers import MAX_QUEUED_RUNS, EventSampler, replay_sampler
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import cold_copies
from quantbench.timing.session import MAX_QUEUED

MIB = 2**20


@dataclass
class FakeGpu:
    """Keeps a log of what is queued, a clock that its work advances, and answers as told.

    run_us: what a run takes between its events, empty_us: what an empty kernel takes.
    """

    run_us: float = 100.0
    empty_us: float = 2.0
    held: list[bool] = field(default_factory=list)  # answers of was_held, then True
    mhz: tuple[float, ...] | None = None  # what the stamps tell; None: 1410 for every gap
    log: list[str] = field(default_factory=list)
    now_s: float = 0.0
    capturing: bool = False
    polls: int = 0
    queue: int = 10_000  # launches that fit behind a hold
    held_from: int = 0  # place in the log behind the last hold
    expired: int = 0  # holds that ended because more were queued

    def now(self) -> float:
        return self.now_s

    def note(self, word: str) -> None:
        if not self.capturing:
            self.log.append(word)

    def run(self) -> None:
        self.now_s += self.run_us * 1e-6
        self.note("run")

    def empty(self) -> None:
        self.now_s += self.empty_us * 1e-6
        self.note("empty")

    def event_pair(self) -> FakePair:
        return FakePair(self)

    def flush(self) -> None:
        self.now_s += 50e-6
        self.note("flush")

    def hold(self) -> None:
        self.now_s += 100e-6  # what the host takes to queue a batch
        self.note("hold")
        self.held_from = len(self.log)

    def release(self) -> None:
        self.note("release")

    def was_held(self) -> bool:
        if self.log.index("release", self.held_from) - self.held_from > self.queue:
            self.expired += 1
            return False
        return self.held.pop(0) if self.held else True

    def stamp(self, index: int) -> None:
        self.note(f"stamp {index}")

    def clocks_mhz(self, stamps: int) -> tuple[float, ...]:
        return (1410.0,) * (stamps - 1) if self.mhz is None else self.mhz

    def state(self) -> DeviceState:
        self.note("state")
        self.polls += 1
        return DeviceState(sm_clock_mhz=1400.0, power_w=300.0 + self.polls)

    def synchronize(self) -> None:
        self.note("synchronize")

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.capturing = True
        start_s = self.now_s
        body()
        body()
        took_s = self.now_s - start_s
        self.capturing = False
        self.note("rehearse and capture")

        def replay() -> None:
            self.now_s += took_s / 2
            self.note("replay")

        return replay


class FakePair:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._start_s = self._stop_s = 0.0

    def start(self) -> None:
        self._gpu.note("start")
        self._start_s = self._gpu.now_s

    def stop(self) -> None:
        self._gpu.note("stop")
        self._stop_s = self._gpu.now_s

    def elapsed_us(self) -> float:
        return (self._stop_s - self._start_s) * 1e6


# ---- the runs of a graph


def in_graph(
    run_us: float, *, min_bytes: int | None = None, cache: str = "cold"
) -> tuple[int, int]:
    return runs_in_graph(TimingOptions(cache=cache), run_us, min_bytes=min_bytes, l2_bytes=40 * MIB)


def test_hot_runs_are_replayed_for_half_a_millisecond() -> None:
    assert in_graph(5.0, cache="hot") == (0, 100)
    assert in_graph(0.2, cache="hot") == (0, 1000)  # no more than that
    assert in_graph(700.0, cache="hot") == (0, 1)


def test_cold_runs_rotate_over_copies_that_outgrow_the_cache() -> None:
    needed = cold_copies(40 * MIB, 4 * MIB)  # 41
    assert in_graph(10.0, min_bytes=4 * MIB) == (40, 41)
    assert in_graph(4.0, min_bytes=4 * MIB) == (40, 3 * needed)


def test_more_copies_than_are_made_are_refused() -> None:
    assert in_graph(10.0, min_bytes=28 * 1024) == (5852, 5853)
    with pytest.raises(UnsupportedError, match=r"6069 copies .*; expected .* at most 6000"):
        in_graph(10.0, min_bytes=27 * 1024)


def test_a_graph_without_copies_is_not_called_cold() -> None:
    # The "cold" graph that was silently warm (flashinfer 4468) cannot come about.
    gpu = FakeGpu(run_us=5.0)
    for min_bytes in (None, 2 * MIB):
        with pytest.raises(UnsupportedError, match="0 copies to rotate over"):
            timer(gpu, mode="graph").measure(gpu.run, min_bytes=min_bytes)


# ---- the order of launches


def test_cold_events_flush_before_the_start_event_and_release_once_everything_is_queued() -> None:
    gpu = FakeGpu()
    got = EventSampler(gpu, gpu.run, flush=True).sample(2)
    assert gpu.log == [
        "hold", "stamp 0",
        "flush", "start", "run", "stop", "stamp 1",
        "flush", "start", "run", "stop", "stamp 2",
        "release", "state", "synchronize",
    ]  # fmt: skip
    assert got.samples_us == pytest.approx((100.0, 100.0))  # the flush is not in it
    assert got.clocks_mhz == (1410.0, 1410.0)
    assert got.invalid == ()


def test_the_stream_is_let_go_when_a_run_fails() -> None:
    gpu = FakeGpu()

    def broken() -> None:
        raise RuntimeError("CUDA error: invalid argument")

    with pytest.raises(RuntimeError, match="invalid argument"):
        EventSampler(gpu, broken, flush=True).sample(4)
    assert gpu.log[-1] == "release"


def test_a_hold_that_ran_out_marks_the_batch_and_the_next_is_half_as_long() -> None:
    gpu = FakeGpu(held=[False, False])
    sampler = EventSampler(gpu, gpu.run, flush=True)
    first = sampler.sample(16)
    assert first.invalid == ("launch gap: the device had to wait for the host",) * 16
    assert len(sampler.sample(16).samples_us) == 8
    third = sampler.sample(16)
    assert (len(third.samples_us), third.invalid) == (4, ())


def test_without_counters_the_clock_is_nvmls_and_hot_events_do_not_flush() -> None:
    gpu = FakeGpu(mhz=())
    assert EventSampler(gpu, gpu.run, flush=False).sample(3).clocks_mhz == (1400.0,) * 3
    assert "flush" not in gpu.log


def test_a_replay_is_divided_by_its_runs() -> None:
    gpu = FakeGpu(run_us=4.0)
    sampler = replay_sampler(gpu, [gpu.run] * 10)
    # The first replay uploads, nothing is held.
    assert gpu.log == ["rehearse and capture", "replay", "synchronize"]
    gpu.log.clear()
    got = sampler.sample(2)
    assert gpu.log == [
        "hold", "stamp 0", "start", "replay", "stop", "stamp 1", "start", "replay", "stop", "stamp 2",
        "release", "state", "synchronize",
    ]  # fmt: skip
    assert got.samples_us == pytest.approx((4.0, 4.0))
    assert sampler.runs_per_sample == 10


def test_replays_behind_one_hold_stay_within_the_drivers_queue_and_shrink_when_it_ran_out() -> None:
    def queued(runs: int, *held: bool) -> list[int]:
        gpu = FakeGpu(held=list(held))
        sampler = replay_sampler(gpu, [gpu.run] * runs)
        return [len(sampler.sample(MAX_QUEUED).samples_us) for _ in range(4)]

    assert queued(10) == [MAX_QUEUED] * 4
    assert queued(100) == [MAX_QUEUED_RUNS // 100] * 4
    assert queued(1000) == [1] * 4
    assert queued(10, False, True, False) == [16, 8, 8, 4]


# ---- the timer


def timer(gpu: FakeGpu, **options: object) -> CudaTimer:
    def pause(seconds: float) -> None:
        gpu.now_s += seconds

    made = CudaTimer(TimingOptions(**options), A100, gpu.state, ops=gpu, now=gpu.now, pause=pause)  # type: ignore[arg-type]
    gpu.log.clear()  # of the empty kernel
    return made


def test_a_cold_point_from_beginning_to_end() -> None:
    gpu = FakeGpu()
    made = timer(gpu)
    got = made.measure(gpu.run)
    assert got.stopped_by == "precision"
    assert got.samples_us == pytest.approx((100.0,) * len(got.samples_us))
    assert got.clocks_mhz == (1410.0,) * len(got.samples_us)
    assert got.stated.clock == pytest.approx(15 / 1410)
    assert 40 <= len(got.samples_us) <= 80  # the steady ones of the warm-up count
    assert got.state_after.power_w == 300.0 + gpu.polls
    assert got.state_before.power_w == 300.0 + gpu.polls - 1
    assert gpu.log[:3] == ["run", "run", "synchronize"]  # before anything is held
    assert made.warmup_s >= 2.1  # the first point heats the card, then two windows of 50 ms
    assert made.measuring_s == pytest.approx(150e-6 + 100e-6)
    heated_s = made.warmup_s
    made.measure(gpu.run)
    assert heated_s == pytest.approx(2 + made.warmup_s - heated_s, rel=0.1)
    assert made.measuring_s == pytest.approx(2 * (150e-6 + 100e-6))


def most_samples_behind_a_hold(gpu: FakeGpu) -> int:
    return max(batch.count(" start") for batch in " ".join(gpu.log).split("hold"))


def test_a_run_of_many_launches_never_fills_the_queue() -> None:
    """Such as a loop over 64 experts: operations of torch, of up to two kernels each."""
    gpu = FakeGpu(queue=1024)

    def run() -> None:
        for _ in range(64):
            torch.zeros(1)
            gpu.note("product")
            gpu.note("sum of its parts")
        gpu.now_s += 1e-3

    got = timer(gpu).measure(run)
    assert gpu.expired == 0
    assert got.discarded == ()
    assert most_samples_behind_a_hold(gpu) == 7


def test_what_fits_is_learnt_once_where_launches_cannot_be_counted() -> None:
    gpu = FakeGpu(queue=1024)

    def run() -> None:
        gpu.log += ["kernel of another library"] * 200
        gpu.now_s += 500e-6

    made = timer(gpu)
    made.measure(run)
    assert gpu.expired == 2  # 16 and 8 samples of 205 launches; 4 fit
    for _ in range(3):
        assert made.measure(run).discarded == ()
    assert gpu.expired == 2


def test_a_hold_that_ends_for_another_reason_teaches_nothing() -> None:
    """The first sample of a point alone is behind its hold: what ran out was not the queue."""
    gpu = FakeGpu()
    made = timer(gpu)
    gpu.held = [False]
    made.measure(gpu.run)
    gpu.log.clear()
    made.measure(gpu.run)
    assert most_samples_behind_a_hold(gpu) == MAX_QUEUED


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("run_us", [19.9, 5000.0])
def test_the_method_does_not_depend_on_the_time(run_us: float, cache: str) -> None:
    gpu = FakeGpu(run_us=run_us)
    got = timer(gpu, cache=cache).measure(
        gpu.run, copy=lambda number: pytest.fail("a copy"), min_bytes=2 * MIB
    )
    assert (got.mode, got.cache, got.kernels_per_sample) == ("events", cache, 1)
    assert got.samples_us[0] == pytest.approx(run_us)
    assert got.stopped_by == "precision"


def test_a_cold_graph_rotates_over_as_many_copies_as_it_takes() -> None:
    gpu = FakeGpu(run_us=5.0)
    made: list[int] = []

    def copy(number: int) -> Callable[[], None]:
        made.append(number)
        return gpu.run

    got = timer(gpu, mode="graph").measure(gpu.run, copy=copy, min_bytes=2 * MIB)
    assert made == list(range(80))  # 4 · 40 MiB / 2 MiB
    assert (got.mode, got.cache, got.kernels_per_sample) == ("graph", "cold", 81)


@pytest.mark.parametrize("mode", ["auto", "events", "graph"])
def test_the_floor_is_an_empty_kernel_in_the_same_mode(mode: str) -> None:
    gpu = FakeGpu()
    made = timer(gpu, mode=mode, cache="hot")
    assert made.warmup_s == 0  # not a point's
    got = made.measure(gpu.run)
    assert got.floor_us == pytest.approx(2.0)
    assert got.samples_us[0] == pytest.approx(100.0)  # it is not subtracted


def test_phases_are_counted_when_a_run_fails_while_sampling() -> None:
    gpu = FakeGpu()
    made = timer(gpu)

    def run() -> None:
        gpu.run()
        if made.warmup_s:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.measure(run)
    assert gpu.log[-1] == "release"
    assert made.measuring_s == pytest.approx(250e-6)  # one flush and one run


def test_a_processor_is_no_cuda_device() -> None:
    with pytest.raises(InputError, match="a device of kind 'cpu'; expected a cuda device"):
        CudaTimer(TimingOptions(), replace(A100, kind="cpu"), DeviceState, ops=FakeGpu())


def test_probes_that_do_not_compile_leave_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilationError(Exception):
        """As triton's, which is no RuntimeError."""

    def broken(kernel: object) -> None:
        raise CompilationError("at 12:7: no such instruction")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(cuda_device, "HostFlagHold", broken)
    note = cuda_device.TorchCuda._load_probes(object.__new__(cuda_device.TorchCuda))
    assert note == "no counters of the SM clock: at 12:7: no such instruction"
