"""The grid of a sweep with points on both sides of predicted edges, and the sizes that are measured together.

`parse_grid` reads the axes for `sweep` and `predict`; `neighbour_groups` groups the sizes of an axis for `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.op_times import assumed_tile
from quantbench.quantization import quantize
from quantbench.sweep.axes import MOST_VALUES, Axis, Held, check_axes, grain_of, ops_at, parse_axis
from quantbench.workload import Gemm, Op

# A smaller step in the number of waves is below the noise of a measurement.
_SMALLEST_STEP = 1.02


@dataclass(frozen=True)
class Grid:
    """Axes with their edges among the values. loose: a range is a default or edges were added, so impossible sizes are
    left out instead of refused."""

    axes: tuple[Axis, ...]
    loose: bool


def parse_grid(dims: tuple[str, ...], held: Held, spec: DeviceSpec, who: str = "sweep") -> Grid:
    """The grid of `dims`, each `hidden` or `hidden=1024:4096`.

    held: with its defaults filled in. who: the command, for its errors.
    """
    axes = tuple(parse_axis(text, spec.kind) for text in dims)
    check_axes(axes, who)
    edged = tuple(_with_edges(axes, i, held, spec) if axis.edges else axis for i, axis in enumerate(axes))
    check_axes(edged, who)
    return Grid(edged, any(axis.edges for axis in edged) or not all("=" in text for text in dims))


def _with_edges(axes: tuple[Axis, ...], index: int, held: Held, spec: DeviceSpec) -> Axis:
    """An axis with the two sides of every predicted edge among its values."""
    axis = axes[index]
    edges = predicted_edges(axes, index, held, spec)
    both = {side for edge in edges for side in (edge, edge + grain_of(axis.dim))}
    inside = {v for v in both if axis.values[0] <= v <= axis.values[-1]}
    return replace(axis, values=tuple(sorted({*axis.values, *inside})))


def predicted_edges(axes: tuple[Axis, ...], index: int, held: Held, spec: DeviceSpec) -> list[int]:
    """Values of axis `index` after which some product needs at least 2 % more waves of the assumed tile.

    The other axes are at their first value. Impossible sizes (heads that do not divide, …) are skipped.
    """
    axis = axes[index]
    step = grain_of(axis.dim)
    start = -(-axis.values[0] // step) * step
    sizes = range(start, axis.values[-1] + 1, step)
    if len(sizes) > MOST_VALUES:
        wide = f"@edges over {len(sizes):,} sizes from {axis.values[0]} to {axis.values[-1]}"
        raise InputError(f"--dim {axis.dim}", wide, f"at most {MOST_VALUES:,} sizes to look at")
    edges: list[int] = []
    before: dict[str, int] = {}
    last = 0
    for value in sizes:
        point = tuple(value if i == index else other.values[0] for i, other in enumerate(axes))
        try:
            ops = ops_at(axes, point, held)
        except InputError:
            continue
        waves = _waves(ops, spec)
        if any(waves[name] >= _SMALLEST_STEP * before[name] for name in waves.keys() & before.keys()):
            edges.append(last)
        before, last = waves, value
    return edges


def _waves(ops: Iterable[Op], spec: DeviceSpec) -> dict[str, int]:
    """Number of waves of each product with the assumed tile, by label."""
    assumed = assumed_tile(spec)
    return {
        op.label: quantize(op.workload, assumed.tile, spec.sm_count, assumed.blocks_per_sm).num_waves
        for op in ops
        if isinstance(op.workload, Gemm)
    }


def predicted_jump(before: Sequence[Op], after: Sequence[Op], spec: DeviceSpec) -> float:
    """The predicted edge between two places: log of the largest growth of a product's waves beyond that of its work; 0
    without products."""
    waves_before, waves_after = _waves(before, spec), _waves(after, spec)
    work_before, work_after = ({op.label: op.workload.flops for op in ops} for ops in (before, after))
    return max(
        (
            log(waves_after[label] / waves_before[label]) - log(work_after[label] / work_before[label])
            for label in waves_before.keys() & waves_after.keys()
        ),
        default=0.0,
    )


def neighbour_groups(jumps: Sequence[float]) -> list[tuple[range, int]]:
    """Groups of an axis's values that are measured together, as index ranges in ascending order, each with its rank.

    jumps: (values - 1,) predicted jump between each value and the next. Both sides of a predicted edge make a pair, and
    so do neighbours among the rest. The ends of the axis have rank 0, then follows the group with the largest jump near
    the middle of each stretch between, and so on by halves. Any number of groups, taken by rank, is thus a coarse grid
    in which nearly every size has a neighbour, most often across a predicted edge.

    >>> neighbour_groups([0.0, 0.0, 0.3, 0.0, 0.0])
    [(range(0, 1), 0), (range(1, 2), 2), (range(2, 4), 1), (range(4, 5), 2), (range(5, 6), 0)]
    """
    groups = _pairs(jumps)
    heights = [jumps[group.start] if len(group) == 2 else -inf for group in groups]
    ranks = [0] * len(groups)
    stretches = [(range(1, len(groups) - 1), 1)]
    while stretches:
        inside, rank = stretches.pop()
        if not inside:
            continue
        away = 3 * len(inside) // 8
        near_middle = inside[away : len(inside) - away]
        middle = (inside[0] + inside[-1]) / 2
        chosen = max(near_middle, key=lambda i: (heights[i], -abs(i - middle)))
        ranks[chosen] = rank
        stretches += [(range(inside.start, chosen), rank + 1), (range(chosen + 1, inside.stop), rank + 1)]
    return list(zip(groups, ranks, strict=True))


def _pairs(jumps: Sequence[float]) -> list[range]:
    """All indices, ascending: the two sides of each predicted edge in pairs (of two edges at one value the larger), and
    the others with their neighbours. The two ends stay single."""
    last = len(jumps)
    starts: set[int] = set()
    paired: set[int] = set()
    edges = [i for i, jump in enumerate(jumps) if jump >= log(_SMALLEST_STEP)]
    for i in (*sorted(edges, key=lambda i: -jumps[i]), *range(1, last - 1)):
        if not paired & {i, i + 1}:
            starts.add(i)
            paired |= {i, i + 1}
    return [range(i, i + 2 if i in starts else i + 1) for i in range(last + 1) if i in starts or i not in paired]
