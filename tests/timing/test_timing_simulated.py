"""The timer on a simulated GPU whose events tick and cost time and whose clock ramps: false cliffs
and warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from made_devices import A100

from quantbench.analysis.check import fit_all
from quantbench.analysis.curves import LEAST_ERROR
from quantbench.analysis.jumps import Cliff, find_cliffs, jumps_of
from quantbench.analysis.periods import tile_finder
from quantbench.analysis.summary import points_of
from quantbench.device.spec import DeviceState
from quantbench.measurement import Grade, Measurement
from quantbench.stats import typical_us
from quantbench.store.record import Measured, Place, Record, record_key
from quantbench.timing.cuda import CudaTimer
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm

IDLE_MHZ, BOOST_MHZ, LIMITED_MHZ = 600.0, 1980.0, 1600.0
FLUSH_US, STAMP_US, HOLD_US = 70.0, 5.0, 1000.0


@dataclass
class SimulatedCuda:
    """`TorchCuda` of a device that runs what is queued at once.

    offset_us: time between the start event and the kernel. tick_us: resolution of the events.
        ramp_s: how long the
    clock climbs from idle to top_mhz. limit_after_s: how long heavy work (over half of the time)
    runs before the power limit lowers its clock. Times of runs are at the boost clock.
    """

    offset_us: float = 2.0
    tick_us: float = 0.5
    ramp_s: float = 0.15
    top_mhz: float = BOOST_MHZ
    limit_after_s: float = 0.06
    seed: int = 0
    now_s: float = 0.0
    mhz: float = IDLE_MHZ
    heavy_s: float = 0.0
    stamps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def pass_us(self, us: float, *, load: float) -> None:
        """Let device time pass. load: 1 for a kernel at full power, -1 for less than half of the
        time.
        """
        self.now_s += us * 1e-6
        self.heavy_s = min(max(0.0, self.heavy_s + load * us * 1e-6), 1.2 * self.limit_after_s)
        top = LIMITED_MHZ if self.heavy_s > self.limit_after_s else self.top_mhz
        self.mhz = min(top, self.mhz + (BOOST_MHZ - IDLE_MHZ) * us * 1e-6 / self.ramp_s)

    def idle(self, seconds: float) -> None:
        self.now_s += seconds
        self.mhz, self.heavy_s = IDLE_MHZ, 0.0

    def run(self, us: float) -> Callable[[], None]:
        return lambda: self.pass_us(
            (us + self.random.normal(0, 0.03)) * BOOST_MHZ / self.mhz, load=1
        )

    def empty(self) -> None:
        self.pass_us(1.0, load=1)

    def event_pair(self) -> SimulatedPair:
        return SimulatedPair(self)

    def read_us(self) -> float:
        return float(np.floor(self.now_s * 1e6 / self.tick_us) * self.tick_us)

    def flush(self) -> None:
        self.pass_us(FLUSH_US + self.random.normal(0, 1), load=-1)

    def hold(self) -> None:
        self.pass_us(HOLD_US * self.random.uniform(0.8, 1.2), load=-1)
        self.stamps.clear()

    def release(self) -> None:
        pass

    def was_held(self) -> bool:
        return True

    def stamp(self, index: int) -> None:
        self.pass_us(STAMP_US + self.random.normal(0, 0.05), load=-1)
        self.stamps.append(self.mhz)

    def clocks_mhz(self, stamps: int) -> tuple[float, ...]:
        return tuple((a + b) / 2 for a, b in zip(self.stamps, self.stamps[1:], strict=False))

    def state(self) -> DeviceState:
        return DeviceState(sm_clock_mhz=self.mhz)

    def synchronize(self) -> None:
        pass

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return body


class SimulatedPair:
    def __init__(self, gpu: SimulatedCuda) -> None:
        self._gpu = gpu
        self._start_us = self._stop_us = 0.0

    def start(self) -> None:
        self._start_us = self._gpu.read_us()
        self._gpu.pass_us(self._gpu.offset_us, load=-1)

    def stop(self) -> None:
        self._stop_us = self._gpu.read_us()

    def elapsed_us(self) -> float:
        return self._stop_us - self._start_us


def timer_of(gpu: SimulatedCuda, **options: object) -> CudaTimer:
    made = TimingOptions(**options)  # type: ignore[arg-type]
    return CudaTimer(made, A100, gpu.state, ops=gpu, now=lambda: gpu.now_s, pause=gpu.idle)


# ---- one curve, one method


SIZES = range(1024, 4096, 64)


def cliffs_of(true_us: Sequence[float], gpu: SimulatedCuda, **options: object) -> tuple[Cliff, ...]:
    """The cliffs on a sweep of kernels that take true_us."""
    timer = timer_of(gpu, **options)
    records = []
    for n, us in zip(SIZES, true_us, strict=True):
        gemm = Gemm(256, n, 256)
        outcome = Measured(timer.measure(gpu.run(us)), Grade("A"))
        key = record_key(gemm, "torch.mm", TimingOptions())
        records.append(
            Record("run", key, gemm, "torch.mm", outcome, places=(Place({"n": n}, "gemm"),))
        )
    return find_cliffs(
        jumps_of(fit_all(points_of(records, A100), LEAST_ERROR)), A100, tile_finder(A100, ())
    )


def smooth_us() -> list[float]:
    return np.linspace(12.0, 40.0, len(SIZES)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize(
    ("offset_us", "tick_us"), [(1.0, 0.5), (1.8, 0.5), (2.5, 0.5), (1.8, 1.024), (1.8, 0.032)]
)
def test_a_smooth_sweep_from_12_to_40_us_has_no_cliff(
    offset_us: float, tick_us: float, cache: str
) -> None:
    gpu = SimulatedCuda(offset_us, tick_us, seed=1)
    assert cliffs_of(smooth_us(), gpu, cache=cache) == ()


@pytest.mark.parametrize(
    ("offset_us", "last", "cache"),
    [(1.0, 5, "cold"), (2.5, 13, "hot"), (1.8, 13, "cold"), (2.5, 30, "cold")],
)
def test_a_sweep_with_one_step_of_a_tenth_shows_this_one(
    offset_us: float, last: int, cache: str
) -> None:
    true_us = [us * (1.1 if i > last else 1.0) for i, us in enumerate(smooth_us())]
    (found,) = cliffs_of(true_us, SimulatedCuda(offset_us, seed=2), cache=cache)
    assert (found.at, found.next) == (SIZES[last], SIZES[last + 1])
    # The floor is in both times, so that the step looks a little smaller than it is.
    floor_us = offset_us + 1.0
    assert found.ratio == pytest.approx(
        (floor_us + 1.1 * true_us[last]) / (floor_us + true_us[last]), abs=0.02
    )


def test_the_floor_is_that_of_the_events_and_the_empty_kernel() -> None:
    gpu = SimulatedCuda(offset_us=1.8)
    got = timer_of(gpu).measure(gpu.run(12.0))
    assert got.floor_us == pytest.approx(2.8, abs=0.1)  # between ticks of 0.5 µs
    assert typical_us(got.samples_us) == pytest.approx(13.8, abs=0.1)


# ---- the warm-up


def warmed(timer: CudaTimer, gpu: SimulatedCuda, us: float) -> tuple[Measurement, float]:
    """A point and the seconds that it was warmed up for."""
    before_s = timer.warmup_s
    got = timer.measure(gpu.run(us))
    return got, timer.warmup_s - before_s


@pytest.mark.parametrize("us", [12.0, 40.0, 60.0])
def test_short_windows_suffice_while_the_clock_stays(us: float) -> None:
    gpu = SimulatedCuda()
    timer = timer_of(gpu)
    warmed(timer, gpu, us)  # the first point heats the card
    for _ in range(3):
        got, warm_s = warmed(timer, gpu, us)
        assert warm_s < 0.03
        assert typical_us(got.samples_us) == pytest.approx(us + gpu.offset_us, rel=0.01)


@pytest.mark.parametrize("ramp_s", [0.02, 0.05, 0.15, 0.4])
@pytest.mark.parametrize("us", [12.0, 60.0, 500.0])
def test_a_clock_that_climbs_again_is_waited_for(us: float, ramp_s: float) -> None:
    gpu = SimulatedCuda(ramp_s=ramp_s, limit_after_s=9.0)
    timer = timer_of(gpu)
    for seconds in (0.2, 2.0):
        gpu.idle(seconds)
        got, _ = warmed(timer, gpu, us)
        assert min(got.clocks_mhz) > 0.985 * BOOST_MHZ
        assert typical_us(got.samples_us) == pytest.approx(us + gpu.offset_us, rel=0.02)


def test_work_at_the_power_limit_is_measured_there_whatever_came_before() -> None:
    gpu = SimulatedCuda()
    timer = timer_of(gpu)
    slow_us = 1000.0 * BOOST_MHZ / LIMITED_MHZ
    for light_before in (True, False, True):
        if light_before:
            light, warm_s = warmed(timer, gpu, 12.0)
            assert typical_us(light.samples_us) == pytest.approx(14.0, rel=0.01)
        heavy, warm_s = warmed(timer, gpu, 1000.0)
        assert warm_s >= 0.1  # two whole windows
        assert max(heavy.clocks_mhz) < 1.01 * LIMITED_MHZ
        assert typical_us(heavy.samples_us) == pytest.approx(slow_us + gpu.offset_us, rel=0.005)


def test_a_clock_that_sinks_slowly_does_not_take_the_known_one_along() -> None:
    # The card loses 0.4 % from point to point: every third is more than 1 % from the clock of the
    # last whole windows.
    gpu = SimulatedCuda(limit_after_s=9.0)
    timer = timer_of(gpu)
    whole = 0
    for turn in range(12):
        gpu.top_mhz = BOOST_MHZ * 0.996**turn
        got, warm_s = warmed(timer, gpu, 12.0)
        assert max(got.clocks_mhz) == gpu.top_mhz
        whole += warm_s >= 0.1
    assert 2 <= whole <= 6
