"""Measures tile and wave edges of named kernels where sizes are scattered, so that no two points form a curve.

Entry point: `kernel_waves`, which returns `KernelWaves`. Used by `analysis.check`, `report.sections` and tools. A
point needs the kernel's name, its tile and its grid.

A block takes a time in proportion to its part of the reduction, plus a constant; points of at most one block per SM
give both. The other points give their measured waves by blocks per SM: a staircase if waves are paid whole. Points of
equal numbers of blocks tell whether a partly filled tile is paid whole, and what rows off 16 bytes cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch, Tile
from quantbench.quantization import VECTOR_BYTES, gemm_alignment_bytes
from quantbench.stats import median_interval
from quantbench.workload import Gemm

Floats = npt.NDArray[np.float64]

# Points of one block per SM from which the two constants are fitted, and the least spread of their reductions.
_FEWEST, _LEAST_SPREAD = 20, 4.0
# Points in half a block per SM whose median counts, and blocks per SM up to which edges are looked for.
_FEWEST_IN_BIN, _MOST_PER_SM = 8, 8
# Points are used where the constant part is less than this share of the time.
_CONSTANT_SHARE = 0.5
# Measured waves of one block per SM for which the two constants are taken to be right.
_ONE_WAVE = (0.75, 1.35)
# A wave edge rises by this factor more than blocks that share the SMs evenly.
_ABOVE_SMOOTH = 1.05


@dataclass(frozen=True)
class WaveEdge:
    """Rise of the time after a whole number of blocks per SM.

    blocks: number of blocks after which it rises.
    ratio, low, high: rise and its 95 % interval, from half a block per SM before to half a block after.
    smooth: rise if blocks shared the SMs evenly.
    """

    blocks: int
    ratio: float
    low: float
    high: float
    smooth: float


@dataclass(frozen=True)
class KernelWaves:
    """Tile and wave edges of one kernel.

    constant_us: part of the time that does not grow with the reduction.
    us_per_1000: time of one block per 1,000 elements of the reduction.
    waves: measured waves by half blocks per SM, None where there are few points.
    fill_exponent, fill_error: exponent of the time in the filled share of the tiles, at equal blocks, and its standard
        error: 0 if a tile is paid whole, 1 if only its filled part is.
    fill_low, fill_high: 5th and 95th percentile of the share.
    unaligned, unaligned_error: log ratio of the time with rows off 16 bytes to that without, at equal blocks.
    """

    provider: str
    kernel: str
    tile: Tile
    num_points: int
    constant_us: float
    us_per_1000: float
    waves: tuple[float | None, ...]
    edges: tuple[WaveEdge, ...]
    fill_exponent: float | None
    fill_error: float | None
    fill_low: float | None
    fill_high: float | None
    unaligned: float | None
    unaligned_error: float | None

    @property
    def whole_tiles(self) -> bool:
        """Whether a partly filled tile takes the time of a full one."""
        if self.fill_exponent is None or self.fill_error is None:
            return False
        return abs(self.fill_exponent) + 2 * self.fill_error < 0.25


def kernel_waves(points: Sequence[Point], spec: DeviceSpec) -> tuple[KernelWaves, ...]:
    """Returns the named kernels with enough points to tell, those with most points first."""
    groups: dict[tuple[str, str], list[tuple[Point, Gemm, Launch, Tile]]] = defaultdict(list)
    for point in points:
        work, launch = point.workload, point.launch
        if isinstance(work, Gemm) and launch is not None and launch.tile is not None and launch.num_blocks is not None:
            groups[point.provider, launch.kernel].append((point, work, launch, launch.tile))
    found = [_of_kernel(*names, group, spec.sm_count) for names, group in groups.items() if len(group) >= _FEWEST]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.num_points))


def _of_kernel(
    provider: str, kernel: str, group: Sequence[tuple[Point, Gemm, Launch, Tile]], sm_count: int
) -> KernelWaves | None:
    tile = group[0][3]
    time_us = np.array([point.latency_us for point, *_ in group])
    reduction = np.array([work.k / own.split_k for _, work, _, own in group])
    blocks = np.array([launch.num_blocks or 0 for _, _, launch, _ in group])
    used = np.array([work.m * work.n * work.batch * own.split_k / own.elements for _, work, _, own in group])
    few = blocks <= sm_count
    if few.sum() < _FEWEST or np.ptp(np.log(reduction[few])) < np.log(_LEAST_SPREAD):
        return None
    made = np.column_stack([np.ones(few.sum()), reduction[few]]) / time_us[few, None]
    constant_us, slope_us = np.linalg.lstsq(made, np.ones(few.sum()), rcond=None)[0].tolist()
    if slope_us <= 0:
        return None
    large = constant_us < _CONSTANT_SHARE * time_us
    waves = (time_us[large] - constant_us) / (slope_us * reduction[large])
    per_sm = blocks[large] / sm_count
    bins = [waves[(per_sm > low / 2) & (per_sm <= (low + 1) / 2)] for low in range(2 * _MOST_PER_SM + 1)]
    edges = tuple(edge for i in range(1, _MOST_PER_SM + 1) if (edge := _edge(bins, i, sm_count)) is not None)
    medians = [float(np.median(part)) if len(part) >= _FEWEST_IN_BIN else None for part in bins]
    share = used[large] / blocks[large]
    off = np.array([gemm_alignment_bytes(work) < VECTOR_BYTES for _, work, *_ in group])[large]
    filled, unaligned = _within(np.log(waves), (np.log(share), off.astype(float)), blocks[large])
    fill_low, fill_high = np.quantile(share, (0.05, 0.95)).tolist() if len(share) else (None, None)
    if medians[1] is None or not _ONE_WAVE[0] <= medians[1] <= _ONE_WAVE[1]:
        return None
    return KernelWaves(
        provider, kernel, tile, len(group), constant_us, 1e3 * slope_us, tuple(medians), edges,
        *filled, fill_low, fill_high, *unaligned,
    )  # fmt: skip


def _edge(bins: Sequence[Floats], per_sm: int, sm_count: int) -> WaveEdge | None:
    """Returns the rise after `per_sm` blocks per SM, if it is larger than if blocks shared the SMs evenly."""
    before, after = bins[2 * per_sm - 1], bins[2 * per_sm]
    if min(len(before), len(after)) < _FEWEST_IN_BIN:
        return None
    smooth = (per_sm + 0.25) / max(1.0, per_sm - 0.25)
    first, then = median_interval(before), median_interval(after)
    low, high = then.low / first.high, then.high / first.low
    if low <= smooth * _ABOVE_SMOOTH:
        return None
    return WaveEdge(per_sm * sm_count, float(np.median(after) / np.median(before)), low, high, smooth)


_Effect = tuple[float | None, float | None]


def _within(y: Floats, terms: Sequence[Floats], blocks: npt.NDArray[np.int_]) -> tuple[_Effect, ...]:
    """Fits y to linear terms among points of equal blocks. Returns each coefficient and its standard error, or None."""
    order = np.argsort(blocks, kind="stable")
    groups = [list(same) for _, same in groupby(order.tolist(), key=lambda i: blocks[i])]
    groups = [same for same in groups if len(same) > 1]
    nothing: tuple[_Effect, ...] = ((None, None),) * len(terms)
    if sum(map(len, groups)) < _FEWEST:
        return nothing
    left, *right = (np.concatenate([v[same] - v[same].mean() for same in groups]) for v in (y, *terms))
    told = [i for i, term in enumerate(right) if np.ptp(term) > 0]
    made = np.column_stack([right[i] for i in told]) if told else np.empty((len(left), 0))
    if np.linalg.matrix_rank(made) < max(1, len(told)):
        return nothing
    found = np.linalg.lstsq(made, left, rcond=None)[0]
    freedom = max(1, len(left) - len(groups) - len(told))
    errors = np.sqrt(np.diag(np.linalg.inv(made.T @ made)) * float(((left - made @ found) ** 2).sum()) / freedom)
    at = {i: (float(found[j]), float(errors[j])) for j, i in enumerate(told)}
    return tuple(at.get(i, (None, None)) for i in range(len(terms)))
