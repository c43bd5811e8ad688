"""Searches over layouts of a training job.

`search` enumerates every combination of parallel degrees and micro-batch size that the strict rules allow, drops
layouts that exceed the memory before predicting times, and ranks the others by time per iteration. Layer times depend
only on tensor and sequence parallelism and micro-batch size, so tens of thousands of layouts need a few dozen layer
times, predicted in one batch.
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
from quantbench.planner.constraints import chunk_layers, is_possible
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, partition_of
from quantbench.planner.memory import Memory, limit_bytes, memory
from quantbench.planner.predict import Planner, Prediction
from quantbench.quantization import divisors


@dataclass(frozen=True)
class Space:
    """Allowed values in a search over layouts; an empty tuple allows all. (`advice.space.Space` is for shapes.)

    recompute: () tries all but selective recomputation of flash attention, which frees next to nothing.
    mbs_limit: largest micro-batch to try.
    sequence_parallel: None tries both.
    cp, ep: as in `Layout`.
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
    heads = job.shape.heads
    experts = job.shape.experts
    tp = ",".join(map(str, space.tp))
    ep = ",".join(map(str, space.ep))
    if space.tp and all(heads % degree for degree in space.tp):
        raise InputError("plan", f"--tp {tp} for {heads} heads", f"a divisor of {heads}")
    if space.tp and all(job.gpus % degree for degree in space.tp):
        raise InputError("plan", f"--tp {tp} on {job.gpus} GPUs", f"a divisor of {job.gpus}")
    if not experts and 1 not in space.ep:
        raise InputError("plan", f"--ep {ep} for a model without experts", "no --ep, or a model with them")
    dividing = [degree for degree in space.ep if max(1, experts) % degree == 0]
    if not dividing:
        raise InputError("plan", f"--ep {ep} for {experts} experts", f"a divisor of {experts}")
    if all(job.gpus % degree for degree in dividing):
        raise InputError("plan", f"--ep {ep} on {job.gpus} GPUs", f"a divisor of {job.gpus}")


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
                base = Layout(dp, tp, pp, 1, 1, zero, recompute, sequence_parallel, partition, cp=cp, ep=ep)
                # Only the rules that do not depend on the micro-batch.
                alone = replace(job, gbs=dp)
                if (zero > 0 and dp * cp == 1) or not is_possible(alone, base):
                    continue
                group = list(_micro_batches(job, base, sizes, space))
                if group:
                    yield group


def _micro_batches(job: Job, base: Layout, sizes: list[int], space: Space) -> Iterator[Layout]:
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
        for chunks in _allowed(uneven if base.partition == "uneven" else divisors(each), space.interleave):
            if chunks > 1:
                yield replace(plain, interleave=chunks)


def _tensor_degrees(job: Job, space: Space) -> Iterator[int]:
    """Yields degrees within a node that keep every strict rule of tensor parallelism."""
    for tp in _allowed(divisors(job.cluster.gpus_per_node), space.tp):
        # One micro-batch and one stage, so that only the rules of tensor parallelism count.
        alone = replace(job, gbs=max(1, job.gpus // tp))
        if job.gpus % tp == 0 and is_possible(alone, Layout(dp=job.gpus // tp, tp=tp, pp=1, mbs=1)):
            yield tp


def _allowed(values: list[int], wanted: tuple[int, ...]) -> list[int]:
    return [value for value in values if not wanted or value in wanted]
