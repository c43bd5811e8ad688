"""The time of a whole transformer shape: every product, softmax and attention of `TransformerShape.ops`, summed.

Only those ops: norms, residual additions, activations, embeddings, optimizer and communication are not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.estimate import Estimate, Estimates
from quantbench.latency.softmax import SoftmaxModel
from quantbench.launch import Launch
from quantbench.megatron import softmax_objections
from quantbench.workload import Attention, Gemm, Op, Softmax, TransformerShape

FloatArray = npt.NDArray[np.float64]

#: How much of the errors of two ops is common: 0 would let errors cancel as if each were drawn anew, 1 is every op off
#: by its whole interval at once. With 0.5 the interval of sums of four products covers 89 to 99 % of them on the five
#: public tables (rows that the shipped models were not fitted on).
CORRELATION = 0.5
#: the same for a device on which nothing was measured: what is wrong is wrong for all of its ops
UNMEASURED_CORRELATION = 1.0


@dataclass(frozen=True)
class WorkEstimate:
    """What a model says of one piece of work. launch: the tile it believes in, where it names one; waves: of a
    product's blocks, None where they cannot be stated (`quantization.credible_waves`); note: what to know of the
    model, in words."""

    estimate: Estimate
    launch: Launch | None = None
    waves: int | None = None
    note: str = ""


#: products, each in its own number format, to estimates, in order
GemmPredictor = Callable[[Sequence[Gemm]], list[WorkEstimate]]


@dataclass(frozen=True)
class OpEstimate:
    """One op of a shape and what a model says of one run of it."""

    op: Op
    work: WorkEstimate

    @property
    def total_us(self) -> float:
        """Time of all its runs in a micro-batch."""
        return self.work.estimate.latency_us * self.op.count


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
        """What to know of the models behind it, each once."""
        return tuple(dict.fromkeys(o.work.note for o in self.ops if o.work.note))

    def share(self, op: OpEstimate) -> float:
        """The part of the whole time that an op takes."""
        return op.total_us / self.latency_us


def total(ops: Sequence[OpEstimate], correlation: float = CORRELATION) -> ShapeEstimate:
    """The sum of several ops, with the interval of the sum. correlation: of their errors, see CORRELATION."""
    if not ops:
        raise InputError("total", "no ops", "at least one")
    count = np.array([o.op.count for o in ops], dtype=float)
    latency_us, low_us, high_us = (
        count * np.array([getattr(o.work.estimate, name) for o in ops]) for name in ("latency_us", "low_us", "high_us")
    )
    middle = float(latency_us.sum())
    below, above = _combine(latency_us - low_us, correlation), _combine(high_us - latency_us, correlation)
    return ShapeEstimate(tuple(ops), middle, middle - below, middle + above)


def _combine(half_widths_us: FloatArray, correlation: float) -> float:
    """Half-width of a sum whose parts' errors are correlated."""
    alone = float((half_widths_us**2).sum())
    together = float(half_widths_us.sum()) ** 2
    return float(np.sqrt((1.0 - correlation) * alone + correlation * together))


@dataclass(frozen=True)
class TransformerModel:
    """The models of one device together.

    gemm: predicts products; softmax, attention: the models of the other two. correlation: of the errors of its ops.
    """

    device: DeviceSpec
    gemm: GemmPredictor
    softmax: SoftmaxModel
    attention: AttentionModel
    correlation: float = CORRELATION

    def predict(self, shape: TransformerShape, *, backward: bool = True) -> ShapeEstimate:
        """The time of one micro-batch through all layers of `shape` on one GPU, op by op."""
        return total(self.predict_ops(shape.ops(backward=backward)), self.correlation)

    def predict_ops(self, ops: Sequence[Op], *, softmax: str = "") -> tuple[OpEstimate, ...]:
        """Each op's estimate, in order. Equal work is asked for once, and all of one kind together.

        softmax: megatron (its fused kernel where it takes the softmax, else separate kernels), torch (separate kernels)
        or "" (one fused kernel, whatever Megatron's would take).
        """
        kinds: dict[tuple[str, str], dict[Gemm | Softmax | Attention, None]] = defaultdict(dict)
        for op in ops:
            kinds[op.workload.kind, op.workload.dtype][op.workload] = None
        known: dict[Gemm | Softmax | Attention, WorkEstimate] = {}
        for works in kinds.values():
            known.update(zip(works, self._ask(list(works)), strict=True))
        if softmax:
            separate = [
                work for work in known if isinstance(work, Softmax) and (softmax == "torch" or softmax_objections(work))
            ]
            if separate:
                known.update(zip(separate, self._softmax(separate, fused=False), strict=True))
        return tuple(OpEstimate(op, known[op.workload]) for op in ops)

    def _ask(self, works: list[Gemm | Softmax | Attention]) -> list[WorkEstimate]:
        gemms = [work for work in works if isinstance(work, Gemm)]
        if gemms:
            return self.gemm(gemms)
        attentions = [work for work in works if isinstance(work, Attention)]
        if attentions:
            return _each(self.attention.predict(attentions))
        return self._softmax([work for work in works if isinstance(work, Softmax)], fused=True)

    def _softmax(self, works: list[Softmax], *, fused: bool) -> list[WorkEstimate]:
        return _each(self.softmax.predict(works, fused=fused))


def _each(found: Estimates) -> list[WorkEstimate]:
    return [WorkEstimate(estimate, note=found.note) for estimate in found]
