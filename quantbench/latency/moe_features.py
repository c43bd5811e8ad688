"""Computes the features and the roofline of MoE layers from the load of each layer's busiest GPU.

The main features are the time of the bytes at the memory bandwidth, the time of the FLOPs at peak
with rows padded to tiles, and the waves of tiles. `moe.MoEModel` learns from the features how the
time differs from the roofline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.forest import Float32Array, chunks
from quantbench.workload import MoE
from quantbench.workload.dtypes import DTYPES

#: Heights of tiles, in rows, to which an expert's rows are padded.
TILES = (16, 64, 128)
_TILE_COLUMNS = 128  # width of a tile, in columns
#: Number of columns of `Layers.features`. Each tile height has five: the time of the padded rows,
#: and for each of an expert's two GEMMs the waves and how full they are.
NUM_FEATURES = 21 + 5 * len(TILES)
#: Number of draws of a power law over which loads are averaged. Measured times are published for a
#: distribution, not for one draw.
LOAD_DRAWS = 4
_DRAW_SEED = 0
# Number of elements per array of drawn loads, which keeps the arrays in the cache.
_ELEMENTS = 2**18
# Constants of the roofline; the trees correct errors of all three. The first two are the fractions
# of peak arithmetic and of memory bandwidth that good kernels reach. The third is the time of a
# layer's kernel launches in µs.
_COMPUTE_SHARE = 0.6
_MEMORY_SHARE = 0.75
_LAUNCH_US = 8.0
# Times and counts are raised to this value before their logarithm is taken. It is far below any
# measured time or count.
_LEAST = 1e-4


#: largest number of tokens in the newest public tables of experts
MOST_TOKENS = 16384


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of the busiest rank, the GPU whose experts together have the most rows; (layers,) each.

    A row is one token routed to one expert. For a power law, the loads are means over draws.

    rows: number of rows of all the rank's experts together.
    active: number of the rank's experts that have rows.
    fullest, median: number of rows of the rank's fullest and of its median expert.
    tiles: (len(TILES), layers), number of tiles along the rows, summed over the rank's experts.
    """

    rows: FloatArray
    active: FloatArray
    fullest: FloatArray
    median: FloatArray
    tiles: FloatArray

    @classmethod
    def of(cls, works: Sequence[MoE]) -> ExpertLoads:
        """Returns the loads of each layer. Each distinct routing is computed once."""
        keys = [(w.num_experts, w.ep, w.distribution, w.tokens, w.top_k) for w in works]
        place = {key: i for i, key in enumerate(sorted(set(keys), key=str))}
        groups = defaultdict(list)
        for key in place:
            groups[key[:3]].append(key)
        found = np.empty((4 + len(TILES), len(place)))
        for (experts, ep, distribution), group in groups.items():
            for part in chunks(len(group), max(1, _ELEMENTS // (experts * LOAD_DRAWS))):
                routed = np.array([key[3:] for key in group[part]], dtype=np.float64)
                where = [place[key] for key in group[part]]
                found[:, where] = _busiest(_loads(experts, ep, distribution, routed), ep)
        rows, active, fullest, median, *tiles = found[:, [place[key] for key in keys]]
        return cls(rows, active, fullest, median, np.array(tiles))


def _loads(
    experts: int, ep: int, distribution: str | tuple[int, ...], routed: FloatArray
) -> FloatArray:
    """Returns the number of rows of each expert, (layers, draws, experts).

    distribution: as in `MoE`: "balanced", the numbers of rows themselves, or a power law.
    routed: (layers, 2), tokens and top_k of each layer.
    """
    total = routed.prod(axis=1)[:, None, None]
    if distribution == "balanced":
        edges = np.floor(np.arange(experts + 1) * total / experts)
        return np.diff(edges, axis=2)
    if isinstance(distribution, tuple):
        exact = []
        for tokens, top_k in routed.astype(int).tolist():
            work = MoE(tokens, 1, 1, experts, top_k, ep=ep, distribution=distribution)
            exact.append(work.tokens_per_expert)
        return np.array(exact, dtype=np.float64)[:, None, :]
    # From here on, the draw of `MoE.tokens_per_expert` is repeated, with the same constants, for
    # many layers at once. Rounding may leave too few or too many rows. The difference is spread
    # evenly over the ranks.
    tokens = routed[:, :1, None]
    low = np.where(total > experts, 1.0, 0.01)
    high = np.where(total > experts, 0.8 * tokens, 2.0)
    share = np.random.default_rng(_DRAW_SEED).random((LOAD_DRAWS, experts))
    power = 1.0 - float(distribution.removeprefix("power_law_"))
    between = (high**power - low**power) * share + low**power
    weight = between ** (1 / power) if power else low * (high / low) ** share
    loads = np.minimum(np.round(weight * (total / weight.sum(axis=2, keepdims=True))), tokens)
    by_rank = np.sort(loads.reshape(*loads.shape[:2], ep, -1), axis=3)
    missing = (total[..., 0] - loads.sum(axis=2))[:, :, None]
    each, left = np.divmod(np.abs(missing), ep)
    each = (each + (np.arange(ep) < left))[..., None]
    local = np.arange(experts // ep)
    added = np.where(missing[..., None] > 0, local < each, -1.0 * (local[::-1] < each))
    return np.asarray(np.maximum(by_rank + added, 0.0).reshape(loads.shape))


def _busiest(loads: FloatArray, ep: int) -> FloatArray:
    """Returns the fields of `ExpertLoads` in order, (4 + tiles, layers), as means over draws.

    loads: (layers, draws, experts), number of rows of each expert.
    """
    ranks = loads.reshape(*loads.shape[:2], ep, -1)
    which = ranks.sum(axis=3).argmax(axis=2)[:, :, None, None]
    held = np.take_along_axis(ranks, which, axis=2)[:, :, 0]
    stats = [held.sum(axis=2), (held > 0).sum(axis=2), held.max(axis=2), np.median(held, axis=2)]
    for tile in TILES:
        stats.append(np.ceil(held / tile).sum(axis=2))
    return np.asarray(np.mean(stats, axis=2))


def fewer_gpus(tokens: int, ep: int) -> int:
    """Returns the smallest divisor of ep that reduces a layer to at most MOST_TOKENS tokens.

    Before a layer's time is predicted, its tokens, experts and GPUs are divided by this divisor, so
    that the load per GPU stays the same. The result is ep if no smaller divisor suffices.
    """
    return next((f for f in range(1, ep) if ep % f == 0 and tokens <= f * MOST_TOKENS), ep)


@dataclass(frozen=True)
class Layers:
    """Sizes of MoE layers of one dtype, (layers,) each, and the loads of their busiest ranks.

    Layers with more tokens than were measured are reduced to fewer GPUs (`fewer_gpus`).

    ffn: one GPU's columns of expert_ffn, which tensor parallelism divides.
    width: output columns of an expert's first GEMM: ffn, or twice ffn with a gate.
    """

    dtype: str
    tokens: FloatArray
    hidden: FloatArray
    expert_ffn: FloatArray
    ffn: FloatArray
    width: FloatArray
    num_experts: FloatArray
    top_k: FloatArray
    ep: FloatArray
    loads: ExpertLoads

    @classmethod
    def of(cls, works: Sequence[MoE]) -> Layers:
        """Returns the sizes of layers.

        works: at least one layer, all of one dtype.
        """

        def column(name: str) -> FloatArray:
            return np.array([getattr(work, name) for work in works], dtype=np.float64)

        fewer = np.array([fewer_gpus(work.tokens, work.ep) for work in works])
        ffn = column("expert_ffn") // column("tp")
        return cls(
            dtype=works[0].dtype,
            tokens=column("tokens") / fewer,
            hidden=column("hidden"),
            expert_ffn=column("expert_ffn"),
            ffn=ffn,
            width=ffn * (1.0 + column("gated")),
            num_experts=column("num_experts") // fewer,
            top_k=column("top_k"),
            ep=column("ep") // fewer,
            loads=ExpertLoads.of(works),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weights_per_expert(self) -> FloatArray:
        """Number of weights of one expert on one GPU, in both GEMMs together, (layers,)."""
        return self.hidden * (self.width + self.ffn)

    def bytes_moved(self) -> tuple[FloatArray, FloatArray]:
        """Returns the bytes of weights read, and the bytes of rows read and written.

        Only experts with rows read their weights. Both GEMMs of an expert read and write rows.
        Summing the results of each token's experts adds 4 bytes per token and element of hidden.
        """
        held = DTYPES[self.dtype]
        read = (self.hidden + self.ffn) * held.a_bytes
        written = (self.width + self.hidden) * DTYPES[held.output].a_bytes
        rows = self.loads.rows * (read + written) + 4.0 * self.tokens * self.hidden
        return self.loads.active * self.weights_per_expert * held.b_bytes, rows

    def compute_us(self, device: DeviceSpec, rows: FloatArray | None = None) -> FloatArray:
        """Returns the time of `rows` at the device's peak in µs, (layers,).

        rows: (layers,); the default is the rows of the busiest rank.
        """
        # A dtype that the device does not multiply is widened to bf16 first.
        peak = device.peak(self.dtype) or device.peak("bf16") or min(device.peak_tflops.values())
        if rows is None:
            rows = self.loads.rows
        return 2.0 * rows * self.weights_per_expert / (peak * 1e6)

    def limits(self, device: DeviceSpec) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the launch, compute and memory times from the spec sheet in µs, (layers,) each.

        The compute time is that of rows padded to tiles of 64.
        """
        memory_us = np.add(*self.bytes_moved()) / (device.memory_gb_per_s * 1e3 * _MEMORY_SHARE)
        padded_us = self.compute_us(device, TILES[1] * self.loads.tiles[1]) / _COMPUTE_SHARE
        return np.full(len(self), _LAUNCH_US), padded_us, memory_us

    def roofline(self, device: DeviceSpec) -> FloatArray:
        """Returns the log of the roofline time in µs, (layers,).

        The roofline time is the launches plus the larger of memory time and padded compute time.
        """
        launch_us, padded_us, memory_us = self.limits(device)
        log_us: FloatArray = np.log(launch_us + np.maximum(memory_us, padded_us))
        return log_us

    def _waves(self, device: DeviceSpec, tiles: FloatArray) -> list[FloatArray]:
        """Returns the waves of the experts' first and second GEMMs, not rounded, (layers,) each.

        One block per SM is assumed.

        tiles: (layers,), number of tiles along the rows.
        """
        first = tiles * np.ceil(self.width / _TILE_COLUMNS)
        second = tiles * np.ceil(self.hidden / _TILE_COLUMNS)
        return [first / device.sm_count, second / device.sm_count]

    def waves(self, device: DeviceSpec) -> FloatArray:
        """Returns the waves of both GEMMs, each rounded up, with the largest tile, (layers,)."""
        first, second = self._waves(device, self.loads.tiles[-1])
        return np.ceil(first) + np.ceil(second)

    def features(self, device: DeviceSpec) -> Float32Array:
        """Returns the inputs of the trees, (layers, features)."""
        return np.array(self.columns(device)).astype(np.float32).T

    def columns(self, device: DeviceSpec) -> list[Any]:
        """Returns the columns of `features` before they are rounded to float32, (layers,) each.

        The columns are arrays, or symbols for a layer of symbols (`explore.trace`).
        """
        loads = self.loads
        per_us = device.memory_gb_per_s * 1e3
        weights, rows = self.bytes_moved()
        local = self.num_experts / self.ep
        waves = []
        padded_us = []
        for tile, tiles in zip(TILES, loads.tiles, strict=True):
            waves += self._waves(device, tiles)
            padded_us.append(self.compute_us(device, tile * tiles))
        # The median load may be 0. The added 0.1 brings its log near those of small loads.
        logged = [
            self.compute_us(device),
            (weights + rows) / per_us,
            weights / per_us,
            rows / per_us,
            *padded_us,
            *waves,
            self.tokens,
            loads.rows,
            loads.active,
            loads.fullest,
            loads.median + 0.1,
            local,
            self.num_experts,
            self.hidden,
            self.ffn,
            self.expert_ffn,
            self.ep,
            self.top_k,
            loads.rows / loads.active,
            loads.fullest * local / loads.rows,
            self.width / self.ffn,
        ]
        return [
            *(np.log(np.maximum(column, _LEAST)) for column in logged),
            *(wave / np.ceil(wave) for wave in waves),
            loads.active / local,
            self.ffn / (_TILE_COLUMNS * np.ceil(self.ffn / _TILE_COLUMNS)),
        ]
