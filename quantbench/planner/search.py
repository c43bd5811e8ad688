"""Searches over layouts of a training job, and over shapes of about the same number of parameters.

Entry points: `search` (over a `Space`), `shape_search` (over a `ShapeSpace`), and their results `Found` and
`ShapeFound`; `divisors`. Used by the command `plan`, by tools, and by `cli.model_options` for its defaults;
`advice.space` uses `layers_within`, `folklore` uses `Found`.

`search` enumerates every combination of parallel degrees and micro-batch size that the strict rules allow, drops
layouts that exceed the memory before predicting times, and ranks the others by time per iteration. Layer times depend
only on tensor and sequence parallelism and micro-batch size, so tens of thousands of layouts need a few dozen layer
times, predicted in one batch.

`shape_search` varies hidden, heads and layers together. It predicts each shape in the layouts that are best for the
starting shape, and scales its time to the same number of parameters, so that small models gain nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from math import ceil
from typing import Any

from quantbench.errors import InputError
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.op_times import OpTimes, RememberedTimes
from quantbench.planner.calibration import Calibration
from quantbench.planner.constraints import chunk_layers, is_possible
from quantbench.planner.formulas import parameters
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, partition_of, require_recomputation
from quantbench.planner.memory import Memory, limit_bytes, memory
from quantbench.planner.predict import Planner, Prediction
from quantbench.workload import TransformerShape

# A search over more shapes would take several minutes.
_MOST_SHAPES = 5_000


@dataclass(frozen=True)
class Space:
    """Allowed values in a search over layouts; an empty tuple allows all. (`advice.space.Space` is for shapes.)

    recompute: () tries all but selective recomputation of flash attention, which frees next to nothing.
    mbs_limit: largest micro-batch to try.
    sequence_parallel: None tries both.
    cp, ep, expert_tp, cp_ring, cp_balanced, shards, recompute_layers, offload_activations, offload_optimizer: as in
        `Layout`.
    uneven: whether to try stages of different length.
    """

    dp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    mbs: tuple[int, ...] = ()
    interleave: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ()
    sequence_parallel: bool | None = None
    mbs_limit: int = 64
    uneven: bool = False
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    expert_tp: int = 1
    cp_ring: bool = True
    cp_balanced: bool = True
    shards: int = 0
    recompute_layers: int = 0
    offload_activations: float = 0.0
    offload_optimizer: float = 0.0

    def __post_init__(self) -> None:
        for kind in self.recompute:
            require_recomputation("plan", kind)


@dataclass(frozen=True)
class Found:
    """Result of a search over layouts.

    ranked: predictions of layouts that fit, fastest first.
    looked_at: number of layouts that the rules allow.
    too_large: number of these that exceed the memory.
    smallest: the one of these that needs the least memory.
    """

    ranked: tuple[Prediction, ...]
    looked_at: int
    too_large: int
    smallest: tuple[Layout, Memory] | None = None

    @property
    def safest(self) -> Prediction | None:
        """The fastest layout that is not close to the memory limit, if it is not the fastest of all."""
        roomy = next((p for p in self.ranked if not p.tight), None)
        return None if not self.ranked or roomy is self.ranked[0] else roomy


def search(job: Job, times: OpTimes, calibration: Calibration, space: Space | None = None) -> Found:
    """Ranks every layout of `space` by predicted time. Raises InputError if the rules allow none."""
    space = space or Space()
    limit = limit_bytes(job)
    fitting: list[tuple[Layout, Memory]] = []
    smallest: tuple[Layout, Memory] | None = None
    too_large = 0
    for group in layout_groups(job, space):
        # Memory grows with mbs, and interleaving only adds to it, so larger mbs need not be computed.
        full = False
        for layout in group:
            if full:
                too_large += 1
                continue
            needed = memory(job, layout, calibration)
            if needed.total <= limit:
                fitting.append((layout, needed))
                continue
            too_large += 1
            full = layout.interleave == 1
            if smallest is None or needed.total < smallest[1].total:
                smallest = (layout, needed)
    if not fitting and smallest is None:
        _require_divisors(job, space)
        what = f"no dp · tp · pp = {job.gpus} GPUs for gbs {job.gbs} and {job.shape.layers} layers keeps every rule"
        helps = not space.uneven and (not space.interleave or 1 in space.interleave)
        change = "a gbs and layers with more divisors" + (", or --allow-uneven" if helps else "")
        raise InputError("plan", what, change + (", or another --interleave" if space.interleave else ""))
    planner = Planner(job, times, calibration)
    planner.layers.prepare(layout.per_layer for layout, _ in fitting)
    # Of equal times, the one that shards the least: it needs the least of its software.
    ranked = sorted(
        (planner.predict(*one) for one in fitting), key=lambda p: (p.sec_per_it, p.layout.zero, p.memory.total)
    )
    return Found(tuple(ranked), len(fitting) + too_large, too_large, smallest)


def _require_divisors(job: Job, space: Space) -> None:
    """Raises InputError for degrees of which none divides what it must."""
    heads, experts, width, each = job.shape.heads, job.shape.experts, job.shape.moe_ffn, space.expert_tp
    tp, ep = (",".join(map(str, degrees)) for degrees in (space.tp, space.ep))
    if space.tp and all(heads % degree for degree in space.tp):
        raise InputError("plan", f"--tp {tp} for {heads} heads", f"a divisor of {heads}")
    if space.tp and all(job.gpus % degree for degree in space.tp):
        raise InputError("plan", f"--tp {tp} on {job.gpus} GPUs", f"a divisor of {job.gpus}")
    for name, typed, idle in (("--ep", ep, 1 in space.ep), ("--expert-tp", each, each == 1)):
        if not experts and not idle:
            raise InputError("plan", f"{name} {typed} for a model without experts", f"no {name}, or a model with them")
    dividing = [degree for degree in space.ep if max(1, experts) % degree == 0]
    if not dividing:
        raise InputError("plan", f"--ep {ep} for {experts} experts", f"a divisor of {experts}")
    if width % each:
        raise InputError("plan", f"--expert-tp {each} for experts of width {width}", f"a divisor of {width}")
    if all(job.gpus % (degree * each) for degree in dividing):
        both = f"--ep {ep}" + (f" · --expert-tp {each}" if each > 1 else "")
        raise InputError("plan", f"{both} on {job.gpus} GPUs", f"a divisor of {job.gpus}")


def layout_groups(job: Job, space: Space) -> Iterator[list[Layout]]:
    """Yields groups of allowed layouts that differ only in mbs (ascending) and interleave."""
    flash = job.shape.attention == "flash"
    recomputations = space.recompute or tuple(kind for kind in RECOMPUTATIONS if not (flash and kind == "selective"))
    for tp, cp, ep in product(_tensor_degrees(job, space), space.cp, space.ep):
        parallel = (False, True) if space.sequence_parallel is None else (space.sequence_parallel,)
        if tp == 1 or job.shape.seq % tp:
            parallel = (False,)
        for pp in _allowed(divisors(job.gpus // (tp * cp)) if job.gpus % (tp * cp) == 0 else [], space.pp):
            dp = job.gpus // (tp * pp * cp)
            partition = partition_of(job.shape.layers, pp, uneven=space.uneven)
            if job.gbs % dp or not _allowed([dp], space.dp):
                continue
            sizes = _allowed([mbs for mbs in divisors(job.gbs // dp) if mbs <= space.mbs_limit], space.mbs)
            for zero, recompute, sequence_parallel in product(space.zero, recomputations, parallel):
                base = Layout(
                    dp, tp, pp, 1, 1, zero, recompute, sequence_parallel, partition, cp=cp, cp_ring=space.cp_ring,
                    cp_balanced=space.cp_balanced, shards=space.shards if zero > 0 else 0,
                    recompute_layers=space.recompute_layers if recompute == "full" else 0, ep=ep,
                    expert_tp=space.expert_tp,
                    offload_activations=space.offload_activations, offload_optimizer=space.offload_optimizer,
                )  # fmt: skip
                # Only the rules that do not depend on the micro-batch.
                alone = replace(job, gbs=dp, rampup_step=0)
                if (zero > 0 and dp * cp == 1) or not is_possible(alone, base):
                    continue
                group = list(_micro_batches(job, base, sizes, space))
                if group:
                    yield group


def _micro_batches(job: Job, base: Layout, sizes: list[int], space: Space) -> Iterator[Layout]:
    for mbs in sizes:
        plain = replace(base, mbs=mbs)
        if job.rampup_step % (base.dp * mbs):
            continue
        if not space.mbs and mbs * job.shape.seq > LARGEST_SIDE * base.cp:
            continue  # more rows than a product that is predicted
        if not space.interleave or 1 in space.interleave:
            yield plain
        if base.pp == 1 or plain.micro_batches(job.gbs) % base.pp:
            continue
        each = chunk_layers(job.shape.layers, base) // base.pp
        # Chunks of different length: as many as the longest one asks for.
        uneven = sorted({ceil(each / size) for size in range(1, each + 1)})
        for chunks in _allowed(uneven if base.partition == "uneven" else divisors(each), space.interleave):
            if chunks > 1:
                yield replace(plain, interleave=chunks)


def _tensor_degrees(job: Job, space: Space) -> Iterator[int]:
    """Yields degrees within a node that keep every strict rule of tensor parallelism."""
    for tp in _allowed(divisors(job.cluster.gpus_per_node), space.tp):
        # One micro-batch and one stage, so that only the rules of tensor parallelism count.
        alone = replace(job, gbs=max(1, job.gpus // tp), rampup_step=0)
        if job.gpus % tp == 0 and is_possible(alone, Layout(dp=job.gpus // tp, tp=tp, pp=1, mbs=1)):
            yield tp


def _allowed(values: list[int], wanted: tuple[int, ...]) -> list[int]:
    return [value for value in values if not wanted or value in wanted]


def divisors(number: int) -> list[int]:
    """Returns all divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True)
class ShapeSpace:
    """Allowed shapes in a search over shapes.

    parameters: parameter budget.
    tolerance: largest deviation from the budget, as a share.
    hidden_step: divisor of all hidden sizes.
    aspect: range of hidden / layers. The BigScience documents tried 128 (12288 / 96) to 205 (14336 / 70); without
        bounds the widest model is the fastest.
    layouts: largest number of layouts to try per shape.
    """

    parameters: float
    tolerance: float = 0.03
    hidden_step: int = 128
    aspect: tuple[float, float] = (125.0, 205.0)
    head_dim: tuple[int, int] = (64, 256)
    layouts: int = 32


@dataclass(frozen=True)
class ShapeFound:
    """Shape with its fastest layout. scaled_s: seconds per iteration, times the budget over `parameters`."""

    shape: TransformerShape
    parameters: int
    best: Prediction
    scaled_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.shape),
            "parameters": self.parameters,
            "scaled_sec_per_it": self.scaled_s,
            **self.best.to_json(),
        }


def candidates(base: TransformerShape, space: ShapeSpace) -> Iterator[TransformerShape]:
    """Yields the shapes within the budget and bounds, hidden ascending, with the base's ratios of MLP width to hidden
    and of query to key/value heads."""
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
    """Returns the (fractional) numbers of layers for (1 − tolerance), 1 and (1 + tolerance) times the budget."""
    least = shape.dense_layers + 1
    one = parameters(replace(shape, layers=least))
    each = parameters(replace(shape, layers=least + 1)) - one
    rest = one - least * each
    low, middle, high = (((1 + part) * budget - rest) / each for part in (-tolerance, 0.0, tolerance))
    return low, middle, high


def shape_search(
    job: Job, times: OpTimes, calibration: Calibration, space: ShapeSpace, within: Space
) -> list[ShapeFound]:
    """Returns the candidate shapes with their fastest layouts, fastest first.

    Tries the best layouts of the job's own shape, even if its layers do not divide. within: allowed layouts.
    Raises InputError if no layout fits, or if there are no or too many shapes.
    """
    found = search(job, times, calibration, replace(within, uneven=True))
    # The best layout of each combination of degrees.
    by_degrees: dict[tuple[int, int, int, int], Layout] = {}
    for layout in (p.layout for p in found.ranked):
        by_degrees.setdefault((layout.dp, layout.tp, layout.pp, layout.mbs), layout)
    layouts = list(by_degrees.values())[: space.layouts]
    who = "plan --shape-search"
    if not layouts:
        raise InputError(who, "no layout of the given shape fits", "more GPUs, or a smaller shape")
    shapes = list(islice(candidates(job.shape, space), _MOST_SHAPES + 1))
    if len(shapes) > _MOST_SHAPES:
        what = f"more than {_MOST_SHAPES:,} shapes of {space.parameters:.3g} parameters"
        raise InputError(who, what, "a narrower --aspect, --head-dim or --tolerance")
    if not shapes:
        what = f"no shape of {space.parameters:.3g} parameters within the bounds"
        raise InputError(who, what, "a wider --aspect or --head-dim")
    remembered = RememberedTimes(times)
    planners: list[tuple[Planner, list[Layout]]] = []
    limit = limit_bytes(job)
    for shape in shapes:
        own = replace(job, shape=shape)
        fitting = [
            layout for layout in (_fitted(shape, layout) for layout in layouts)
            if is_possible(own, layout) and memory(own, layout, calibration).total <= limit
        ]  # fmt: skip
        if fitting:
            planners.append((Planner(own, remembered, calibration), fitting))
    remembered.ask(
        work
        for planner, fitting in planners
        for work in planner.layers.workloads(layout.per_layer for layout in fitting)
    )
    results = []
    for planner, fitting in planners:
        best = min(map(planner.predict, fitting), key=lambda p: p.sec_per_it)
        count = parameters(planner.job.shape)
        results.append(ShapeFound(planner.job.shape, count, best, best.sec_per_it * space.parameters / count))
    return sorted(results, key=lambda r: r.scaled_s)


def _fitted(shape: TransformerShape, layout: Layout) -> Layout:
    """Returns the layout with the partition for the shape's layers, and without interleaving if they do not divide."""
    whole = shape.layers % (layout.pp * layout.interleave) == 0
    return replace(
        layout, partition=partition_of(shape.layers, layout.pp), interleave=layout.interleave if whole else 1
    )
