"""Measures collectives between ranks over message sizes, and computes their bandwidths.

`points` plans the collectives of `quantbench comm`, and a `CommSession` on rank 0 measures them.
Between the operations, a reference collective is measured again, so that a change of the network
shows. The module also parses the option for message sizes (`parse_sizes`).
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby, product, takewhile
from math import ceil
from operator import attrgetter

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, MeasurementError, require_choice
from quantbench.measurement import Measurement
from quantbench.quantization import cdiv
from quantbench.stats import typical_us
from quantbench.store.record import (
    Failed,
    GridPosition,
    Measured,
    Outcome,
    Record,
    Skipped,
    record_key,
)
from quantbench.timing.grade import Drift, grade
from quantbench.timing.lockstep import Leader, LeaderSampler
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import sample_point, warm_up
from quantbench.workload import Collective
from quantbench.workload.dtypes import element_bytes
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS

DEFAULT_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
#: default message sizes by backend; they end where the bandwidth is saturated, which is near 1 GB
#: for links between GPUs, and much earlier for gloo over Ethernet
DEFAULT_SIZES = {"nccl": "4KiB:1GiB", "gloo": "4KiB:16MiB"}
# Operation and message size in bytes of the reference point, by backend.
_REFERENCE = {"nccl": ("all_reduce", 2**24), "gloo": ("all_reduce", 2**18)}
_STEP = 4  # default factor between the sizes of a range
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(B|KiB|MiB|GiB|KB|MB|GB)?", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses message sizes, and returns them in bytes, in ascending order.

    text: a range (`4KiB:1GiB`), whose sizes grow by a factor of 4; a range with another factor
        (`4KiB:1GiB:x2`); or a list (`1MiB,64MiB`). The end of a range is included only if it is
        reached exactly.

    Raises InputError for any other text.

    >>> parse_sizes("1KiB:16KiB")
    (1024, 4096, 16384)
    >>> parse_sizes("1MB,512KiB")
    (524288, 1000000)
    """
    first, *rest = text.split(":")
    if not rest:
        return tuple(sorted({_bytes(word, text) for word in text.split(",")}))
    if len(rest) > 2:
        raise InputError("--sizes", repr(text), "from:to, from:to:xN or a list")
    factor = rest[1] if len(rest) == 2 else f"x{_STEP}"
    if not re.fullmatch(r"x\d{1,9}", factor, re.ASCII) or int(factor[1:]) < 2:
        raise InputError(
            "--sizes", repr(text), "from:to:xN with N of at least 2, such as 4KiB:1GiB:x2"
        )
    step = int(factor[1:])
    low = _bytes(first, text)
    high = _bytes(rest[0], text)
    if low > high:
        raise InputError("--sizes", repr(text), "the smaller size first")
    return tuple(takewhile(lambda size: size <= high, (low * step**i for i in count())))


def _bytes(word: str, text: str) -> int:
    """Converts one size, such as `4KiB`, to whole bytes.

    text: whole text of the option, for error messages.

    Raises InputError if the word is not a size of at least 1 byte.
    """
    match = _SIZE.fullmatch(word.strip())
    size = float(match[1]) * _UNITS[(match[2] or "B").lower()] if match else 0
    if size < 1:
        raise InputError("--sizes", repr(text), "sizes such as 4KiB, 1MB or 65536")
    return int(size)


def points(
    ops: Sequence[str], sizes: Sequence[int], *, num_gpus: int, num_nodes: int, dtype: str
) -> tuple[Collective, ...]:
    """Returns the collectives to measure: every operation at every size, without repetition.

    sizes: message sizes in bytes. Each size is rounded up to a whole number of elements per rank.
    num_gpus: number of ranks.

    Raises InputError for an unknown operation or dtype.
    """
    require_choice("comm", "dtype", dtype, COLLECTIVE_DTYPES)
    for op in ops:
        require_choice("comm", "op", op, COLLECTIVE_OPS)
    unit = num_gpus * element_bytes(dtype)
    whole = dict.fromkeys(cdiv(size, unit) * unit for size in sizes)
    return tuple(
        Collective(op, size, num_gpus, dtype, num_nodes)
        for op, size in product(dict.fromkeys(ops), whole)
    )


def reference_point(backend: str, like: Collective) -> Collective:
    """Returns the collective that is measured again and again to show drift.

    backend: backend whose operation and message size are used.
    like: collective whose number of ranks and dtype are used.
    """
    op, size = _REFERENCE[backend]
    unit = like.num_gpus * element_bytes(like.dtype)
    return replace(like, op=op, message_bytes=cdiv(size, unit) * unit)


# Length of a warm-up window, time limit of the warm-up, and maximum number of samples in a batch
# (see `timing.session.warm_up`).
_WARM_UP_WINDOW_S = 0.05
_WARM_UP_LIMIT_S = 1.0
_BATCH_LIMIT = 64
# Minimum duration of a sample in µs, by backend. A sample repeats the collective up to _MOST_RUNS
# times to reach this duration. Samples must be long on nccl, because CUDA events have a resolution
# of 0.5 µs, and the timers of the ranks differ by some microseconds. On gloo, a sample is one run.
_SAMPLE_US = {"nccl": 200.0, "gloo": 0.0}
_MOST_RUNS = 100
# If launching takes the host more than this fraction of a collective's time, the time does not show
# the speed of the links. A note in the grade then says so.
_LAUNCH_BOUND = 0.8
# Resolution of the timer in µs, by backend: that of CUDA events, and that of the host's timer.
_TICK_US = {"nccl": 0.5, "gloo": 0.05}


@dataclass(frozen=True)
class Figures:
    """Time and bandwidths of one collective, as nccl-tests defines them.

    algorithm_gb_per_s: message size / time, in 1e9 bytes per second.
    bus_gb_per_s: traffic on each rank's links / time, in 1e9 bytes per second. The traffic is the
        message size times a factor, which depends on the operation and the number of ranks.
    """

    latency_us: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


def figures(collective: Collective, latency_us: float) -> Figures:
    """Computes the bandwidths of one collective from its time.

    >>> figures(Collective("all_reduce", 10**9, 8), 1e6).bus_gb_per_s
    1.75
    """
    algorithm_gb_per_s = collective.message_bytes / latency_us / 1e3
    return Figures(latency_us, algorithm_gb_per_s, collective.bus_bytes / latency_us / 1e3)


@dataclass
class CommSession:
    """Measures collectives, as seen from rank 0.

    leader: connection to the other ranks, which run the same collective at the same time.
    backend: nccl or gloo.
    spec: constants of rank 0's device.
    state: function that reads the current state of rank 0's device.
    on_record: function that is called with each record as soon as it is made.
    now, pause: clock in s, and function that waits for a number of s; default those of `time`.
    reference_us: median time in µs of each measurement of the reference point, in order.
    """

    leader: Leader
    backend: str
    run_id: str
    spec: DeviceSpec
    state: Callable[[], DeviceState]
    options: TimingOptions
    on_record: Callable[[Record], None]
    now: Callable[[], float] = time.perf_counter
    pause: Callable[[float], None] = time.sleep
    reference_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start_s = self.now()

    def run(self, plan: Sequence[Collective]) -> None:
        """Measures the collectives of a plan, in order.

        The reference point is measured before the first operation and after each operation.

        plan: collectives, grouped by operation.
        """
        reference = reference_point(self.backend, plan[0])
        self._measure(reference, role="reference")
        for _, of_op in groupby(plan, key=attrgetter("op")):
            for collective in of_op:
                self._measure(collective, role="point")
            self._measure(reference, role="reference")

    def _measure(self, collective: Collective, role: str) -> None:
        """Measures one collective, and passes its record to `on_record`."""
        outcome = self._outcome(collective)
        provider = f"torch.{self.backend}"
        if role == "reference" and isinstance(outcome, Measured):
            self.reference_us.append(typical_us(outcome.measurement.samples_us))
        record = Record(
            self.run_id,
            record_key(collective, provider, self.options),
            collective,
            provider,
            outcome,
            places=(GridPosition({"message_bytes": collective.message_bytes}, collective.op),),
            role=role,
            elapsed_s=self.now() - self._start_s,
        )
        self.on_record(record)

    def _outcome(self, collective: Collective) -> Outcome:
        """Measures and grades one collective.

        The outcome is Skipped if the collective is unsupported, and Failed if it fails in another
        way or if its measurement raises MeasurementError.
        """
        refused = self.leader.begin(collective)
        if refused is not None:
            if refused.kind == "unsupported":
                return Skipped(refused.message)
            return Failed(refused.kind, refused.message)
        sampler = LeaderSampler(self.leader)
        try:
            measurement = self._sample(sampler)
        except MeasurementError as error:
            return Failed("error", str(error))
        drift = None
        if self.reference_us:
            drift = Drift(self.reference_us[-1] / self.reference_us[0])
        # 0 operations and bytes: the time is not checked against a peak, because link speeds are
        # unknown.
        graded = grade(
            measurement,
            flops=0,
            min_bytes=0,
            spec=self.spec,
            dtype=collective.dtype,
            drift=drift,
            options=self.options,
        )
        latency_us = typical_us(measurement.samples_us)
        if sampler.launch_us > _LAUNCH_BOUND * latency_us:
            launching = f"launching takes the host {sampler.launch_us:.3g} µs of it"
            note = f"{launching}: it is no time of the links"
            graded = replace(graded, reasons=(*graded.reasons, note))
        return Measured(measurement, graded)

    def _sample(self, sampler: LeaderSampler) -> Measurement:
        """Warms up, chooses the number of runs per sample, and takes the samples."""
        before = self.state()
        warm = warm_up(
            sampler,
            window_s=_WARM_UP_WINDOW_S,
            limit_s=min(_WARM_UP_LIMIT_S, self.options.max_time_s),
            batch_limit=_BATCH_LIMIT,
            now=self.now,
        )
        runs = min(_MOST_RUNS, max(1, ceil(_SAMPLE_US[self.backend] / warm.typical_us)))
        sampler.runs = runs
        measured = sample_point(
            sampler,
            self.options,
            warm,
            mode="events" if self.backend == "nccl" else "cpu",
            runs_per_sample=runs,
            batch_limit=_BATCH_LIMIT,
            tick_us=_TICK_US[self.backend] / runs,
            now=self.now,
            pause=self.pause,
        )
        if self.backend == "nccl":  # the samples already come with the state of each rank's GPU
            return measured
        return replace(measured, state_before=before, state_after=self.state())
