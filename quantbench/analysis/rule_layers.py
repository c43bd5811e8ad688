"""Pairs of whole layers: for rules about micro-batch and tensor parallelism, where no single op decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, log

import numpy as np

from quantbench.analysis.cliffs import useful_work
from quantbench.analysis.layers import counted
from quantbench.analysis.rule_pairs import Finder, Found, Material, Pair
from quantbench.analysis.summary import Point
from quantbench.sweep.shapes import LINEAR_OPS


@dataclass(frozen=True)
class _Layer:
    """All ops of one place together. log_cost: of time per work; sigma: its standard error."""

    keys: tuple[str, ...]
    log_cost: float
    sigma: float


def _layers(material: Material, axis: str) -> list[dict[int, _Layer]]:
    """For each setting of the other axes: layers by value of `axis`. Each op by its fastest provider; only ops that
    were measured at every value count, and without a product of the linear layers among them they are no layer."""
    groups: dict[tuple[object, ...], dict[int, dict[str, Point]]] = {}
    for point in material.points:
        if axis in point.axes:
            held = tuple((name, value) for name, value in point.axes.items() if name != axis)
            ops = groups.setdefault((held, point.workload.dtype), {}).setdefault(point.axes[axis], {})
            seen = ops.get(point.op)
            if seen is None or point.latency_us < seen.latency_us:
                ops[point.op] = point
    found = []
    for by_value in groups.values():
        common = counted(set.intersection(*(set(ops) for ops in by_value.values())))
        if any(name.partition(".")[0] in LINEAR_OPS for name in common):
            layers = {v: _layer([ops[name] for name in common], material) for v, ops in by_value.items()}
            found.append(layers)
    return found


def _layer(points: Sequence[Point], material: Material) -> _Layer:
    times = [p.latency_us * p.count for p in points]
    work = sum(useful_work(p.workload) * p.count for p in points)
    error = float(np.sqrt(sum((t * material.sigma(p)) ** 2 for t, p in zip(times, points, strict=True)))) / sum(times)
    return _Layer(tuple(p.key for p in points), log(sum(times) / work), error)


def best_value(axis: str, value: int) -> Finder:
    """Whole layers at `value` of `axis` against the other value that does best."""

    def find(material: Material) -> Found:
        groups = [layers for layers in _layers(material, axis) if value in layers and len(layers) > 1]
        if not groups:
            return f"no layer at {axis} = {value} with other values to compare"
        by_rival: dict[int, list[Pair]] = {}
        for layers in groups:
            for rival in layers.keys() - {value}:
                by_rival.setdefault(rival, []).append(_between(layers[value], layers[rival]))
        return min(by_rival.values(), key=lambda pairs: float(np.mean([pair.log_effect for pair in pairs])))

    return find


def doublings(axis: str) -> Finder:
    """Whole layers at each value of `axis` against twice that value."""

    def find(material: Material) -> Found:
        pairs = [
            _between(layers[value], layers[2 * value])
            for layers in _layers(material, axis)
            for value in layers
            if 2 * value in layers
        ]
        return pairs or f"no layer measured at both a value of {axis} and twice that"

    return find


def _between(good: _Layer, bad: _Layer) -> Pair:
    return Pair(good.keys + bad.keys, bad.log_cost - good.log_cost, hypot(good.sigma, bad.sigma))
