"""The timer on the double of a GPU, whose events tick and cost time and whose clock climbs: false
cliffs and warm-up.
"""

from collections.abc import Callable, Sequence

import device_double
import numpy as np
import pytest
from device_double import EVENTS_US, FULL_MHZ, Gpu, Kernel
from timer_on_double import SPEC, timer_of

from quantbench.analysis.check import fit_all
from quantbench.analysis.curves import LEAST_ERROR
from quantbench.analysis.jumps import Cliff, find_cliffs, jumps_of
from quantbench.analysis.periods import tile_finder
from quantbench.analysis.summary import points_of
from quantbench.measurement import Grade, Measurement
from quantbench.stats import typical_us
from quantbench.store.record import GridPosition, Measured, Record, record_key
from quantbench.timing.cuda import CudaTimer
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm

SIZES = range(1024, 4096, 96)
SMOOTH_US = np.linspace(12.0, 40.0, len(SIZES))


def runs(gpu: Gpu, us: float) -> Callable[[], None]:
    return lambda: gpu.queue(Kernel("k", us))


def cliffs_of(true_us: Sequence[float], cache: str) -> tuple[Cliff, ...]:
    """The cliffs on a sweep of kernels that take true_us."""
    gpu = Gpu()
    timer = timer_of(gpu, options=TimingOptions(cache=cache))
    records = []
    for n, us in zip(SIZES, true_us, strict=True):
        gemm = Gemm(256, n, 256)
        outcome = Measured(timer.measure(runs(gpu, us)), Grade("A"))
        key = record_key(gemm, "torch.mm", TimingOptions())
        places = (GridPosition({"n": n}, "gemm"),)
        records.append(Record("run", key, gemm, "torch.mm", outcome, places=places))
    jumps = jumps_of(fit_all(points_of(records, SPEC), LEAST_ERROR))
    return find_cliffs(jumps, SPEC, tile_finder(SPEC, ()))


@pytest.mark.slow
@pytest.mark.parametrize(("tick_us", "cache"), [(0.5, "cold"), (1.024, "cold"), (0.032, "hot")])
def test_a_smooth_sweep_from_12_to_40_us_has_no_cliff(
    tick_us: float, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_double, "_TICK_US", tick_us)
    assert cliffs_of(SMOOTH_US.tolist(), cache) == ()


@pytest.mark.parametrize("last", [5, 24])
def test_a_sweep_with_one_step_of_a_tenth_shows_this_one(last: int) -> None:
    true_us = SMOOTH_US * np.where(np.arange(len(SIZES)) > last, 1.1, 1.0)
    (found,) = cliffs_of(true_us.tolist(), "cold")
    assert (found.at, found.next) == (SIZES[last], SIZES[last + 1])
    # The time between events is in both times, so that the step looks a little smaller than it is.
    beside = (EVENTS_US + 1.1 * true_us[last]) / (EVENTS_US + true_us[last])
    assert found.ratio == pytest.approx(beside, abs=0.025)


def warmed(timer: CudaTimer, gpu: Gpu, us: float) -> tuple[Measurement, float]:
    """A point and the seconds that it was warmed up for."""
    before_s = timer.warmup_s
    got = timer.measure(runs(gpu, us))
    return got, timer.warmup_s - before_s


@pytest.mark.parametrize("us", [12.0, 40.0])
def test_short_windows_suffice_while_the_clock_stays(us: float) -> None:
    gpu = Gpu()
    timer = timer_of(gpu)
    warmed(timer, gpu, us)  # the first point heats the card
    for _ in range(3):
        got, warm_s = warmed(timer, gpu, us)
        assert warm_s < 0.03
        assert typical_us(got.samples_us) == pytest.approx(us + EVENTS_US, rel=0.01)


@pytest.mark.parametrize("ramp_us", [10_000.0, 50_000.0])
@pytest.mark.parametrize("us", [12.0, 500.0])
def test_a_clock_that_climbs_again_is_waited_for(
    us: float, ramp_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_double, "_WARM_US", ramp_us)
    gpu = Gpu()
    timer = timer_of(gpu)
    for seconds in (0.2, 2.0):
        gpu.pause(seconds)
        got, _ = warmed(timer, gpu, us)
        assert min(got.clocks_mhz) > 0.97 * FULL_MHZ
        assert typical_us(got.samples_us) == pytest.approx(us + EVENTS_US, rel=0.02)


def test_a_clock_that_sinks_slowly_does_not_take_the_known_one_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The card loses a step of 15 MHz, 0.8 %, from point to point: every second is more than 1 %
    # from the clock of the last whole windows.
    gpu = Gpu()
    timer = timer_of(gpu)
    whole = 0
    for turn in range(12):
        monkeypatch.setattr(device_double, "FULL_MHZ", FULL_MHZ - 15 * turn)
        _, warm_s = warmed(timer, gpu, 12.0)
        whole += warm_s >= 0.1
    assert 2 <= whole <= 7
