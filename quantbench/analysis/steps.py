"""Steps along an axis: neighbours where the rate falls by more than the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantbench.analysis.explain import idle_reasons, quantized_efficiency
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.quantization import gemm_alignment_bytes
from quantbench.workload import Gemm

# A fall of the rate below this is not called a step, however quiet the measurement.
SMALLEST_STEP = 0.03
# Arithmetic that accounts for less of a drop than this is not its cause.
_EXPLAINED_SHARE = 0.5


@dataclass(frozen=True)
class Step:
    """Between `before` and `after`, neighbours on the axis, the rate falls by `drop` (a share of the rate before).

    low, high: bounds of the drop from both medians' intervals. cause: in words.
    """

    axis: str
    before: Point
    after: Point
    drop: float
    low: float
    high: float
    cause: str


def find_steps(points: Sequence[Point], axis: str, spec: DeviceSpec) -> tuple[Step, ...]:
    """Steps of each op and provider along `axis`, the other axes held, in order of size.

    A step is a fall of the rate (useful work per second) whose interval lies above SMALLEST_STEP.
    """
    curves: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        rest = tuple(value for name, value in point.axes.items() if name != axis)
        curves.setdefault((point.op, point.provider, rest), []).append(point)
    steps = []
    for curve in curves.values():
        curve.sort(key=lambda p: p.axes[axis])
        steps += [step for a, b in pairwise(curve) if (step := _step(axis, a, b, spec))]
    return tuple(sorted(steps, key=lambda step: -step.drop))


def _step(axis: str, before: Point, after: Point, spec: DeviceSpec) -> Step | None:
    # Rates in work per µs; the smallest drop is from the slowest "before" to the fastest "after".
    work = _work(after) / _work(before)
    drop = 1 - work * before.latency_us / after.latency_us
    low = 1 - work * before.high_us / after.low_us
    high = 1 - work * before.low_us / after.high_us
    if low < SMALLEST_STEP:
        return None
    return Step(axis, before, after, drop, low, high, _cause(before, after, drop, spec))


def _work(point: Point) -> int:
    """FLOPs; bytes of a collective, which has none."""
    return point.workload.flops or point.workload.min_bytes


def _cause(before: Point, after: Point, drop: float, spec: DeviceSpec) -> str:
    """In words. Arithmetic is named only where it accounts for at least half of the drop: a tile that idles 3 % is not
    the cause of a fall by 18 %."""
    old, new = before.launch, after.launch
    if old is not None and new is not None and old.kernel != new.kernel:
        if old.tile is not None and new.tile is not None and old.tile != new.tile:
            return f"the library changed from {old.tile} to {new.tile}"
        return f"the library changed kernel ({old.kernel[:40]} to {new.kernel[:40]})"
    a, b = before.workload, after.workload
    reasons = idle_reasons(b, spec, new)
    if isinstance(a, Gemm) and isinstance(b, Gemm):
        if gemm_alignment_bytes(b) < min(16, gemm_alignment_bytes(a)):
            return reasons[-1]
        expected = 1 - quantized_efficiency(b, spec, new) / quantized_efficiency(a, spec, old)
        return reasons[0] if reasons and expected >= _EXPLAINED_SHARE * drop else "unexplained"
    fresh = [reason for reason in reasons if reason not in idle_reasons(a, spec, old)]
    return fresh[0] if fresh else "unexplained"
