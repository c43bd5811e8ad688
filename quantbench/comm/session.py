"""Measuring all points of a plan on rank 0, and keeping each one before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from quantbench.comm.points import reference_point
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import MeasurementError
from quantbench.measurement import Measurement
from quantbench.stats import median
from quantbench.store.record import Failed, Measured, Outcome, Place, Record, Skipped, record_key
from quantbench.timing.grade import grade
from quantbench.timing.lockstep import Leader, LeaderSampler
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import sample_point, warm_up
from quantbench.workload import Collective

_WARM_UP_WINDOW_S = 0.05
_WARM_UP_LIMIT_S = 1.0
_BATCH_LIMIT = 64
# Runs are put together until a sample takes this long: events tick at half a microsecond, and a rank's clock starts
# some microseconds apart from the others'.
_SAMPLE_US = {"nccl": 200.0, "gloo": 0.0}
_MOST_RUNS = 100
_TICK_US = {"nccl": 0.5, "gloo": 0.05}


@dataclass(frozen=True)
class Figures:
    """What a time means. algorithm_gb_per_s: message over time; bus_gb_per_s: what each rank's links carried, by the
    factors of nccl-tests; both in 1e9 bytes a second."""

    latency_us: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


def figures(collective: Collective, latency_us: float) -> Figures:
    """Bandwidths of one point.

    >>> figures(Collective("all_reduce", 10**9, 8), 1e6).bus_gb_per_s
    1.75
    """
    return Figures(
        latency_us,
        collective.message_bytes / latency_us / 1e3,
        collective.bus_bytes / latency_us / 1e3,
    )


class CommSession:
    """Rank 0's run over a plan.

    backend: nccl or gloo. spec, state: of rank 0's device. on_record: takes every record as soon as there is one.
    """

    def __init__(
        self,
        leader: Leader,
        *,
        backend: str,
        run_id: str,
        spec: DeviceSpec,
        state: Callable[[], DeviceState],
        options: TimingOptions,
        on_record: Callable[[Record], None],
        now: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._leader, self._backend, self._run_id = leader, backend, run_id
        self._spec, self._state, self._options = spec, state, options
        self._on_record, self._now, self._pause = on_record, now, pause
        self._start_s = now()
        self._reference_us: list[float] = []

    @property
    def reference_us(self) -> tuple[float, ...]:
        """Medians of the repeated point, in order."""
        return tuple(self._reference_us)

    def run(self, plan: Sequence[Collective]) -> None:
        """Measure every point; the reference before the first operation and after each."""
        reference = reference_point(self._backend, plan[0])
        self._measure(reference, role="reference")
        for op, points in _by_op(plan):
            for collective in points:
                self._measure(collective, role="point")
            if op:
                self._measure(reference, role="reference")

    def _measure(self, collective: Collective, role: str) -> None:
        outcome = self._outcome(collective)
        if role == "reference" and isinstance(outcome, Measured):
            self._reference_us.append(median(outcome.measurement.samples_us))
        self._on_record(
            Record(
                run_id=self._run_id,
                key=record_key(collective, self._provider, self._options),
                workload=collective,
                provider=self._provider,
                outcome=outcome,
                places=(Place({"message_bytes": collective.message_bytes}, collective.op),),
                role=role,
                elapsed_s=self._now() - self._start_s,
            )
        )

    @property
    def _provider(self) -> str:
        return f"torch.{self._backend}"

    def _outcome(self, collective: Collective) -> Outcome:
        refused = self._leader.begin(collective)
        if refused is not None:
            if refused.kind == "unsupported":
                return Skipped(refused.message)
            return Failed(refused.kind, refused.message)
        try:
            measurement = self._sample(collective)
        except MeasurementError as error:
            return Failed("error", str(error))
        drift = None
        if self._reference_us and collective.message_bytes:
            drift = self._reference_us[-1] / self._reference_us[0]
        # No arithmetic and no memory to be held against a peak: links have no registry.
        graded = grade(
            measurement, flops=0, min_bytes=0, spec=self._spec, dtype=collective.dtype, drift_ratio=drift,
            options=self._options,
        )  # fmt: skip
        return Measured(measurement, graded)

    def _sample(self, collective: Collective) -> Measurement:
        sampler = LeaderSampler(self._leader, collective)
        before = self._state()
        warm = warm_up(
            sampler, window_s=_WARM_UP_WINDOW_S, limit_s=min(_WARM_UP_LIMIT_S, self._options.max_time_s),
            batch_limit=_BATCH_LIMIT, now=self._now,
        )  # fmt: skip
        runs = min(_MOST_RUNS, max(1, ceil(_SAMPLE_US[self._backend] / warm.typical_us)))
        sampler.runs = runs
        measured = sample_point(
            sampler, self._options, warm, mode="events" if self._backend == "nccl" else "cpu", runs_per_sample=runs,
            batch_limit=_BATCH_LIMIT, tick_us=_TICK_US[self._backend] / runs, now=self._now, pause=self._pause,
        )  # fmt: skip
        return replace(measured, state_before=before, state_after=self._state())


def _by_op(plan: Sequence[Collective]) -> Iterable[tuple[str, list[Collective]]]:
    """Points in groups of one operation, in the plan's order."""
    groups: dict[str, list[Collective]] = {}
    for collective in plan:
        groups.setdefault(collective.op, []).append(collective)
    return groups.items()
