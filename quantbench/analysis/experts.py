"""Finds pairs of layers with experts that differ in one choice, and tells how many rows grouped GEMMs pad.

Entry points: `Choice` and its values `SPREAD`, `BALANCED` and `LARGE`; `matched`, which pairs layers; `preferred`, the
finder of pairs (`rule_pairs.PairFinder`) for a choice; `rows_of`, the rows of each expert of a point. Used by `rules`
and by the guide in tools. `padding_lines`, used by `check`.

Whole layers are not swept, they come from imported tables. Effects are ratios of the busiest GPU's time. A kernel that
runs all experts in one launch pads each expert's rows to whole tiles; a loop of products pads none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import hypot, log

from quantbench.analysis.periods import TileOf
from quantbench.analysis.rule_pairs import Material, PairsOrReason, RulePair
from quantbench.analysis.summary import Point
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import padded_rows
from quantbench.units import percent
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


def _balanced(work: MoE) -> float | None:
    return None if work.ep == 1 else {"balanced": 1.0, SKEWED: 0.0}.get(work.routing_words)


def _sizes(work: MoE) -> object:
    total, active = work.num_experts * work.expert_ffn, work.top_k * work.expert_ffn
    return (work.tokens, work.hidden, total, active, work.dtype, work.tp, work.ep, work.gated, work.distribution)


#: whole experts on each GPU, by ep, instead of a part of each expert, by tp
SPREAD = Choice(
    lambda work: (replace(work, tp=1, ep=1), work.tp * work.ep),
    lambda work: None if (work.tp == 1) == (work.ep == 1) else float(work.tp == 1),
)
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


def preferred(material: Material, choice: Choice, what: str) -> PairsOrReason:
    """Compares layers by a choice. what: description of such pairs."""
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


def rows_of(point: Point) -> int:
    """Returns the rows of the fullest expert of grouped products or of a layer; 0 if not all experts have the same."""
    work = point.workload
    if isinstance(work, GroupedGemm | MoE):
        rows = set(work.tokens_per_expert)
        return rows.pop() if len(rows) == 1 else 0
    return 0


#: rows of the tile that unpadded rows are compared with, as of most grouped kernels on GPUs (DeepGEMM pads to 128)
_USUAL_BLOCK_M = 128


def padding_lines(points: Iterable[Point], tile_of: TileOf) -> tuple[str, ...]:
    """Returns a line for each provider that ran grouped GEMMs: the rows that it pads, or that this is not known.

    tile_of: function from a point to its tile (`check.Check.tile_of`); assumed tiles do not count.
    """
    by_provider: dict[str, list[tuple[Point, GroupedGemm]]] = {}
    for point in points:
        if isinstance(point.workload, GroupedGemm) and point.workload.layout != "tn":
            by_provider.setdefault(point.provider, []).append((point, point.workload))
    return tuple(_line(provider, group, tile_of) for provider, group in by_provider.items())


def _line(provider: str, group: list[tuple[Point, GroupedGemm]], tile_of: TileOf) -> str:
    who = f"{provider} multiplies each expert's"
    if provider in UNPADDED:
        point, work = max(group, key=lambda pair: padded_rows(pair[1], _USUAL_BLOCK_M) / pair[1].rows)
        added = _added(point, work, _USUAL_BLOCK_M)
        return (
            f"{who} rows as they are and pads none: its steps are those of single products and of their number; a "
            f"kernel with tiles of {_USUAL_BLOCK_M} rows would pad {added}"
        )
    tiles = [(point, work, tile_of(point)) for point, work in group]
    known = [(point, work, used.tile.block_m) for point, work, used in tiles if used and used.source != "assumed"]
    if not known:
        return f"{who} rows by a kernel whose tile is not known: whether it pads them cannot be told"
    added = _added(*max(known, key=lambda one: padded_rows(one[1], one[2]) / one[1].rows))
    blocks = " or ".join(map(str, sorted({block_m for *_, block_m in known})))
    return f"{who} rows padded to tiles of {blocks} rows: at most {added}"


def _added(point: Point, work: GroupedGemm, block_m: int) -> str:
    """Formats the padding of one point: `512 rows to 4,096 (+700 %) at experts = 32`."""
    padded = padded_rows(work, block_m)
    at = ", ".join(f"{name.replace('_', '-')} = {value}" for name, value in point.axes.items())
    return f"{work.rows:,} rows to {padded:,} (+{percent(padded / work.rows - 1)})" + (f" at {at}" if at else "")
