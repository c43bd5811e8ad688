"""Finds pairs of layers with experts that differ in one choice: their split over GPUs, their routing or their size.

Entry points: `Choice` and its values `SPREAD`, `BALANCED` and `LARGE`; `matched`, which pairs layers; `preferred`, the
finder of pairs (`rule_pairs.PairFinder`) for a choice; `rows_of`, the rows of each expert of a point. Used by `rules`
and by the guide in tools.

Whole layers are not swept, they come from imported tables. Effects are ratios of the busiest GPU's time: both layers
of a pair do the same work on as many GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, log

from quantbench.analysis.rule_pairs import Material, PairFinder, PairsOrReason, RulePair
from quantbench.analysis.summary import Point
from quantbench.workload import GroupedGemm, MoE

SKEWED = "power_law_1.2"


@dataclass(frozen=True)
class Choice:
    """A choice between layers.

    alike: what must be equal in both layers of a pair.
    order: rank of a layer: the highest of those that are alike keeps the rule, the lowest breaks it; None: neither.
    """

    alike: Callable[[MoE], object]
    order: Callable[[MoE], float | None]


def _spread(work: MoE) -> float | None:
    return None if (work.tp == 1) == (work.ep == 1) else float(work.tp == 1)


def _balanced(work: MoE) -> float | None:
    return None if work.ep == 1 else {"balanced": 1.0, SKEWED: 0.0}.get(work.routing_words)


def _sizes(work: MoE) -> object:
    total, active = work.num_experts * work.expert_ffn, work.top_k * work.expert_ffn
    return (work.tokens, work.hidden, total, active, work.dtype, work.tp, work.ep, work.gated, work.distribution)


#: whole experts on each GPU, by ep, instead of a part of each expert, by tp
SPREAD = Choice(lambda work: (replace(work, tp=1, ep=1), work.tp * work.ep), _spread)
#: as many rows for each expert instead of a power law of 1.2, over several GPUs
BALANCED = Choice(lambda work: replace(work, distribution="balanced"), _balanced)
#: few large experts instead of many small ones, at equal active and total widths
LARGE = Choice(_sizes, lambda work: float(work.expert_ffn))


def matched(works: Sequence[MoE], choice: Choice) -> list[tuple[int, int]]:
    """Returns pairs of places in `works`: of the layer that keeps the rule, and of the one that breaks it."""
    groups: dict[object, dict[float, int]] = defaultdict(dict)
    for i, work in enumerate(works):
        rank = choice.order(work)
        if rank is not None:
            groups[choice.alike(work)][rank] = i
    return [(ranks[max(ranks)], ranks[min(ranks)]) for ranks in groups.values() if len(ranks) > 1]


def preferred(choice: Choice, what: str) -> PairFinder:
    """Builds a finder that compares layers by a choice. what: description of such pairs."""

    def find(material: Material) -> PairsOrReason:
        by_provider: dict[tuple[str, str], list[Point]] = defaultdict(list)
        for point in material.points:
            if isinstance(point.workload, MoE):
                by_provider[point.provider, point.mode].append(point)
        pairs = []
        for points in by_provider.values():
            works = [point.workload for point in points if isinstance(point.workload, MoE)]
            for good, bad in ((points[i], points[j]) for i, j in matched(works, choice)):
                error = hypot(material.sigma(good), material.sigma(bad))
                pairs.append(RulePair((good.key, bad.key), log(bad.latency_us / good.latency_us), error))
        return pairs or f"no layers of experts {what} (quantbench import aiconfigurator --table moe has some)"

    return find


def rows_of(point: Point) -> int:
    """Returns the rows of the fullest expert of grouped products or of a layer; 0 if not all experts have the same."""
    work = point.workload
    if isinstance(work, GroupedGemm | MoE):
        rows = set(work.tokens_per_expert)
        return rows.pop() if len(rows) == 1 else 0
    return 0
