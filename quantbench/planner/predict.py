"""Predicts a training job's time, memory, TFLOP/s and MFU in a given layout (`Planner.predict`)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

from quantbench.latency.op_times import OpTimes
from quantbench.planner.calibration import Calibration
from quantbench.planner.formulas import hardware_flops, model_flops
from quantbench.planner.iteration import Iteration, iteration
from quantbench.planner.layer_time import LayerTimes
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import Memory, limit_bytes, memory
from quantbench.quantization import cdiv

# Fraction of the usable memory above which a run may fail (`Prediction.tight`).
_NEARLY_FULL = 0.95
#: Activities of a real run that predicted times leave out. Predicted times are lower bounds.
NOT_COUNTED = ("data loading", "checkpoints", "evaluation", "restarts")
# Attributes of a prediction that `to_json` copies.
_SHOWN = (
    "sec_per_it",
    "model_tflops",
    "hardware_tflops",
    "mfu",
    "tokens_per_s",
    "days_per_trillion_tokens",
    "gpu_hours_per_trillion_tokens",
    "fits",
    "tight",
)


@dataclass(frozen=True)
class Prediction:
    """Predicted time, memory and rates of a job in one layout.

    iteration: time per iteration and its parts.
    memory: memory of the fullest GPU.
    model_tflops: TFLOP/s per GPU, not counting recomputation.
    hardware_tflops: TFLOP/s per GPU, counting recomputation, by Megatron's formula for GPT layers
        (see `formulas.hardware_flops`).
    mfu: model FLOPs utilization: model_tflops over the GPU's peak, 0 to 1; nan if the peak is
        unknown.
    tokens_per_s: tokens per second of the whole job.
    fits: whether the memory is within the GPU's usable memory.
    tight: whether the memory exceeds 95 % of the usable memory. Such a run may fail, because the
        memory varies with the order of allocations.
    """

    layout: Layout
    iteration: Iteration
    memory: Memory
    model_tflops: float
    hardware_tflops: float
    mfu: float
    tokens_per_s: float
    fits: bool
    tight: bool

    @property
    def days_per_trillion_tokens(self) -> float:
        """Days to train on 1e12 tokens at this rate."""
        return 1e12 / self.tokens_per_s / 86400

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        """GPU-hours to train on 1e12 tokens at this rate."""
        return self.days_per_trillion_tokens * 24 * self.layout.gpus

    @property
    def sec_per_it(self) -> float:
        """Time per iteration, in s."""
        return self.iteration.sec.mid

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as a JSON object, with times in seconds and memory in GiB."""
        found = self.iteration
        return {
            "layout": asdict(self.layout),
            "sec_per_it_low": found.sec.low,
            "sec_per_it_high": found.sec.high,
            **{name: getattr(self, name) for name in _SHOWN},
            "not_counted": NOT_COUNTED,
            "mem_gb": self.memory.total_gib,
            "bubble_share": found.bubble_share,
            "bound": found.bound,
            "seconds": found.parts,
            "memory_gib": self.memory.parts_gib,
            "fullest_stage": self.memory.stage,
        }


class Planner:
    """Predicts layouts of one job.

    `layers` caches layer times, which many layouts share.
    """

    def __init__(self, job: Job, times: OpTimes, calibration: Calibration) -> None:
        self.job = job
        self.calibration = calibration
        self.layers = LayerTimes(job, times)

    def predict(self, layout: Layout, needed: Memory | None = None) -> Prediction:
        """Predicts one layout.

        layout: layout that may break strict rules only if they are in `constraints.OF_SOFTWARE`.
        needed: memory of the layout; None to compute it.
        """
        job = self.job
        needed = needed or memory(job, layout, self.calibration)
        found = iteration(job, layout, self.layers, self.calibration)
        gpu_s = found.sec.mid * job.gpus
        model_tflops = model_flops(job.shape, job.gbs) / gpu_s / 1e12
        hardware = hardware_flops(job.shape, job.gbs, layout.recompute)
        limit = limit_bytes(job)
        return Prediction(
            layout=layout,
            iteration=found,
            memory=needed,
            model_tflops=model_tflops,
            hardware_tflops=hardware / gpu_s / 1e12,
            mfu=model_tflops / (job.cluster.device.peak(job.shape.dtype) or nan),
            tokens_per_s=job.gbs * job.shape.seq / found.sec.mid,
            fits=needed.total <= limit,
            tight=needed.total > _NEARLY_FULL * limit,
        )


def job_to_json(
    job: Job, calibration: Calibration, times_note: str, assumed: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a job as a JSON object, with everything that its predictions depend on.

    calibration: factors of training.
    times_note: sources of the op times.
    assumed: descriptions of values that the user did not give.
    """
    where = job.cluster
    data = asdict(job)
    del data["cluster"]
    return {
        **data,
        "topology": {
            "cluster": where.name,
            "device": where.device.name,
            "gpus_per_node": where.gpus_per_node,
            "nodes": cdiv(job.gpus, where.gpus_per_node),
            "node_gb_per_s": where.node_gb_per_s,
            "source": where.source,
        },
        "calibration": asdict(calibration),
        "op_times": times_note,
        "assumed": assumed,
    }
