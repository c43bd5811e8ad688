"""Predicting cases: time, TFLOPs, memory, and what forbids them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from quantbench.latency.op_times import OpTimes, TimesOf
from quantbench.planner.calibration import Calibration, Calibrations
from quantbench.planner.constraints import Violation, violations
from quantbench.planner.formulas import CALCULATORS, megatron_flops, model_flops, tokens_per_s
from quantbench.planner.iteration import Iteration, iteration
from quantbench.planner.layer_time import LayerTimes
from quantbench.planner.layout import Case, Job, Layout
from quantbench.planner.memory import Memory, limit_bytes, memory


@dataclass(frozen=True)
class Prediction:
    """What is expected of a layout. tflops: per GPU, hardware FLOPs with what is recomputed counted (Megatron's
    calculator where it holds); mfu: the model's own FLOPs over the GPU's peak. fits: whether memory is below the
    limit. not_counted: what a real iteration takes besides, so that times are lower bounds."""

    layout: Layout
    iteration: Iteration
    memory: Memory
    tflops: float
    mfu: float
    tokens_per_s: float
    fits: bool
    not_counted: tuple[str, ...]

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        """GPU-hours that 1e12 tokens take at this rate."""
        return self.days_per_trillion_tokens * 24 * self.layout.dp * self.layout.tp * self.layout.pp

    @property
    def days_per_trillion_tokens(self) -> float:
        """Days that 1e12 tokens take at this rate."""
        return 1e12 / self.tokens_per_s / 86400

    @property
    def sec_per_it(self) -> float:
        """Predicted seconds per iteration."""
        return self.iteration.sec.mid


class Planner:
    """Predictions for one job; layer times are shared between layouts."""

    def __init__(self, job: Job, times: OpTimes, calibration: Calibration) -> None:
        self.job, self.calibration = job, calibration
        self.times = times
        self._layers = LayerTimes(job, times, calibration)
        self._hardware_flops = _hardware_flops(job)
        self._model_flops = model_flops(job.shape, job.gbs)
        self._limit_bytes = limit_bytes(job)
        self._peak_flops = (job.cluster.device.peak(job.shape.dtype) or float("nan")) * 1e12

    def prepare(self, keys: Iterable[tuple[int, int, bool]]) -> None:
        """Ask for the layers of many layouts, (tp, mbs, sequence_parallel) each, in one batch."""
        self._layers.prepare(keys)

    def predict(self, layout: Layout) -> Prediction:
        """Time and memory of a possible layout."""
        return self.with_memory(layout, memory(self.job, layout, self.calibration))

    def with_memory(self, layout: Layout, needed: Memory) -> Prediction:
        """As `predict`, with the memory known already."""
        found = iteration(self.job, layout, self._layers, self.calibration)
        seconds = found.sec.mid * self.job.gpus
        return Prediction(
            layout=layout,
            iteration=found,
            memory=needed,
            tflops=self._hardware_flops[layout.recompute] / seconds / 1e12,
            mfu=self._model_flops / seconds / self._peak_flops,
            tokens_per_s=tokens_per_s(gbs=self.job.gbs, seq=self.job.shape.seq, sec_per_it=found.sec.mid),
            fits=needed.total <= self._limit_bytes,
            not_counted=_not_counted(layout, self.calibration),
        )


def _not_counted(layout: Layout, calibration: Calibration) -> tuple[str, ...]:
    """What no prediction has: everything outside the iteration, and what no constant was fitted to."""
    missing = ["data loading", "checkpoints", "evaluation", "restarts"]
    if not calibration.layer_overhead_ms:
        missing += ["launches", "stragglers"]
    if layout.zero == 3:
        missing.append("weight gathers of ZeRO-3 that outlast the computation")
    return tuple(missing)


def _hardware_flops(job: Job) -> dict[str, float]:
    """FLOPs per iteration by recomputation, as TFLOPs are usually stated of them."""
    if CALCULATORS["megatron"].objection(job.shape) is None:
        full = megatron_flops(job.shape, job.gbs)
        none = 0.75 * full
    else:
        none = model_flops(job.shape, job.gbs)
        full = none * 4 / 3
    width = job.shape.heads * job.shape.head_dim
    core = 4.0 * job.gbs * job.shape.seq**2 * width * job.shape.layers
    return {"full": full, "selective": none + core, "none": none}


def predict_cases(
    cases: Sequence[Case], times: TimesOf, calibrations: Calibrations, *, forgiven: Container[str] = ()
) -> list[Prediction | tuple[Violation, ...]]:
    """One prediction per case, or the strict rules that make it impossible. Equal jobs share their layer times.
    forgiven: names of strict rules that a case may break."""
    planners: dict[tuple[object, ...], Planner] = {}
    found: list[Prediction | tuple[Violation, ...]] = []
    for case in cases:
        strict = (v for v in violations(case.job, case.layout) if v.constraint.strict)
        broken = tuple(v for v in strict if v.constraint.name not in forgiven)
        if broken:
            found.append(broken)
            continue
        key = case.job.key
        if key not in planners:
            where = case.job.cluster
            planners[key] = Planner(case.job, times(where.device), calibrations.of(where))
        found.append(planners[key].predict(case.layout))
    return found
