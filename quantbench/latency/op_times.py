"""Defines the interface to op times (`OpTimes`), caches op times, and sums them with intervals.

Errors of ops on one GPU are correlated, so the interval of a sum (`total`) is wider than for
independent errors. The module also estimates times from the spec sheet: of casts, and of any op
when a sweep is planned.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.estimate import Estimate
from quantbench.latency.softmax import fallback_bytes
from quantbench.launch import Launch, Tile
from quantbench.megatron import fused_softmax_failures
from quantbench.quantization import VECTOR_BYTES, quantize
from quantbench.workload import Attention, Gemm, GroupedGemm, MoE, Op, Softmax, Workload
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.kinds import Compute
from quantbench.workload.ops import Cast

#: Correlation of the errors of two ops: 0 for independent errors, 1 if all ops err by the same
#: fraction of their interval. With 0.5, the intervals of four-GEMM sums cover 89 to 99 % of the
#: measured sums in the five public tables, on rows that the shipped models were not fitted to.
CORRELATION = 0.5
#: The same correlation for a device without measurements, where one error affects all ops.
UNMEASURED_CORRELATION = 1.0

#: Fraction of the error variance that ops of one kind share on a GPU without measurements. It
#: applies to ratios of times (`advice.cost.ratio_factor`). With 0.8, the intervals of ratios cover
#: at least 90 % on each of the five public tables, if the times are predicted from priors without
#: GPUs of the same architecture.
UNMEASURED_COMMON = 0.8

#: Rate of batched 16-bit GEMMs with rows not aligned to 16 bytes, as a fraction of the GPU's fp32
#: peak. The rate was fitted to training iterations in BigScience's tables with head_dim 150
#: (tests/data/bloom_tables.csv), together with the fitted factors of their computing centre.
UNALIGNED_SHARE = 0.5555
#: Half-width, as a factor, of an unaligned batched GEMM's interval. It is a guess, because the rate
#: was fitted only to whole training iterations.
UNALIGNED_SPREAD = 1.5
# Half-width, as a factor, of a cast's interval. It is a guess.
_CAST_SPREAD = 1.3
_CAST_NOTE = "casts: by their bytes and the memory's bandwidth"
UNALIGNED_NOTE = "batched products of unaligned rows: at a rate fitted to whole iterations on A100s"


class OpTimes(Protocol):
    """Interface to op times on one GPU, whether modelled or from a profile."""

    @property
    def device(self) -> DeviceSpec:
        """GPU on which the ops run."""

    @property
    def note(self) -> str:
        """Sources of the estimates made so far, for headers and provenance."""

    @property
    def common_error(self) -> float:
        """Fraction of the error variance that ops of one kind share, 0 to 1; see `advice.cost`."""

    def estimates(self, workloads: Sequence[Compute]) -> Sequence[Estimate]:
        """Returns one estimate per workload, in order.

        A softmax is assumed to run as one fused kernel.
        """


#: function from a GPU to its op times, for tables whose rows are of several GPUs
TimesOf = Callable[[DeviceSpec], OpTimes]


# The jumps in latency in the public A100 table of bf16 GEMMs correlate best (0.72) with the waves
# of a 128×256 tile at one block per SM. On Hopper and Blackwell, the jumps correlate less with the
# waves of any tile, so the tile is a guess there.
_AMPERE_AND_LATER = Tile(128, 256)
# The largest tile of cuBLAS's fp16 kernels on Volta and Turing
# (volta_fp16_s884gemm_fp16_256x128_…).
_VOLTA = Tile(256, 128)
# oneDNN's AVX-512 kernels process n in blocks of 64 columns. On one core, the measured latency
# jumps at every multiple of 64 in n.
_CPU = Tile(1, 64)

#: Fractions of the spec's peak arithmetic and peak bandwidth that a large GEMM is assumed to reach.
#: Good libraries reach 0.7 to 0.85 on a GPU. A CPU's spec has upper limits for any core; a usual
#: core reaches only 0.1 TFLOP/s in fp32 and 30 GB/s.
COMPUTE_EFFICIENCY = {"cuda": 0.75, "cpu": 0.015}
BANDWIDTH_EFFICIENCY = {"cuda": 0.8, "cpu": 0.2}
#: Time in µs to start and end a kernel on the device, without the launch from the host.
KERNEL_OVERHEAD_US = {"cuda": 3.0, "cpu": 2.0}
_OF_FLOPS = Gemm | GroupedGemm | MoE | Attention


def assumed_tile(spec: DeviceSpec) -> Tile:
    """Returns the tile to assume on a device if neither a launch nor a fitted model gives a tile.

    One block of this tile is assumed to be resident per SM.
    """
    if spec.compute_capability is None:
        return _CPU
    return _AMPERE_AND_LATER if spec.compute_capability >= (8, 0) else _VOLTA


def roofline_us(workload: Workload, spec: DeviceSpec) -> float:
    """Estimates the time of one run in µs from the spec sheet.

    The time is the larger of compute time and memory time, plus a kernel's overhead. A GEMM's
    compute time includes idle SMs in waves of the assumed tile. The estimate is accurate to a
    factor of about two. That is enough to plan a sweep and to place expected edges, the sizes at
    which another tile or wave begins.
    """
    overhead_us = KERNEL_OVERHEAD_US[spec.torch_kind]
    memory_us = copy_us(workload.min_bytes, spec) - overhead_us
    compute_us = 0.0
    if isinstance(workload, _OF_FLOPS):
        # A dtype that the device lacks is assumed to run at the device's slowest peak, because
        # emulation is not faster.
        peak = spec.peak(workload.dtype) or min(spec.peak_tflops.values())
        compute_us = workload.flops / (peak * 1e6 * COMPUTE_EFFICIENCY[spec.torch_kind])
    if isinstance(workload, Gemm | GroupedGemm):
        compute_us /= quantize(workload, assumed_tile(spec), spec.sm_count).efficiency
    return max(memory_us, compute_us) + overhead_us


def copy_us(moved_bytes: float, spec: DeviceSpec) -> float:
    """Estimates the time in µs of one kernel that only moves data.

    moved_bytes: bytes read and written together.
    """
    bytes_per_us = spec.memory_gb_per_s * 1e3 * BANDWIDTH_EFFICIENCY[spec.torch_kind]
    return moved_bytes / bytes_per_us + KERNEL_OVERHEAD_US[spec.torch_kind]


def peak_share(workload: Workload, latency_us: float, spec: DeviceSpec) -> float | None:
    """Returns the fraction of the device's peak rate that a workload with this time reaches.

    The peak is FLOP/s for (grouped) GEMMs, experts and attention, and memory bandwidth for other
    workloads. The result is None if the device has no peak for the dtype, and on a CPU, whose
    specified peaks are only upper limits.
    """
    if spec.kind == "cpu":
        return None
    if isinstance(workload, _OF_FLOPS):
        peak = spec.peak(workload.dtype)
        return None if peak is None else workload.flops / latency_us / 1e6 / peak
    return workload.min_bytes / latency_us / 1e3 / spec.memory_gb_per_s


def runs_separately(work: Compute, softmax: str) -> bool:
    """Returns whether a softmax runs as separate kernels (`softmax.fallback_bytes`).

    softmax: "megatron" (a fused kernel if its constraints are met), "torch" (always separate
        kernels) or "" (always a fused kernel).
    """
    if not isinstance(work, Softmax) or not softmax:
        return False
    return softmax == "torch" or bool(fused_softmax_failures(work))


def unaligned_us(work: Compute, device: DeviceSpec) -> float | None:
    """Returns the time in µs of a batched 16-bit GEMM with rows not aligned to 16 bytes.

    The result is None for all other workloads. Fused attention runs no such GEMM: it pads
    misaligned heads, and the attention model includes the padding.
    """
    if not isinstance(work, Gemm) or work.batch == 1 or work.dtype not in ("fp16", "bf16"):
        return None
    row_bytes = DTYPES[work.dtype].row_bytes
    peak = device.peak("fp32")
    aligned = all(row_bytes(size) % VECTOR_BYTES == 0 for size in (work.m, work.n, work.k))
    if aligned or peak is None:
        return None
    return work.flops / (peak * 1e6 * UNALIGNED_SHARE)


def as_run(work: Compute, source: Estimate, device: DeviceSpec, *, softmax: str = "") -> Estimate:
    """Returns an estimate corrected for softmax in separate kernels and for unaligned GEMMs.

    For a softmax in separate kernels, the given time is multiplied by a ratio: the bytes that the
    separate kernels move over those of the fused kernel. An unaligned batched GEMM that was not
    measured takes `unaligned_us`, but at least the given time.

    source: estimate to correct.
    softmax: as in `runs_separately`.
    """
    if runs_separately(work, softmax):
        assert isinstance(work, Softmax)
        return source.scaled(fallback_bytes(work) / work.min_bytes)
    slow_us = unaligned_us(work, device)
    if slow_us is None or source.source == "measured":
        return source
    mid_us = max(slow_us, source.latency_us)
    return replace(
        source,
        latency_us=mid_us,
        low_us=max(mid_us / UNALIGNED_SPREAD, source.low_us),
        high_us=mid_us * UNALIGNED_SPREAD,
        unmeasured=UNALIGNED_NOTE,
    )


def with_casts(times: OpTimes, works: Sequence[Compute]) -> dict[Compute, Estimate]:
    """Returns the estimates of distinct workloads, which may include casts.

    A cast takes the time of its bytes at the memory bandwidth (`copy_us`). `times` estimates the
    other workloads.
    """
    others = [work for work in works if not isinstance(work, Cast)]
    found: dict[Compute, Estimate] = {}
    if others:
        found.update(zip(others, times.estimates(others), strict=True))
    for work in works:
        if isinstance(work, Cast):
            us = copy_us(work.min_bytes, times.device)
            cast = Estimate(us, us / _CAST_SPREAD, us * _CAST_SPREAD, bound="memory")
            found[work] = replace(cast, unmeasured=_CAST_NOTE)
    return found


class CachedTimes:
    """Cache of op times that also estimates casts and applies `as_run`; implements `OpTimes`.

    softmax: implementation of softmax, as in `runs_separately`.
    kernels: second source of kernel launches, for workloads whose estimate by `times` has none;
        None if there is no second source.
    """

    def __init__(
        self,
        times: OpTimes,
        *,
        softmax: str = "",
        kernels: OpTimes | None = None,
    ) -> None:
        self.softmax = softmax
        self._times = times
        self._kernels = kernels
        self._fused: dict[Compute, Estimate] = {}
        self._known: dict[Compute, Estimate] = {}
        self._launches: dict[Compute, Launch | None] = {}
        self._unaligned = False

    @property
    def device(self) -> DeviceSpec:
        return self._times.device

    @property
    def note(self) -> str:
        notes = [self._times.note]
        if self._unaligned:
            notes.append(UNALIGNED_NOTE)
        return "; ".join(filter(None, notes))

    @property
    def common_error(self) -> float:
        return self._times.common_error

    def ask(self, workloads: Iterable[Compute]) -> None:
        """Estimates all workloads that are not cached yet, in one batch."""
        wanted = [work for work in dict.fromkeys(workloads) if work not in self._fused]
        if not wanted:
            return
        for work, source in with_casts(self._times, wanted).items():
            found = as_run(work, source, self.device)
            self._unaligned = self._unaligned or found is not source
            self._fused[work] = found
            self._known[work] = as_run(work, found, self.device, softmax=self.softmax)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        self.ask(workloads)
        return [self._known[work] for work in workloads]

    def estimate(self, work: Compute) -> Estimate:
        if work not in self._known:
            self.ask([work])
        return self._known[work]

    def fused(self, work: Compute) -> Estimate:
        """Returns the estimate of one workload. A softmax is assumed to run as one fused kernel."""
        if work not in self._fused:
            self.ask([work])
        return self._fused[work]

    def launch(self, work: Compute) -> Launch | None:
        """Returns the expected kernel launch of a workload, or None if no source has one."""
        launch = self.fused(work).launch
        if launch is not None or self._kernels is None or isinstance(work, Cast):
            return launch
        if work not in self._launches:
            self._launches[work] = self._kernels.estimates([work])[0].launch
        return self._launches[work]


@dataclass(frozen=True)
class OpEstimate:
    """Op of a transformer shape, with the estimate of a single run of the op."""

    op: Op
    estimate: Estimate

    @property
    def total_us(self) -> float:
        """Time in µs of all runs of the op in one micro-batch."""
        return self.estimate.latency_us * self.op.count


@dataclass(frozen=True)
class ShapeEstimate:
    """Summed time of all ops of a shape per micro-batch in µs, with its 90 % interval."""

    ops: tuple[OpEstimate, ...]
    latency_us: float
    low_us: float
    high_us: float

    @property
    def flops(self) -> int:
        return sum(o.op.workload.flops * o.op.count for o in self.ops)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s."""
        return self.flops / self.latency_us / 1e6


def correlation_of(times: OpTimes) -> float:
    """Returns the error correlation that sums of ops from `times` use."""
    return UNMEASURED_CORRELATION if times.common_error else CORRELATION


def total(ops: Sequence[OpEstimate], correlation: float = CORRELATION) -> ShapeEstimate:
    """Sums the times of ops and their intervals.

    correlation: correlation of the errors of two ops; see CORRELATION.

    Raises InputError for no ops.
    """
    if not ops:
        raise InputError("total", "no ops", "at least one")
    rows = []
    for one in ops:
        whole = one.estimate.scaled(one.op.count)
        rows.append((whole.latency_us, whole.low_us, whole.high_us))
    times = np.array(rows)  # (ops, 3)
    middle = float(times[:, 0].sum())
    below = _combine(times[:, 0] - times[:, 1], correlation)
    above = _combine(times[:, 2] - times[:, 0], correlation)
    return ShapeEstimate(tuple(ops), middle, middle - below, middle + above)


def _combine(half_widths_us: FloatArray, correlation: float) -> float:
    """Returns the half-width of a sum's interval in µs.

    half_widths_us: (ops,), half-widths of the terms' intervals.
    correlation: correlation of the errors of two terms.
    """
    alone = float((half_widths_us**2).sum())
    together = float(half_widths_us.sum()) ** 2
    return float(np.sqrt((1.0 - correlation) * alone + correlation * together))
