"""Computes the expected load of each GPU's experts, and from it the terms that explain the time of
an MoE layer: bytes over the memory's bandwidth, FLOPs of rows padded to tiles over the peak, and
tiles over the SMs, in waves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.workload import MoE
from quantbench.workload.dtypes import DTYPES

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

#: rows per tile for which an expert's rows are padded
TILES = (16, 64, 128)
_TILE_COLUMNS = 128
#: columns of `Layers.features`
NUM_FEATURES = 21 + 5 * len(TILES)
#: draws of a power law over which loads are averaged: a time is known for a distribution, not for
#: one draw of it
LOAD_DRAWS = 4
_DRAW_SEED = 0
# Elements per array of drawn loads: keeps them in the cache.
_MOST_ELEMENTS = 2**18
# Shares of the peaks that good kernels reach, and the launches of a layer, µs. The trees correct
# all three.
_COMPUTE_SHARE, _MEMORY_SHARE, _LAUNCH_US = 0.6, 0.75, 8.0
# Smallest time and count whose logarithm is taken: far below any measured one.
_LEAST = 1e-4


#: largest number of tokens in the newest public tables of experts
MOST_TOKENS = 16384


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of the busiest rank, (layers,) each: means over draws where the distribution is a power
    law.

    rows, active, most, median: rows of all experts, experts with rows, rows of the fullest and of
        the median expert.
    tiles: (len(TILES), layers) tiles along the rows, over all experts.
    """

    rows: FloatArray
    active: FloatArray
    most: FloatArray
    median: FloatArray
    tiles: FloatArray

    @classmethod
    def of(cls, works: Sequence[MoE]) -> ExpertLoads:
        """Returns the loads of each layer; layers with the same routing are computed once."""
        keys = [(w.num_experts, w.ep, w.distribution, w.tokens, w.top_k) for w in works]
        place = {key: i for i, key in enumerate(sorted(set(keys), key=str))}
        found = np.empty((4 + len(TILES), len(place)))
        groups: dict[tuple[int, int, str | tuple[int, ...]], list[tuple[int, int]]] = {}
        for experts, ep, distribution, tokens, top_k in place:
            groups.setdefault((experts, ep, distribution), []).append((tokens, top_k))
        for (experts, ep, distribution), routed in groups.items():
            size = max(1, _MOST_ELEMENTS // (experts * LOAD_DRAWS))
            for start in range(0, len(routed), size):
                part = routed[start : start + size]
                loads = _loads(experts, ep, distribution, np.array(part, dtype=np.float64))
                where = [place[experts, ep, distribution, tokens, top_k] for tokens, top_k in part]
                found[:, where] = _busiest(loads, ep)
        rows, active, most, median, *tiles = found[:, [place[key] for key in keys]]
        return cls(rows, active, most, median, np.array(tiles))


def _loads(
    experts: int, ep: int, distribution: str | tuple[int, ...], routed: FloatArray
) -> FloatArray:
    """Returns the rows of each expert, (layers, draws, experts). routed: (layers, 2) tokens and
    top_k.
    """
    total = routed.prod(axis=1)[:, None, None]
    if distribution == "balanced":
        edges = np.floor(np.arange(experts + 1) * total / experts)
        return np.diff(edges, axis=2)
    if isinstance(distribution, tuple):
        exact = [
            MoE(int(t), 1, 1, experts, int(k), ep=ep, distribution=distribution) for t, k in routed
        ]
        return np.array([work.tokens_per_expert for work in exact], dtype=np.float64)[:, None, :]
    # The draw of `MoE.tokens_per_expert` for many layers at once; what rounding leaves over is
    # shared out by rank.
    exponent, tokens = float(distribution.removeprefix("power_law_")), routed[:, :1, None]
    low = np.where(total > experts, 1.0, 0.01)
    high = np.where(total > experts, 0.8 * tokens, 2.0)
    share = np.random.default_rng(_DRAW_SEED).random((LOAD_DRAWS, experts))
    power = 1.0 - exponent
    weight = (
        low * (high / low) ** share
        if power == 0
        else ((high**power - low**power) * share + low**power) ** (1 / power)
    )
    loads = np.minimum(np.round(weight * (total / weight.sum(axis=2, keepdims=True))), tokens)
    by_rank = np.sort(loads.reshape(*loads.shape[:2], ep, -1), axis=3)
    missing = (total[..., 0] - loads.sum(axis=2))[:, :, None]
    each, left = np.divmod(np.abs(missing), ep)
    each = (each + (np.arange(ep) < left))[..., None]
    local = np.arange(experts // ep)
    added = np.where(missing[..., None] > 0, local < each, -1.0 * (local[::-1] < each))
    return np.asarray(np.maximum(by_rank + added, 0.0).reshape(loads.shape))


def _busiest(loads: FloatArray, ep: int) -> FloatArray:
    """Returns rows, active, most, median and tiles of the rank with the most rows, (4 + tiles,
    layers).
    """
    ranks = loads.reshape(*loads.shape[:2], ep, -1)
    which = ranks.sum(axis=3).argmax(axis=2)[:, :, None, None]
    held = np.take_along_axis(ranks, which, axis=2)[:, :, 0]
    stats = [held.sum(axis=2), (held > 0).sum(axis=2), held.max(axis=2), np.median(held, axis=2)]
    stats += [np.ceil(held / tile).sum(axis=2) for tile in TILES]
    return np.array([stat.mean(axis=1) for stat in stats])


def fewer_gpus(tokens: int, ep: int) -> int:
    """Returns the factor by which a layer's tokens, experts and GPUs are divided before its time is
    predicted, so that it has at most MOST_TOKENS: each GPU keeps its rows and experts. It divides
    ep."""
    return next((f for f in range(1, ep) if ep % f == 0 and tokens <= f * MOST_TOKENS), ep)


@dataclass(frozen=True)
class Layers:
    """Sizes of MoE layers of one dtype, (layers,) each, and the loads of their busiest ranks.

    Layers of more tokens than were measured have the sizes of fewer GPUs (`fewer_gpus`).

    ffn: width of one expert on one GPU. width: columns of its first product, twice ffn with a gate.
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
        """Returns the layers of `works`, which have one dtype and are not none."""
        fewer = [fewer_gpus(w.tokens, w.ep) for w in works]
        sizes = np.array(
            [
                (
                    w.tokens / f,
                    w.hidden,
                    w.expert_ffn,
                    w.expert_ffn // w.tp,
                    w.expert_ffn // w.tp * (2 if w.gated else 1),
                    w.num_experts // f,
                    w.top_k,
                    w.ep // f,
                )
                for w, f in zip(works, fewer, strict=True)
            ],
            dtype=np.float64,
        ).T
        tokens, hidden, expert_ffn, ffn, width, num_experts, top_k, ep = sizes
        loads = ExpertLoads.of(works)
        return cls(
            works[0].dtype, tokens, hidden, expert_ffn, ffn, width, num_experts, top_k, ep, loads
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weights_per_expert(self) -> FloatArray:
        return self.hidden * (self.width + self.ffn)

    def bytes_moved(self) -> tuple[FloatArray, FloatArray]:
        """Returns the bytes of the weights of experts with rows, and of rows read and written by
        both products and by their sum per token."""
        held = DTYPES[self.dtype]
        outputs = self.width + self.hidden
        rows = self.loads.rows * (
            (self.hidden + self.ffn) * held.a_bytes + outputs * DTYPES[held.output].a_bytes
        )
        return (
            self.loads.active * self.weights_per_expert * held.b_bytes,
            rows + 4.0 * self.tokens * self.hidden,
        )

    def compute_us(self, device: DeviceSpec, rows: FloatArray | None = None) -> FloatArray:
        """Returns the time of `rows` (by default those of the busiest rank) at the device's
        peak.
        """
        # Formats that the device does not multiply are widened to bf16 first.
        peak = device.peak(self.dtype) or device.peak("bf16") or min(device.peak_tflops.values())
        return (
            2.0
            * (self.loads.rows if rows is None else rows)
            * self.weights_per_expert
            / (peak * 1e6)
        )

    def limits(self, device: DeviceSpec) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the times of launches, of padded rows' FLOPs and of memory traffic from the spec
        sheet, µs.
        """
        memory_us = np.add(*self.bytes_moved()) / (device.memory_gb_per_s * 1e3 * _MEMORY_SHARE)
        padded_us = self.compute_us(device, TILES[1] * self.loads.tiles[1]) / _COMPUTE_SHARE
        return np.full(len(self), _LAUNCH_US), padded_us, memory_us

    def roofline(self, device: DeviceSpec) -> FloatArray:
        """Returns log µs from the spec sheet: launches, and the larger of memory time and padded
        compute time.
        """
        launch_us, padded_us, memory_us = self.limits(device)
        log_us: FloatArray = np.log(launch_us + np.maximum(memory_us, padded_us))
        return log_us

    def _waves(self, device: DeviceSpec, tiles: FloatArray) -> list[FloatArray]:
        """Returns the waves of both products, one block per SM, for tiles along the rows."""
        return [
            tiles * np.ceil(n / _TILE_COLUMNS) / device.sm_count for n in (self.width, self.hidden)
        ]

    def waves(self, device: DeviceSpec) -> FloatArray:
        """Returns the whole waves of both products with the largest tile."""
        return np.asarray(sum(np.ceil(wave) for wave in self._waves(device, self.loads.tiles[-1])))

    def features(self, device: DeviceSpec) -> Float32Array:
        """Returns the inputs of the trees, (layers, features)."""
        return np.array(self.columns(device)).astype(np.float32).T

    def columns(self, device: DeviceSpec) -> list[Any]:
        """Returns `features` before they are rounded, (layers,) each, of arrays or of symbols
        (`explore.trace`).
        """
        loads, per_us = self.loads, device.memory_gb_per_s * 1e3
        weights, rows = self.bytes_moved()
        columns = [
            self.compute_us(device),
            (weights + rows) / per_us,
            weights / per_us,
            rows / per_us,
        ]
        columns += [
            self.compute_us(device, tile * tiles)
            for tile, tiles in zip(TILES, loads.tiles, strict=True)
        ]
        waves = [wave for tiles in loads.tiles for wave in self._waves(device, tiles)]
        local = self.num_experts / self.ep
        columns += [
            *waves,
            self.tokens,
            loads.rows,
            loads.active,
            loads.most,
            loads.median + 0.1,
            local,
        ]
        columns += [self.num_experts, self.hidden, self.ffn, self.expert_ffn, self.ep, self.top_k]
        columns += [
            loads.rows / loads.active,
            loads.most * local / loads.rows,
            self.width / self.ffn,
        ]
        plain = [wave / np.ceil(wave) for wave in waves]
        plain += [
            loads.active / local,
            self.ffn / (_TILE_COLUMNS * np.ceil(self.ffn / _TILE_COLUMNS)),
        ]
        return [*(np.log(np.maximum(column, _LEAST)) for column in columns), *plain]
