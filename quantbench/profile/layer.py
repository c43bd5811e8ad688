"""The time of a transformer layer from the times of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.latency.transformer import CORRELATION, OpEstimate, ShapeEstimate, WorkEstimate, total
from quantbench.profile.estimate import SOURCES, Estimate
from quantbench.workload import Op


@dataclass(frozen=True)
class LayerEstimate(Estimate):
    """A layer's time. source: that of its least known operation; bound: of those that take most of the time. parts:
    operation by operation."""

    parts: ShapeEstimate | None = None

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """Its operations, each with its estimate."""
        return () if self.parts is None else self.parts.ops


def layer_of(ops: Sequence[Op], found: Sequence[Estimate]) -> LayerEstimate:
    """The operations of a layer, one run of each, taken together."""
    works = [OpEstimate(op, WorkEstimate(one, note=one.note)) for op, one in zip(ops, found, strict=True)]
    parts = total(works, CORRELATION)
    by_bound: dict[str, float] = {}
    for one in found:
        by_bound[one.bound] = by_bound.get(one.bound, 0.0) + one.latency_us
    return LayerEstimate(
        parts.latency_us,
        parts.low_us,
        parts.high_us,
        max((one.source for one in found), key=SOURCES.index),
        max(by_bound, key=lambda bound: by_bound[bound]),
        any(one.outside for one in found),
        "; ".join(parts.notes),
        parts,
    )
