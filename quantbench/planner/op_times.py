"""Where the planner's times of single operations come from: anything that answers `OpTimes`.

A measured profile answers from its table, a latency model from its fit; the planner knows neither. What no source
measured here is said in `note`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quantbench.device.spec import DeviceSpec
from quantbench.latency.roofline import roofline_us
from quantbench.workload import Attention, Gemm, Softmax
from quantbench.workload.transformer import Compute

if TYPE_CHECKING:
    from quantbench.latency.attention import AttentionModel
    from quantbench.latency.estimate import Estimate
    from quantbench.latency.gemm.model import GemmModel
    from quantbench.latency.softmax import SoftmaxModel


@dataclass(frozen=True)
class Latency:
    """A time in microseconds with the interval that it lies in nine times out of ten."""

    low: float
    mid: float
    high: float


class OpTimes(Protocol):
    """Times of a layer's operations on one GPU. note: what they rest on, in words, for headers and provenance."""

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""

    @property
    def note(self) -> str:
        """What the times rest on."""

    def latencies_us(self, workloads: Sequence[Compute]) -> list[Latency]:
        """One latency per workload, in their order."""


def latency_us(times: OpTimes, workload: Compute) -> Latency:
    """One workload's latency."""
    return times.latencies_us([workload])[0]


@dataclass(frozen=True)
class RooflineTimes:
    """Waves of an assumed tile, or bytes over bandwidth: for a GPU of which nothing is known but its spec sheet.

    spread: the factor that the interval goes to both sides.

    >>> from quantbench.device import lookup
    >>> times = RooflineTimes(lookup("a100-sxm4-80gb"))
    >>> round(latency_us(times, Gemm(m=4096, n=4096, k=4096)).mid)
    622
    """

    device: DeviceSpec
    spread: float = 2.0

    @property
    def note(self) -> str:
        """What the times rest on."""
        return f"roofline of {self.device.name} with an assumed tile: good to a factor of {self.spread:g}"

    def latencies_us(self, workloads: Sequence[Compute]) -> list[Latency]:
        """One latency per workload, in their order."""
        mids = [roofline_us(work, self.device) for work in workloads]
        return [Latency(mid / self.spread, mid, mid * self.spread) for mid in mids]


@dataclass(frozen=True)
class ModelTimes:
    """Fitted latency models of one GPU: products, softmax and fused attention, each asked for its own kind."""

    gemm: GemmModel
    softmax: SoftmaxModel
    attention: AttentionModel

    @classmethod
    def best(cls, device: DeviceSpec) -> ModelTimes:
        """The models shipped for a GPU, or what is known of its relatives where there are none."""
        from quantbench.latency.attention import AttentionModel
        from quantbench.latency.gemm.model import GemmModel
        from quantbench.latency.softmax import SoftmaxModel

        # fp16 runs at bf16's rate wherever there is bf16, and that is what was measured.
        dtype = "fp16" if device.peak("bf16") is None else "bf16"
        return cls(GemmModel.best(device, dtype=dtype), SoftmaxModel.prior(device), AttentionModel.best(device))

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""
        return self.gemm.device

    @property
    def note(self) -> str:
        """What the times rest on."""
        rows = f"fitted on {self.gemm.rows} rows" if self.gemm.rows else "from the prior, nothing fitted"
        products = f"products on {self.gemm.device.name} ({self.gemm.dtype}): {rows}"
        return "; ".join(filter(None, (products, self.gemm.note, self.softmax.note, self.attention.note)))

    def latencies_us(self, workloads: Sequence[Compute]) -> list[Latency]:
        """One latency per workload, in their order."""
        from quantbench.latency.reach import predict_within_reach

        found: dict[Compute, Latency] = {}
        gemms = [work for work in dict.fromkeys(workloads) if isinstance(work, Gemm)]
        if gemms:
            answers = predict_within_reach(self.gemm, gemms)
            for work, answer in zip(gemms, answers, strict=True):
                found[work] = _latency(answer.estimate)
        softmaxes = [work for work in dict.fromkeys(workloads) if isinstance(work, Softmax)]
        if softmaxes:
            found.update(zip(softmaxes, map(_latency, self.softmax.predict(softmaxes)), strict=True))
        attentions = [work for work in dict.fromkeys(workloads) if isinstance(work, Attention)]
        if attentions:
            found.update(zip(attentions, map(_latency, self.attention.predict(attentions)), strict=True))
        return [found[work] for work in workloads]


def _latency(estimate: Estimate) -> Latency:
    return Latency(estimate.low_us, estimate.latency_us, estimate.high_us)


class RememberedTimes:
    """Any times, asked for many workloads at once and remembered: models answer a thousand as fast as ten."""

    def __init__(self, times: OpTimes) -> None:
        self._times = times
        self._known: dict[Compute, Latency] = {}

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""
        return self._times.device

    @property
    def note(self) -> str:
        """What the times rest on."""
        return self._times.note

    def ask(self, workloads: Iterable[Compute]) -> None:
        """Ask for what is not known yet."""
        wanted = [work for work in dict.fromkeys(workloads) if work not in self._known]
        if wanted:
            self._known.update(zip(wanted, self._times.latencies_us(wanted), strict=True))

    def latencies_us(self, workloads: Sequence[Compute]) -> list[Latency]:
        """One latency per workload, in their order."""
        self.ask(workloads)
        return [self._known[work] for work in workloads]


#: times by GPU, for tables whose rows ran on several
TimesOf = Callable[[DeviceSpec], OpTimes]


class BestTimes:
    """The best that is known of each GPU without measuring it, remembered."""

    def __init__(self) -> None:
        self._known: dict[str, OpTimes] = {}

    def __call__(self, device: DeviceSpec) -> OpTimes:
        if device.name not in self._known:
            self._known[device.name] = RememberedTimes(ModelTimes.best(device))
        return self._known[device.name]
