"""Where many curves step at one size: tables of hundreds of shapes, read across the shapes.

A single figure per shape is too noisy for all but the largest steps of one curve; the middle of a hundred curves is
not. Every compute-bound curve that has both sizes counts, whether or not it shows a cliff of its own there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from quantbench.analysis.blocks import compute_bound, num_blocks
from quantbench.analysis.cliffs import SMALLEST_CLIFF, Cliff
from quantbench.analysis.curve_fits import FittedCurve
from quantbench.analysis.staircase import Explanation
from quantbench.device.spec import DeviceSpec
from quantbench.quantization import cdiv
from quantbench.stats import median_interval

# Fewer curves are looked at one by one.
_FEWEST_CURVES = 8


# Kinds of cause that are told of one size.
_CAUSES_SAID = 2

#: axis, op, provider, variant, and the sizes on both sides
_Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True)
class CommonCliff:
    """After size `at` of `axis` the time jumps by `ratio` in the middle of num_curves curves of one family.

    low, high: 95 % interval of that median. num_cliffs: curves whose own jump there is sure. causes: kinds of cause of
    those with their number, the kind that costs most first. stepping, level: median ratio of the curves whose waves (of
    the explanation that the family's period names) rise there, and of those whose do not, with their number; None where
    no explanation is sure.
    """

    axis: str
    op: str
    provider: str
    variant: str
    at: int
    next: int
    num_curves: int
    ratio: float
    low: float
    high: float
    num_cliffs: int
    causes: tuple[tuple[str, int], ...]
    stepping: tuple[float, int] | None = None
    level: tuple[float, int] | None = None

    @property
    def cause(self) -> str:
        """The kind that costs most."""
        return self.causes[0][0] if self.causes else "unexplained"

    @property
    def cause_words(self) -> str:
        """`wave edge 71, tile edge 64`: what explains the most costly cliffs, with the number of curves."""
        return ", ".join(f"{kind} {number}" for kind, number in self.causes[:_CAUSES_SAID]) or "unexplained"


def common_cliffs(
    fitted: Iterable[FittedCurve],
    cliffs: Sequence[Cliff],
    spec: DeviceSpec,
    explained_by: dict[tuple[str, str, str], Explanation],
) -> tuple[CommonCliff, ...]:
    """Sizes that many curves have in common and after which the middle one jumps by 3 % or more, the largest first."""
    jumps: dict[_Key, list[tuple[float, bool | None]]] = {}
    counted: set[tuple[_Key, str]] = set()
    for one in fitted:
        curve, sizes = one.curve, one.curve.sizes
        rise = np.diff(curve.log_time) - one.fit.trend * np.diff(curve.log_size)
        explanation = explained_by.get(curve.family)
        for i in curve.close_gaps:
            if compute_bound(curve.points[i + 1].workload, spec):
                key: _Key = (curve.axis, *curve.family, sizes[i], sizes[i + 1])
                steps = None if explanation is None else _steps(one, i, explanation)
                jumps.setdefault(key, []).append((float(rise[i]), steps))
                counted.add((key, curve.points[i].key))
    heights: dict[_Key, dict[str, list[float]]] = {}
    for cliff in cliffs:
        at = (cliff.axis, *cliff.family, cliff.at, cliff.next)
        if cliff.ratio > 1 and (at, cliff.before.key) in counted:
            heights.setdefault(at, {}).setdefault(cliff.cause.kind, []).append(log(cliff.ratio))
    found = [_common(key, of_key, heights.get(key, {})) for key, of_key in jumps.items()]
    return tuple(sorted((c for c in found if c is not None), key=lambda c: -c.ratio))


def _steps(one: FittedCurve, i: int, explanation: Explanation) -> bool | None:
    """Whether the explanation needs more waves for point i + 1 than for point i."""
    blocks = [num_blocks(point.workload, explanation.tile) for point in one.curve.points[i : i + 2]]
    if None in blocks:
        return None
    before, after = (cdiv(count or 0, explanation.resident_blocks) for count in blocks)
    return after > before


def _common(
    key: _Key, jumps: Sequence[tuple[float, bool | None]], heights: dict[str, list[float]]
) -> CommonCliff | None:
    if len(jumps) < _FEWEST_CURVES:
        return None
    rises = [rise for rise, _ in jumps]
    middle = float(np.median(rises))
    interval = median_interval(rises)
    if middle < SMALLEST_CLIFF or interval.low <= 0:
        return None
    axis, op, provider, variant, at, following = key
    causes = tuple((kind, len(heights[kind])) for kind in sorted(heights, key=lambda kind: -sum(heights[kind])))
    return CommonCliff(
        axis, op, provider, variant, at, following, len(jumps), exp(middle), exp(interval.low), exp(interval.high),
        sum(number for _, number in causes), causes,
        _median_ratio([rise for rise, steps in jumps if steps]),
        _median_ratio([rise for rise, steps in jumps if steps is False]),
    )  # fmt: skip


def _median_ratio(rises: Sequence[float]) -> tuple[float, int] | None:
    return (exp(float(np.median(rises))), len(rises)) if rises else None
