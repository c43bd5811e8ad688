"""Predicts a transformer shape's time on one GPU op by op, and the time lost past edges.

An edge is a size past which an op becomes less efficient. `cost_of` returns the cost of a shape.
`ratio_factor` gives the interval of a ratio of two sums of op times, such as the gain of one shape
over another. Errors that both sums share cancel in the ratio and do not widen the interval.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import exp, log, sqrt

from quantbench.advice.edges import Edge, edges
from quantbench.analysis.blocks import tile_in_use
from quantbench.latency.estimate import Estimate
from quantbench.latency.op_times import CORRELATION, CachedTimes, OpEstimate, peak_share, total
from quantbench.launch import Launch
from quantbench.quantization import Quantization, credible_waves
from quantbench.workload import Gemm, Op, TransformerShape
from quantbench.workload.kinds import Compute

# Smallest waste that is reported, as a fraction of the op's time. Latency models do not resolve
# smaller fractions.
_WORTH_SAYING = 0.01
# Smallest fraction of a shape's time that misaligned rows must waste before the advice is to change
# the shape.
_MISALIGNED = 0.02
_TRILLION = 1e12
#: note on what the times of a shape leave out
LOWER_BOUND = "lower bound: no communication, norms, optimizer or stalls"
_US_PER_HOUR = 3.6e9


@dataclass(frozen=True)
class EdgeWaste:
    """An edge that an op has crossed, and the time that one run of the op wastes because of it.

    The waste is the predicted time minus an ideal time:

    - for a softmax that does not run fused: the fused kernel's time
    - for skewed experts: the balanced experts' time
    - for other edges: the time of the same FLOPs at the rate predicted just before the edge

    The waste is at most `Edge.largest_share` of the predicted time. For tiles and waves, this limit
    is the fraction of the GPU that becomes idle at the edge.

    waste_us: wasted time in µs.
    low_us, high_us: 90 % interval of the wasted time in µs.
    """

    edge: Edge
    waste_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class OpCost:
    """Predicted cost of one op of a shape.

    op: the op, with the number of its runs per micro-batch.
    latency: predicted time of one run.
    launch: predicted kernel launch; None if it is unknown.
    quantization: tiles and waves of a GEMM; None for other ops, and if the waves are unknown or
        contradict the predicted rate (see `credible_waves`).
    findings: crossed edges that waste at least 1 % of the time, worst first. Their wastes overlap,
        so `waste_us` counts only the first edge.
    """

    op: Op
    latency: Estimate
    launch: Launch | None
    quantization: Quantization | None
    findings: tuple[EdgeWaste, ...]

    @property
    def total_us(self) -> float:
        """Predicted time in µs of all runs of the op in a micro-batch."""
        return self.latency.latency_us * self.op.count

    @property
    def waste_us(self) -> float:
        """Wasted time in µs of all runs of the op in a micro-batch."""
        return self.findings[0].waste_us * self.op.count if self.findings else 0.0

    @property
    def edges(self) -> list[Edge]:
        """Crossed edges that waste at least 1 % of the time, worst first."""
        return [finding.edge for finding in self.findings]


@dataclass(frozen=True)
class ShapeCost:
    """Predicted cost of a shape's ops per micro-batch, on one GPU.

    The ops are those with latency models (`TransformerShape.modelled_ops`): forward and backward
    ops, but only forward ops for a shape with experts. Norms, activation functions, communication,
    the optimizer and recomputation are not counted.

    latency: total time of the ops, with its 90 % interval.
    waste_low_us, waste_high_us: 90 % interval of the wasted time in µs.
    """

    shape: TransformerShape
    ops: tuple[OpCost, ...]
    latency: Estimate
    waste_low_us: float
    waste_high_us: float

    @property
    def waste_us(self) -> float:
        """Time in µs that all ops together waste in a micro-batch."""
        return total_waste_us(self.ops)

    @property
    def waste_share(self) -> float:
        """Wasted time as a fraction of the total time."""
        return self.waste_us / self.latency.latency_us

    @property
    def misaligned(self) -> list[OpCost]:
        """Ops whose most wasteful edge is misaligned rows, worst first.

        The list is empty if these ops together waste less than 2 % of the shape's time.
        """
        found = [op for op in self.ops if op.findings and op.findings[0].edge.kind == "alignment"]
        if total_waste_us(found) < _MISALIGNED * self.latency.latency_us:
            return []
        return sorted(found, key=lambda op: -op.waste_us)

    @property
    def misaligned_labels(self) -> list[str]:
        """Labels of the ops with misaligned rows that waste at least 1 % of the op's time."""
        return [op.op.label for op in self.ops if "alignment" in {edge.kind for edge in op.edges}]

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s on one GPU."""
        return total_flops(self.ops) / self.latency.latency_us / 1e6

    @property
    def edges(self) -> list[Edge]:
        """Crossed edges of all ops."""
        return list(chain.from_iterable(op.edges for op in self.ops))

    def gpu_hours_per_trillion_tokens(self, us: float) -> float:
        """Converts a time per micro-batch to GPU-hours per 1e12 tokens.

        us: time in µs that each of the tp GPUs takes for one micro-batch.
        """
        return us * self.shape.tp / self.shape.tokens * _TRILLION / _US_PER_HOUR

    @cached_property
    def by_name(self) -> dict[str, tuple[OpCost, ...]]:
        """Ops grouped by name (qkv, proj, …), with forward ops before backward ops.

        Names with the most wasted time come first. Equal waste is ordered by total time, largest
        first.
        """
        named: dict[str, tuple[OpCost, ...]] = defaultdict(tuple)
        for cost in self.ops:
            named[cost.op.name] += (cost,)

        def rank(item: tuple[str, tuple[OpCost, ...]]) -> tuple[float, float]:
            return total_waste_us(item[1]), total_us(item[1])

        return dict(sorted(named.items(), key=rank, reverse=True))


def total_us(costs: Iterable[OpCost]) -> float:
    """Returns the predicted time of several ops per micro-batch, in µs."""
    return sum(cost.total_us for cost in costs)


def total_waste_us(costs: Iterable[OpCost]) -> float:
    """Returns the wasted time of several ops per micro-batch, in µs."""
    return sum(cost.waste_us for cost in costs)


def total_flops(costs: Iterable[OpCost]) -> int:
    """Returns the FLOPs of several ops per micro-batch."""
    return sum(cost.op.workload.flops * cost.op.count for cost in costs)


def cost_of(shape: TransformerShape, times: CachedTimes) -> ShapeCost:
    """Predicts the time and the waste of a shape's ops (`TransformerShape.modelled_ops`)."""
    ops = shape.modelled_ops()
    times.ask(op.workload for op in ops)
    found: dict[Op, list[Edge]] = {op: [] for op in ops}
    before = []
    for op, past in found.items():
        share = _peak_share(op.workload, times)
        for edge in edges(op, times.device, times.launch(op.workload), share):
            # A softmax that does not run fused is waste only with Megatron's softmax.
            if times.softmax == "megatron" or edge.kind != "fused softmax":
                past.append(edge)
                before.append(edge.before)
    times.ask(before)
    costs = tuple(_cost(op, found[op], times) for op in ops)
    whole = _latency_of(costs)
    low, high = _waste_interval(costs, whole.latency_us, total_waste_us(costs), times)
    return ShapeCost(shape, costs, whole, low, high)


def _latency_of(costs: Iterable[OpCost]) -> Estimate:
    """Returns the total time of several ops per micro-batch, with its 90 % interval."""
    summed = total([OpEstimate(c.op, c.latency) for c in costs], CORRELATION)
    return Estimate(summed.latency_us, summed.low_us, summed.high_us)


def latency_per_run(costs: Sequence[OpCost]) -> Estimate:
    """Returns the time to run each of several ops once, with its 90 % interval.

    costs: costs of ops that run equally often per micro-batch.
    """
    return _latency_of(costs).scaled(1 / costs[0].op.count)


def _cost(op: Op, past: Iterable[Edge], times: CachedTimes) -> OpCost:
    """Predicts the cost of one op.

    past: edges that the op has crossed.
    """
    work = op.workload
    launch = times.launch(work)
    waves = None
    if isinstance(work, Gemm):
        used = tile_in_use(times.device, work.dtype, launch)
        share = _peak_share(work, times)
        waves = credible_waves(work, used.tile, times.device.sm_count, used.blocks_per_sm, share)
    return OpCost(op, times.estimate(work), launch, waves, _findings(op, past, times))


def _peak_share(work: Compute, times: CachedTimes) -> float | None:
    """Returns a workload's predicted rate as a fraction of the GPU's peak; None if unknown."""
    return peak_share(work, times.estimate(work).latency_us, times.device)


def _findings(op: Op, past: Iterable[Edge], times: CachedTimes) -> tuple[EdgeWaste, ...]:
    """Returns the crossed edges that waste at least 1 % of an op's time, worst first.

    past: all edges that the op has crossed.
    """
    now = times.estimate(op.workload)
    found = []
    for edge in past:
        # The ideal is the time of the op's FLOPs at the rate just before the edge. Balanced experts
        # have the same FLOPs, so their time needs no scaling.
        ideal = times.fused(edge.before)
        if edge.kind != "skew":
            ideal = ideal.scaled(op.workload.flops / edge.before.flops)
        share = min(edge.largest_share, 1 - ideal.latency_us / now.latency_us)
        if share < _WORTH_SAYING:
            continue
        if edge.before == op.workload:
            # The softmax has the same workload with and without fusion, so all errors would cancel
            # in `ratio_factor`. The factor comes from the interval of the unfused time instead.
            factor = sqrt(now.high_us / now.low_us)
        else:
            shares = {op.workload: (1.0, now)}
            factor = ratio_factor(shares, {edge.before: (1.0, ideal)}, times.common_error)
        low = min(edge.largest_share, _wasted_if_slower(share, factor))
        high = min(edge.largest_share, _wasted_if_slower(share, 1 / factor))
        us = now.latency_us
        found.append(EdgeWaste(edge, share * us, low * us, high * us))
    # Rounding keeps edges with nearly equal waste in the order of `edges`.
    return tuple(sorted(found, key=lambda f: -float(f"{f.waste_us:.6g}")))


def _waste_interval(
    costs: Iterable[OpCost], whole_us: float, wasted_us: float, times: CachedTimes
) -> tuple[float, float]:
    """Returns the 90 % interval of the wasted time, as (low, high) in µs.

    It follows from the interval of a ratio: the time without waste over the whole time.

    whole_us: total time of the ops in µs.
    wasted_us: wasted time of the ops in µs.
    """
    if not wasted_us:
        return 0.0, 0.0
    whole: dict[Compute, tuple[float, Estimate]] = {}
    left: dict[Compute, tuple[float, Estimate]] = {}
    for cost in costs:
        work = cost.op.workload
        latency = cost.latency
        _add(whole, work, cost.total_us / whole_us, latency)
        if cost.findings:
            work = cost.findings[0].edge.before
            latency = times.fused(work)
        _add(left, work, (cost.total_us - cost.waste_us) / (whole_us - wasted_us), latency)
    factor = ratio_factor(whole, left, times.common_error)
    share = wasted_us / whole_us
    low = _wasted_if_slower(share, factor)
    high = _wasted_if_slower(share, 1 / factor)
    return low * whole_us, high * whole_us


def _add(
    parts: dict[Compute, tuple[float, Estimate]], work: Compute, share: float, latency: Estimate
) -> None:
    """Adds `share` to a workload's fraction of a sum of times.

    parts: fractions and estimated times, by workload (see `Shares`).
    """
    parts[work] = (parts.get(work, (0.0, latency))[0] + share, latency)


def _wasted_if_slower(share: float, factor: float) -> float:
    """Returns the wasted fraction of the time if the ideal time is `factor` times its estimate.

    The result is at least 0.

    share: estimated wasted fraction of the time, 0 to 1.
    """
    return max(0.0, 1 - (1 - share) * factor)


# --- intervals of ratios ---
#
# A ratio compares two sums of op times. The interval of each op's time gives the half-width of its
# log error. A workload's error cancels in the ratio if the workload takes the same fraction of both
# sums. The ratio of a shape's time to itself is therefore 1 ± 0, and the interval is narrow for two
# shapes that differ in few ops.
#
# Ops of one kind (GEMM, softmax, attention) are predicted by one model, so they may also have an
# error in common. The common error cancels to the extent that ops of this kind take the same
# fraction of both sums.
#
# The common error was tested with ratios of four GEMMs to four neighbouring GEMMs in five public
# tables (A100, H100, H200, B200, L40S). The tested rows have sides of at least 1024, and the
# shipped models were not fitted to them. A model that was fitted to the GPU is right on average,
# and its errors have nothing in common. Its intervals are too narrow for these ratios, by a factor
# of up to WIDER. On a GPU without measurements, most of the error is common.

#: Factor that widens the intervals of ratios. With 1.3, the intervals contain 99, 93, 92, 92 and
#: 90 % of the ratios in the five tables.
WIDER = 1.3

#: For each workload in a sum of times: its fraction of the sum, 0 to 1, and its estimated time.
Shares = Mapping[Compute, tuple[float, Estimate]]


def ratio_factor(
    above: Shares, below: Shares, common: float = 0.0, *, wider: float = WIDER
) -> float:
    """Returns the factor f that gives the 90 % interval of a ratio of two sums of times.

    The interval of a ratio r is from r / f to r · f.

    above: workloads of the numerator.
    below: workloads of the denominator.
    common: fraction of the error variance that ops of one kind have in common, 0 to 1
        (`OpTimes.common_error`).
    wider: factor that widens the interval.

    >>> from quantbench.workload import Gemm
    >>> work = Gemm(m=4096, n=4096, k=4096)
    >>> sums = {work: (1.0, Estimate(100.0, 90.0, 110.0))}
    >>> ratio_factor(sums, sums)
    1.0
    """
    alone = 0.0
    together: dict[str, float] = defaultdict(float)
    for work in dict.fromkeys((*above, *below)):
        _, latency = above.get(work) or below[work]
        none = (0.0, latency)
        share = above.get(work, none)[0] - below.get(work, none)[0]
        part = share * log(latency.high_us / latency.low_us) / 2
        alone += part**2
        together[work.kind] += part
    shared = sum(part**2 for part in together.values())
    return exp(wider * sqrt((1 - common) * alone + common * shared))
