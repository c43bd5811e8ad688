"""What an operation takes and which kernel runs it: asked for in batches, remembered, from any source of times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from quantbench.advice.spread import UNMEASURED_COMMON
from quantbench.device.spec import DeviceSpec
from quantbench.latency.best import best_models
from quantbench.latency.softmax import fallback_bytes
from quantbench.latency.transformer import UNMEASURED_CORRELATION, TransformerModel
from quantbench.launch import Launch
from quantbench.megatron import softmax_objections
from quantbench.planner.calibration import shipped
from quantbench.planner.layer_time import unaligned_s
from quantbench.planner.op_times import Latency, OpTimes, RememberedTimes
from quantbench.workload import Gemm, Op, Softmax
from quantbench.workload.transformer import Compute

# The rate of unaligned batched products was fitted to whole iterations of training and never timed alone; how far off
# it is, is a guess.
_UNALIGNED_SPREAD = 1.5
UNALIGNED_NOTE = "batched products of unaligned rows: at a rate fitted to whole iterations on A100s"


@runtime_checkable
class KernelTimes(OpTimes, Protocol):
    """Times that come with the kernels they belong to, and with how much of their errors is in common."""

    @property
    def common_error(self) -> float:
        """The part of the errors that operations of one kind have in common, see `spread`."""

    def launches(self, workloads: Sequence[Compute]) -> list[Launch | None]:
        """The launch that is believed in, per workload, None where none is known."""

    def unmeasured(self, workloads: Sequence[Compute]) -> list[str]:
        """Why a time rests on no measurement of its kind on this GPU, per workload; "" where it does rest on one."""


class ModelledTimes:
    """Times of a device's latency models, each number format's own, with the kernels they believe in.

    Batched products whose rows are not 16-byte aligned, which no public table holds, run at the share of the fp32 peak
    that the planner fitted to measured training iterations (`Calibration.unaligned_share`).
    """

    def __init__(
        self,
        device: DeviceSpec,
        unaligned_share: float | None = None,
        models: Callable[[str], TransformerModel] | None = None,
    ) -> None:
        """models: those of a number format; the best at hand unless given."""
        self._device, self._share = device, unaligned_share
        self._models_of = models or partial(best_models, device)
        self._models: dict[str, TransformerModel] = {}
        self._launches: dict[Compute, Launch | None] = {}
        self._unmeasured: dict[Compute, str] = {}
        self._notes: dict[str, None] = {}

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""
        return self._device

    @property
    def note(self) -> str:
        """What the times that were asked for so far rest on."""
        return "; ".join(filter(None, self._notes))

    @property
    def common_error(self) -> float:
        """The part of the errors that operations of one kind have in common, see `spread`."""
        unmeasured = any(model.correlation == UNMEASURED_CORRELATION for model in self._models.values())
        return UNMEASURED_COMMON if unmeasured else 0.0

    def latencies_us(self, workloads: Sequence[Compute]) -> list[Latency]:
        """One latency per workload, in their order."""
        by_dtype: dict[str, list[Compute]] = defaultdict(list)
        for work in dict.fromkeys(workloads):
            by_dtype[work.dtype].append(work)
        found: dict[Compute, Latency] = {}
        for dtype, works in by_dtype.items():
            found.update(zip(works, self._of_one_dtype(dtype, works), strict=True))
        return [found[work] for work in workloads]

    def _of_one_dtype(self, dtype: str, works: Sequence[Compute]) -> list[Latency]:
        if dtype not in self._models:
            self._models[dtype] = self._models_of(dtype)
        model = self._models[dtype]
        answers = model.predict_ops([Op(work.kind, "forward", work, 1) for work in works])
        found = []
        for work, op in zip(works, answers, strict=True):
            estimate = op.work.estimate
            self._launches[work] = op.work.launch
            self._unmeasured[work] = _unmeasured(work, model)
            self._note(op.work.note, model.attention.note)
            latency = Latency(estimate.low_us, estimate.latency_us, estimate.high_us)
            slow = unaligned(work, latency, self.device, self._share)
            if slow is not None:
                self._note(UNALIGNED_NOTE, model.attention.note)
                self._unmeasured[work] = UNALIGNED_NOTE
            found.append(slow or latency)
        return found

    def _note(self, note: str, attention: str) -> None:
        """Keep a note. The attention model adds to its own how many of a batch are beyond what was measured."""
        if note.startswith(attention) and note != attention:
            self._notes[attention] = None
            note = "backward attention and unusual heads are beyond what was measured there"
        self._notes[note] = None

    def launches(self, workloads: Sequence[Compute]) -> list[Launch | None]:
        """The launch that is believed in, per workload; None for softmax and attention."""
        self._ask(workloads)
        return [self._launches[work] for work in workloads]

    def unmeasured(self, workloads: Sequence[Compute]) -> list[str]:
        """Why a time rests on no measurement of its kind on this GPU, per workload; "" where it does rest on one."""
        self._ask(workloads)
        return [self._unmeasured[work] for work in workloads]

    def _ask(self, workloads: Sequence[Compute]) -> None:
        missing = [work for work in workloads if work not in self._launches]
        if missing:
            self.latencies_us(missing)


def _unmeasured(work: Compute, model: TransformerModel) -> str:
    device = model.device.name
    if isinstance(work, Gemm):
        if model.correlation == UNMEASURED_CORRELATION:
            return f"{work.dtype} products: none measured on {device}"
        return "batched products: none measured" if work.batch > 1 else ""
    if isinstance(work, Softmax):
        return "" if model.softmax.rows else f"softmax: none measured on {device}"
    if not model.attention.fitted:
        return f"attention: none measured on {device}"
    if model.attention.knows(work):
        return ""
    if work.direction == "backward":
        return "backward attention: only forward passes measured"
    return "attention: no such heads, mask or number format measured"


def unaligned(work: Compute, latency: Latency, device: DeviceSpec, share: float | None = None) -> Latency | None:
    """The time of a batched product of rows that are not 16-byte aligned, from what a model says that does not know
    them; None for all other work. share: `Calibration.unaligned_share`, the shipped one unless given."""
    slow_s = unaligned_s(work, device, shipped().elsewhere.unaligned_share if share is None else share)
    if slow_s is None:
        return None
    # No faster than aligned rows would be, whatever the fitted rate says.
    mid = max(slow_s * 1e6, latency.mid)
    return Latency(max(mid / _UNALIGNED_SPREAD, latency.low), mid, mid * _UNALIGNED_SPREAD)


class Answers:
    """Latencies and launches of single operations. A softmax that Megatron's fused kernel refuses takes as much longer
    as its fallback moves more bytes; everything else is as the source says.

    softmax: megatron, or torch, where no softmax runs in the fused kernel.
    """

    def __init__(self, times: OpTimes, softmax: str = "megatron") -> None:
        self.softmax = softmax
        self._source = times
        self._times = RememberedTimes(times)

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""
        return self._times.device

    @property
    def note(self) -> str:
        """What the times rest on."""
        return self._times.note

    @property
    def common_error(self) -> float:
        """The part of the errors that operations of one kind have in common; nothing where the source does not say."""
        return self._source.common_error if isinstance(self._source, KernelTimes) else 0.0

    def ask(self, workloads: Iterable[Compute]) -> None:
        """Ask for many at once what is not known yet."""
        self._times.ask(workloads)

    def fused(self, work: Compute) -> Latency:
        """The time of one run; of a softmax, as if the fused kernel ran."""
        return self._times.latencies_us([work])[0]

    def latency(self, work: Compute) -> Latency:
        """The time of one run."""
        us = self.fused(work)
        if not isinstance(work, Softmax) or (self.softmax == "megatron" and not softmax_objections(work)):
            return us
        factor = fallback_bytes(work) / work.min_bytes
        return Latency(us.low * factor, us.mid * factor, us.high * factor)

    def unmeasured(self, works: Sequence[Compute]) -> list[str]:
        """Why each time rests on no measurement; "" where it does rest on one. Nothing is known to be measured of a
        source that does not say."""
        if isinstance(self._source, KernelTimes):
            return self._source.unmeasured(works)
        return [self._source.note] * len(works)

    def launch(self, work: Compute) -> Launch | None:
        """The kernel that is believed to run it; None where the source does not know."""
        return self._source.launches([work])[0] if isinstance(self._source, KernelTimes) else None
