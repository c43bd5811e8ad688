"""The double of a GPU with two clocks, and the timer on it."""

import pytest
from device_double import QUEUE_LIMIT, Gpu, Kernel, Ops
from timer_on_double import timer_of

from quantbench.stats import median
from quantbench.timing.cuda_samplers import EventSampler
from quantbench.timing.options import TimingOptions


def sampler(gpu: Gpu, us: float, launches: int = 1) -> EventSampler:
    def run() -> None:
        for _ in range(launches):
            gpu.queue(Kernel("k", us))

    return EventSampler(Ops(gpu), run, flush=True)


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
    with pytest.raises(RuntimeError, match="deadlock: 1024 launches"):
        sampler(Gpu(), 1.0, QUEUE_LIMIT // 16).sample(16)


def test_a_host_that_takes_half_a_second_loses_its_hold() -> None:
    gpu = Gpu()

    def slow() -> None:
        gpu.pause(0.6)
        gpu.queue(Kernel("k", 10.0))

    assert EventSampler(Ops(gpu), slow, flush=True).sample(1).invalid


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_the_timer_measures_the_double_to_its_offset(cache: str) -> None:
    gpu = Gpu()
    measured = timer_of(gpu, options=TimingOptions(cache=cache)).measure(
        lambda: gpu.queue(Kernel("k", 300.0))
    )
    assert 300 <= median(measured.samples_us) <= 304
