"""The timer, and sweeps of products, on the device double, whose true times are known."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from device_double import CLOCK_STEP_MHZ, EVENTS_US, FULL_MHZ, Gpu, Kernel, Ops, kernel_of

from quantbench.device import lookup
from quantbench.measurement import Check
from quantbench.store.record import Measured
from quantbench.sweep.axes import Held, parse_axis, with_defaults
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.plan import build_plan
from quantbench.sweep.runner import Sweep, SweepJob
from quantbench.timing.cuda import CudaTimer
from quantbench.timing.options import TimingOptions

SPEC = lookup("h200-sxm-141gb")
#: wander of the SM clock between visits of the same work, and its loss with heat, as shares
WANDER = 0.004
HEAT = 0.01
#: between two points: inputs and checks
BETWEEN_S = 0.05


def timer_of(gpu: Gpu, options: TimingOptions | None = None) -> CudaTimer:
    ops = Ops(gpu=gpu)
    return CudaTimer(
        options or TimingOptions(), SPEC, ops.state, ops=ops, now=gpu.now_s, pause=gpu.pause
    )  # type: ignore[arg-type]


@lru_cache(maxsize=100_000)
def _mean_in_steps(mhz: float, wander: float) -> float:
    """Returns the mean of a normally distributed clock that moves in steps."""
    if not wander:
        return round(mhz / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    deviations = np.linspace(-6, 6, 2001)
    weights = np.exp(-(deviations**2) / 2)
    clocks = np.round(mhz * (1 + wander * deviations) / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    return float(clocks @ weights / weights.sum())


def truth_us(gpu: Gpu, kernel: Kernel) -> float:
    """Returns the median of a kernel's times between events at the mean clock."""
    mhz = _mean_in_steps(round(gpu.mean_mhz), gpu.wander)
    return kernel.us * (1 - kernel.clocked + kernel.clocked * FULL_MHZ / mhz) + EVENTS_US


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
    """Returns the grades of the points of a sweep that were measured under a condition."""
    gpu = Gpu(random=random.Random(seed), wander=WANDER, heat=HEAT)
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
