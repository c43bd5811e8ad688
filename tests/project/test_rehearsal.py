"""The rehearsal of tools.evidence in short, and the device double that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_double import LOST, QUEUE_LIMIT, Gpu, Kernel, Ops
from rehearse import false_cliffs, rehearse

from quantbench.device import lookup
from quantbench.stats import median
from quantbench.timing.cuda import CudaTimer
from quantbench.timing.cuda_samplers import EventSampler
from quantbench.timing.options import TimingOptions


def sampler(gpu: Gpu, us: float, launches: int = 1) -> EventSampler:
    def run() -> None:
        for _ in range(launches):
            gpu.queue(Kernel("k", us))

    return EventSampler(Ops(gpu=gpu), run, flush=True)


def test_work_queued_behind_a_hold_runs_back_to_back_once_the_clock_is_up() -> None:
    gpu = Gpu()
    sampled = sampler(gpu, 100.0)
    cold = sampled.sample(16)
    for _ in range(200):
        warm = sampled.sample(16)
    assert cold.samples_us[0] > 1.5 * warm.samples_us[0]
    assert cold.clocks_mhz[0] < 0.7 * warm.clocks_mhz[0]
    # The kernel, the time between event and kernel on both sides, and ticks of half a microsecond.
    assert all(101 <= us <= 103 and us % 0.5 == 0 for us in warm.samples_us)
    assert not warm.invalid


def test_a_full_queue_behind_a_held_stream_is_a_failure() -> None:
    fits, blocks = (QUEUE_LIMIT - 100) // 16, QUEUE_LIMIT // 16
    assert sampler(Gpu(), 1.0, fits).sample(16).samples_us
    with pytest.raises(RuntimeError, match="deadlock: 1024 launches"):
        sampler(Gpu(), 1.0, blocks).sample(16)


def test_a_full_queue_of_a_running_stream_makes_the_host_wait() -> None:
    gpu = Gpu()
    for _ in range(QUEUE_LIMIT + 100):
        gpu.queue(Kernel("k", 1000.0))
    assert gpu.host_us > 99 * 1000


def test_a_host_that_takes_half_a_second_loses_its_hold() -> None:
    gpu = Gpu()

    def slow() -> None:
        gpu.pause(0.6)
        gpu.queue(Kernel("k", 10.0))

    assert EventSampler(Ops(gpu=gpu), slow, flush=True).sample(1).invalid


def test_a_lost_context_stays_lost(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path)
    gpu.synchronize()
    (tmp_path / "1").touch()
    with pytest.raises(RuntimeError, match=LOST):
        gpu.synchronize()
    assert not list(tmp_path.iterdir())  # one process dies for each
    with pytest.raises(RuntimeError, match=LOST):
        gpu.queue(Kernel("k", 1.0))


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_the_timer_measures_the_double_to_its_offset(cache: str) -> None:
    gpu = Gpu()
    timer = CudaTimer(
        TimingOptions(cache=cache), lookup("h200-sxm-141gb"), lambda: Ops(gpu=gpu).state(), ops=Ops(gpu=gpu),
        now=gpu.now_s, pause=gpu.pause,
    )  # fmt: skip
    measured = timer.measure(lambda: gpu.queue(Kernel("k", 300.0)))
    assert 300 <= median(measured.samples_us) <= 304


@pytest.mark.slow
def test_a_sweep_that_was_killed_packs_every_point_once(tmp_path: Path) -> None:
    assert rehearse(tmp_path, "c", kills=1, only="n-fp8", most_wait_s=3.0) == 34


@pytest.mark.slow
def test_a_curve_from_12_to_40_us_has_no_cliff_that_is_not_in_the_truth(tmp_path: Path) -> None:
    assert not false_cliffs(tmp_path, "n=1024:4096:64", "12:40")
