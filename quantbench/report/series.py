"""Which of many curves a picture shows, and what it calls them."""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.analysis.curves import Curve

# Sizes that span more than this factor are drawn on a logarithmic axis.
_WIDE = 24.0


def typical(curves: Sequence[Curve], most: int) -> list[Curve]:
    """At most `most` of the curves: all, or as many evenly spaced ones from the smaller to the larger work, of those
    with most points."""
    if len(curves) <= most:
        return list(curves)
    longest = max(len(curve.points) for curve in curves)
    full = [curve for curve in curves if len(curve.points) >= 0.9 * longest]
    full.sort(key=lambda curve: curve.points[-1].workload.flops or curve.points[-1].workload.min_bytes)
    last = len(full) - 1
    # Small products wait for launches and memory and have no teeth to show: the lower third is left out.
    return [full[round(last * (1 / 3 + 2 / 3 * i / (most - 1)))] for i in range(most)]


def curve_names(curves: Sequence[Curve]) -> list[str]:
    """What tells each of these curves from the others; the provider where there is one curve alone."""
    names = []
    for curve in curves:
        parts = [f"{name.replace('_', '-')}={value}" for name, value in curve.held]
        if len({c.variant for c in curves}) > 1:
            parts.insert(0, curve.variant)
        if len({c.provider for c in curves}) > 1:
            parts.insert(0, curve.provider)
        names.append(" ".join(parts) or curve.provider)
    return names


def is_wide(sizes: Sequence[int]) -> bool:
    """Whether the sizes want a logarithmic axis."""
    return min(sizes) > 0 and max(sizes) / min(sizes) > _WIDE
