"""Curves: the points of a run that differ in one axis and in nothing else.

`curves_of` makes the curves, `axes_of` names the axes. Everything that looks at a run along an axis starts here: fits,
cliffs, periods, pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.analysis.summary import Point
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.workload import Workload

Floats = npt.NDArray[np.float64]

#: between sizes further apart than this (in log size) there may be any number of steps
COARSE = 0.125

# What of a workload is no size: points that differ in one of these are never on one curve.
_VARIANTS = ("dtype", "layout", "mask", "causal", "direction", "op")


@dataclass(frozen=True)
class Curve:
    """Points of one op and provider along `axis`, ascending, no two at the same size.

    held: values of the other axes.
    variant: what the workloads have in common besides sizes (`gemm bf16 nt`).
    """

    axis: str
    op: str
    provider: str
    variant: str
    held: tuple[tuple[str, int], ...]
    points: tuple[Point, ...]

    @property
    def family(self) -> tuple[str, str, str]:
        """Op, provider and variant. Curves of one family are fitted and explained together."""
        return (self.op, self.provider, self.variant)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The axis values."""
        return tuple(point.axes[self.axis] for point in self.points)

    @cached_property
    def log_size(self) -> Floats:
        """Natural logarithm of the axis values (points,)."""
        return np.log(np.array(self.sizes, dtype=np.float64))

    @cached_property
    def close_gaps(self) -> tuple[int, ...]:
        """Indices of points whose next neighbour is close enough to tell a step between them."""
        return tuple((self.log_size[1:] - self.log_size[:-1] <= COARSE).nonzero()[0].tolist())

    @cached_property
    def log_time(self) -> Floats:
        """Natural logarithm of the medians in microseconds (points,)."""
        return np.log([point.latency_us for point in self.points])


def variant_of(workload: Workload) -> str:
    """Kind and everything beside sizes: `gemm bf16 nt`."""
    kind: Any = type(workload)
    return _variant(_variant_getter(kind)(workload))


@cache
def _variant_getter(kind: Any) -> attrgetter[tuple[object, ...]]:
    names = {f.name for f in fields(kind)}
    return attrgetter("kind", *(name for name in _VARIANTS if name in names))


@cache
def _variant(values: tuple[object, ...]) -> str:
    return " ".join(map(str, values))


def curves_of(points: Iterable[Point], axis: str, *, fewest: int = 2) -> tuple[Curve, ...]:
    """All curves along `axis` that have at least `fewest` points, in the order they are first met.

    Where several records stand at one place (a table that names kernels), the fastest counts.
    """
    groups: dict[tuple[object, ...], dict[int, Point]] = {}
    for point in points:
        size = point.axes.get(axis)
        if size is None:
            continue
        held = tuple([item for item in point.axes.items() if item[0] != axis])
        key = (point.op, point.provider, variant_of(point.workload), held)
        group = groups.get(key)
        if group is None:
            groups[key] = {size: point}
            continue
        seen = group.get(size)
        if seen is None or point.latency_us < seen.latency_us:
            group[size] = point
    return tuple(
        Curve(axis, op, provider, variant, held, tuple(point for _, point in sorted(group.items())))  # type: ignore[arg-type]
        for (op, provider, variant, held), group in groups.items()
        if len(group) >= fewest
    )


def axes_of(points: Sequence[Point]) -> tuple[str, ...]:
    """The axes along which the points differ, those with the most values first.

    The number of a shape in a list of shapes is not a size and is left out.
    """
    values: dict[str, set[int]] = defaultdict(set)
    for point in points:
        for name, value in point.axes.items():
            values[name].add(value)
    varied = [name for name, found in values.items() if len(found) > 1 and name != SHAPE_DIM]
    return tuple(sorted(varied, key=lambda name: -len(values[name])))
