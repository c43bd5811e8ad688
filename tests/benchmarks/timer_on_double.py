"""Coverage, cost and grades of the timer on the device double, whose clock wanders and whose truth
is known.

    python tests/benchmarks/timer_on_double.py PAGE.md

Writes the tables between the markers of a page. All clocks are simulated, so the
figures depend on the seeds alone. The truth of a point is the median of its times at the mean
clock.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[1:3]]

from device_double import CLOCK_STEP_MHZ, EVENTS_US, FULL_MHZ, Gpu, Kernel, Ops, Pair, kernel_of  # noqa: E402

from quantbench.device import lookup  # noqa: E402
from quantbench.measurement import Check  # noqa: E402
from quantbench.stats import typical_interval, typical_us  # noqa: E402
from quantbench.store.record import Measured  # noqa: E402
from quantbench.sweep.axes import Held, parse_axis, with_defaults  # noqa: E402
from quantbench.sweep.messages import Reply, Request  # noqa: E402
from quantbench.sweep.plan import build_plan  # noqa: E402
from quantbench.sweep.runner import Sweep, SweepJob  # noqa: E402
from quantbench.timing.cuda import CudaTimer  # noqa: E402
from quantbench.timing.options import TimingOptions  # noqa: E402
from tools.guide.markers import fill, table  # noqa: E402
from tools.measure.figures import MAMF_SHAPES, MAMF_START_S  # noqa: E402

WANDERS = (0.0, 0.005, 0.01, 0.02)
HEAT = 0.025
# Not used while the timer was tuned.
FIRST_SEED = 1000
# Time in µs, and the share of it that follows the clock.
MIX = (
    (10, 1.0), (10, 0.0), (30, 1.0), (30, 0.5), (100, 1.0), (100, 0.0), (300, 1.0), (300, 0.5), (1000, 1.0),
    (1000, 0.0), (2000, 1.0), (5000, 1.0), (5000, 0.5),
)  # fmt: skip
#: between two points: inputs and checks
BETWEEN_S = 0.05
SPEC = lookup("h200-sxm-141gb")


@dataclass(frozen=True)
class Found:
    """One timed point. error: of its time, relative to the truth. cost_s: host time."""

    error: float
    covered: bool
    half_width: float
    cost_s: float


@lru_cache(maxsize=100_000)
def mean_in_steps(mhz: float, wander: float) -> float:
    """Returns the mean of a normally distributed clock that moves in steps."""
    if not wander:
        return round(mhz / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    deviations = np.linspace(-6, 6, 2001)
    weights = np.exp(-(deviations**2) / 2)
    clocks = np.round(mhz * (1 + wander * deviations) / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    return float(clocks @ weights / weights.sum())


def truth_us(gpu: Gpu, kernel: Kernel) -> float:
    """Returns the median of a kernel's times between events at the mean clock."""
    mhz = mean_in_steps(round(gpu.mean_mhz), gpu.wander)
    return kernel.us * (1 - kernel.clocked + kernel.clocked * FULL_MHZ / mhz) + EVENTS_US


# --- methods: each returns time, low and high -------------------------------------------------------------------------

Timed = tuple[float, float, float]
Method = Callable[[Callable[[], None]], Timed]


def timer_of(
    gpu: Gpu, kind: type[CudaTimer] = CudaTimer, options: TimingOptions | None = None
) -> CudaTimer:
    ops = Ops(gpu=gpu)
    return kind(
        options or TimingOptions(), SPEC, ops.state, ops=ops, now=gpu.now_s, pause=gpu.pause
    )  # type: ignore[arg-type]


def ours(gpu: Gpu) -> Method:
    """The timer."""
    timer = timer_of(gpu)

    def method(run: Callable[[], None]) -> Timed:
        stated = timer.measure(run).stated
        return stated.latency_us, stated.interval.low, stated.interval.high

    return method


class OneBatch(CudaTimer):
    """The timer without mean clocks: mostly ten samples of one batch, as in version 0.1.0 before
    they were recorded.
    """

    def _heat(self, sampler: object) -> None:  # type: ignore[override]
        return None


def one_batch(gpu: Gpu) -> Method:
    """Ten samples or more, mostly of one batch, and the interval of their median."""
    timer = timer_of(gpu, OneBatch)

    def method(run: Callable[[], None]) -> Timed:
        samples_us = timer.measure(run).samples_us
        interval = typical_interval(samples_us)
        return typical_us(samples_us), interval.low, interval.high

    return method


def mamf(gpu: Gpu) -> Method:
    """mamf-finder's way: 50 runs, then 100 between events, the cache cleared before each."""

    def method(run: Callable[[], None]) -> Timed:
        for _ in range(50):
            run()
        pairs = [Pair(gpu) for _ in range(100)]
        for pair in pairs:
            gpu.queue(Kernel("clear", 2**28 / 4e6, clocked=0.0))  # 256 MiB at 4 TB/s
            pair.start()
            run()
            pair.stop()
        gpu.synchronize()
        samples_us = [pair.elapsed_us() for pair in pairs]
        interval = typical_interval(samples_us)
        return typical_us(samples_us), interval.low, interval.high

    return method


def points(
    make: Callable[[Gpu], Method],
    wander: float,
    seed: int,
    mix: Sequence[tuple[float, float]] = MIX,
) -> Iterator[Found]:
    """Yields every point of the mix, in random order, on a card that gets hot. The first point
    heats it.
    """
    gpu = Gpu(random=random.Random(seed), wander=wander, heat=HEAT)
    method = make(gpu)
    method(lambda: gpu.queue(Kernel("first", 200.0)))
    for us, clocked in random.Random(seed).sample(list(mix), len(mix)):
        kernel = Kernel("k", us, clocked)
        gpu.pause(BETWEEN_S)
        start_us = gpu.host_us
        middle, low, high = method(lambda kernel=kernel: gpu.queue(kernel))  # type: ignore[misc]
        true_us = truth_us(gpu, kernel)
        yield Found(
            middle / true_us - 1,
            low <= true_us <= high,
            (high - low) / 2 / true_us,
            (gpu.host_us - start_us) * 1e-6,
        )


# --- grades -----------------------------------------------------------------------------------------------------------

#: what happens to the card during a sweep
CONDITIONS: dict[str, Callable[[Gpu], None]] = {
    "healthy": lambda gpu: None,
    "5 % slower, which its clock does not show": lambda gpu: setattr(gpu, "slowdown", 1.05),
    "a second process": lambda gpu: setattr(gpu, "others", 1),
    "throttled": lambda gpu: setattr(gpu, "throttled", True),
}
#: requests before it happens: in the middle between two references
CHANGE_AT = 16


@dataclass
class DoubleWorker:
    """The sweep's worker on the double. happens: called once, after CHANGE_AT requests."""

    gpu: Gpu
    happens: Callable[[Gpu], None]
    asked: int = 0

    def __post_init__(self) -> None:
        self._timer = timer_of(self.gpu)

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        if self.asked == CHANGE_AT:
            self.happens(self.gpu)
        self.asked += 1
        self.gpu.pause(BETWEEN_S)
        kernel, launch = kernel_of(request.workload)
        measured = self._timer.measure(lambda: self.gpu.queue(kernel))
        return Reply(measured, launch=launch, checked=Check(0.001, 0.005))

    def close(self) -> None:
        pass


def grades(condition: str, seed: int, count: int) -> list[str]:
    """Returns the grades of the points of a sweep that were measured under a condition; the clock
    wanders by 1 %.
    """
    gpu = Gpu(random=random.Random(seed), wander=0.01, heat=HEAT)
    axis = parse_axis(f"n=1024:{1024 + 64 * (count - 1)}:64")
    plan = build_plan(
        (axis,), with_defaults(Held(m=4096, k=4096), SPEC), ("torch.mm",), TimingOptions(), SPEC
    )
    worker = DoubleWorker(gpu, CONDITIONS[condition])
    job = SweepJob(plan, "double", SPEC, TimingOptions())
    sweep = Sweep(job, lambda: worker, lambda record: None, gpu.now_s)
    sweep.run()
    records = (
        sweep.records if condition == "healthy" else sweep.records[CHANGE_AT:]
    )  # one for each request
    outcomes = [record.outcome for record in records if record.role == "point"]
    return [outcome.grade.letter for outcome in outcomes if isinstance(outcome, Measured)]


# --- tables -----------------------------------------------------------------------------------------------------------

_NAMES: dict[str, Callable[[Gpu], Method]] = {
    "at the mean clock (quantbench)": ours,
    "ten samples of one batch": one_batch,
    "mamf-finder": mamf,
}
# Seconds that a method heats the card for, once for MAMF_SHAPES points.
_HEATED_S = {ours: 2.0, mamf: MAMF_START_S}


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def timer_table(seeds: Sequence[int]) -> tuple[str, str]:
    """Returns a table of the methods by wander, and one of costs and savings."""
    rows, savings = [], []
    for wander in WANDERS:
        cost_s, error = {}, {}
        for name, make in _NAMES.items():
            found = [point for seed in seeds for point in points(make, wander, seed)]
            cost_s[make] = float(np.mean([point.cost_s for point in found]))
            error[make] = float(np.sqrt(np.mean([point.error**2 for point in found])))
            covered = np.mean([point.covered for point in found])
            half = float(np.median([point.half_width for point in found]))
            rows.append([
                f"{100 * wander:g} %", name, f"{covered:.0%}".replace("%", " %"), f"±{_percent(half)}",
                _percent(error[make]), f"{1e3 * cost_s[make]:.0f}",
            ])  # fmt: skip
        whole_s = {make: cost_s[make] + _HEATED_S[make] / MAMF_SHAPES for make in (ours, mamf)}
        narrower = (error[mamf] / error[ours]) ** 2
        savings.append([
            f"{100 * wander:g} %", f"{cost_s[ours] / cost_s[one_batch]:.2f}", f"{whole_s[mamf] / whole_s[ours]:.1f}",
            f"{cost_s[mamf] / cost_s[ours] * narrower:.1f}", f"{whole_s[mamf] / whole_s[ours] * narrower:.1f}",
        ])  # fmt: skip
    head = [
        "wander",
        "method",
        "intervals that cover the truth",
        "half-width, median",
        "error, rms",
        "ms a point",
    ]
    costs = [
        "wander", "cost, ten samples of one batch = 1", "mamf-finder's cost, ours = 1",
        "at equal error, without heating", "at equal error",
    ]  # fmt: skip
    return table(head, rows, words=2), table(costs, savings)


def grade_table(seeds: Sequence[int], count: int) -> str:
    """Returns a table of the grades by what happens to the card."""
    rows = []
    for condition in CONDITIONS:
        letters = [letter for seed in seeds for letter in grades(condition, seed, count)]
        shares = [
            f"{letters.count(letter) / len(letters):.1%}".replace("%", " %") for letter in "ABCD"
        ]
        rows.append([condition, str(len(letters)), *shares])
    return table(["", "points", *"ABCD"], rows)


def main() -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + 20)
    intervals, costs = timer_table(seeds)
    found = {"intervals": intervals, "costs": costs, "grades": grade_table(seeds[:2], count=135)}
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
