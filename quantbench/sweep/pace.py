"""How long points take: an estimate from the spec sheet, corrected by what has been measured so far."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import roofline_us
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import COLD_L2_MULTIPLE
from quantbench.workload import Workload

# Wall seconds that a point of any size costs beside its samples (inputs, identification), and samples it usually takes:
# on a CPU as seen in real sweeps, on a GPU two windows of warming up and as much again. How many points fit into a
# budget and the estimate of the time left depend on them; nothing that is measured does.
_POINT_OVERHEAD_S = {"cuda": 0.20, "cpu": 0.06}
_USUAL_SAMPLES = 40
# Runs beside the samples: the first one, the three that are checked, and the warm-up's.
_OTHER_RUNS = 5
# What the checks cost (`quantbench.providers.audit`). New inputs and random projections go with the bytes that the
# workload touches: 2.4 to 5.5 ns a byte for products of 0.5 to 17 GFLOP in fp32 and bf16 on one core of a Xeon. On a
# GPU the passes of the conversions and projections over memory are counted. Softmax and attention are recomputed as
# well, in the time of so many runs (4 to 6 and 4 to 12 on that Xeon).
_CHECK_S_PER_BYTE_ON_CPU = 4e-9
_CHECK_PASSES_ON_GPU = 50
_CHECK_RUNS = {"softmax": 5, "attention": 8}
# A cold cache is made by passing a few times the last-level cache through it before each sample.
_FLUSH_FACTOR = {"cuda": COLD_L2_MULTIPLE, "cpu": 3}
# The estimate counts as much as so many seconds of measuring; and so many points of a kind tell its usual slowdown.
_ESTIMATE_WEIGHS_S = 0.5
_REMEMBERED = 25


def point_estimate_s(workload: Workload, timing: TimingOptions, spec: DeviceSpec, slowdown: float = 1.0) -> float:
    """Expected wall seconds of one point, its checks included. slowdown: time of one run over the roofline's."""
    run_s = sample_s = slowdown * roofline_us(workload, spec) / 1e6
    if timing.cache == "cold":
        sample_s += _FLUSH_FACTOR[spec.kind] * spec.l2_bytes / (spec.memory_gb_per_s * 1e9)
    samples = max(timing.min_samples, min(_USUAL_SAMPLES, timing.max_samples))
    # The fewest samples are taken however long they are.
    sampling_s = max(min(timing.max_time_s, samples * sample_s), timing.min_samples * sample_s)
    check_s = _CHECK_RUNS.get(workload.kind, 0) * run_s
    if spec.kind == "cpu":
        check_s += _CHECK_S_PER_BYTE_ON_CPU * workload.min_bytes
    else:
        check_s += _CHECK_PASSES_ON_GPU * workload.min_bytes / (spec.memory_gb_per_s * 1e9)
    return _POINT_OVERHEAD_S[spec.kind] + sampling_s + _OTHER_RUNS * sample_s + check_s


class Pace:
    """Expected wall seconds of points here and now.

    Two things are learned: how much longer than the roofline's time one run takes, by kind of workload, and how much
    longer than its estimate a point then takes.
    """

    def __init__(self, timing: TimingOptions, spec: DeviceSpec) -> None:
        self._timing = timing
        self._spec = spec
        self._slowdowns: dict[str, list[float]] = {}
        self._expected_s = _ESTIMATE_WEIGHS_S
        self._took_s = _ESTIMATE_WEIGHS_S

    def learn(self, workload: Workload, took_s: float, run_us: float) -> None:
        """A point of this workload took so long; run_us: the median of its samples."""
        slowdown = run_us / roofline_us(workload, self._spec)
        known = self._slowdowns.setdefault(workload.kind, [])
        known.append(slowdown)
        del known[:-_REMEMBERED]
        self._expected_s += point_estimate_s(workload, self._timing, self._spec, slowdown)
        self._took_s += took_s

    def estimate(self) -> Callable[[Workload], float]:
        """From a workload to its expected seconds, as things stand now."""
        usual = {kind: median(values) for kind, values in self._slowdowns.items()}
        of_all = median(usual.values()) if usual else 1.0
        rate = self._took_s / self._expected_s

        def seconds(workload: Workload) -> float:
            slowdown = usual.get(workload.kind, of_all)
            return rate * point_estimate_s(workload, self._timing, self._spec, slowdown)

        return seconds
