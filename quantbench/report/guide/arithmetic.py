"""What tiles and waves alone say about hidden sizes: no measurement, exact counts.

The folklore divides the hidden size by the number of SMs. What must be whole is the number of tiles over the number of
SMs, and that depends on the rows and columns of each product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from statistics import mean

from quantbench.device.spec import DeviceSpec
from quantbench.latency.roofline import assumed_tile
from quantbench.quantization import Quantization, cdiv, quantize
from quantbench.workload import Gemm, Op
from quantbench.workload.transformer import backward_of

#: hidden sizes of the comparison and the layout they run in: those of the search that the folklore comes from
HIDDEN = range(8192, 16384 + 1, 8)
TP, SEQ = 8, 2048


@dataclass(frozen=True)
class Slots:
    """Mean share of the block slots that does useful work, over `sizes` hidden sizes; lowest and highest of them."""

    sizes: int
    mean: float
    lowest: float
    highest: float


def linear_layers(hidden: int, mbs: int, *, backward: bool = False) -> tuple[Op, ...]:
    """The four products of one GPT layer on one of TP GPUs, at SEQ tokens a sample."""
    tokens = SEQ * mbs
    sizes = {
        "qkv": (3 * hidden // TP, hidden), "proj": (hidden, hidden // TP), "mlp_up": (4 * hidden // TP, hidden),
        "mlp_down": (hidden, 4 * hidden // TP),
    }  # fmt: skip
    forward = [Op(name, "forward", Gemm(tokens, n, k, layout="nt"), 1) for name, (n, k) in sizes.items()]
    return (*forward, *(b for op in forward for b in backward_of(op))) if backward else tuple(forward)


def slots_of(op: Op, spec: DeviceSpec) -> Quantization:
    """Tiles and waves of one product, with the tile that is assumed for the device."""
    assumed = assumed_tile(spec)
    assert isinstance(op.workload, Gemm)
    return quantize(op.workload, assumed.tile, spec.sm_count, assumed.blocks_per_sm)


def layer_share(hidden: int, mbs: int, spec: DeviceSpec, *, backward: bool = False) -> float:
    """Useful share of the block slots over the linear layers, each weighted by the slots it takes."""
    useful = taken = 0.0
    for op in linear_layers(hidden, mbs, backward=backward):
        useful += op.workload.flops
        taken += op.workload.flops / slots_of(op, spec).efficiency
    return useful / taken


def shares(spec: DeviceSpec, mbs: int, sizes: Iterable[int] = HIDDEN) -> dict[int, float]:
    """The share of every hidden size."""
    return {hidden: layer_share(hidden, mbs, spec) for hidden in sizes}


def of_sizes(found: dict[int, float], divisor: int, *, divides: bool = True) -> Slots:
    """The sizes that `divisor` divides, or the others."""
    chosen: Sequence[float] = [share for hidden, share in found.items() if (hidden % divisor == 0) == divides]
    return Slots(len(chosen), mean(chosen), min(chosen), max(chosen))


def whole_waves_step(rows: int, block_n: int, block_m: int, sm_count: int) -> int:
    """Columns n of a product with `rows` rows whose tiles are whole waves: every multiple of this.

    ceil(rows / block_m) · (n / block_n) must be a multiple of sm_count.

    >>> whole_waves_step(rows=2048, block_n=256, block_m=128, sm_count=108)
    6912
    """
    return block_n * sm_count // gcd(sm_count, cdiv(rows, block_m))
