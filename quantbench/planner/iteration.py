"""Time of one training iteration: the pipeline's slots, its bubble, data-parallel traffic and the optimizer's step.

1F1B (Narayanan et al., 2019 and 2021): every micro-batch takes a slot on each stage, forward and backward together; the
slowest stage sets the pace, and filling and draining the pipeline costs one slot of each other stage (divided by the
number of chunks where stages are interleaved).
"""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.planner.calibration import Calibration
from quantbench.planner.layer_time import LayerTime, LayerTimes, Span, exactly
from quantbench.planner.layout import Job, Layout, StageKind, stage_kinds
from quantbench.planner.memory import embedding_parameters, stage_parameters
from quantbench.planner.traffic import exposed_s, tied_embedding_s, traffic

# Adam in mixed precision reads master weight, two moments and a gradient in fp32, writes back the first three and the
# half-precision weight.
_STEP_BYTES = 4 * 4 + 3 * 4 + 2
_BANDWIDTH_SHARE = 0.8


@dataclass(frozen=True)
class Iteration:
    """Seconds per iteration, and what they go to on the slowest stage. The parts add up to `sec.mid`.

    products, attention, recompute, vector, overhead: computation (recompute: what is done twice). tensor: tensor-
    parallel collectives. logits: what the last stage does beyond its layers, where it is the slowest. point_to_point,
    bubble, data_parallel, optimizer: the rest. bubble_share: bubble over the whole.
    """

    sec: Span
    products: float
    attention: float
    recompute: float
    vector: float
    overhead: float
    tensor: float
    logits: float
    point_to_point: float
    bubble: float
    data_parallel: float
    optimizer: float

    @property
    def bubble_share(self) -> float:
        """The part of the iteration in which the slowest stage has nothing to do."""
        return self.bubble / self.sec.mid

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they go to."""
        names = (
            "products", "attention", "recompute", "vector", "overhead", "tensor", "logits", "point_to_point", "bubble",
            "data_parallel", "optimizer",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def bound(self) -> str:
        """What to look at first, in a word: computation, or the largest thing that is none."""
        losses = {
            "tensor-parallel traffic": self.tensor,
            "pipeline bubble": self.bubble,
            "network": self.data_parallel + self.point_to_point,
            "recomputation": self.recompute,
            "launches and stragglers": self.overhead,
            # Without a pipeline the logits are part of the work; with one they hold the other stages up.
            "logits": self.logits if self.bubble else 0.0,
            "memory bandwidth": self.vector + self.optimizer,
        }
        worst = max(losses, key=lambda name: losses[name])
        # Below a fifth of the computation proper nothing else is worth naming first.
        return worst if losses[worst] > 0.2 * (self.products + self.attention) else "compute"


def iteration(job: Job, layout: Layout, layer_times: LayerTimes, calibration: Calibration) -> Iteration:
    """Predict one iteration of `job` in `layout`, which is taken to be possible."""
    time = layer_times.at(layout.tp, layout.mbs, sequence_parallel=layout.sequence_parallel)
    count = layout.micro_batches(job.gbs)
    kinds = stage_kinds(job.shape.layers, layout.pp, layout.partition)
    heaviest = max(stage_parameters(job, layout, kind) for kind in kinds)
    moved = traffic(job, layout, calibration, heaviest, count)
    hop = moved.point_to_point * layout.interleave
    layer = time.by_recompute[layout.recompute]
    slots = [_slot(kind, layer, time, hop) for kind in kinds]
    pace, slowest = max(zip(slots, kinds, strict=True), key=lambda pair: pair[0].mid)
    fill = exactly(0.0)
    for span, kind in zip(slots, kinds, strict=True):
        fill += span.times(kind.count)
    fill = Span(fill.low - pace.low, fill.mid - pace.mid, fill.high - pace.high).times(1 / layout.interleave)

    step = _STEP_BYTES * heaviest / (layout.dp if layout.zero >= 1 else 1)
    step_s = step / (job.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE)
    room = pace.mid * (count if layout.zero >= 2 else 1)
    network = exposed_s(job, layout, moved.data_parallel, room)
    network += tied_embedding_s(job, layout, calibration, embedding_parameters(job.shape, layout.tp))

    own = slowest.layers * count
    ends = (time.logits.mid if slowest.last else 0.0) + (time.embedding if slowest.first else 0.0)
    return Iteration(
        sec=(pace.times(count) + fill + exactly(network + step_s)).widened(calibration.scatter),
        products=time.products.mid * own,
        attention=time.core.mid * own,
        recompute=(layer.mid - time.by_recompute["none"].mid) * own,
        vector=time.vector * own,
        overhead=time.overhead * own,
        tensor=time.reduces * own,
        logits=ends * count,
        point_to_point=hop * _sides(slowest) * count,
        bubble=fill.mid,
        data_parallel=network,
        optimizer=step_s,
    )


def _sides(kind: StageKind) -> int:
    """Neighbours of a stage: a middle one receives on one side while it sends on the other, forward and backward."""
    return 2 - kind.first - kind.last


def _slot(kind: StageKind, layer: Span, time: LayerTime, hop: float) -> Span:
    """One micro-batch on one stage, forward and backward."""
    span = layer.times(kind.layers) + exactly(hop * _sides(kind) + (time.embedding if kind.first else 0.0))
    return span + time.logits if kind.last else span
