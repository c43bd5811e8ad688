"""Timing on the processor: with clocks made of literals, and really, without a word about how long
it takes.
"""

import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from made_devices import A100

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.timing import make_timer
from quantbench.timing.cpu import CpuClocks, CpuSampler, CpuTimer
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


def test_a_preempted_run_is_marked_and_has_the_threads_own_time() -> None:
    fake = Fake(lost=[0, 1, 2])
    got = CpuSampler(fake.run, None, fake.clocks()).sample(4)
    assert got.samples_us == (100.0,) * 4
    assert [word[:9] for word in got.invalid] == ["", "preempted", "preempted", ""]
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


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_a_point_from_beginning_to_end(cache: str) -> None:
    fake = Fake(run_us=250.0)
    made = timer(fake, cache=cache)
    got = made.measure(fake.run)
    assert (got.mode, got.cache, got.stopped_by) == ("cpu", cache, "precision")
    assert (got.kernels_per_sample, got.clocks_mhz) == (1, ())
    assert got.samples_us == (250.0,) * 49
    assert got.state_before == got.state_after == STATE
    assert made.warmup_s == pytest.approx(0.02, rel=0.2)  # two windows of 10 ms
    assert made.measuring_s == pytest.approx(250e-6)  # the warm-up's steady samples count


def test_graphs_and_gpus_are_none_of_a_processor() -> None:
    with pytest.raises(UnsupportedError, match="mode = 'graph' on a processor"):
        timer(Fake(), mode="graph")
    with pytest.raises(InputError, match="a device of kind 'cuda'; expected a processor"):
        CpuTimer(TimingOptions(), A100, lambda: STATE)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
@pytest.mark.parametrize("fails", [False, True])
def test_one_pinned_thread_while_measuring_and_free_again_after(fails: bool) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    seen: set[tuple[frozenset[int], int]] = set()
    fake = Fake()

    def run() -> None:
        seen.add((frozenset(os.sched_getaffinity(0)), torch.get_num_threads()))
        fake.run()
        if fails:
            raise RuntimeError

    with pytest.raises(RuntimeError) if fails else nullcontext():
        timer(fake).measure(run)
    assert seen == {(frozenset({max(cores)}), 1)}
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)


def test_a_real_product_is_timed() -> None:
    a, b, out = torch.randn(128, 128), torch.randn(128, 128), torch.empty(128, 128)
    made = make_timer(CPU, TimingOptions(max_time_s=0.2))
    got = made.measure(lambda: torch.mm(a, b, out=out))
    assert got.samples_us
    assert got.stopped_by in ("precision", "noise_floor", "max_time", "max_samples", "discards")
    assert min(made.warmup_s, made.measuring_s) > 0
    assert got.state_before.note  # a processor always has something that it cannot tell
