"""Computes the time of attention with seq_q != seq_k, such as decode attention.

A thread block processes the keys of one key head of one sequence, or one slice of these keys if the
kernel splits them over SMs. A block's time follows from the rates at which one SM reads and
multiplies. Blocks run in waves of one block per SM, and all SMs share the memory bandwidth.
`attention.AttentionModel` fits `DecodePhysics` to measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention_cost_model import (
    AttentionShapes,
    BoolArray,
    FloatArray,
    Terms,
    peak_tflops,
)
from quantbench.latency.estimate import Parameter
from quantbench.workload.dtypes import element_bytes


@dataclass(frozen=True)
class DecodeKernel:
    """Rule by which an attention kernel divides its work into thread blocks.

    block_m: query rows of a block. Query heads that share a key head are packed into these rows.
    blocks_per_sm: largest number of blocks per SM that splitting the keys of a head may lead to;
        0 if keys are never split. The number of key slices is the largest within this limit.
    least_keys: smallest number of keys in a slice, which limits the number of slices.
    shares_groups_only: whether keys are split only if several query heads share them. These
        kernels also copy the queries of a batch, so that heads of a group become rows.
    largest_group: largest number of query heads that share the blocks of a key head; 0 for any
        number. In larger groups each query head reads the keys for itself.
    """

    block_m: int
    blocks_per_sm: int
    least_keys: int = 1
    shares_groups_only: bool = False
    largest_group: int = 0


# Candidate rules: block_m with each way of splitting (blocks_per_sm, least_keys and
# shares_groups_only). FlashAttention-2 splits keys only if several query heads share them. It
# transposes the queries of these (csrc/flash_attn/flash_api.cpp, seqlenq_ngroups_swapped).
_RULES = ((1, 128), (1, 512), (2, 256), (2, 128, True))
KERNELS = (
    *(DecodeKernel(64, *rule) for rule in _RULES),
    *(DecodeKernel(32, *rule, largest_group=32) for rule in ((1, 128), (2, 256))),
)
PARAMETERS = (
    Parameter("log_launch_us", "time of an empty call", 2.1, 0.7),
    Parameter("log_block_us", "fixed cost of one block on its SM", 0.0, 1.0),
    Parameter("log_row_us", "cost of 1024 elements of a block's query rows", -3.0, 1.5),
    Parameter(
        "log_read_rate", "rate at which one SM reads keys over its share of the bandwidth", 0.3, 0.7
    ),
    Parameter("log_product_efficiency", "share of its peak at which one SM multiplies", -1.0, 1.0),
    Parameter("log_memory_efficiency", "share of the memory bandwidth that is reached", -0.15, 0.3),
    Parameter("log_l2_rate", "rate of reading from L2 over that from memory", 0.5, 0.7),
    Parameter("log_l2_share", "bytes of which half are found in L2, over its size", -0.7, 0.5),
    Parameter(
        "logit_fluid_share", "share of waves that blocks of different length overlap", 0.0, 1.5
    ),
    Parameter(
        "log_join", "p - 1 of the norm that joins the blocks' and the memory's time", 1.0, 0.7
    ),
    Parameter("log_alone", "cost of a block with one query head over that of others", 0.0, 0.7),
    Parameter("log_part_us", "cost of joining one part of the keys", -3.5, 1.0),
    Parameter("log_tile_keys", "keys of a tile, which a block processes as a whole", 3.0, 1.0),
    Parameter("log_copy_us", "time of copying queries so that heads become rows", 1.0, 1.0),
    Parameter("log_l2_slope", "steepness of the fall of the hits in L2, over 3", 0.0, 0.5),
    Parameter("log_miss_us", "extra time of a call that finds nothing in L2", 1.0, 1.0),
)
_NAMES = tuple(p.name for p in PARAMETERS)
#: Parameters that a stored model may lack, with the values that have no effect.
_ABSENT = dict.fromkeys(_NAMES, -20.0) | {"log_alone": 0.0, "log_l2_slope": 0.0}


@dataclass(frozen=True)
class DecodePhysics:
    """Cost model of decode attention on one device.

    kernel: rule by which the kernel divides the keys.
    parameters: values in the order of PARAMETERS.
    """

    device: DeviceSpec
    kernel: DecodeKernel
    parameters: FloatArray
    spread: ClassVar[FloatArray] = np.array([p.sd for p in PARAMETERS])

    @classmethod
    def candidates(cls, device: DeviceSpec) -> list[DecodePhysics]:
        """Returns one cost model for each rule in KERNELS, with the prior means as parameters."""
        return [cls(device, kernel, np.array([p.mean for p in PARAMETERS])) for kernel in KERNELS]

    def cost(
        self, shapes: AttentionShapes, cache_write: BoolArray
    ) -> Callable[[FloatArray], Terms]:
        """Returns a function from a parameter vector to the times of these shapes.

        cache_write: ignored, because writing one token to the cache takes little time.
        """
        device, kernel = self.device, self.kernel
        blocks, parts, query_rows = self._cut(shapes)
        waves = np.ceil(blocks * parts / device.sm_count)
        filled = np.maximum(blocks * parts / device.sm_count, 1.0)
        elements = shapes.seq_k * shapes.head_dim / parts
        bytes_per_us = device.memory_gb_per_s * 1e3
        # A block reads its keys and values (factor 2) at the bandwidth per SM. It multiplies both
        # with the queries, at 2 FLOP per element and query row (factor 4).
        read_us = 2.0 * element_bytes(shapes.dtype) * elements * device.sm_count / bytes_per_us
        flop_per_us = peak_tflops(device, shapes.dtype) * 1e6 / device.sm_count
        multiply_us = 4.0 * elements * kernel.block_m / flop_per_us
        moved_us = shapes.forward_bytes / bytes_per_us
        in_l2 = np.log(shapes.forward_bytes / device.l2_bytes)
        # Kernels with a largest group process single query heads without tiles.
        tiled = (query_rows > 1) | (not kernel.largest_group)
        # With one sequence or one key head, transposed queries need no copy.
        copied = (
            kernel.shares_groups_only
            & (shapes.heads > shapes.kv_heads)
            & (shapes.kv_heads > 1)
            & (shapes.batch > 1)
        )

        def terms(parameters: FloatArray) -> Terms:
            x = dict(zip(_NAMES, parameters, strict=True))
            reading_us = read_us * np.exp(-x["log_read_rate"])
            multiplying_us = multiply_us * np.exp(-x["log_product_efficiency"])
            # A smooth maximum of the keys of a part and of a tile, over the former.
            filling = (
                1.0 + tiled * (np.exp(x["log_tile_keys"]) * parts / shapes.seq_k) ** 4
            ) ** 0.25
            fixed_us = (
                np.exp(x["log_block_us"])
                + np.exp(x["log_row_us"]) * query_rows * shapes.head_dim / 1024.0
            )
            # Reading and multiplying overlap in part: a norm with p = 3 joins their times.
            block_us = fixed_us + filling * (reading_us**3 + multiplying_us**3) ** (1.0 / 3.0)
            block_us = block_us * np.where(query_rows == 1, np.exp(x["log_alone"]), 1.0)
            fluid = 1.0 / (1.0 + np.exp(-x["logit_fluid_share"]))
            compute_us = block_us * ((1.0 - fluid) * waves + fluid * filled)
            # Fraction of the bytes that hit in L2. With the slope 3.0, this fraction falls from 0.9
            # to 0.1 while the bytes grow about fourfold.
            excess = 3.0 * np.exp(x["log_l2_slope"]) * (in_l2 - x["log_l2_share"])
            hits = 0.5 - 0.5 * np.tanh(0.5 * excess)
            memory_us = moved_us * np.exp(-x["log_memory_efficiency"])
            memory_us = memory_us * (1.0 - hits * (1.0 - np.exp(-x["log_l2_rate"])))
            memory_us = memory_us + (1.0 - hits) * np.exp(x["log_miss_us"])
            join = 1.0 + np.exp(x["log_join"])
            # The norm uses the ratio of the times, because powers of the times overflow.
            longer_us = np.maximum(compute_us, memory_us)
            ratio = np.minimum(compute_us, memory_us) / longer_us
            busy_us = longer_us * (1.0 + ratio**join) ** (1.0 / join)
            # One more block combines the partial results of a head.
            joining_us = np.exp(x["log_block_us"]) + np.exp(x["log_part_us"]) * parts
            launch_us = np.exp(x["log_launch_us"]) + np.where(parts > 1.0, joining_us, 0.0)
            launch_us = launch_us + copied * np.exp(x["log_copy_us"])
            return Terms(launch_us + busy_us, launch_us, compute_us, memory_us, waves)

        return terms

    def _cut(self, shapes: AttentionShapes) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns blocks before keys are split, key slices per block and query rows, (n,) each."""
        kernel = self.kernel
        group = shapes.heads / shapes.kv_heads
        query_rows = group * shapes.seq_q
        rows = np.ceil(query_rows / kernel.block_m)
        if kernel.largest_group:
            large = group > kernel.largest_group
            rows[large] = query_rows[large]
            query_rows[large] = 1.0
        blocks = np.asarray(shapes.batch * shapes.kv_heads * rows, dtype=np.float64)
        most = np.maximum(1.0, shapes.seq_k // kernel.least_keys)
        parts = np.clip(kernel.blocks_per_sm * self.device.sm_count // blocks, 1.0, most)
        if kernel.shares_groups_only:
            parts[group == 1] = 1.0
        return blocks, parts, query_rows

    def features(self, shapes: AttentionShapes, terms: Terms) -> FloatArray:
        """Returns the inputs of the Gaussian process, (n, 10).

        The features describe the shape, the cost model's time, the number of waves, how full the
        waves are, and the number of key slices.
        """
        blocks, parts, query_rows = self._cut(shapes)
        filled = blocks * parts / self.device.sm_count
        # The ratio of rounded-up to exact waves is faded out above four waves, where a partial wave
        # costs little. The factor 2.0 has no effect, because the process standardises its inputs.
        columns = [
            np.log(shapes.batch * shapes.seq_q),
            np.log(shapes.kv_heads),
            np.log(query_rows / shapes.seq_q),
            np.log(shapes.seq_k),
            2.0 * np.log(shapes.head_dim),
            np.log(terms.latency_us),
            np.log(filled),
            terms.waves / filled * np.minimum(1.0, 4.0 / terms.waves),
            np.log(parts),
            np.log(shapes.forward_bytes),
        ]
        return np.column_stack(columns)

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": asdict(self.kernel),
            "parameters": dict(zip(_NAMES, self.parameters.tolist(), strict=True)),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], device: DeviceSpec) -> DecodePhysics:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError if the data is broken."""
        return cls(
            device,
            DecodeKernel(**data["kernel"]),
            np.array([float({**_ABSENT, **data["parameters"]}[n]) for n in _NAMES]),
        )
