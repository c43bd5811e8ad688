"""Computes the guide's results on hidden sizes and heads.

Entry points: `shares` (computed share of block slots in use), `widths`, `head_counts` and `fours` (measured attention
over head_dim and heads), `iterations` (times of published searches). Used by `evidence`, `page` and `__main__`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, gcd, log
from pathlib import Path
from statistics import mean

import numpy as np

from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.files import open_text
from quantbench.latency.op_times import assumed_tile
from quantbench.quantization import Quantization, cdiv, quantize
from quantbench.workload import Attention, Gemm, Op
from quantbench.workload.transformer import backward_of

#: hidden sizes and layout of the published search that the rules of thumb come from
HIDDEN = range(8192, 16384 + 1, 8)
TP, SEQ = 8, 2048


@dataclass(frozen=True)
class Slots:
    """Share of the block slots that do useful work, over some hidden sizes.

    sizes: number of hidden sizes.
    mean, lowest, highest: statistics of the share, 0 to 1.
    """

    sizes: int
    mean: float
    lowest: float
    highest: float


def linear_layers(hidden: int, mbs: int, *, backward: bool = False) -> tuple[Op, ...]:
    """Returns the four GEMMs of one GPT layer on one of TP GPUs, at SEQ tokens per sample."""
    tokens = SEQ * mbs
    sizes = {
        "qkv": (3 * hidden // TP, hidden), "proj": (hidden, hidden // TP), "mlp_up": (4 * hidden // TP, hidden),
        "mlp_down": (hidden, 4 * hidden // TP),
    }  # fmt: skip
    forward = [Op(name, "forward", Gemm(tokens, n, k, layout="nt"), 1) for name, (n, k) in sizes.items()]
    return (*forward, *(b for op in forward for b in backward_of(op))) if backward else tuple(forward)


def slots_of(op: Op, spec: DeviceSpec) -> Quantization:
    """Computes tiles and waves of one GEMM, with the device's assumed tile."""
    assumed = assumed_tile(spec)
    assert isinstance(op.workload, Gemm)
    return quantize(op.workload, assumed, spec.sm_count)


def layer_share(hidden: int, mbs: int, spec: DeviceSpec, *, backward: bool = False) -> float:
    """Computes the useful share of the block slots over the linear layers, weighted by slots."""
    useful = taken = 0.0
    for op in linear_layers(hidden, mbs, backward=backward):
        useful += op.workload.flops
        taken += op.workload.flops / slots_of(op, spec).efficiency
    return useful / taken


def shares(spec: DeviceSpec, mbs: int, sizes: Iterable[int] = HIDDEN) -> dict[int, float]:
    """Returns the useful share of the block slots by hidden size."""
    return {hidden: layer_share(hidden, mbs, spec) for hidden in sizes}


def of_sizes(found: dict[int, float], divisor: int, *, divides: bool = True) -> Slots:
    """Summarizes the sizes that `divisor` divides, or the others."""
    chosen: Sequence[float] = [share for hidden, share in found.items() if (hidden % divisor == 0) == divides]
    return Slots(len(chosen), mean(chosen), min(chosen), max(chosen))


def whole_waves_step(rows: int, block_n: int, block_m: int, sm_count: int) -> int:
    """Returns the step of n at which the tiles of a GEMM with `rows` rows fill whole waves.

    ceil(rows / block_m) · (n / block_n) must be a multiple of sm_count.

    >>> whole_waves_step(rows=2048, block_n=256, block_m=128, sm_count=108)
    6912
    """
    return block_n * sm_count // gcd(sm_count, cdiv(rows, block_m))


#: head_dim that the others are compared with
USUAL = 128
SEQUENCES = (1024, 2048, 4096, 8192, 16384)
# Fewer ratios than this give no result.
_FEWEST = 10


@dataclass(frozen=True)
class Width:
    """Attention speed at head_dim relative to head_dim 128, at equal heads × head_dim, key width, batch and sequence.

    ratios: relative speed of each pair.
    low, median, high: 10, 50 and 90 % quantiles of the ratios.
    """

    head_dim: int
    seq: int
    ratios: tuple[float, ...]
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Fours:
    """Attention speed over the speed interpolated between the neighbouring powers of two in heads.

    off: ratios of shapes whose batch × heads is not a multiple of 4.
    on: ratios of shapes whose batch × heads is a multiple of 4.
    """

    off: tuple[float, ...]
    on: tuple[float, ...]


def widths(points: Sequence[Point]) -> tuple[Width, ...]:
    """Computes one result per head_dim and sequence length with at least ten pairs."""
    rate: dict[tuple[int, int, int, int, int], float] = {}
    for work, tflops in _rates(points):
        key = (work.head_dim, work.seq_q, work.batch, work.heads * work.head_dim, work.kv_heads * work.head_dim)
        rate[key] = max(tflops, rate.get(key, 0.0))
    found = []
    for head_dim in sorted({key[0] for key in rate} - {USUAL}):
        for seq in SEQUENCES:
            ratios = [
                value / rate[USUAL, *key[1:]]
                for key, value in rate.items()
                if key[:2] == (head_dim, seq) and (USUAL, *key[1:]) in rate
            ]
            if len(ratios) >= _FEWEST:
                low, middle, high = (float(q) for q in np.quantile(ratios, (0.1, 0.5, 0.9)))
                found.append(Width(head_dim, seq, tuple(ratios), low, middle, high))
    return tuple(found)


def head_counts(points: Sequence[Point], seq: int, head_dim: int = USUAL) -> dict[int, float]:
    """Returns TFLOP/s of one sample by number of heads, for shapes with kv_heads equal to heads."""
    found: dict[int, float] = {}
    for work, tflops in _rates(points):
        if (work.batch, work.seq_q, work.head_dim) == (1, seq, head_dim) and work.kv_heads == work.heads:
            found[work.heads] = max(tflops, found.get(work.heads, 0.0))
    return dict(sorted(found.items()))


def fours(points: Sequence[Point], seq: int) -> Fours | None:
    """Tests the rule (heads / tp × MBS) % 4 == 0 at `seq` tokens or more; None for under ten shapes in a group."""
    rate: dict[tuple[int, int, int, int], float] = {}
    for work, tflops in _rates(points):
        if work.seq_q >= seq:
            key = (work.batch, work.heads, work.kv_heads, work.seq_q * 1000 + work.head_dim)
            rate[key] = max(tflops, rate.get(key, 0.0))
    off: list[float] = []
    on: list[float] = []
    for (batch, heads, kv_heads, rest), tflops in rate.items():
        if heads & (heads - 1) == 0:
            continue
        below = 1 << (heads.bit_length() - 1)
        neighbours = [rate.get((batch, h, kv_heads, rest)) for h in (below, 2 * below)]
        if None in neighbours:
            continue
        share = (log(heads) - log(below)) / log(2)
        low, high = (log(n) for n in neighbours if n is not None)
        relative = tflops / exp(low + share * (high - low))
        (on if batch * heads % 4 == 0 else off).append(relative)
    if min(len(off), len(on)) < _FEWEST:
        return None
    return Fours(tuple(off), tuple(on))


def _rates(points: Sequence[Point]) -> list[tuple[Attention, float]]:
    return [(p.workload, p.tflops) for p in points if isinstance(p.workload, Attention) and p.workload.causal]


_HEADS_SECTION = "NHEADs"


@dataclass(frozen=True)
class Iteration:
    """One row of the published manual searches.

    heads: number of heads; None if the table does not have it.
    seconds: time per iteration. tflops: reported TFLOP/s per GPU.
    section, line: position of the row in its document.
    """

    hidden: int
    heads: int | None
    mbs: int
    seconds: float
    tflops: float
    section: str
    line: int

    @property
    def head_dim(self) -> float:
        """hidden / heads, not always an integer."""
        assert self.heads is not None
        return self.hidden / self.heads


def iterations(path: Path) -> tuple[Iteration, ...]:
    """Reads every timed row that has a hidden size and an MBS. Raises StoreError if `path` cannot be read."""
    try:
        with open_text(path) as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise StoreError("guide", f"{path} ({error.strerror})", "the table of the searches, in a checkout") from None
    found = []
    for row in rows:
        needed = [row[name] for name in ("nhidden", "mbs", "sec_per_it", "tflops_reported")]
        if all(needed) and row["status"] == "ok":
            hidden, mbs = int(needed[0]), int(needed[1])
            heads = int(row["nheads"]) if row["nheads"] else None
            seconds, tflops = float(needed[2]), float(needed[3])
            found.append(Iteration(hidden, heads, mbs, seconds, tflops, row["section"], int(row["line"])))
    return tuple(found)


def head_searches(found: tuple[Iteration, ...]) -> tuple[Iteration, ...]:
    """Selects the rows in which only the number of heads was varied."""
    return tuple(row for row in found if row.section.startswith(_HEADS_SECTION))
