"""Predicts each op's time in a transformer shape on one GPU, and the time lost by crossing
`edges`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, sqrt

from quantbench.advice.edges import Edge, edges
from quantbench.analysis.blocks import tile_in_use
from quantbench.latency.estimate import Estimate
from quantbench.latency.op_times import CORRELATION, OpEstimate, RememberedTimes, peak_share, total
from quantbench.launch import Launch
from quantbench.quantization import Quantization, credible_waves
from quantbench.workload import Gemm, Op, TransformerShape
from quantbench.workload.kinds import Compute

# Least waste, as a share of an op's time, that is reported; no model resolves less.
_WORTH_SAYING = 0.01
_TRILLION = 1e12
#: text on what the times of a shape leave out
LOWER_BOUND = "lower bound: no communication, norms, optimizer or stalls"
_US_PER_HOUR = 3.6e9


@dataclass(frozen=True)
class EdgeWaste:
    """An `Edge` that an op has crossed, and the time lost by it in one run of the op, with its 90 %
    interval.

    The waste is the predicted time minus the time of the same arithmetic at the rate (FLOP per µs)
    predicted just before the edge; for the fused softmax, minus the time of the fused kernel; for
    skew, minus that of balanced experts. For tiles and waves, its share of the time is at most the
    share of the device that becomes idle at the edge (`Edge.largest_share`).
    """

    edge: Edge
    waste_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class OpCost:
    """The predicted cost of one op of a shape.

    latency: time of one run.
    launch: the predicted kernel launch; None if unknown.
    quantization: tiles and waves of a GEMM; None for other ops, or if `credible_waves` returns
        None.
    findings: edges past which 1 % or more is wasted, worst first. They overlap, so only the worst
        counts.
    """

    op: Op
    latency: Estimate
    launch: Launch | None
    quantization: Quantization | None
    findings: tuple[EdgeWaste, ...]

    @property
    def total_us(self) -> float:
        """Time of all runs of this op in a micro-batch, µs."""
        return self.latency.latency_us * self.op.count

    @property
    def waste_us(self) -> float:
        """Time wasted by this op over all its runs in a micro-batch, µs."""
        return self.findings[0].waste_us * self.op.count if self.findings else 0.0


@dataclass(frozen=True)
class ShapeCost:
    """Cost of all GEMM, softmax and attention ops of a shape, forward and backward, per micro-batch
    on one GPU.

    Of a shape with experts it is that of a forward pass. Norms, activations, communication, the
    optimizer and recomputation are not counted.
    """

    shape: TransformerShape
    ops: tuple[OpCost, ...]
    latency: Estimate
    waste_low_us: float
    waste_high_us: float

    @property
    def waste_us(self) -> float:
        """Time wasted past edges in a micro-batch, µs."""
        return sum(op.waste_us for op in self.ops)

    @property
    def waste_share(self) -> float:
        """Wasted time as a fraction of the total time."""
        return self.waste_us / self.latency.latency_us

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s on one GPU."""
        return (
            sum(o.op.workload.flops * o.op.count for o in self.ops) / self.latency.latency_us / 1e6
        )

    def gpu_hours_per_trillion_tokens(self, us: float) -> float:
        """Converts `us` per micro-batch on each of the tp GPUs to GPU-hours per 1e12 tokens."""
        return us * self.shape.tp / self.shape.tokens * _TRILLION / _US_PER_HOUR

    @cached_property
    def by_name(self) -> dict[str, tuple[OpCost, ...]]:
        """Ops by name (qkv, proj, …), forward first; names by wasted time, then by total time,
        largest first.
        """
        named: dict[str, list[OpCost]] = defaultdict(list)
        for cost in self.ops:
            named[cost.op.name].append(cost)
        worst = sorted(
            named.values(),
            key=lambda ops: (-sum(c.waste_us for c in ops), -sum(c.total_us for c in ops)),
        )
        return {costs[0].op.name: tuple(costs) for costs in worst}


def cost_of(shape: TransformerShape, times: RememberedTimes) -> ShapeCost:
    """Predicts the time and the waste of every op of a shape (`TransformerShape.modelled_ops`)."""
    ops = shape.modelled_ops()
    times.ask(op.workload for op in ops)
    found = {
        op: edges(op, times.device, times.launch(op.workload), _peak_share(op.workload, times))
        for op in dict.fromkeys(ops)
    }
    if times.softmax != "megatron":  # the fused kernel is not wanted
        found = {
            op: tuple(edge for edge in past if edge.kind != "fused softmax")
            for op, past in found.items()
        }
    times.ask(edge.before for past in found.values() for edge in past)
    costs = tuple(_cost(op, found[op], times) for op in ops)
    whole = _latency_of(costs)
    wasted = sum(cost.waste_us for cost in costs)
    low, high = _waste_interval(costs, whole.latency_us, wasted, times)
    return ShapeCost(shape, costs, whole, low, high)


def _latency_of(costs: Iterable[OpCost]) -> Estimate:
    """Returns the total time of several ops, with the interval of `op_times.total` for correlated
    errors.
    """
    summed = total([OpEstimate(c.op, c.latency) for c in costs], CORRELATION)
    return Estimate(summed.latency_us, summed.low_us, summed.high_us)


def latency_per_run(costs: Sequence[OpCost]) -> Estimate:
    """Returns the time to run each of these ops once, with its interval; all must have the same
    count.
    """
    return _latency_of(costs).scaled(1 / costs[0].op.count)


def _cost(op: Op, past: Iterable[Edge], times: RememberedTimes) -> OpCost:
    launch, quantization = times.launch(op.workload), None
    if isinstance(op.workload, Gemm):
        used = tile_in_use(times.device, op.workload.dtype, launch)
        share = _peak_share(op.workload, times)
        quantization = credible_waves(
            op.workload, used.tile, times.device.sm_count, used.blocks_per_sm, share
        )
    return OpCost(op, times.estimate(op.workload), launch, quantization, _findings(op, past, times))


def _peak_share(work: Compute, times: RememberedTimes) -> float | None:
    return peak_share(work, times.estimate(work).latency_us, times.device)


def _findings(op: Op, past: Iterable[Edge], times: RememberedTimes) -> tuple[EdgeWaste, ...]:
    now = times.estimate(op.workload)
    found = []
    for edge in past:
        # Time of the op's arithmetic at the rate just before the edge.
        ideal = times.fused(edge.before)
        if edge.kind != "skew":
            ideal = ideal.scaled(op.workload.flops / edge.before.flops)
        share = min(edge.largest_share, 1 - ideal.latency_us / now.latency_us)
        if share < _WORTH_SAYING:
            continue
        factor = ratio_factor(
            {op.workload: (1.0, now)}, {edge.before: (1.0, ideal)}, times.common_error
        )
        if (
            edge.before == op.workload
        ):  # the time of the unfused softmax is estimated from its bytes
            factor = sqrt(now.high_us / now.low_us)
        low = min(edge.largest_share, _wasted_if_slower(share, factor))
        high = min(edge.largest_share, _wasted_if_slower(share, 1 / factor))
        found.append(
            EdgeWaste(edge, share * now.latency_us, low * now.latency_us, high * now.latency_us)
        )
    # Of edges that cost the same but for rounding, the one that `edges` names first.
    return tuple(sorted(found, key=lambda f: -float(f"{f.waste_us:.6g}")))


def _waste_interval(
    costs: Iterable[OpCost], whole_us: float, wasted_us: float, times: RememberedTimes
) -> tuple[float, float]:
    """Returns the 90 % interval of the wasted time, from that of the ratio of the remaining to the
    whole time.
    """
    if not wasted_us:
        return 0.0, 0.0
    above: dict[Compute, tuple[float, Estimate]] = {}
    below: dict[Compute, tuple[float, Estimate]] = {}

    def add(
        parts: dict[Compute, tuple[float, Estimate]], work: Compute, share: float, latency: Estimate
    ) -> None:
        parts[work] = (parts.get(work, (0.0, latency))[0] + share, latency)

    for cost in costs:
        add(above, cost.op.workload, cost.total_us / whole_us, cost.latency)
        left = (cost.total_us - cost.waste_us) / (whole_us - wasted_us)
        before = cost.findings[0].edge.before if cost.findings else cost.op.workload
        add(below, before, left, times.fused(before) if cost.findings else cost.latency)
    factor = ratio_factor(above, below, times.common_error)
    share = wasted_us / whole_us
    return _wasted_if_slower(share, factor) * whole_us, _wasted_if_slower(
        share, 1 / factor
    ) * whole_us


def _wasted_if_slower(share: float, factor: float) -> float:
    """Returns the wasted share of a time if what is not wasted takes `factor` times as long as
    estimated.
    """
    return max(0.0, 1 - (1 - share) * factor)


# --- intervals of ratios ---------------------------------------------------------------------------------------------
#
# Each op's log error has a half-width, from its own interval. Ops of one kind (GEMM, softmax,
# attention: each kind has its own model) share a part of their errors. This part cancels as far as
# both sums have the same share of that kind, and the error of an op that is in both sums cancels
# completely. So the interval of a shape against itself is 1 ± 0, and it is narrow for shapes that
# differ in few ops.
#
# The shared part was tested on five public tables (A100, H100, H200, B200, L40S; rows that the
# shipped models were not fitted to, sides of at least 1024), as ratios of four GEMMs to four
# neighbouring GEMMs. The errors of a fitted model share nothing, because it is right on average,
# and its intervals are too narrow for these GEMMs by up to WIDER. On a GPU without measurements,
# most of the error is shared.

#: factor on intervals with which 99, 93, 92, 92 and 90 % of the ratios in those tables lie within
#: them
WIDER = 1.3

#: by workload: its share of a sum of times, 0 to 1, and its estimated time
Shares = Mapping[Compute, tuple[float, Estimate]]


def ratio_factor(
    above: Shares, below: Shares, common: float = 0.0, *, wider: float = WIDER
) -> float:
    """Returns f such that the 90 % interval of the ratio r of two sums of times is r / f to r · f.

    above, below: shares of the numerator and of the denominator, by workload.
    common: fraction of the error variance that ops of one kind share, 0 to 1.
    wider: factor on the intervals of the times.

    >>> from quantbench.workload import Gemm
    >>> work = Gemm(m=4096, n=4096, k=4096)
    >>> sums = {work: (1.0, Estimate(100.0, 90.0, 110.0))}
    >>> ratio_factor(sums, sums)
    1.0
    """
    alone = 0.0
    together: dict[str, float] = defaultdict(float)
    for work in dict.fromkeys((*above, *below)):
        share = (above[work][0] if work in above else 0.0) - (
            below[work][0] if work in below else 0.0
        )
        latency = (above.get(work) or below[work])[1]
        part = share * log(latency.high_us / latency.low_us) / 2
        alone += part**2
        together[work.kind] += part
    shared = sum(part**2 for part in together.values())
    return exp(wider * sqrt((1 - common) * alone + common * shared))
