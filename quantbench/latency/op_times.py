"""The time of an op: the one protocol that latency models and profiles answer, and the rules that hold for all of them.

`OpTimes` is implemented by `latency.model_times.ModelTimes`, by `profile.Profile` and by `RooflineTimes`, which needs
the spec sheet alone. `plan`, `advise` and `predict` ask it. The sources know neither Megatron's fallback for softmax
nor batched products of unaligned rows: `as_run` adds both, and `RememberedTimes` applies it. `total` sums ops whose
errors are correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.softmax import fallback_bytes
from quantbench.launch import Launch, Tile
from quantbench.megatron import softmax_objections
from quantbench.quantization import quantize
from quantbench.workload import Attention, Gemm, Op, Softmax, Workload
from quantbench.workload.dtypes import element_bytes
from quantbench.workload.ops import Compute

#: Correlation of the errors of two ops: with 0 errors cancel as if each were drawn anew, with 1 every op is off by its
#: whole interval at once. With 0.5 the interval of sums of four products covers 89 to 99 % of them on the five
#: public tables (rows that the shipped models were not fitted on).
CORRELATION = 0.5
#: the same for a device on which nothing was measured: one error affects all of its ops
UNMEASURED_CORRELATION = 1.0

#: The part of the errors that ops of one kind have in common on a GPU on which nothing was measured, for ratios of
#: times: with it, and models that no GPU of the same architecture taught, such ratios lie within their intervals at
#: least 90 % of the time on each of the five.
UNMEASURED_COMMON = 0.8

# Kernels load so much at a time; rows that start elsewhere are unaligned.
_ALIGNED_BYTES = 16
# The rate of unaligned batched products was fitted to whole iterations of training and never timed alone; this factor
# to both sides is a guess.
_UNALIGNED_SPREAD = 1.5
UNALIGNED_NOTE = "batched products of unaligned rows: at a rate fitted to whole iterations on A100s"


class OpTimes(Protocol):
    """Times of single ops on one GPU."""

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""

    @property
    def note(self) -> str:
        """Sources of the estimates given so far, in words, for headers and provenance."""

    @property
    def common_error(self) -> float:
        """The part of the errors that ops of one kind have in common, 0 to 1 (`advice.cost`)."""

    def estimates(self, workloads: Sequence[Compute]) -> Sequence[Estimate]:
        """One estimate per workload, in their order. Of a softmax: as if one fused kernel runs it."""


#: times by GPU, for tables whose rows ran on several
TimesOf = Callable[[DeviceSpec], OpTimes]


@dataclass(frozen=True)
class AssumedTile:
    """The tile assumed for every product of a device: blocks_per_sm are resident on an SM. reason: in words."""

    tile: Tile
    blocks_per_sm: int
    reason: str


# The steps of the public A100 bf16 GEMM table follow the waves of a 128×256 tile at one block per SM more closely than
# those of any other tile (correlation 0.72); Hopper's and Blackwell's follow none as closely, so theirs is a guess.
_AMPERE_AND_LATER = AssumedTile(Tile(128, 256), 1, "128x256 tile, one block per SM, is assumed")
# The largest tile of cuBLAS's fp16 kernels on Volta and Turing (volta_fp16_s884gemm_fp16_256x128_…).
_VOLTA = AssumedTile(Tile(256, 128), 1, "256x128 tile, one block per SM, is assumed")
# oneDNN's AVX-512 kernels walk n in blocks of 64 columns: measured as steps every 64 in n on one core.
_CPU = AssumedTile(Tile(1, 64), 1, "columns in blocks of 64 (oneDNN) are assumed")

# What a large product reaches of the data-sheet peak; good libraries on large shapes reach 0.7 to 0.85.
_COMPUTE_EFFICIENCY = 0.75
_BANDWIDTH_EFFICIENCY = 0.8
# Start and end of a kernel on the device, without the launch from the host.
_KERNEL_OVERHEAD_US = {"cuda": 3.0, "cpu": 2.0}


def assumed_tile(spec: DeviceSpec) -> AssumedTile:
    """The tile assumed on a device where neither a launch nor a fitted model names one."""
    if spec.compute_capability is None:
        return _CPU
    return _AMPERE_AND_LATER if spec.compute_capability >= (8, 0) else _VOLTA


def roofline_us(workload: Workload, spec: DeviceSpec) -> float:
    """Estimated time of one run in microseconds: waves of the assumed tile, or bytes over bandwidth if that is more.

    Good to a factor of about two: enough to plan a sweep and to draw where edges are expected.
    """
    memory_us = workload.min_bytes / (spec.memory_gb_per_s * 1e3 * _BANDWIDTH_EFFICIENCY)
    compute_us = 0.0
    if isinstance(workload, Gemm | Attention):
        # Of what a device has no arithmetic for, the slowest it has is taken: emulation is never faster.
        peak = spec.peak(workload.dtype) or min(spec.peak_tflops.values())
        compute_us = workload.flops / (peak * 1e6 * _COMPUTE_EFFICIENCY)
    if isinstance(workload, Gemm):
        assumed = assumed_tile(spec)
        compute_us /= quantize(workload, assumed.tile, spec.sm_count, assumed.blocks_per_sm).efficiency
    return max(memory_us, compute_us) + _KERNEL_OVERHEAD_US[spec.kind]


def peak_share(workload: Workload, latency_us: float, spec: DeviceSpec) -> float | None:
    """Useful work per second over what the device could do at most."""
    if isinstance(workload, Gemm | Attention):
        peak = spec.peak(workload.dtype)
        return None if peak is None else workload.flops / latency_us / 1e6 / peak
    return workload.min_bytes / latency_us / 1e3 / spec.memory_gb_per_s


@dataclass(frozen=True)
class RooflineTimes:
    """Op times from the spec sheet alone: waves of an assumed tile, or bytes over bandwidth.

    spread: the interval goes from the time over this factor to the time multiplied by it.

    >>> from quantbench.device import lookup
    >>> times = RooflineTimes(lookup("a100-sxm4-80gb"))
    >>> round(times.estimates([Gemm(m=4096, n=4096, k=4096)])[0].latency_us)
    622
    """

    device: DeviceSpec
    spread: float = 2.0
    common_error: float = 0.0

    @property
    def note(self) -> str:
        """The source of the estimates, in words."""
        return f"roofline of {self.device.name} with an assumed tile: good to a factor of {self.spread:g}"

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """One estimate per workload, in their order."""
        mids = [roofline_us(work, self.device) for work in workloads]
        return [Estimate(mid, mid / self.spread, mid * self.spread, unmeasured=self.note) for mid in mids]


def runs_separately(work: Compute, softmax: str) -> bool:
    """Whether a softmax runs as separate scale, mask and softmax kernels.

    softmax: megatron (its fused kernel where the conditions hold), torch (always separate) or "" (always fused).
    """
    if not isinstance(work, Softmax) or not softmax:
        return False
    return softmax == "torch" or bool(softmax_objections(work))


def unaligned_us(work: Compute, device: DeviceSpec, share: float) -> float | None:
    """The time of a batched 16-bit product whose rows are not 16-byte aligned: it runs at `share` of the fp32 peak.

    None for all other work. Fused attention pads its heads instead and is left to its own model.
    """
    if not isinstance(work, Gemm) or work.batch == 1 or work.dtype not in ("fp16", "bf16"):
        return None
    if all(size * element_bytes(work.dtype) % _ALIGNED_BYTES == 0 for size in (work.m, work.n, work.k)):
        return None
    peak = device.peak("fp32")
    return None if peak is None else work.flops / (peak * 1e6 * share)


def as_run(
    work: Compute, source: Estimate, device: DeviceSpec, *, softmax: str = "", unaligned_share: float | None = None
) -> Estimate:
    """A source's estimate with Megatron's softmax fallback and unaligned batched products taken into account.

    An unaligned batched product that was not measured runs at the fitted rate, no faster than the source's estimate for
    aligned rows. A softmax that runs in separate kernels takes longer in proportion to the bytes that these move.

    softmax: see `runs_separately`.
    unaligned_share: the fitted rate over the fp32 peak (`planner.calibration.Calibration.unaligned_share`); None
        keeps the estimate.
    """
    if runs_separately(work, softmax):
        assert isinstance(work, Softmax)
        return source.times(fallback_bytes(work) / work.min_bytes)
    if unaligned_share is None or source.source == "measured":
        return source
    slow_us = unaligned_us(work, device, unaligned_share)
    if slow_us is None:
        return source
    mid = max(slow_us, source.latency_us)
    low = max(mid / _UNALIGNED_SPREAD, source.low_us)
    return replace(
        source, latency_us=mid, low_us=low, high_us=mid * _UNALIGNED_SPREAD, unmeasured=UNALIGNED_NOTE
    )  # fmt: skip


class RememberedTimes:
    """Any times, asked for many workloads at once and remembered, with `as_run` applied.

    softmax, unaligned_share: see `as_run`. Without them the estimates of the source are kept.
    kernels: where launches are asked for that `times` does not name.
    """

    def __init__(
        self,
        times: OpTimes,
        *,
        softmax: str = "",
        unaligned_share: float | None = None,
        kernels: OpTimes | None = None,
    ) -> None:
        self.softmax = softmax
        self._times, self._share, self._kernels = times, unaligned_share, kernels
        self._fused: dict[Compute, Estimate] = {}
        self._known: dict[Compute, Estimate] = {}
        self._launches: dict[Compute, Launch | None] = {}
        self._unaligned = False

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""
        return self._times.device

    @property
    def note(self) -> str:
        """Sources of the estimates given so far."""
        return "; ".join(filter(None, (self._times.note, UNALIGNED_NOTE if self._unaligned else "")))

    @property
    def common_error(self) -> float:
        """The part of the errors that ops of one kind have in common."""
        return self._times.common_error

    def ask(self, workloads: Iterable[Compute]) -> None:
        """Ask for all unknown workloads in one batch."""
        wanted = [work for work in dict.fromkeys(workloads) if work not in self._fused]
        if not wanted:
            return
        for work, source in zip(wanted, self._times.estimates(wanted), strict=True):
            found = as_run(work, source, self.device, unaligned_share=self._share)
            self._unaligned = self._unaligned or found is not source
            self._fused[work] = found
            self._known[work] = as_run(work, found, self.device, softmax=self.softmax)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """One estimate per workload, in their order."""
        self.ask(workloads)
        return [self._known[work] for work in workloads]

    def estimate(self, work: Compute) -> Estimate:
        """The estimate of one workload."""
        if work not in self._known:
            self.ask([work])
        return self._known[work]

    def fused(self, work: Compute) -> Estimate:
        """The estimate of one workload; of a softmax, as if the fused kernel runs it."""
        if work not in self._fused:
            self.ask([work])
        return self._fused[work]

    def launch(self, work: Compute) -> Launch | None:
        """The kernel that is expected to run a workload; None where neither `times` nor `kernels` names one."""
        own = self.fused(work).launch
        if own is not None or self._kernels is None:
            return own
        if work not in self._launches:
            self._launches[work] = self._kernels.estimates([work])[0].launch
        return self._launches[work]


@dataclass(frozen=True)
class OpEstimate:
    """One op of a shape and the estimate of one run of it."""

    op: Op
    estimate: Estimate

    @property
    def total_us(self) -> float:
        """Time of all its runs in a micro-batch."""
        return self.estimate.latency_us * self.op.count


@dataclass(frozen=True)
class ShapeEstimate:
    """All ops of a shape together, per micro-batch. latency_us: their sum; low_us, high_us: its 90 % interval."""

    ops: tuple[OpEstimate, ...]
    latency_us: float
    low_us: float
    high_us: float

    @property
    def flops(self) -> int:
        """Useful arithmetic of all ops."""
        return sum(o.op.workload.flops * o.op.count for o in self.ops)

    @property
    def tflops(self) -> float:
        """Useful arithmetic per second."""
        return self.flops / self.latency_us / 1e6

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the models used, each once."""
        return tuple(dict.fromkeys(o.estimate.note for o in self.ops if o.estimate.note))


def correlation_of(times: OpTimes) -> float:
    """The correlation of the errors of a sum of ops that `times` estimated."""
    return UNMEASURED_CORRELATION if times.common_error else CORRELATION


def total(ops: Sequence[OpEstimate], correlation: float = CORRELATION) -> ShapeEstimate:
    """The sum of several ops, with the interval of the sum. correlation: of their errors, see CORRELATION."""
    if not ops:
        raise InputError("total", "no ops", "at least one")
    count = np.array([o.op.count for o in ops], dtype=float)
    latency_us, low_us, high_us = (
        count * np.array([getattr(o.estimate, name) for o in ops]) for name in ("latency_us", "low_us", "high_us")
    )
    middle = float(latency_us.sum())
    below, above = _combine(latency_us - low_us, correlation), _combine(high_us - latency_us, correlation)
    return ShapeEstimate(tuple(ops), middle, middle - below, middle + above)


def _combine(half_widths_us: npt.NDArray[np.float64], correlation: float) -> float:
    """Half-width of a sum whose parts' errors are correlated."""
    alone = float((half_widths_us**2).sum())
    together = float(half_widths_us.sum()) ** 2
    return float(np.sqrt((1.0 - correlation) * alone + correlation * together))
