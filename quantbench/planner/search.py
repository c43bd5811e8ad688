"""Searches over layouts of a training job.

`search` enumerates every combination of parallel degrees and micro-batch size that the strict rules
allow, drops layouts that exceed the memory before predicting times, and ranks the others by time
per iteration. Layer times depend only on tensor and sequence parallelism and micro-batch size, so
tens of thousands of layouts need a few dozen layer times, predicted in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from quantbench.errors import InputError, require_choice
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.op_times import OpTimes
from quantbench.planner.calibration import Calibration
from quantbench.planner.constraints import chunk_layers, is_possible, strict_violations
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, partition_of
from quantbench.planner.memory import Memory, limit_bytes, memory
from quantbench.planner.predict import Planner, Prediction
from quantbench.quantization import divisors

# Fewest tokens of a sequence on one GPU that context parallelism is tried with unless asked for:
# below, a ring's messages no longer overlap with attention.
_FEWEST_TOKENS = 4096


@dataclass(frozen=True)
class LayoutSpace:
    """Allowed values in a search over layouts; an empty tuple allows all.

    recompute: () tries all but selective recomputation of flash attention, which frees next to
        nothing.
    mbs_limit: largest micro-batch to try.
    sequence_parallel: None tries both.
    cp: () tries those that leave each GPU at least 4096 tokens of a sequence.
    ep: as in `Layout`.
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
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for kind in self.recompute:
            require_choice("plan", "recompute", kind, RECOMPUTATIONS)


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
        """The fastest layout that is not close to the memory limit, if it is not the fastest of
        all.
        """
        roomy = next((p for p in self.ranked if not p.tight), None)
        return None if not self.ranked or roomy is self.ranked[0] else roomy


def search(
    job: Job, times: OpTimes, calibration: Calibration, space: LayoutSpace | None = None
) -> Found:
    """Ranks every layout of `space` by predicted time. Raises InputError if the rules allow
    none.
    """
    space = space or LayoutSpace()
    limit = limit_bytes(job)
    fitting: list[tuple[Layout, Memory]] = []
    smallest: tuple[Layout, Memory] | None = None
    too_large = 0
    for group in layout_groups(job, space):
        # Memory grows with mbs, and interleaving only adds to it, so larger mbs need not be
        # computed.
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
        raise _impossible(job, space)
    planner = Planner(job, times, calibration)
    planner.layers.prepare(layout.per_layer for layout, _ in fitting)
    # Of equal times, the one that shards the least: it needs the least of its software.
    ranked = sorted(
        (planner.predict(*one) for one in fitting),
        key=lambda p: (p.sec_per_it, p.layout.zero, p.memory.total),
    )
    return Found(tuple(ranked), len(fitting) + too_large, too_large, smallest)


def _impossible(job: Job, space: LayoutSpace) -> InputError:
    """Returns the error for a space without layouts: the rule that the nearest of them break."""
    degrees = product(
        space.tp or divisors(job.cluster.gpus_per_node),
        _context_degrees(job, space),
        space.ep,
        space.pp or divisors(job.gpus),
    )
    nearest = []
    for tp, cp, ep, pp in degrees:
        for dp in space.dp or (max(1, job.gpus // (tp * cp * pp)),):
            partition = partition_of(job.shape.layers, pp, uneven=space.uneven)
            mbs = min(space.mbs, default=1)
            interleave = min(space.interleave, default=1)
            layout = Layout(
                dp, tp, pp, mbs, interleave, min(space.zero), partition=partition, cp=cp, ep=ep
            )
            nearest.append((strict_violations(job, layout), layout))
    broken, layout = min(nearest, key=lambda found: len(found[0]))
    if not broken:
        return InputError(
            "plan", f"{layout} and others", "degrees, micro-batches and chunks of one layout"
        )
    what, _, change = broken[0].message.rpartition("; take ")
    return InputError(
        "plan", f"no layout keeps every rule, the nearest is {layout}: {what}", change
    )


def layout_groups(job: Job, space: LayoutSpace) -> Iterator[list[Layout]]:
    """Yields groups of allowed layouts that differ only in mbs (ascending) and interleave."""
    flash = job.shape.attention == "flash"
    recomputations = space.recompute or tuple(
        kind for kind in RECOMPUTATIONS if not (flash and kind == "selective")
    )
    for tp, cp, ep in product(_tensor_degrees(job, space), _context_degrees(job, space), space.ep):
        parallel = (False, True) if space.sequence_parallel is None else (space.sequence_parallel,)
        if tp == 1 or job.shape.seq % tp:
            parallel = (False,)
        for pp in _allowed(
            divisors(job.gpus // (tp * cp)) if job.gpus % (tp * cp) == 0 else [], space.pp
        ):
            dp = job.gpus // (tp * pp * cp)
            partition = partition_of(job.shape.layers, pp, uneven=space.uneven)
            if job.gbs % dp or not _allowed([dp], space.dp):
                continue
            sizes = _allowed(
                [mbs for mbs in divisors(job.gbs // dp) if mbs <= space.mbs_limit], space.mbs
            )
            for zero, recompute, sequence_parallel in product(space.zero, recomputations, parallel):
                base = Layout(
                    dp, tp, pp, 1, 1, zero, recompute, sequence_parallel, partition, cp=cp, ep=ep
                )
                # Only the rules that do not depend on the micro-batch.
                alone = replace(job, gbs=dp)
                if (zero > 0 and dp * cp == 1) or not is_possible(alone, base):
                    continue
                group = list(_micro_batches(job, base, sizes, space))
                if group:
                    yield group


def _micro_batches(
    job: Job, base: Layout, sizes: list[int], space: LayoutSpace
) -> Iterator[Layout]:
    for mbs in sizes:
        plain = replace(base, mbs=mbs)
        if not space.mbs and mbs * job.shape.seq > LARGEST_SIDE * base.cp:
            continue  # more rows than a product that is predicted
        if not space.interleave or 1 in space.interleave:
            yield plain
        if base.pp == 1 or plain.micro_batches(job.gbs) % base.pp:
            continue
        each = chunk_layers(job.shape.layers, base) // base.pp
        # Chunks of different length: as many as the longest one asks for.
        uneven = sorted({ceil(each / size) for size in range(1, each + 1)})
        for chunks in _allowed(
            uneven if base.partition == "uneven" else divisors(each), space.interleave
        ):
            if chunks > 1:
                yield replace(plain, interleave=chunks)


def _tensor_degrees(job: Job, space: LayoutSpace) -> Iterator[int]:
    """Yields degrees within a node that keep every strict rule of tensor parallelism."""
    for tp in _allowed(divisors(job.cluster.gpus_per_node), space.tp):
        # One micro-batch and one stage, so that only the rules of tensor parallelism count.
        alone = replace(job, gbs=max(1, job.gpus // tp))
        if job.gpus % tp == 0 and is_possible(alone, Layout(dp=job.gpus // tp, tp=tp, pp=1, mbs=1)):
            yield tp


def _context_degrees(job: Job, space: LayoutSpace) -> tuple[int, ...]:
    """Returns the context-parallel degrees to try: powers of two that leave each GPU many tokens of
    a sequence.
    """
    largest = max(1, job.shape.seq // _FEWEST_TOKENS)
    return space.cp or tuple(
        cp for cp in divisors(job.gpus) if cp <= largest and cp & (cp - 1) == 0
    )


def _allowed(values: list[int], wanted: tuple[int, ...]) -> list[int]:
    return [value for value in values if not wanted or value in wanted]
