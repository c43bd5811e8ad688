"""Whole layers: what a place on the axes costs with each op by the provider that is fastest there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from quantbench.analysis.summary import Point, Row, op_order, row_of
from quantbench.device.spec import DeviceSpec

#: stands for the provider in rows that are made of several
FASTEST = "each op's fastest"
# What attention computes in one kernel: where both were measured, only the one kernel counts.
_UNFUSED = ("scores", "softmax", "context")


def are_parts(points: Sequence[Point]) -> bool:
    """Whether the providers of a run compute different ops, so that only together they are a layer. Providers that all
    compute the same are rivals, and a layer of each is worth seeing."""
    ops: dict[str, set[str]] = {}
    for point in points:
        ops.setdefault(point.provider, set()).add(point.op)
    return len({frozenset(own) for own in ops.values()}) > 1


def layer_rows(points: Sequence[Point], spec: DeviceSpec) -> tuple[Row, ...]:
    """One row for each place and number format, in order of places."""
    places: dict[tuple[str, tuple[int, ...]], dict[str, Point]] = {}
    for point in points:
        ops = places.setdefault((point.workload.dtype, tuple(point.axes.values())), {})
        seen = ops.get(point.op)
        if seen is None or point.latency_us < seen.latency_us:
            ops[point.op] = point
    whole = set(counted({name for ops in places.values() for name in ops}))
    return tuple(
        replace(row_of(tuple(ops[name] for name in counted(ops)), spec, _needed(whole, ops)), provider=FASTEST)
        for _, ops in sorted(places.items())
    )


def _needed(whole: set[str], ops: Iterable[str]) -> set[str]:
    """The ops that a place needs to be a whole layer: one kernel for attention, or the three that do as well."""
    return whole - {"attention"} if set(_UNFUSED) <= set(ops) else whole


def counted(ops: Iterable[str]) -> tuple[str, ...]:
    """The ops of a layer as it runs them, without those that another one does as well.

    >>> counted(["attention", "softmax", "qkv", "context", "scores"])
    ('qkv', 'attention')
    """
    names = set(ops)
    fused = "attention" in names
    kept = [name for name in names if not (fused and name.partition(".")[0] in _UNFUSED)]
    return tuple(sorted(kept, key=op_order))
