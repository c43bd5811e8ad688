"""Where edges are predicted along an axis, the points on both sides of them, and which sizes are measured together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, log

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.op_times import assumed_tile
from quantbench.quantization import quantize
from quantbench.sweep.axes import MOST_VALUES, Axis
from quantbench.sweep.shapes import Held, ops_at
from quantbench.workload import Gemm, Op

#: how far past an edge its neighbour stands. Rows of bf16 stay 16-byte aligned in steps of 8, so that an edge is not
#: mistaken for a misalignment; m, batches, heads and samples are never a stored row's length.
NEIGHBOUR = {"hidden": 8, "head-dim": 8, "ffn": 8, "seq": 8, "vocab": 8, "n": 8, "k": 8}
# A smaller step in the number of waves is lost in the noise of a measurement.
_SMALLEST_STEP = 1.02


def with_edges(axes: tuple[Axis, ...], held: Held, spec: DeviceSpec) -> tuple[Axis, ...]:
    """Each axis that asked for `@edges` with the two sides of every predicted edge among its values."""
    return tuple(_add_edges(axes, i, held, spec) if axis.edges else axis for i, axis in enumerate(axes))


def _add_edges(axes: tuple[Axis, ...], index: int, held: Held, spec: DeviceSpec) -> Axis:
    axis = axes[index]
    edges = predicted_edges(axes, index, held, spec)
    neighbour = NEIGHBOUR.get(axis.dim, 1)
    both = {side for edge in edges for side in (edge, edge + neighbour)}
    inside = {v for v in both if axis.values[0] <= v <= axis.values[-1]}
    return replace(axis, values=tuple(sorted({*axis.values, *inside})))


def predicted_edges(axes: tuple[Axis, ...], index: int, held: Held, spec: DeviceSpec) -> list[int]:
    """Values of the axis after which some product needs at least 2 % more waves of the assumed tile.

    The other axes stand at their first value. Sizes that cannot be (heads that do not divide, …) are passed over.
    """
    axis = axes[index]
    step = NEIGHBOUR.get(axis.dim, 1)
    start = -(-axis.values[0] // step) * step
    looked_at = len(range(start, axis.values[-1] + 1, step))
    if looked_at > MOST_VALUES:
        wide = f"@edges over {looked_at:,} sizes from {axis.values[0]} to {axis.values[-1]}"
        raise InputError(f"--dim {axis.dim}", wide, f"at most {MOST_VALUES:,} sizes to look at")
    edges: list[int] = []
    before: dict[str, int] = {}
    last = 0
    for value in range(start, axis.values[-1] + 1, step):
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
    """Waves of the assumed tile that each product takes, by label."""
    assumed = assumed_tile(spec)
    return {
        op.label: quantize(op.workload, assumed.tile, spec.sm_count, assumed.blocks_per_sm).num_waves
        for op in ops
        if isinstance(op.workload, Gemm)
    }


def predicted_jump(before: Sequence[Op], after: Sequence[Op], spec: DeviceSpec) -> float:
    """By how much the waves of some product grow beyond its work between two places, as a logarithm: the predicted
    edge between them; 0 where there is no product."""
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
    """Indices of an axis's values in groups that are measured together, each with its rank, in order of the axis.

    jumps: the predicted jump between each value and the next, one fewer than values. Both sides of a predicted edge
    make a pair, and so do neighbours of what is left. The ends of the axis have rank 0, then follow the group with
    the largest jump near the middle of each stretch between, and so on by halves: any number of groups, taken by rank,
    is a coarse grid in which nearly every size has a neighbour, most often across a predicted edge.

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
    """All indices, ascending: the two sides of each predicted edge together (of two edges at one value the larger), and
    the others with their neighbours, but for the two ends."""
    last = len(jumps)
    starts: set[int] = set()
    paired: set[int] = set()
    edges = [i for i, jump in enumerate(jumps) if jump >= log(_SMALLEST_STEP)]
    for i in (*sorted(edges, key=lambda i: -jumps[i]), *range(1, last - 1)):
        if not paired & {i, i + 1}:
            starts.add(i)
            paired |= {i, i + 1}
    return [range(i, i + 2 if i in starts else i + 1) for i in range(last + 1) if i in starts or i not in paired]
