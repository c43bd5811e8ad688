"""What a shape costs on one GPU, op by op, and what of that is wasted past edges."""

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
from quantbench.workload.ops import Compute

# A loss of less than this share of an op's time is not worth a word, nor can any model tell it.
_WORTH_SAYING = 0.01
_TRILLION = 1e12
#: what the times of a shape leave out
LOWER_BOUND = "lower bound: no communication, norms, optimizer or stalls"
_US_PER_HOUR = 3.6e9


@dataclass(frozen=True)
class EdgeWaste:
    """An edge that an op is past, and the time that one run of the op wastes by it, with its 90 % interval.

    The waste is the predicted time minus the time of the same arithmetic at the rate (FLOP per µs) predicted just
    before the edge, or of the fused kernel for the fused softmax. For tiles and waves it is at most the share of the
    device that becomes idle at the edge.
    """

    edge: Edge
    waste_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class OpCost:
    """One op of a shape.

    latency: of one run.
    launch: the predicted kernel; None where it is not known.
    quantization: tiles and waves of a product; None where `quantization.credible_waves` cannot state them.
    findings: the edges that it is past, the worst first. They overlap, so the op's waste is that of the worst.
    """

    op: Op
    latency: Estimate
    launch: Launch | None
    quantization: Quantization | None
    findings: tuple[EdgeWaste, ...]

    @property
    def total_us(self) -> float:
        """Time of all its runs in a micro-batch."""
        return self.latency.latency_us * self.op.count

    @property
    def waste_us(self) -> float:
        """What all its runs waste in a micro-batch."""
        return self.findings[0].waste_us * self.op.count if self.findings else 0.0


@dataclass(frozen=True)
class ShapeCost:
    """All products, softmax and attention of a shape, forward and backward, per micro-batch on one GPU.

    Norms, activations, communication, the optimizer and recomputation are not counted.
    """

    shape: TransformerShape
    ops: tuple[OpCost, ...]
    latency: Estimate
    waste_low_us: float
    waste_high_us: float

    @property
    def waste_us(self) -> float:
        """What is wasted past edges in a micro-batch."""
        return sum(op.waste_us for op in self.ops)

    @property
    def waste_share(self) -> float:
        """The part of the time that is wasted past edges."""
        return self.waste_us / self.latency.latency_us

    @property
    def tflops(self) -> float:
        """Useful arithmetic per second on one GPU."""
        return sum(o.op.workload.flops * o.op.count for o in self.ops) / self.latency.latency_us / 1e6

    def gpu_hours_per_trillion_tokens(self, us: float) -> float:
        """GPU-hours that `us` per micro-batch on each of the tp GPUs come to over 1e12 tokens."""
        return us * self.shape.tp / self.shape.tokens * _TRILLION / _US_PER_HOUR

    @cached_property
    def by_name(self) -> dict[str, tuple[OpCost, ...]]:
        """The ops by name (qkv, proj, …), forward first; the name that wastes most first, then the longest."""
        named: dict[str, list[OpCost]] = defaultdict(list)
        for cost in self.ops:
            named[cost.op.name].append(cost)
        worst = sorted(named.values(), key=lambda own: (-sum(c.waste_us for c in own), -sum(c.total_us for c in own)))
        return {costs[0].op.name: tuple(costs) for costs in worst}


def cost_of(shape: TransformerShape, times: RememberedTimes) -> ShapeCost:
    """What every op of a shape takes, and what it wastes."""
    ops = shape.ops()
    times.ask(op.workload for op in ops)
    found = {
        op: edges(op, times.device, times.launch(op.workload), _peak_share(op.workload, times))
        for op in dict.fromkeys(ops)
    }
    if times.softmax != "megatron":  # nobody waits for the fused kernel
        found = {op: tuple(edge for edge in own if edge.kind != "fused softmax") for op, own in found.items()}
    times.ask(edge.before for own in found.values() for edge in own)
    costs = tuple(_cost(op, found[op], times) for op in ops)
    whole = latency_of(costs)
    wasted = sum(cost.waste_us for cost in costs)
    low, high = _waste_interval(costs, whole.latency_us, wasted, times)
    return ShapeCost(shape, costs, whole, low, high)


def latency_of(costs: Iterable[OpCost]) -> Estimate:
    """The time of several ops together, with its interval; their errors are alike, see `op_times.total`."""
    summed = total([OpEstimate(c.op, c.latency) for c in costs], CORRELATION)
    return Estimate(summed.latency_us, summed.low_us, summed.high_us)


def latency_per_run(costs: Sequence[OpCost]) -> Estimate:
    """The time of one run of each of several ops that run equally often, with its interval."""
    return latency_of(costs).scaled(1 / costs[0].op.count)


def _cost(op: Op, past: Iterable[Edge], times: RememberedTimes) -> OpCost:
    launch, quantization = times.launch(op.workload), None
    if isinstance(op.workload, Gemm):
        used = tile_in_use(times.device, op.workload.dtype, launch)
        share = _peak_share(op.workload, times)
        quantization = credible_waves(
            op.workload, used.tile, times.device.sm_count, used.blocks_per_sm, share
        )  # fmt: skip
    return OpCost(op, times.estimate(op.workload), launch, quantization, _findings(op, past, times))


def _peak_share(work: Compute, times: RememberedTimes) -> float | None:
    return peak_share(work, times.estimate(work).latency_us, times.device)


def _findings(op: Op, past: Iterable[Edge], times: RememberedTimes) -> tuple[EdgeWaste, ...]:
    now = times.estimate(op.workload)
    found = []
    for edge in past:
        # The time at the rate that is reached just before the edge.
        ideal = times.fused(edge.before).scaled(op.workload.flops / edge.before.flops)
        share = min(edge.most, 1 - ideal.latency_us / now.latency_us)
        if share < _WORTH_SAYING:
            continue
        factor = ratio_factor({op.workload: (1.0, now)}, {edge.before: (1.0, ideal)}, times.common_error)
        if edge.before == op.workload:  # the fallback's bytes are counted, its time was never measured
            factor = sqrt(now.high_us / now.low_us)
        low, high = (min(edge.most, max(0.0, 1 - (1 - share) * by)) for by in (factor, 1 / factor))
        found.append(EdgeWaste(edge, share * now.latency_us, low * now.latency_us, high * now.latency_us))
    return tuple(sorted(found, key=lambda f: -f.waste_us))


def _waste_interval(
    costs: Iterable[OpCost], whole_us: float, wasted_us: float, times: RememberedTimes
) -> tuple[float, float]:
    """What is wasted at the least and at the most: from the ratio of what would be left to the whole."""
    if not wasted_us:
        return 0.0, 0.0
    above: dict[Compute, tuple[float, Estimate]] = {}
    below: dict[Compute, tuple[float, Estimate]] = {}

    def add(parts: dict[Compute, tuple[float, Estimate]], work: Compute, share: float, latency: Estimate) -> None:
        parts[work] = (parts.get(work, (0.0, latency))[0] + share, latency)

    for cost in costs:
        add(above, cost.op.workload, cost.total_us / whole_us, cost.latency)
        left = (cost.total_us - cost.waste_us) / (whole_us - wasted_us)
        before = cost.findings[0].edge.before if cost.findings else cost.op.workload
        add(below, before, left, times.fused(before) if cost.findings else cost.latency)
    factor = ratio_factor(above, below, times.common_error)
    share = wasted_us / whole_us
    low, high = (max(0.0, 1 - (1 - share) * by) for by in (factor, 1 / factor))
    return low * whole_us, high * whole_us


# --- intervals of ratios ---------------------------------------------------------------------------------------------
#
# Each op's log error has a half-width, from its own interval. Ops of one kind (products, softmax, attention: each has a
# model of its own) share a part of their errors, which cancels as far as both sides have the same share of that kind.
# The error of the same op on both sides cancels altogether. So the interval of a shape against itself is 1 ± 0, and it
# is narrow for shapes that differ in few ops.
#
# The shared part was tested on five public tables (A100, H100, H200, B200, L40S; rows that the shipped models were not
# fitted to, sides of at least 1024), as ratios of four products to four neighbours of theirs. The errors of a fitted
# model, which is right on average, share nothing, and its intervals are too narrow for such products by up to WIDER.
# For a GPU that nothing was measured on, most of the error is shared.

#: with it the ratios of those tables lie within their intervals 99, 93, 92, 92 and 90 % of the time
WIDER = 1.3

#: an operation's part of a sum, 0 to 1, and its own time
Shares = Mapping[Compute, tuple[float, Estimate]]


def ratio_factor(above: Shares, below: Shares, common: float = 0.0) -> float:
    """The factor of the 90 % interval of the ratio of two sums of times, to either side.

    above, below: the two sums by op, as shares of their own wholes.
    common: the part of their errors that ops of one kind share.

    >>> from quantbench.workload import Gemm
    >>> work = Gemm(m=4096, n=4096, k=4096)
    >>> sums = {work: (1.0, Estimate(100.0, 90.0, 110.0))}
    >>> ratio_factor(sums, sums)
    1.0
    """
    alone = 0.0
    together: dict[str, float] = defaultdict(float)
    for work in dict.fromkeys((*above, *below)):
        share = (above[work][0] if work in above else 0.0) - (below[work][0] if work in below else 0.0)
        latency = (above.get(work) or below[work])[1]
        part = share * log(latency.high_us / latency.low_us) / 2
        alone += part**2
        together[work.kind] += part
    shared = sum(part**2 for part in together.values())
    return exp(WIDER * sqrt((1 - common) * alone + common * shared))
