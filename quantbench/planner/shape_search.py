"""Shapes of about the same number of parameters, ranked by the time that their best layouts take.

hidden, heads and layers vary together; each candidate is tried in the layouts that suit the shape it starts from, and
its time is scaled to the budget, so that a model is not called fast for being small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil

from quantbench.errors import InputError
from quantbench.latency.op_times import OpTimes, RememberedTimes
from quantbench.planner.calibration import Calibration
from quantbench.planner.constraints import is_possible
from quantbench.planner.formulas import parameters
from quantbench.planner.layer_time import layer_workloads
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import limit_bytes, memory
from quantbench.planner.predict import Planner, Prediction
from quantbench.planner.search import Space, divisors, search
from quantbench.workload import TransformerShape

#: a search over more shapes would take more than some minutes
MOST_SHAPES = 5_000


@dataclass(frozen=True)
class ShapeSpace:
    """What shapes are tried, each in `layouts` layouts.

    parameters: the budget. tolerance: how far from it, as a share. hidden_step: hidden sizes are multiples of it.
    aspect: hidden over layers, from and to; the documents tried 128 (12288 / 96) to 205 (14336 / 70), and without
    bounds the fastest model is the widest. head_dim: from and to.
    """

    parameters: float
    tolerance: float = 0.03
    hidden_step: int = 128
    aspect: tuple[float, float] = (125.0, 205.0)
    head_dim: tuple[int, int] = (64, 256)
    layouts: int = 32


@dataclass(frozen=True)
class ShapeFound:
    """A shape with its best layout. scaled_s: its time per iteration, times the budget over its parameters."""

    shape: TransformerShape
    parameters: int
    best: Prediction
    scaled_s: float


def candidates(base: TransformerShape, space: ShapeSpace) -> Iterator[TransformerShape]:
    """Shapes within the budget and the bounds, hidden ascending. Their MLPs keep the base's ratio to hidden, their
    grouped heads the base's ratio of query to key heads."""
    ratio, group = base.ffn / base.hidden, base.heads // base.kv_heads
    for hidden in range(space.hidden_step, 2**20, space.hidden_step):
        ffn = round(ratio * hidden)
        one = replace(base, hidden=hidden, heads=1, kv_heads=1, head_dim=hidden, ffn=ffn, layers=1)
        low, _, high = layers_within(one, space.parameters, space.tolerance)
        if hidden > space.aspect[1] * max(1.0, high):
            return
        fewest, most = max(1, low, hidden / space.aspect[1]), min(high, hidden / space.aspect[0])
        for layers in range(ceil(fewest), int(most) + 1):
            if not space.aspect[0] <= hidden / layers <= space.aspect[1]:
                continue
            for heads in divisors(hidden):
                width = hidden // heads
                if space.head_dim[0] <= width <= space.head_dim[1] and heads % group == 0:
                    yield replace(
                        base, hidden=hidden, heads=heads, kv_heads=heads // group, head_dim=width, ffn=ffn,
                        layers=layers,
                    )  # fmt: skip


def layers_within(shape: TransformerShape, budget: float, tolerance: float) -> tuple[float, float, float]:
    """How many of its layers give `shape` the budget of parameters: at its lower end, exactly, at its upper end."""
    one = parameters(replace(shape, layers=1))
    each = parameters(replace(shape, layers=2)) - one
    rest = one - each
    low, middle, high = (((1 + part) * budget - rest) / each for part in (-tolerance, 0.0, tolerance))
    return low, middle, high


def shape_search(
    job: Job, times: OpTimes, calibration: Calibration, space: ShapeSpace, within: Space
) -> list[ShapeFound]:
    """Every candidate with the best layout that it can take, fastest first. The layouts that are tried are those that
    suit the job's own shape best, were its layers divisible by anything. within: what layouts may be."""
    found = search(job, times, calibration, replace(within, uneven=True))
    layouts = _distinct([p.layout for p in found.ranked], space.layouts)
    if not layouts:
        raise InputError("plan --shape-search", "no layout of the given shape fits", "more GPUs, or a smaller shape")
    shapes = list(islice(candidates(job.shape, space), MOST_SHAPES + 1))
    if len(shapes) > MOST_SHAPES:
        raise InputError(
            "plan --shape-search", f"more than {MOST_SHAPES:,} shapes of {space.parameters:.3g} parameters",
            "a narrower --aspect, --head-dim or --tolerance",
        )  # fmt: skip
    if not shapes:
        raise InputError(
            "plan --shape-search", f"no shape of {space.parameters:.3g} parameters within the bounds",
            "a wider --aspect or --head-dim",
        )  # fmt: skip
    remembered = RememberedTimes(times)
    planners: dict[TransformerShape, tuple[Planner, list[Layout]]] = {}
    limit = limit_bytes(job)
    for shape in shapes:
        own = replace(job, shape=shape)
        fitting = [
            layout for layout in (_fitted(shape, layout) for layout in layouts)
            if is_possible(own, layout) and memory(own, layout, calibration).total <= limit
        ]  # fmt: skip
        if fitting:
            planners[shape] = (Planner(own, remembered, calibration), fitting)
    remembered.ask(
        work
        for planner, fitting in planners.values()
        for work in layer_workloads(planner.job, ((layout.tp, layout.mbs) for layout in fitting))
    )
    results = []
    for shape, (planner, fitting) in planners.items():
        best = min(map(planner.predict, fitting), key=lambda p: p.sec_per_it)
        count = parameters(shape)
        results.append(ShapeFound(shape, count, best, best.sec_per_it * space.parameters / count))
    return sorted(results, key=lambda r: r.scaled_s)


def _fitted(shape: TransformerShape, layout: Layout) -> Layout:
    """A layout with the partition that the shape's layers need (and without chunks, where they do not divide)."""
    if shape.layers % layout.pp == 0:
        chunks = layout.interleave if shape.layers % (layout.pp * layout.interleave) == 0 else 1
        return replace(layout, partition="layers", interleave=chunks)
    partition = "embedding" if (shape.layers + 2) % layout.pp == 0 else "layers"
    return replace(layout, partition=partition, interleave=1)


def _distinct(layouts: Sequence[Layout], count: int) -> list[Layout]:
    """The first layouts that differ in their degrees."""
    kept: dict[tuple[int, int, int, int], Layout] = {}
    for layout in layouts:
        kept.setdefault((layout.dp, layout.tp, layout.pp, layout.mbs), layout)
        if len(kept) == count:
            break
    return list(kept.values())
