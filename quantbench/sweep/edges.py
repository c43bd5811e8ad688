"""Predicts edges along an axis, and groups the sizes to measure together.

An edge is a size after which a GEMM needs more waves (rounds of tiles over all SMs). `parse_grid`
adds both sides of each predicted edge to the axes of a sweep. `neighbour_groups` keeps neighbouring
sizes together, because a step in the time shows only between two measured sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, log

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.op_times import assumed_tile
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.sweep.axes import MAX_VALUES, Axis, Held, check_axes, ops_at, parse_axis
from quantbench.sweep.sizes import grain_of, past_edge
from quantbench.workload import Gemm, GroupedGemm, Op

# Smallest growth of the number of waves, as a factor from one size to the next, that counts as an
# edge. A smaller step is below the measurement noise.
_SMALLEST_STEP = 1.02
# The same limit for `predicted_jump`. It is half as large, because the growth of the FLOPs is
# subtracted from a jump.
_SMALLEST_JUMP = log(_SMALLEST_STEP) / 2
# Maximum number of sizes in a group of consecutive edges. Without this limit, an axis with an
# edge at every size would be a single group.
_LARGEST_GROUP = 4


def parse_grid(
    dims: tuple[str, ...],
    held: Held,
    spec: DeviceSpec,
    who: str = "sweep",
    tiles: Sequence[Tile | None] = (None,),
) -> tuple[Axis, ...]:
    """Parses axes, and adds both sides of the predicted edges to every axis that ends in `@edges`.

    dims: axes as the user typed them, `hidden` or `hidden=1024:4096`.
    held: values of all other sizes, with the defaults filled in.
    who: command to name in error messages.
    tiles: tiles to predict edges for, as in `predicted_edges`.
    """
    axes = tuple(parse_axis(text, spec.torch_kind) for text in dims)
    check_axes(axes, who)
    edged = list(axes)
    for i, axis in enumerate(axes):
        if axis.edges:
            values = set(axis.values)
            for edge in predicted_edges(axes, i, held, spec, tiles):
                values |= {edge, edge + past_edge(axis.dim, held.dtype)}
            inside = filter(range(axis.values[0], axis.values[-1] + 1).__contains__, values)
            edged[i] = replace(axis, values=tuple(sorted(inside)))
    check_axes(tuple(edged), who)
    return tuple(edged)


def predicted_edges(
    axes: tuple[Axis, ...],
    index: int,
    held: Held,
    spec: DeviceSpec,
    tiles: Sequence[Tile | None] = (None,),
) -> list[int]:
    """Returns the sizes of axis `index` after which some GEMM needs at least 2 % more waves.

    The other axes stay at their first value. Impossible sizes (for example, heads that do not
    divide hidden) are skipped.

    tiles: tiles that the providers declare. None stands for the tile assumed for the device.
    Raises InputError if the axis spans too many sizes.
    """
    axis = axes[index]
    step = grain_of(axis.dim, held.dtype)
    start = -(-axis.values[0] // step) * step
    sizes = range(start, axis.values[-1] + 1, step)
    if len(sizes) > MAX_VALUES:
        wide = f"@edges over {len(sizes):,} sizes from {axis.values[0]} to {axis.values[-1]}"
        raise InputError(f"--dim {axis.dim}", wide, f"at most {MAX_VALUES:,} sizes to look at")
    point = {other.field: other.values[0] for other in axes}
    edges: list[int] = []
    before: dict[tuple[str, Tile], int] = {}
    last = 0
    for value in sizes:
        point[axis.field] = value
        try:
            ops, _ = ops_at(axes, point, held)
        except InputError:
            continue
        waves = _waves(ops, spec, tiles)
        both = waves.keys() & before.keys()
        if any(waves[name] >= _SMALLEST_STEP * before[name] for name in both):
            edges.append(last)
        before = waves
        last = value
    return edges


def _waves(
    ops: Iterable[Op], spec: DeviceSpec, tiles: Sequence[Tile | None]
) -> dict[tuple[str, Tile], int]:
    """Returns the number of waves that each GEMM needs with each tile, by op label and tile."""
    named = {tile or assumed_tile(spec) for tile in tiles}
    found = {}
    for op in ops:
        if isinstance(op.workload, Gemm | GroupedGemm):
            for tile in named:
                waves = quantize(op.workload, tile, spec.sm_count).num_waves
                found[op.label, tile] = waves
    return found


def predicted_jump(
    before: Sequence[Op],
    after: Sequence[Op],
    spec: DeviceSpec,
    tiles: Sequence[Tile | None] = (None,),
) -> float:
    """Returns by how much a GEMM's waves grow more than its FLOPs, as a log ratio.

    The value is the largest over all GEMMs and tiles; 0 if the two points have no GEMM in common.

    before, after: ops at two neighbouring points.
    tiles: as in `predicted_edges`.
    """
    waves_before = _waves(before, spec, tiles)
    waves_after = _waves(after, spec, tiles)
    work_before = {op.label: op.workload.flops for op in before}
    work_after = {op.label: op.workload.flops for op in after}
    jumps = []
    for label, tile in waves_before.keys() & waves_after.keys():
        more_waves = log(waves_after[label, tile] / waves_before[label, tile])
        jumps.append(more_waves - log(work_after[label] / work_before[label]))
    return max(jumps, default=0.0)


def neighbour_groups(jumps: Sequence[float]) -> list[tuple[range, int]]:
    """Divides the values of an axis into groups to measure together.

    Returns (indices, rank) of each group, in ascending order of the indices. Groups with a lower
    rank are measured first. Both sides of a predicted edge are in one group. Values away from edges
    are grouped in pairs of neighbours.

    The first and the last group have rank 0. Among the groups near the middle of the axis, the
    group with the largest jump inside has rank 1. This group splits the axis into two stretches,
    which are split in the same way with rank 2, and so on. The groups up to any rank thus form a
    coarse grid in which nearly every size has a neighbour, most often across a predicted edge.

    jumps: (values − 1,) `predicted_jump` from each value to the next, a log ratio.

    >>> neighbour_groups([0.0, 0.0, 0.3, 0.0, 0.0])
    [(range(0, 1), 0), (range(1, 2), 2), (range(2, 4), 1), (range(4, 5), 2), (range(5, 6), 0)]
    """
    groups = _joined_neighbours(jumps)
    heights = [max(jumps[group.start : group.stop - 1], default=-inf) for group in groups]
    ranks = [0] * len(groups)
    stretches = [(range(1, len(groups) - 1), 1)]
    while stretches:
        inside, rank = stretches.pop()
        if not inside:
            continue
        # Only groups in the middle quarter of a stretch are candidates, so that its two halves have
        # similar lengths.
        away = 3 * len(inside) // 8
        near_middle = inside[away : len(inside) - away]
        middle = (inside[0] + inside[-1]) / 2
        chosen = max(near_middle, key=lambda i: (heights[i], -abs(i - middle)))
        ranks[chosen] = rank
        stretches += [
            (range(inside.start, chosen), rank + 1),
            (range(chosen + 1, inside.stop), rank + 1),
        ]
    return list(zip(groups, ranks, strict=True))


def edge_indices(jumps: Sequence[float]) -> set[int]:
    """Returns the indices of all values next to a predicted edge, on either side.

    jumps: as in `neighbour_groups`.

    >>> sorted(edge_indices([0.0, 0.3, 0.0]))
    [1, 2]
    """
    edges = [i for i, jump in enumerate(jumps) if jump >= _SMALLEST_JUMP]
    return {*edges, *(i + 1 for i in edges)}


def _joined_neighbours(jumps: Sequence[float]) -> list[range]:
    """Joins neighbouring indices into ranges, across the largest jumps first.

    The two sides of each edge are joined, up to _LARGEST_GROUP indices. Other neighbours are joined
    in pairs. The first and the last index stay single if no edge is next to them.
    """
    last = len(jumps) - 1
    found = [range(i, i + 1) for i in range(len(jumps) + 1)]  # range that each index is in
    for i in sorted(range(len(jumps)), key=lambda i: -jumps[i]):
        edge = jumps[i] >= _SMALLEST_JUMP
        joined = range(found[i].start, found[i + 1].stop)
        if len(joined) <= (_LARGEST_GROUP if edge else 2) and (edge or 0 < i < last):
            for index in joined:
                found[index] = joined
    return list(dict.fromkeys(found))
