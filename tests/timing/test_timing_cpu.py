"""Timing on the processor: with clocks made of literals, and really, without a word about how long
it takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.timing import make_timer
from quantbench.timing.cpu import CpuClocks, CpuSampler, CpuTimer, thread_preemptions
from quantbench.timing.options import TimingOptions

MIB = 2**20
CPU = DeviceSpec("cpu-x", "cpu", 1, 3000, 1 * MIB, 0, 2**34, 100, {"fp32": 0.1})
STATE = DeviceState(note="a test's processor")


class Fake:
    """A wall clock in microseconds that a run advances; lost: preemptions that the next runs
    meet.
    """

    def __init__(self, run_us: float = 100.0, lost: list[int] | None = None) -> None:
        self.wall_us = 1000.0
        self.thread_us = 0.0
        self.run_us = run_us
        self.lost = lost or []
        self.preempted = 0
        self.naps: list[float] = []

    def run(self) -> None:
        lost = self.lost.pop(0) if self.lost else 0
        self.preempted += lost
        self.thread_us += self.run_us
        self.wall_us += self.run_us + 4000.0 * lost

    def clocks(self) -> CpuClocks:
        return CpuClocks(
            wall_ns=lambda: round(self.wall_us * 1e3),
            thread_ns=lambda: round(self.thread_us * 1e3),
            preemptions=lambda: self.preempted,
            nap=self.naps.append,
        )


def test_samples_are_wall_times_in_microseconds() -> None:
    fake = Fake(run_us=123.5)
    got = CpuSampler(fake.run, None, fake.clocks()).sample(3)
    assert got.samples_us == (123.5,) * 3
    assert got.invalid == ("", "", "")
    assert fake.naps == []


def test_a_preempted_run_is_marked_and_has_the_threads_own_time() -> None:
    fake = Fake(lost=[0, 1, 2])
    got = CpuSampler(fake.run, None, fake.clocks()).sample(4)
    assert got.samples_us == (100.0,) * 4
    assert got.invalid == (
        "", "preempted: the core went to others once", "preempted: the core went to others 2 times", "",
    )  # fmt: skip
    assert fake.naps == [0.0001, 0.0001]  # before the third and the fourth


def test_the_buffer_is_read_before_each_cold_run_and_never_written() -> None:
    fake = Fake()
    buffer = np.ones(1024, dtype=np.int64)
    buffer.flags.writeable = False
    order: list[str] = []

    class Lines(np.ndarray):
        def sum(self, *rest: object, **more: object) -> np.int64:  # type: ignore[override]
            order.append(f"flush {self.size}")
            return super().sum(*rest, **more)  # type: ignore[arg-type]

    def run() -> None:
        order.append("run")
        fake.run()

    CpuSampler(run, buffer.view(Lines), fake.clocks()).sample(2)
    assert order == ["flush 128", "run", "flush 128", "run"]  # one word in each line of 64 bytes


def test_a_clock_that_goes_back_gives_no_time() -> None:
    backwards = iter([5000, 2000, *range(10_000, 10_000_000, 1000)])
    clocks = CpuClocks(
        wall_ns=lambda: next(backwards),
        thread_ns=lambda: 0,
        preemptions=lambda: 0,
        nap=lambda s: None,
    )
    got = CpuSampler(lambda: None, None, clocks).sample(2)
    assert got.samples_us == (-3.0, 1.0)


def timer(fake: Fake, **options: object) -> CpuTimer:
    return CpuTimer(
        TimingOptions(**options),  # type: ignore[arg-type]
        CPU,
        lambda: STATE,
        clocks=fake.clocks(),
        now=lambda: fake.wall_us / 1e6,
        pause=lambda s: None,
    )


def test_a_point_from_beginning_to_end() -> None:
    fake = Fake(run_us=250.0)
    made = timer(fake)
    got = made.measure(fake.run)
    assert (got.mode, got.cache, got.kernels_per_sample, got.stopped_by) == (
        "cpu",
        "cold",
        1,
        "precision",
    )
    assert got.samples_us == (250.0,) * 10
    assert got.clocks_mhz == ()
    assert got.state_before == got.state_after == STATE
    assert made.warmup_s == pytest.approx(0.02, rel=0.2)  # two windows of 10 ms
    assert made.measuring_s == pytest.approx(10 * 250e-6)


def test_preempted_samples_are_discarded_with_their_reason() -> None:
    fake = Fake(run_us=1000.0)

    def run() -> None:
        if fake.wall_us > 30_000:
            fake.lost = [1] if int(fake.wall_us) % 5 == 0 and not fake.naps else []
        fake.run()

    got = timer(fake, min_samples=20).measure(run)
    assert set(got.samples_us) == {1000.0}
    assert {d.reason for d in got.discarded} <= {"preempted: the core went to others once"}
    assert len(got.samples_us) >= 20


def test_hot_is_recorded_as_hot() -> None:
    fake = Fake()
    assert timer(fake, cache="hot").measure(fake.run).cache == "hot"


def test_a_graph_cannot_be_had_on_a_processor() -> None:
    with pytest.raises(UnsupportedError) as caught:
        timer(Fake(), mode="graph")
    assert str(caught.value) == (
        "timing: mode = 'graph' on a processor; expected a CUDA device, or mode = 'auto'"
    )


def test_a_gpu_is_no_processor() -> None:
    gpu = DeviceSpec("a100", "cuda", 108, 1410, 40 * MIB, 0, 80 * 2**30, 2039, {}, (8, 0))
    with pytest.raises(InputError) as caught:
        CpuTimer(TimingOptions(), gpu, lambda: STATE)
    assert str(caught.value) == "CpuTimer: a device of kind 'cuda'; expected a processor"


needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system pins no threads"
)


@needs_affinity
def test_the_thread_is_pinned_while_measuring_and_free_again_after() -> None:
    before = os.sched_getaffinity(0)
    seen: set[frozenset[int]] = set()
    fake = Fake()

    def run() -> None:
        seen.add(frozenset(os.sched_getaffinity(0)))
        fake.run()

    timer(fake).measure(run)
    assert seen == {frozenset({max(before)})}
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_the_thread_is_free_again_after_a_failure() -> None:
    before = os.sched_getaffinity(0)

    def run() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        timer(Fake()).measure(run)
    assert os.sched_getaffinity(0) == before


def test_torch_runs_on_one_thread_and_gets_its_threads_back() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    before = torch.get_num_threads()
    fake = Fake()
    seen: set[int] = set()

    def run() -> None:
        seen.add(torch.get_num_threads())
        fake.run()

    timer(fake).measure(run)
    assert seen == {1}
    assert torch.get_num_threads() == before


def test_preemptions_are_counted_upwards() -> None:
    first = thread_preemptions()
    assert first >= 0
    assert thread_preemptions() >= first


def real_task() -> Callable[[], None]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a, b, out = torch.randn(128, 128), torch.randn(128, 128), torch.empty(128, 128)
    return lambda: torch.mm(a, b, out=out)


def test_a_real_product_is_timed() -> None:
    made = make_timer(CPU, TimingOptions(max_time_s=0.2), state=lambda: STATE)
    got = made.measure(real_task())
    assert got.samples_us
    assert got.stopped_by in ("precision", "noise_floor", "max_time", "max_samples", "discards")
    assert (got.mode, got.cache) == ("cpu", "cold")
    assert made.warmup_s > 0
    assert made.measuring_s > 0


def test_the_state_is_the_devices_own_by_default() -> None:
    got = make_timer(CPU, TimingOptions(max_time_s=0.05, min_samples=3)).measure(real_task())
    assert got.state_before.note  # a processor always has something that it cannot tell


def test_importing_timing_loads_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, quantbench.timing, quantbench.timing.cpu, quantbench.timing.cuda, quantbench.timing.grade;"
        "print([m for m in ('torch', 'triton', 'scipy.stats') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
