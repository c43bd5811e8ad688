"""Searches for a training job's fastest layouts that fit in GPU memory.

`search` tries all combinations of parallel degrees, micro-batch size and other settings that a
`LayoutSpace` and the strict rules allow. It drops layouts that exceed the memory before it predicts
times. Layer times depend on few of a layout's settings. Tens of thousands of layouts therefore need
only a few dozen layer times, which are predicted in one batch.
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

# Minimum number of a sequence's tokens per GPU for which context parallelism is tried by default.
# With fewer tokens, transfers in the ring no longer overlap with attention.
_FEWEST_TOKENS = 4096
# Largest micro-batch size that is tried, in samples.
_LARGEST_MICRO_BATCH = 64


#: values to try for one setting of a layout
Degrees = tuple[int, ...]


@dataclass(frozen=True)
class LayoutSpace:
    """Values to try for each setting of a `Layout`.

    For the settings with a default, () stands for the default values.

    dp: default: every value with which the degrees use all GPUs and dp divides gbs.
    tp: default: divisors of a node's number of GPUs. Other values are never tried.
    pp: default: divisors of gpus / (tp · cp).
    mbs: default: divisors of gbs / dp. Values above 64 are never tried.
    interleave: default: divisors of the number of layers per stage.
    recompute: default: all kinds, but not `selective` with flash attention, where it frees almost
        no memory.
    uneven: whether to try stages of different length if equal stages are impossible.
    cp: default: powers of two that leave each GPU at least 4096 tokens of a sequence.
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

    ranked: predictions of the layouts that fit in memory, fastest first.
    looked_at: number of layouts that the space and the strict rules allow.
    too_large: number of allowed layouts that do not fit in memory.
    smallest: layout with the least memory among those that do not fit, with its memory; None if all
        layouts fit.
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
    """Ranks the layouts of a space by their predicted time per iteration.

    times: op times on the job's GPU.
    calibration: factors of training.
    space: layouts to try; None for the default `LayoutSpace()`.

    Raises InputError if the strict rules allow no layout of the space.
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
    # Among layouts with equal times, the lowest ZeRO stage comes first, because it needs the
    # simplest software.
    ranked = sorted(
        (planner.predict(*one) for one in fitting),
        key=lambda p: (p.sec_per_it, p.layout.zero, p.memory.total),
    )
    smallest = min(too_large, key=lambda one: one[1].total, default=None)
    looked_at = len(fitting) + len(too_large)
    return Found(tuple(ranked), looked_at, len(too_large), smallest)


def _impossible(job: Job, space: LayoutSpace) -> InputError:
    """Returns the error for a space whose layouts all break strict rules.

    Its text names one broken rule of the layout that breaks the smallest number of rules.
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
    """Yields the layouts of a space that break no strict rule.

    ZeRO is tried only if the weights have several replicas.
    """
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
                # `base` has mbs = 1. With gbs = dp, each pipeline has one micro-batch, so only the
                # rules that do not depend on micro-batches can be broken here.
                if (zero > 0 and dp * cp == 1) or not is_possible(replace(job, gbs=dp), base):
                    continue
                yield from _micro_batches(job, base, space)


def _micro_batches(job: Job, base: Layout, space: LayoutSpace) -> Iterator[Layout]:
    """Yields `base` with each allowed micro-batch size and number of chunks per stage.

    base: layout with all other settings.
    """
    each = chunk_layers(job.shape.layers, base) // base.pp
    chunk_counts = divisors(each)
    if base.partition == "uneven":
        # Uneven chunks need no divisor. One number of chunks is tried per length of the longest
        # chunk.
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
    """Returns the context-parallel degrees to try (see `LayoutSpace.cp`)."""
    largest = max(1, job.shape.seq // _FEWEST_TOKENS)
    powers = (cp for cp in divisors(job.gpus) if cp & (cp - 1) == 0)
    return space.cp or tuple(cp for cp in powers if cp <= largest)


def _allowed(values: list[int], wanted: Degrees) -> list[int]:
    """Returns the values that are also in `wanted`; all values if `wanted` is empty."""
    return [value for value in values if not wanted or value in wanted]
