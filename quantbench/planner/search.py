"""All possible layouts of a job, ranked by predicted time per iteration.

Degrees are enumerated exactly (every divisor that the strict rules allow); what does not fit into memory is counted
and left out before its time is asked for. Layer times depend on tensor parallelism and micro-batch size alone, so a
search over tens of thousands of layouts asks the latency models for a few dozen layers, in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quantbench.errors import InputError, require_choice
from quantbench.latency.op_times import OpTimes
from quantbench.planner.calibration import Calibration
from quantbench.planner.constraints import is_possible
from quantbench.planner.formulas import RECOMPUTATIONS
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import Memory, limit_bytes, memory
from quantbench.planner.predict import Planner, Prediction


@dataclass(frozen=True)
class Space:
    """What may vary. Empty tuples leave a degree free. mbs_limit: the largest micro-batch that is tried.
    sequence_parallel: None tries both. uneven: also stages of different length."""

    dp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    mbs: tuple[int, ...] = ()
    interleave: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTATIONS
    sequence_parallel: bool | None = None
    mbs_limit: int = 64
    uneven: bool = False

    def __post_init__(self) -> None:
        for kind in self.recompute:
            require_choice("plan", "recompute", kind, RECOMPUTATIONS)


@dataclass(frozen=True)
class Found:
    """What a search found. ranked: fitting layouts by time; looked_at: layouts that the rules allow; too_large: how
    many of them do not fit into memory, and smallest: the one that misses by least."""

    ranked: tuple[Prediction, ...]
    looked_at: int
    too_large: int
    smallest: tuple[Layout, Memory] | None = field(default=None)


def search(job: Job, times: OpTimes, calibration: Calibration, space: Space | None = None) -> Found:
    """Every layout of `space`, ranked. Raises InputError where the rules allow none at all."""
    space = space or Space()
    limit = limit_bytes(job)
    fitting: list[tuple[Layout, Memory]] = []
    smallest: tuple[Layout, Memory] | None = None
    too_large = 0
    for group in layout_groups(job, space):
        # Of layouts that differ in mbs alone memory grows with it, and interleaving only adds to it.
        full = False
        for layout in group:
            needed = None if full else memory(job, layout, calibration)
            if needed is not None and needed.total <= limit:
                fitting.append((layout, needed))
                continue
            too_large += 1
            if needed is not None:
                full = full or layout.interleave == 1
                if smallest is None or needed.total < smallest[1].total:
                    smallest = (layout, needed)
    if not fitting and smallest is None:
        raise InputError("plan", _nothing(job), "a gbs and layers with more divisors, or --allow-uneven")
    planner = Planner(job, times, calibration)
    planner.prepare({(layout.tp, layout.mbs, layout.sequence_parallel) for layout, _ in fitting})
    ranked = [planner.with_memory(layout, needed) for layout, needed in fitting]
    ranked.sort(key=lambda p: (p.sec_per_it, p.memory.total))
    return Found(tuple(ranked), len(fitting) + too_large, too_large, smallest)


def _nothing(job: Job) -> str:
    return f"no dp · tp · pp = {job.gpus} GPUs for gbs {job.gbs} and {job.shape.layers} layers keeps every rule"


def layout_groups(job: Job, space: Space) -> Iterator[list[Layout]]:
    """Possible layouts, in groups that differ in mbs (ascending) and interleave alone."""
    for tp in _tensor_degrees(job, space):
        for pp in _allowed(divisors(job.gpus // tp), space.pp):
            dp = job.gpus // (tp * pp)
            if job.gbs % dp or (space.dp and dp not in space.dp):
                continue
            sizes = [mbs for mbs in divisors(job.gbs // dp) if mbs <= space.mbs_limit]
            sizes = _allowed(sizes, space.mbs)
            partition = _partition(job, pp, uneven=space.uneven)
            if partition is None:
                continue
            for zero in space.zero:
                if (zero > 1 and pp > 1) or (zero > 0 and dp == 1):
                    continue
                for recompute in space.recompute:
                    for parallel in _sequence_choices(job, space, tp):
                        base = Layout(dp, tp, pp, 1, 1, zero, recompute, parallel, partition)
                        group = list(_micro_batches(job, base, sizes, space))
                        if group:
                            yield group


def _micro_batches(job: Job, base: Layout, sizes: list[int], space: Space) -> Iterator[Layout]:
    for mbs in sizes:
        plain = replace(base, mbs=mbs)
        if job.rampup_step and job.rampup_step % (base.dp * mbs):
            continue
        if not space.interleave or 1 in space.interleave:
            yield plain
        if base.pp == 1 or base.partition != "layers" or plain.micro_batches(job.gbs) % base.pp:
            continue
        for chunks in _allowed(divisors(job.shape.layers // base.pp), space.interleave):
            if chunks > 1:
                yield replace(plain, interleave=chunks)


def _tensor_degrees(job: Job, space: Space) -> list[int]:
    """Degrees that stay in a node and keep every strict rule of tensor parallelism."""
    found = []
    for tp in _allowed(divisors(job.cluster.gpus_per_node), space.tp):
        if job.gpus % tp:
            continue
        alone = Layout(dp=job.gpus // tp, tp=tp, pp=1, mbs=1)
        # The batch and the stages are somebody else's to check.
        if is_possible(replace(job, gbs=job.gpus // tp, rampup_step=0), alone):
            found.append(tp)
    return found


def _partition(job: Job, pp: int, *, uneven: bool) -> str | None:
    layers = job.shape.layers
    if layers < pp:
        return None
    if layers % pp == 0:
        return "layers"
    if (layers + 2) % pp == 0:
        return "embedding"
    return "uneven" if uneven else None


def _sequence_choices(job: Job, space: Space, tp: int) -> tuple[bool, ...]:
    if tp == 1 or job.shape.seq % tp:
        return (False,)
    return (False, True) if space.sequence_parallel is None else (space.sequence_parallel,)


def _allowed(values: list[int], wanted: tuple[int, ...]) -> list[int]:
    return [value for value in values if not wanted or value in wanted]


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
