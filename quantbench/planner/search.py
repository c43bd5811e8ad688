"""Searches for the fastest layouts of a training job that fit into the memory.

Every combination of parallel degrees and micro-batch size that the strict rules allow is tried, and
layouts that exceed the memory are dropped before their time is predicted. Layer times depend only
on a part of a layout, so tens of thousands of layouts need a few dozen layer times, which are
predicted in one batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from quantbench.errors import InputError
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.op_times import OpTimes
from quantbench.planner.calibration import Calibration
from quantbench.planner.constraints import chunk_layers, is_possible, strict_violations
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, partition_of
from quantbench.planner.memory import Memory, limit_bytes, memory
from quantbench.planner.predict import Planner, Prediction
from quantbench.quantization import cdiv, divisors

# Minimum number of tokens of a sequence on one GPU with which context parallelism is tried, unless
# the user names degrees. With fewer tokens, the messages of a ring no longer overlap with
# attention.
_FEWEST_TOKENS = 4096
# Largest micro-batch size that is tried.
_LARGEST_MICRO_BATCH = 64


Degrees = tuple[int, ...]


@dataclass(frozen=True)
class LayoutSpace:
    """Allowed values in a search over layouts.

    For dp, tp, pp, mbs and interleave, an empty tuple allows all values that are tried: tensor
    parallelism within a node, micro-batches of up to 64 samples, and all divisors otherwise.

    recompute: () allows all kinds except selective recomputation of flash attention, which frees
        next to nothing.
    cp: () allows powers of two that leave each GPU at least 4096 tokens of a sequence.
    ep: as in `Layout`.
    uneven: whether to try stages of different length.
    """

    dp: Degrees = ()
    tp: Degrees = ()
    pp: Degrees = ()
    mbs: Degrees = ()
    interleave: Degrees = ()
    zero: Degrees = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ()
    sequence_parallel: tuple[bool, ...] = (False, True)
    uneven: bool = False
    cp: Degrees = ()
    ep: Degrees = (1,)


@dataclass(frozen=True)
class Found:
    """Result of a search over layouts.

    ranked: predictions of the layouts that fit, fastest first.
    looked_at: number of layouts that the rules allow.
    too_large: number of these layouts that exceed the memory.
    smallest: layout that needs the least memory of the layouts that exceed the memory; None if no
        layout exceeds it.
    """

    ranked: tuple[Prediction, ...]
    looked_at: int
    too_large: int
    smallest: tuple[Layout, Memory] | None

    @property
    def safest(self) -> Prediction | None:
        """The fastest layout that is not close to the memory limit; None if there is none."""
        return next((p for p in self.ranked if not p.tight), None)


def search(
    job: Job, times: OpTimes, calibration: Calibration, space: LayoutSpace | None = None
) -> Found:
    """Ranks every layout of a space by its predicted time.

    times: source of the op times.
    calibration: factors of training.
    Raises InputError if the rules allow no layout.
    """
    space = space or LayoutSpace()
    limit = limit_bytes(job)
    fitting: list[tuple[Layout, Memory]] = []
    too_large: list[tuple[Layout, Memory]] = []
    for layout in layouts(job, space):
        needed = memory(job, layout, calibration)
        if needed.total <= limit:
            fitting.append((layout, needed))
        else:
            too_large.append((layout, needed))
    if not fitting and not too_large:
        raise _impossible(job, space)
    planner = Planner(job, times, calibration)
    planner.layers.prepare(layout.per_layer for layout, _ in fitting)
    # Of layouts with equal times, the one with the lowest ZeRO stage comes first, because it asks
    # the least of the software.
    ranked = sorted(
        (planner.predict(*one) for one in fitting),
        key=lambda p: (p.sec_per_it, p.layout.zero, p.memory.total),
    )
    smallest = min(too_large, key=lambda one: one[1].total, default=None)
    looked_at = len(fitting) + len(too_large)
    return Found(tuple(ranked), looked_at, len(too_large), smallest)


def _impossible(job: Job, space: LayoutSpace) -> InputError:
    """Returns the error for a space without layouts.

    The error names the first rule that the nearest layout breaks. The nearest layout is the one
    that breaks the minimum number of rules.
    """
    tensor = space.tp or divisors(job.cluster.gpus_per_node)
    stages = space.pp or divisors(job.gpus)
    nearest = []
    for tp, cp, ep, pp in product(tensor, _context_degrees(job, space), space.ep, stages):
        for dp in space.dp or (max(1, job.gpus // (tp * cp * pp)),):
            layout = Layout(
                dp,
                tp,
                pp,
                min(space.mbs, default=1),
                min(space.interleave, default=1),
                min(space.zero),
                sequence_parallel=all(space.sequence_parallel),
                partition=partition_of(job.shape.layers, pp, uneven=space.uneven),
                cp=cp,
                ep=ep,
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


def layouts(job: Job, space: LayoutSpace) -> Iterator[Layout]:
    """Yields the layouts of a space that break no strict rule."""
    recomputations = space.recompute or RECOMPUTATIONS
    if job.shape.attention == "flash" and not space.recompute:
        recomputations = ("full", "none")
    tensor = _allowed(divisors(job.cluster.gpus_per_node), space.tp)
    for tp, cp, ep in product(tensor, _context_degrees(job, space), space.ep):
        parallel = space.sequence_parallel
        if tp == 1:
            parallel = (False,)
        elif job.shape.seq % tp:
            parallel = tuple(one for one in parallel if not one)
        rest, left_over = divmod(job.gpus, tp * cp)
        if left_over:
            continue
        for pp in _allowed(divisors(rest), space.pp):
            dp = rest // pp
            if job.gbs % dp or not _allowed([dp], space.dp):
                continue
            partition = partition_of(job.shape.layers, pp, uneven=space.uneven)
            for zero, recompute, sequence_parallel in product(space.zero, recomputations, parallel):
                base = Layout(
                    dp, tp, pp, 1, 1, zero, recompute, sequence_parallel, partition, cp=cp, ep=ep
                )
                # With gbs = dp, only the rules that do not depend on the micro-batch are checked.
                if (zero > 0 and dp * cp == 1) or not is_possible(replace(job, gbs=dp), base):
                    continue
                yield from _micro_batches(job, base, space)


def _micro_batches(job: Job, base: Layout, space: LayoutSpace) -> Iterator[Layout]:
    """Yields the layouts with each allowed micro-batch size and number of chunks.

    base: layout with the other degrees.
    """
    each = chunk_layers(job.shape.layers, base) // base.pp
    chunk_counts = divisors(each)
    if base.partition == "uneven":
        # Chunks may differ in length, so every number of chunks is tried that changes the longest
        # one.
        chunk_counts = sorted({cdiv(each, size) for size in range(1, each + 1)})
    for mbs in _allowed(divisors(job.gbs // base.dp), space.mbs):
        plain = replace(base, mbs=mbs)
        if mbs > _LARGEST_MICRO_BATCH:
            continue
        if not space.mbs and mbs * job.shape.seq > LARGEST_SIDE * base.cp:
            continue  # GEMMs would have more rows than the models predict
        for chunks in _allowed([1, *chunk_counts[1:]], space.interleave):
            if chunks == 1 or (base.pp > 1 and plain.micro_batches(job.gbs) % base.pp == 0):
                yield replace(plain, interleave=chunks)


def _context_degrees(job: Job, space: LayoutSpace) -> Degrees:
    """Returns the context-parallel degrees to try.

    By default they are powers of two that leave each GPU enough tokens of a sequence.
    """
    largest = max(1, job.shape.seq // _FEWEST_TOKENS)
    powers = (cp for cp in divisors(job.gpus) if cp & (cp - 1) == 0)
    return space.cp or tuple(cp for cp in powers if cp <= largest)


def _allowed(values: list[int], wanted: Degrees) -> list[int]:
    """Returns the values that are wanted; all values if `wanted` is empty."""
    return [value for value in values if not wanted or value in wanted]
