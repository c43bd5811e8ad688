"""Where edges are predicted along an axis, and the points on both sides of them."""

from __future__ import annotations

from dataclasses import replace

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.roofline import assumed_tile
from quantbench.quantization import quantize
from quantbench.sweep.axes import MOST_VALUES, Axis
from quantbench.sweep.shapes import Held, ops_at
from quantbench.workload import Gemm

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
    assumed = assumed_tile(spec)
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
        waves = {
            op.label: quantize(op.workload, assumed.tile, spec.sm_count, assumed.blocks_per_sm).num_waves
            for op in ops
            if isinstance(op.workload, Gemm)
        }
        if any(waves[name] >= _SMALLEST_STEP * before[name] for name in waves.keys() & before.keys()):
            edges.append(last)
        before, last = waves, value
    return edges
