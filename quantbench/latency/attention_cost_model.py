"""Computes attention times from the blocks into which a kernel family divides the work.

A row block is a thread block that processes block_m query rows of one head. The keys that these
rows see are processed in key blocks of block_n keys. The time of a key block is the p-norm of the
times of its two matmuls and of its exponentials. Row blocks run in waves of one block per SM, which
gives the compute time. The parameter "logit_fluid_share" softens its jump with each wave.

latency = launch + ‖compute, memory‖₃ + padding copies of misaligned heads + cache write

A throttling factor increases the norm for long kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.estimate import Parameter
from quantbench.latency.families import family
from quantbench.workload import Attention
from quantbench.workload.dtypes import ALIGNED_ELEMENTS, element_bytes

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Key blocks of causal attention are counted exactly for up to this many row blocks per head. For
# more row blocks, an average is used that is within 2 % of the exact count.
_EXACT_BLOCKS = 64


@dataclass(frozen=True)
class KernelFamily:
    """Attention kernels that share tile sizes and scheduling.

    tiles: (largest head_dim, full tile, causal tile) in ascending order of head_dim. The full tile
        applies without a mask. A tile is (block_m, block_n): query rows and keys of a block. The
        last entry also applies to wider heads.
    packs: whether query heads that share a key head are packed into the rows of one block. With a
        single query, every family packs these heads.
    splits: whether the keys are split over idle SMs if there are few row blocks.
    widths: head widths that the kernels support; head_dim is padded to the next of these widths.
    """

    name: str
    tiles: tuple[tuple[int, tuple[int, int], tuple[int, int]], ...]
    packs: bool
    splits: bool
    widths: tuple[int, ...]

    def tile(self, head_dim: IntArray, causal: BoolArray) -> tuple[IntArray, IntArray]:
        """Returns block_m and block_n for each shape, (n,) each."""
        _, full, masked = self.tiles[-1]
        block_m, block_n = (
            np.where(causal, masked[0], full[0]),
            np.where(causal, masked[1], full[1]),
        )
        for widest, full, masked in reversed(self.tiles[:-1]):
            block_m = np.where(head_dim <= widest, np.where(causal, masked[0], full[0]), block_m)
            block_n = np.where(head_dim <= widest, np.where(causal, masked[1], full[1]), block_n)
        return block_m, block_n

    def padded(self, head_dim: IntArray) -> IntArray:
        """Returns head_dim padded to a width that the kernels support, (n,).

        A head that is wider than all supported widths is padded to a multiple of 64.
        """
        padded = -(-head_dim // 64) * 64
        for width in reversed(self.widths):
            padded = np.where(head_dim <= width, width, padded)
        return padded


# Sources: FlashAttention-3, hopper/tile_size.h (tile_size_fwd_sm90, tile_size_fwd_sm8x) and
# hopper/heuristics.h (query heads that share keys are packed into rows when sequence lengths vary,
# as serving engines pass them); FlashAttention-2, csrc/flash_attn/src/flash_fwd_launch_template.h
# (dense and paged forward); CUTLASS example 77 (Blackwell FMHA: two blocks of 128 rows at a time).
# All of https://github.com/Dao-AILab/flash-attention and https://github.com/NVIDIA/cutlass.
_FA3_SM90 = (
    (64, (192, 192), (192, 128)), (96, (192, 144), (192, 144)), (128, (128, 176), (128, 128)),
    (192, (128, 112), (128, 112)), (256, (128, 80), (128, 80)),
)  # fmt: skip
_FA3_SM80 = ((64, (128, 112), (128, 112)), (128, (128, 64), (128, 64)), (256, (128, 96), (128, 96)))
_FA2_DENSE = ((64, (128, 128), (128, 128)), (256, (128, 64), (128, 64)))
_FA2_PAGED = ((64, (64, 256), (64, 256)), (128, (64, 128), (64, 128)), (256, (64, 64), (64, 64)))
_FMHA_SM100 = ((256, (256, 128), (256, 128)),)
FAMILIES: dict[str, KernelFamily] = {
    family.name: family
    for family in (
        KernelFamily("fa3_sm90", _FA3_SM90, True, True, (64, 96, 128, 192, 256)),
        KernelFamily("fa3_sm80", _FA3_SM80, True, True, (64, 96, 128, 192, 256)),
        KernelFamily("fa2_dense", _FA2_DENSE, False, False, (32, 64, 96, 128, 192, 256)),
        KernelFamily("fa2_paged", _FA2_PAGED, False, True, (32, 64, 96, 128, 192, 256)),
        KernelFamily("fmha_sm100", _FMHA_SM100, False, False, (32, 64, 128, 256)),
    )
}


def assumed_family(device: DeviceSpec) -> KernelFamily:
    """Returns the kernel family that is assumed without a measurement.

    Hopper has wgmma and Blackwell has tcgen05, so newer kernels run there. On all other GPUs, which
    include sm_12x, the family is fa2_dense, which needs only mma.sync.
    """
    own = {"hopper": "fa3_sm90", "blackwell": "fmha_sm100"}
    return FAMILIES[own.get(family(device), "fa2_dense")]


@dataclass(frozen=True)
class Blocks:
    """Blocks into which a kernel family divides n shapes; all arrays are (n,).

    rows: number of row blocks. A row block is one thread block unless its keys are split.
    keys: number of key blocks that all row blocks together process.
    longest: number of key blocks that the longest row block processes.
    block_m, block_n: query rows and keys of a block.
    width: padded head_dim.
    group: number of query heads packed into the rows of one block.
    may_split: whether the keys are split over idle SMs if there are few row blocks.
    """

    rows: FloatArray
    keys: FloatArray
    longest: FloatArray
    block_m: FloatArray
    block_n: FloatArray
    width: FloatArray
    group: FloatArray
    may_split: bool


def cut(family: KernelFamily, shapes: AttentionShapes) -> Blocks:
    """Returns the blocks into which a kernel family divides the shapes."""
    heads, seq_q = shapes.heads, shapes.seq_q
    group = np.where(family.packs | (seq_q == 1), heads // shapes.kv_heads, 1)
    block_m, block_n = family.tile(shapes.head_dim, shapes.causal)
    padded = family.padded(shapes.head_dim)
    per_head = -(-seq_q * group // block_m)
    keys, longest = _key_blocks(shapes, per_head, group, block_m, block_n)
    copies = shapes.batch * (heads // group)
    as_float = [x.astype(float) for x in (copies * per_head, block_m, block_n, padded, group)]
    return Blocks(
        rows=as_float[0],
        keys=copies * keys,
        longest=longest,
        block_m=as_float[1],
        block_n=as_float[2],
        width=as_float[3],
        group=as_float[4],
        may_split=family.splits,
    )


def _key_blocks(
    shapes: AttentionShapes,
    per_head: IntArray,
    group: IntArray,
    block_m: IntArray,
    block_n: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Returns how many key blocks one head, and its longest row block, process; (n,) each.

    per_head: (n,), number of row blocks of one head.
    group: (n,), number of query heads packed into the rows of one block.
    block_m, block_n: (n,), query rows and keys of a block.
    """
    every = -(-shapes.seq_k // block_n)
    # With a causal mask, the last query of a row block sees the keys up to its own position.
    index = np.arange(_EXACT_BLOCKS)[:, None]
    last_row = np.minimum((index + 1) * block_m, shapes.seq_q * group) - 1
    walked = -(-(last_row // group + 1) // block_n)
    exact = np.where(index < per_head, walked, 0).sum(axis=0)
    # Rounding up to whole key blocks adds half a key block to each row block on average.
    average = per_head * (per_head + 1) / 2 * (block_m / group) / block_n + per_head * 0.5 * (
        1 - 1 / block_n
    )
    masked = np.where(per_head <= _EXACT_BLOCKS, exact, average)
    return np.where(shapes.causal, masked, per_head * every), every.astype(float)


#: exponentials per SM and cycle of the SM clock: 16 in the special function units from compute
#: capability 7.0 on (CUDA C++ Programming Guide, arithmetic instructions, throughput table)
_EXPONENTIALS_PER_CLOCK = 16
#: FLOPs of a backward pass over those of a forward pass: five matmuls instead of two
#: (FlashAttention, Dao 2022)
BACKWARD_FLOPS = 2.5
# Keys are split if there are fewer row blocks than this times the number of SMs (FlashAttention,
# hopper/heuristics.h).
_SPLIT_BELOW = 0.8
# Smallest number of keys in a slice (estimated from the public A100 and H200 tables).
_SPLIT_KEYS = 512


@dataclass(frozen=True)
class AttentionShapes:
    """Columns of n attention shapes, (n,) each.

    The fields are those of `Attention`, with `backward` (a bool) in place of `direction`.
    """

    batch: IntArray
    heads: IntArray
    kv_heads: IntArray
    seq_q: IntArray
    seq_k: IntArray
    head_dim: IntArray
    causal: BoolArray
    backward: BoolArray
    dtype: str = "bf16"

    @classmethod
    def of(cls, works: Iterable[Attention]) -> AttentionShapes:
        """Builds the columns from workloads. Raises InputError unless they share one dtype."""
        found = list(works)
        dtypes = {work.dtype for work in found}
        if len(dtypes) != 1:
            raise InputError(
                "attention", f"dtypes {sorted(dtypes)}", "workloads of one dtype, at least one"
            )
        rows = [(w.batch, w.heads, w.kv_heads, w.seq_q, w.seq_k, w.head_dim) for w in found]
        batch, heads, kv_heads, seq_q, seq_k, head_dim = np.array(rows, dtype=np.int64).T
        causal = np.array([w.causal for w in found])
        backward = np.array([w.direction == "backward" for w in found])
        return cls(batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, backward, dtypes.pop())

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, rows: Any) -> AttentionShapes:
        arrays = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "dtype"}
        return replace(self, **arrays)

    @cached_property
    def flops(self) -> FloatArray:
        """FLOPs of each shape's matmuls without masked elements, as in `Attention.flops`."""
        seq_q, seq_k = self.seq_q.astype(float), self.seq_k.astype(float)
        pairs = np.where(self.causal, seq_q * (seq_q + 1) / 2, seq_q * seq_k)
        forward = 4.0 * self.batch * self.heads * pairs * self.head_dim
        flops: FloatArray = forward * np.where(self.backward, BACKWARD_FLOPS, 1.0)
        return flops

    @cached_property
    def query_bytes(self) -> FloatArray:
        """Bytes of the queries, which equal the bytes of the output."""
        size: Any = (
            float(element_bytes(self.dtype)) * self.batch * self.heads * self.seq_q * self.head_dim
        )
        return cast(FloatArray, size)

    @cached_property
    def key_bytes(self) -> FloatArray:
        """Bytes of the keys and values together."""
        size: Any = (
            float(element_bytes(self.dtype))
            * self.batch
            * self.kv_heads
            * self.seq_k
            * self.head_dim
        )
        return cast(FloatArray, 2.0 * size)

    @cached_property
    def forward_bytes(self) -> FloatArray:
        """Minimum memory traffic of each shape's forward pass in bytes."""
        row_stats = 4.0 * self.batch * self.heads * self.seq_q
        total: FloatArray = 2.0 * self.query_bytes + self.key_bytes + row_stats
        return total

    @cached_property
    def min_bytes(self) -> FloatArray:
        """Minimum memory traffic of each shape in bytes, as in `Attention.min_bytes`."""
        gradients = 2.0 * self.query_bytes + self.key_bytes
        total: FloatArray = self.forward_bytes + np.where(self.backward, gradients, 0.0)
        return total

    @property
    def misaligned(self) -> BoolArray:
        """Whether head_dim is no multiple of 8, so that 16-bit rows are not 16-byte aligned."""
        misaligned: BoolArray = (
            self.head_dim % ALIGNED_ELEMENTS != 0
        )  # torch's SDPA pads misaligned heads by copying the tensors.
        return misaligned

    @property
    def sites(self) -> IntArray:
        """Group index of each shape. Shapes of a group share heads, kv_heads, head_dim and mask."""
        what = np.stack([self.heads, self.kv_heads, self.head_dim, self.causal])
        return np.asarray(np.unique(what, axis=1, return_inverse=True)[1].ravel())


PARAMETERS = (
    Parameter("log_launch_us", "time of an empty call", 2.1, 0.7),
    Parameter("log_block_us", "fixed cost of one row block on its SM", -0.7, 1.0),
    Parameter(
        "log_product_efficiency",
        "share of the peak that the products of a key block reach",
        -0.29,
        0.3,
    ),
    Parameter("log_exponential_cost", "cost of an exponential over its ideal", 0.0, 0.7),
    Parameter("log_memory_efficiency", "share of the memory bandwidth that is reached", -0.22, 0.5),
    Parameter(
        "logit_fluid_share", "share of waves that blocks of different length overlap", 0.0, 1.5
    ),
    Parameter("log_join", "p - 1 of the norm that joins products and exponentials", 1.0, 0.7),
    Parameter("throttle", "log slowdown of times far above a millisecond", 0.0, 0.1),
    Parameter(
        "log_cache_write",
        "cost of writing keys and values to a cache over two passes at peak",
        0.0,
        1.0,
    ),
    Parameter(
        "log_token_write_us",
        "cost of the block that writes one token's keys and values to a cache",
        -2.0,
        1.0,
    ),
    Parameter(
        "log_masked_block", "cost of the masked key block of a row block over a full one", -1.0, 1.0
    ),
    Parameter(
        "log_store",
        "cost of loading q and storing o, not hidden, over the SM's share of bandwidth",
        0.0,
        1.0,
    ),
)
#: mean and standard deviation of each parameter in the prior that is set by hand
START = np.array([p.mean for p in PARAMETERS])
SPREAD = np.array([p.sd for p in PARAMETERS])


@dataclass(frozen=True)
class Terms:
    """Predicted latency and its parts in µs, and the number of waves; all (n,).

    The parts overlap, so they do not sum to latency_us.
    """

    latency_us: FloatArray
    launch_us: FloatArray
    compute_us: FloatArray
    memory_us: FloatArray
    waves: FloatArray


def peak_tflops(device: DeviceSpec, dtype: str) -> float:
    """Returns the device's peak for a dtype in TFLOP/s.

    Raises UnsupportedError if the device does not support the dtype.
    """
    peak = device.peak(dtype)
    if peak is None:
        raise UnsupportedError(
            "attention", f"{dtype} on {device.name}", "one of " + ", ".join(device.peak_tflops)
        )
    return peak


def times(
    device: DeviceSpec,
    shapes: AttentionShapes,
    blocks: Blocks,
    parameters: Sequence[float] | FloatArray,
    cache_write: BoolArray,
) -> Terms:
    """Computes the times of forward passes of `shapes` on `device`.

    blocks: blocks into which the kernels divide the shapes.
    parameters: values in the order of PARAMETERS.
    cache_write: (n,), whether keys and values are also written to a serving engine's cache.
    """
    x = dict(zip((p.name for p in PARAMETERS), parameters, strict=True))
    bytes_per_us = device.memory_gb_per_s * 1e3
    per_sm = (
        peak_tflops(device, shapes.dtype)
        * 1e6
        / device.sm_count
        * np.exp(x["log_product_efficiency"])
    )
    products_us = 4.0 * blocks.block_m * blocks.block_n * blocks.width / per_sm
    exponentials_us = (
        blocks.block_m * blocks.block_n / (_EXPONENTIALS_PER_CLOCK * device.sm_clock_mhz)
    )
    exponentials_us = exponentials_us * np.exp(x["log_exponential_cost"])
    join = 1.0 + np.exp(x["log_join"])
    longer_us, shorter_us = (
        np.maximum(products_us, exponentials_us),
        np.minimum(products_us, exponentials_us),
    )
    key_block_us = longer_us * (1.0 + (shorter_us / longer_us) ** join) ** (1.0 / join)

    diagonal = np.where(
        shapes.causal, np.maximum(1.0, blocks.block_m / blocks.group / blocks.block_n), 0.0
    )
    masked_us = np.exp(x["log_masked_block"]) * diagonal * key_block_us
    per_block_bytes = 2.0 * shapes.query_bytes / blocks.rows
    store_us = per_block_bytes / (bytes_per_us / device.sm_count) * np.exp(x["log_store"])
    fixed_us = np.exp(x["log_block_us"]) + masked_us + store_us
    # If there are few row blocks, the kernel splits their keys until there are about two thread
    # blocks per SM, and combines the results.
    most = np.floor(blocks.longest * blocks.block_n / _SPLIT_KEYS)
    few = blocks.may_split & (blocks.rows < _SPLIT_BELOW * device.sm_count) & (most >= 2.0)
    splits = np.where(few, np.minimum(np.ceil(2.0 * device.sm_count / blocks.rows), most), 1.0)
    launched = blocks.rows * splits
    all_us = (
        blocks.rows * fixed_us
        + blocks.keys * key_block_us
        + (launched - blocks.rows) * np.exp(x["log_block_us"])
    )
    longest_us = fixed_us + blocks.longest / splits * key_block_us
    waves = np.ceil(launched / device.sm_count)
    quantised_us = np.where(few, 0.0, waves * all_us / launched)
    quantised_us = np.maximum(quantised_us, longest_us)
    fluid_us = np.maximum(all_us / device.sm_count, longest_us)
    fluid_share = 1.0 / (1.0 + np.exp(-x["logit_fluid_share"]))
    compute_us = (1.0 - fluid_share) * quantised_us + fluid_share * fluid_us

    # A padding copy reads and writes q, k, v and the output.
    padding_bytes = np.where(
        shapes.misaligned, 2.0 * (2.0 * shapes.query_bytes + shapes.key_bytes), 0.0
    )
    useful_bytes_per_us = bytes_per_us * np.exp(x["log_memory_efficiency"])
    memory_us = shapes.forward_bytes / useful_bytes_per_us
    busy_us = (compute_us**3 + memory_us**3) ** (1.0 / 3.0)
    # Throttling sets in around 1 ms. The transition is 0.7 wide in log time.
    busy_us = busy_us * np.exp(
        x["throttle"] / (1.0 + np.exp(-(np.log(busy_us) - np.log(1000.0)) / 0.7))
    )
    tokens = shapes.batch * shapes.seq_q.astype(float)
    write_us = tokens / device.sm_count * np.exp(x["log_token_write_us"])
    write_us = write_us + 2.0 * shapes.key_bytes / bytes_per_us * np.exp(x["log_cache_write"])
    launch_us = np.full(len(shapes), np.exp(x["log_launch_us"]))
    # The padding copies are separate kernels, so their time does not overlap with attention's.
    padding_us = padding_bytes / useful_bytes_per_us
    latency_us = launch_us + busy_us + padding_us + np.where(cache_write, write_us, 0.0)
    return Terms(latency_us, launch_us, compute_us, memory_us, waves)


def learner_features(
    device: DeviceSpec, shapes: AttentionShapes, blocks: Blocks, terms: Terms
) -> FloatArray:
    """Returns the inputs of the Gaussian process, (n, 9).

    The features describe the shape, the cost model's time, the number of waves and how full the
    waves are.
    """
    # The ratio of rounded-up to exact waves is faded out above four waves, where a partial wave
    # costs little. The factors 2.0 have no effect, because the process standardises its inputs.
    per_sm = blocks.rows / device.sm_count
    filling = terms.waves / per_sm
    group = shapes.heads / shapes.kv_heads
    return np.column_stack(
        [
            np.log(shapes.seq_q),
            np.log(shapes.batch * shapes.heads),
            2.0 * np.log(shapes.head_dim),
            np.log(group),
            np.log(terms.latency_us),
            np.log(per_sm),
            filling * np.minimum(1.0, 4.0 / terms.waves),
            np.log(shapes.seq_q * group),
            2.0 * shapes.causal,
        ]
    )


@dataclass(frozen=True)
class Physics:
    """Cost model of prefill attention on one device: its kernel family and parameter values."""

    device: DeviceSpec
    family: KernelFamily
    parameters: FloatArray
    spread: ClassVar[FloatArray] = SPREAD

    def cost(
        self, shapes: AttentionShapes, cache_write: BoolArray
    ) -> Callable[[FloatArray], Terms]:
        """Returns a function from a parameter vector to the times of these shapes.

        cache_write: as in `times`.
        """
        blocks = cut(self.family, shapes)
        return lambda parameters: times(self.device, shapes, blocks, parameters, cache_write)

    def features(self, shapes: AttentionShapes, terms: Terms) -> FloatArray:
        """Returns the inputs of the Gaussian process, (n, 9), as in `learner_features`."""
        return learner_features(self.device, shapes, cut(self.family, shapes), terms)

    def to_json(self) -> dict[str, Any]:
        values = zip((p.name for p in PARAMETERS), self.parameters.tolist(), strict=True)
        return {"family": self.family.name, "parameters": dict(values)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], device: DeviceSpec) -> Physics:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError if the data is broken."""
        parameters = np.array([float(data["parameters"][p.name]) for p in PARAMETERS])
        return cls(device, FAMILIES[data["family"]], parameters)
