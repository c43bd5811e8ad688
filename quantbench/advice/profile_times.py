"""Times of a measured profile, where it is asked about shapes that nobody measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from quantbench.advice.answers import UNALIGNED_NOTE, KernelTimes, unaligned
from quantbench.device.spec import DeviceSpec
from quantbench.latency.estimate import Estimate
from quantbench.launch import Launch
from quantbench.planner.op_times import Latency
from quantbench.workload.transformer import Compute

_MEASURED, _MODELLED = "measured", "modelled"
_PLURAL = {"gemm": "products"}


class Estimating(Protocol):
    """What is asked of a profile (`quantbench.profile.Profile`)."""

    @property
    def device(self) -> DeviceSpec:
        """The GPU that was measured."""

    @property
    def note(self) -> str:
        """What was measured, in words."""

    def estimates(self, workloads: Sequence[Compute]) -> Sequence[Estimate]:
        """An estimate of each workload, in their order."""


class ProfileTimes:
    """Times of a profile. Its figures stand where a shape was measured; elsewhere, its models do not know batched
    products of unaligned rows, which run at the rate that `answers.unaligned` says.

    kernels: where the tiles are asked of that edges are counted in; the device's assumed tile without it.
    """

    def __init__(self, profile: Estimating, kernels: KernelTimes | None = None) -> None:
        self._profile = profile
        self._kernels = kernels
        self._sources: Counter[str] = Counter()
        self._unaligned = False
        self._unmeasured: dict[Compute, str] = {}

    @property
    def device(self) -> DeviceSpec:
        """The GPU that the times are of."""
        return self._profile.device

    @property
    def note(self) -> str:
        """What the times that were asked for so far rest on."""
        counted = ", ".join(f"{count} {source}" for source, count in self._sources.most_common())
        asked = f"of what was asked {counted}" if counted else ""
        return "; ".join(filter(None, (self._profile.note, asked, UNALIGNED_NOTE if self._unaligned else "")))

    @property
    def common_error(self) -> float:
        """Nothing: where it was measured, it is right on average."""
        return 0.0

    def launches(self, workloads: Sequence[Compute]) -> list[Launch | None]:
        """The launch that is believed in, per workload."""
        return [None] * len(workloads) if self._kernels is None else self._kernels.launches(workloads)

    def latencies_us(self, workloads: Sequence[Compute]) -> list[Latency]:
        """One latency per workload, in their order."""
        found = []
        for work, one in zip(workloads, self._profile.estimates(workloads), strict=True):
            self._sources[one.source] += 1
            latency = Latency(one.low_us, one.latency_us, one.high_us)
            slow = None if one.source == _MEASURED else unaligned(work, latency, self.device)
            self._unaligned = self._unaligned or slow is not None
            self._unmeasured[work] = _unmeasured(work, one) if slow is None else UNALIGNED_NOTE
            found.append(slow or latency)
        return found

    def unmeasured(self, workloads: Sequence[Compute]) -> list[str]:
        """Why a time rests on no row of the profile, per workload; "" where it does rest on some."""
        missing = [work for work in workloads if work not in self._unmeasured]
        if missing:
            self.latencies_us(missing)
        return [self._unmeasured[work] for work in workloads]


def _unmeasured(work: Compute, one: Estimate) -> str:
    # profile.estimate.Estimate says what it is beyond; nothing is known of any other source.
    beyond = getattr(one, "outside", False) or bool(getattr(one, "note", ""))
    if one.source != _MODELLED or not beyond:
        return ""
    backward = "backward " if getattr(work, "direction", "") == "backward" else ""
    return f"{backward}{_PLURAL.get(work.kind, work.kind)}: beyond the rows of the profile"
