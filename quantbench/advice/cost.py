"""Predicts each op's time in a transformer shape on one GPU, and the time lost by crossing edges.

The module also gives the intervals of ratios of times, which account for the errors that the ops of
two sums share.
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
from quantbench.latency.op_times import CORRELATION, OpEstimate, RememberedTimes, peak_share, total
from quantbench.launch import Launch
from quantbench.quantization import Quantization, credible_waves
from quantbench.workload import Gemm, Op, TransformerShape
from quantbench.workload.kinds import Compute

# Smallest waste, as a fraction of an op's time, that is reported. No model resolves a smaller one.
_WORTH_SAYING = 0.01
# Smallest fraction of a shape's time, wasted by misaligned rows, for which the advice is not to
# keep the shape.
_MISALIGNED = 0.02
_TRILLION = 1e12
#: text that says what the times of a shape leave out
LOWER_BOUND = "lower bound: no communication, norms, optimizer or stalls"
_US_PER_HOUR = 3.6e9


@dataclass(frozen=True)
class EdgeWaste:
    """An `Edge` that an op has crossed, and the time that one run loses by it, with its interval.

    The waste is the predicted time minus an ideal time. In general, the ideal time is that of the
    same arithmetic at the rate (FLOP per µs) predicted just before the edge. For a softmax that
    does not run fused, the ideal is the time of the fused kernel; for skew, it is the time of
    balanced experts. The waste is at most `Edge.largest_share` of the predicted time: for tiles and
    waves, the fraction of the device that becomes idle at the edge.
    """

    edge: Edge
    waste_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class OpCost:
    """Predicted cost of one op of a shape.

    latency: time of one run.
    launch: predicted kernel launch; None if it is unknown.
    quantization: tiles and waves of a GEMM; None for other ops, or if `credible_waves` returns
        None.
    findings: crossed edges that waste 1 % or more of the time, worst first. The wastes overlap, so
        only the first one counts in `waste_us`.
    """

    op: Op
    latency: Estimate
    launch: Launch | None
    quantization: Quantization | None
    findings: tuple[EdgeWaste, ...]

    @property
    def total_us(self) -> float:
        """Time in µs of all runs of this op in a micro-batch."""
        return self.latency.latency_us * self.op.count

    @property
    def waste_us(self) -> float:
        """Time in µs that this op wastes over all its runs in a micro-batch."""
        return self.findings[0].waste_us * self.op.count if self.findings else 0.0

    @property
    def edges(self) -> list[Edge]:
        return [finding.edge for finding in self.findings]


@dataclass(frozen=True)
class ShapeCost:
    """Cost of all GEMM, softmax and attention ops of a shape, per micro-batch on one GPU.

    The cost covers forward and backward pass, or only the forward pass for a shape with experts.
    Norms, activations, communication, the optimizer and recomputation are not counted.

    latency: total time of the ops, with its 90 % interval.
    waste_low_us, waste_high_us: 90 % interval of the wasted time.
    """

    shape: TransformerShape
    ops: tuple[OpCost, ...]
    latency: Estimate
    waste_low_us: float
    waste_high_us: float

    @property
    def waste_us(self) -> float:
        """Time in µs that is wasted past edges in a micro-batch."""
        return total_waste_us(self.ops)

    @property
    def waste_share(self) -> float:
        """Wasted time as a fraction of the total time."""
        return self.waste_us / self.latency.latency_us

    @property
    def misaligned(self) -> list[OpCost]:
        """Ops whose worst edge is misaligned rows, worst first.

        The list is empty if these ops waste less than 2 % of the shape's time.
        """
        found = [op for op in self.ops if op.findings and op.findings[0].edge.kind == "alignment"]
        if total_waste_us(found) < _MISALIGNED * self.latency.latency_us:
            return []
        return sorted(found, key=lambda op: -op.waste_us)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s on one GPU."""
        return total_flops(self.ops) / self.latency.latency_us / 1e6

    @property
    def edges(self) -> list[Edge]:
        return list(chain.from_iterable(op.edges for op in self.ops))

    def gpu_hours_per_trillion_tokens(self, us: float) -> float:
        """Converts a time per micro-batch on each of the tp GPUs to GPU-hours per 1e12 tokens.

        us: time in µs.
        """
        return us * self.shape.tp / self.shape.tokens * _TRILLION / _US_PER_HOUR

    @cached_property
    def by_name(self) -> dict[str, tuple[OpCost, ...]]:
        """Ops by name (qkv, proj, …), forward before backward.

        Names are ordered by wasted time and then by total time, largest first.
        """
        named: dict[str, tuple[OpCost, ...]] = defaultdict(tuple)
        for cost in self.ops:
            named[cost.op.name] += (cost,)

        def rank(item: tuple[str, tuple[OpCost, ...]]) -> tuple[float, float]:
            return total_waste_us(item[1]), total_us(item[1])

        return dict(sorted(named.items(), key=rank, reverse=True))


def total_us(costs: Iterable[OpCost]) -> float:
    return sum(cost.total_us for cost in costs)


def total_waste_us(costs: Iterable[OpCost]) -> float:
    return sum(cost.waste_us for cost in costs)


def total_flops(costs: Iterable[OpCost]) -> int:
    return sum(cost.op.workload.flops * cost.op.count for cost in costs)


def cost_of(shape: TransformerShape, times: RememberedTimes) -> ShapeCost:
    """Predicts the time and the waste of every op of a shape (`TransformerShape.modelled_ops`)."""
    ops = shape.modelled_ops()
    times.ask(op.workload for op in ops)
    found: dict[Op, list[Edge]] = {op: [] for op in ops}
    before = []
    for op, past in found.items():
        share = _peak_share(op.workload, times)
        for edge in edges(op, times.device, times.launch(op.workload), share):
            # A missing fused kernel is waste only if Megatron is used.
            if times.softmax == "megatron" or edge.kind != "fused softmax":
                past.append(edge)
                before.append(edge.before)
    times.ask(before)
    costs = tuple(_cost(op, found[op], times) for op in ops)
    whole = _latency_of(costs)
    low, high = _waste_interval(costs, whole.latency_us, total_waste_us(costs), times)
    return ShapeCost(shape, costs, whole, low, high)


def _latency_of(costs: Iterable[OpCost]) -> Estimate:
    """Returns the total time of several ops, with the interval from `op_times.total`."""
    summed = total([OpEstimate(c.op, c.latency) for c in costs], CORRELATION)
    return Estimate(summed.latency_us, summed.low_us, summed.high_us)


def latency_per_run(costs: Sequence[OpCost]) -> Estimate:
    """Returns the time to run each of these ops once, with its interval.

    costs: ops that run equally often.
    """
    return _latency_of(costs).scaled(1 / costs[0].op.count)


def _cost(op: Op, past: Iterable[Edge], times: RememberedTimes) -> OpCost:
    """Returns the cost of an op that has crossed the edges in `past`."""
    work = op.workload
    launch = times.launch(work)
    waves = None
    if isinstance(work, Gemm):
        used = tile_in_use(times.device, work.dtype, launch)
        share = _peak_share(work, times)
        waves = credible_waves(work, used.tile, times.device.sm_count, used.blocks_per_sm, share)
    return OpCost(op, times.estimate(work), launch, waves, _findings(op, past, times))


def _peak_share(work: Compute, times: RememberedTimes) -> float | None:
    return peak_share(work, times.estimate(work).latency_us, times.device)


def _findings(op: Op, past: Iterable[Edge], times: RememberedTimes) -> tuple[EdgeWaste, ...]:
    """Returns the waste of each edge in `past` that wastes enough to be reported, worst first.

    past: edges that the op has crossed.
    """
    now = times.estimate(op.workload)
    found = []
    for edge in past:
        # The ideal is the time of the op's arithmetic at the rate just before the edge. Balanced
        # experts already do the same arithmetic.
        ideal = times.fused(edge.before)
        if edge.kind != "skew":
            ideal = ideal.scaled(op.workload.flops / edge.before.flops)
        share = min(edge.largest_share, 1 - ideal.latency_us / now.latency_us)
        if share < _WORTH_SAYING:
            continue
        if edge.before == op.workload:
            # Both times are of the same workload, so `ratio_factor` would see no error. The factor
            # is taken from the interval of the unfused time instead.
            factor = sqrt(now.high_us / now.low_us)
        else:
            shares = {op.workload: (1.0, now)}
            factor = ratio_factor(shares, {edge.before: (1.0, ideal)}, times.common_error)
        low = min(edge.largest_share, _wasted_if_slower(share, factor))
        high = min(edge.largest_share, _wasted_if_slower(share, 1 / factor))
        us = now.latency_us
        found.append(EdgeWaste(edge, share * us, low * us, high * us))
    # Edges that cost the same except for rounding keep the order of `edges`.
    return tuple(sorted(found, key=lambda f: -float(f"{f.waste_us:.6g}")))


def _waste_interval(
    costs: Iterable[OpCost], whole_us: float, wasted_us: float, times: RememberedTimes
) -> tuple[float, float]:
    """Returns the 90 % interval of the wasted time in µs.

    The interval follows from that of the ratio of the time without waste to the whole time.

    whole_us, wasted_us: total and wasted time of the ops.
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
    """Adds `share` to the fraction of a sum of times that a workload takes."""
    parts[work] = (parts.get(work, (0.0, latency))[0] + share, latency)


def _wasted_if_slower(share: float, factor: float) -> float:
    """Returns the wasted fraction of the time if the rest takes `factor` times its estimate.

    share: estimated wasted fraction, 0 to 1.
    """
    return max(0.0, 1 - (1 - share) * factor)


# --- intervals of ratios ---
#
# Each op's log error has a half-width, which comes from its own interval. Times of ops of one kind
# (GEMM, softmax, attention) come from one model and share a part of their errors. In a ratio of two
# sums of times, this shared part cancels to the extent that ops of that kind take the same fraction
# of both sums. The error of a workload cancels completely if it takes the same fraction of both.
# The ratio of a shape's time to itself is therefore 1 ± 0, and the interval is narrow for shapes
# that differ in few ops.
#
# The shared part was tested on five public tables (A100, H100, H200, B200, L40S; rows that the
# shipped models were not fitted to, with sides of at least 1024), as ratios of four GEMMs to four
# neighbouring GEMMs. The errors of a fitted model share no part, because the model is right on
# average. The intervals of a fitted model are too narrow for these GEMMs by a factor of up to
# WIDER. On a GPU without measurements, the ops share the larger part of the error.

#: Factor on the half-widths of intervals of ratios. With 1.3, the intervals contain 99, 93, 92, 92
#: and 90 % of the ratios in those tables.
WIDER = 1.3

#: Maps a workload to the fraction of a sum of times that it takes, 0 to 1, and its estimated time.
Shares = Mapping[Compute, tuple[float, Estimate]]


def ratio_factor(
    above: Shares, below: Shares, common: float = 0.0, *, wider: float = WIDER
) -> float:
    """Returns f such that the 90 % interval of a ratio r of two sums of times is r / f to r · f.

    above, below: fractions of the numerator and of the denominator, by workload.
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
        _, latency = above.get(work) or below[work]
        none = (0.0, latency)
        share = above.get(work, none)[0] - below.get(work, none)[0]
        part = share * log(latency.high_us / latency.low_us) / 2
        alone += part**2
        together[work.kind] += part
    shared = sum(part**2 for part in together.values())
    return exp(wider * sqrt((1 - common) * alone + common * shared))
