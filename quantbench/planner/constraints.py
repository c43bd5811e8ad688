"""What a layout must keep, and what it had better keep: every rule a declared check with a message that says what to
change.

`strict` rules make a layout impossible (the run would stop with an error). The others cost time or waste GPUs.
Sources: Megatron-LM (megatron/arguments.py, fused_softmax.py), DeepSpeed's pipeline engine, and the BigScience
documents' sanity checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantbench.megatron import softmax_objections
from quantbench.planner.layout import ALIGNED_ELEMENTS, Job, Layout, padded_vocab
from quantbench.units import percent
from quantbench.workload import Softmax

Check = Callable[[Job, Layout], str | None]


@dataclass(frozen=True)
class Constraint:
    """A rule. name: short, for tables; rule: the predicate in the field's words; check: None where it is kept, else
    what is wrong and what to change."""

    name: str
    rule: str
    strict: bool
    check: Check


@dataclass(frozen=True)
class Violation:
    """A rule that a layout breaks. message: what is wrong and what to change."""

    constraint: Constraint
    message: str

    def __str__(self) -> str:
        return f"{self.constraint.name}: {self.message}"


def violations(job: Job, layout: Layout) -> tuple[Violation, ...]:
    """Every rule that the layout breaks, strict ones first."""
    found = []
    for constraint in sorted(CONSTRAINTS, key=lambda c: not c.strict):
        message = constraint.check(job, layout)
        if message is not None:
            found.append(Violation(constraint, message))
    return tuple(found)


def is_possible(job: Job, layout: Layout) -> bool:
    """Whether every strict rule is kept."""
    return all(c.check(job, layout) is None for c in _STRICT)


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples around a value, for messages.

    >>> nearest_multiples(192, 128), nearest_multiples(70, 12)
    ('128 or 256', '60 or 72')
    """
    low = value // divisor * divisor
    return f"{low + divisor}" if low == 0 else f"{low} or {low + divisor}"


def _world(job: Job, layout: Layout) -> str | None:
    product = layout.dp * layout.tp * layout.pp
    if product == job.gpus:
        return None
    message = f"dp {layout.dp} · tp {layout.tp} · pp {layout.pp} = {product} GPUs, and there are {job.gpus}"
    rest = layout.tp * layout.pp
    if job.gpus % rest == 0:
        return f"{message}; dp = {job.gpus // rest} uses them all"
    return f"{message}; tp · pp must divide {job.gpus}"


def _batch(job: Job, layout: Layout) -> str | None:
    samples = layout.mbs * layout.dp
    if job.gbs % samples == 0:
        return None
    return (
        f"gbs {job.gbs} is no multiple of mbs {layout.mbs} · dp {layout.dp} = {samples} ({job.gbs % samples} left "
        f"over); take gbs = {nearest_multiples(job.gbs, samples)}, or an mbs that divides gbs / dp"
    )


def _stages(job: Job, layout: Layout) -> str | None:
    layers, pp = job.shape.layers, layout.pp
    if layers < pp:
        return f"{layers} layers cannot fill {pp} stages; take pp = {layers} or less"
    if layout.partition == "uneven" or pp == 1:
        return None
    if layout.partition == "embedding":
        if (layers + 2) % pp == 0:
            return None
        choice = nearest_multiples(layers + 2, pp)
        return f"{layers} layers and 2 embeddings over {pp} stages; take layers + 2 = {choice}"
    if layers % pp == 0:
        return None
    return (
        f"{layers} layers over {pp} stages leave {layers % pp} over; take layers = {nearest_multiples(layers, pp)}, or "
        f"a pp that divides {layers}"
    )


def _interleave(job: Job, layout: Layout) -> str | None:
    chunks = layout.interleave
    if chunks == 1:
        return None
    if layout.pp == 1:
        return f"interleave {chunks} without pipeline stages; take interleave = 1"
    if layout.partition != "layers" or job.shape.layers % (layout.pp * chunks):
        return (
            f"{job.shape.layers} layers cannot be cut into {layout.pp} stages of {chunks} equal chunks; take an "
            f"interleave that divides {job.shape.layers // layout.pp}"
        )
    count = layout.micro_batches(job.gbs)
    if count % layout.pp:
        return (
            f"interleaving runs micro-batches in groups of pp {layout.pp}, and there are {count}; take a gbs or mbs "
            f"that gives {nearest_multiples(count, layout.pp)}, or interleave = 1"
        )
    return None


def _heads(job: Job, layout: Layout) -> str | None:
    hidden, heads = job.shape.hidden, job.shape.heads
    if job.shape.head_dim * heads != hidden and hidden % heads:
        return f"hidden {hidden} is no multiple of heads {heads}; take hidden = {nearest_multiples(hidden, heads)}"
    return None


def _divisible(name: str) -> Check:
    def check(job: Job, layout: Layout) -> str | None:
        value = getattr(job.shape, name)
        if value % layout.tp == 0:
            return None
        return f"{name} {value} is no multiple of tp {layout.tp}; take {name} = {nearest_multiples(value, layout.tp)}"

    return check


def _kv_heads(job: Job, layout: Layout) -> str | None:
    kv, tp = job.shape.kv_heads, layout.tp
    if kv % tp == 0 or tp % kv == 0:
        return None
    return f"kv_heads {kv} and tp {tp}: neither divides the other; take a tp that divides {kv}, or a multiple of it"


def _node(job: Job, layout: Layout) -> str | None:
    limit = job.cluster.gpus_per_node
    if layout.tp <= limit:
        return None
    return f"tp {layout.tp} reaches beyond a node of {limit} GPUs, over its network; take tp <= {limit} and more pp"


def _sequence(job: Job, layout: Layout) -> str | None:
    if not layout.sequence_parallel or job.shape.seq % layout.tp == 0:
        return None
    seq, tp = job.shape.seq, layout.tp
    return f"sequence parallelism needs seq {seq} divisible by tp {tp}; take seq = {nearest_multiples(seq, tp)}"


def _zero(job: Job, layout: Layout) -> str | None:
    if layout.zero < 2 or layout.pp == 1:
        return None
    return (
        f"ZeRO-{layout.zero} shards what pipeline stages accumulate over micro-batches, and DeepSpeed refuses it with "
        f"pp {layout.pp}; take zero = 1, or pp = 1"
    )


def _vocabulary(job: Job, layout: Layout) -> str | None:
    vocab = job.shape.vocab
    padded = padded_vocab(vocab, layout.tp)
    if vocab == padded:
        return None
    return f"vocab {vocab} is no multiple of 128 · tp = {128 * layout.tp}; Megatron pads it to {padded}"


def _aligned(job: Job, layout: Layout) -> str | None:
    shape = job.shape
    if shape.head_dim % ALIGNED_ELEMENTS == 0:
        return None
    better = [h for h in range(layout.tp, 2 * shape.heads, layout.tp) if shape.hidden % (h * ALIGNED_ELEMENTS) == 0]
    choice = f"; heads = {min(better, key=lambda h: abs(h - shape.heads))} is aligned" if better else ""
    return (
        f"head_dim {shape.head_dim} is no multiple of {ALIGNED_ELEMENTS}, so rows of q, k and v are not 16-byte "
        f"aligned and attention's products run several times slower{choice}"
    )


def _fused_softmax(job: Job, layout: Layout) -> str | None:
    shape = job.shape
    if shape.attention == "flash" or shape.softmax != "megatron":
        return None
    heads = max(1, shape.heads // layout.tp)
    mask = "causal" if shape.causal else "full"
    reasons = softmax_objections(
        Softmax(heads * layout.mbs, shape.seq, shape.seq, dtype=shape.dtype, mask=mask, mask_batch=layout.mbs)
    )
    if not reasons:
        return None
    return f"the fused softmax does not run: {'; '.join(reasons)}; take heads, tp or mbs that put this right"


def _rampup(job: Job, layout: Layout) -> str | None:
    step = job.rampup_step
    if not step or step % (layout.dp * layout.mbs) == 0:
        return None
    samples = layout.dp * layout.mbs
    return (
        f"the batch grows by {step} samples, no multiple of mbs {layout.mbs} · dp {layout.dp} = {samples}; take a step "
        f"of {nearest_multiples(step, samples)}, or a dp · mbs that divides {step}"
    )


def _filled(job: Job, layout: Layout) -> str | None:
    count = layout.micro_batches(job.gbs)
    if layout.pp == 1 or count >= 4 * layout.pp:
        return None
    idle = (layout.pp - 1) / (count * layout.interleave + layout.pp - 1)
    return (
        f"{count} micro-batches through {layout.pp} stages leave each idle {percent(idle)} of the time; take a smaller "
        "mbs or pp, a larger gbs, or interleaving"
    )


#: strict rules that are the software's, not arithmetic's: other frameworks run what breaks them
OF_SOFTWARE = frozenset({"gbs", "interleave", "tp in a node", "ZeRO with stages", "ramp-up"})
CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("hidden % heads", "hidden % heads == 0", True, _heads),
    Constraint("gpus", "dp * tp * pp == gpus", True, _world),
    Constraint("gbs", "gbs % (mbs * dp) == 0", True, _batch),
    Constraint("stages", "layers % pp == 0 (or layers + 2 with embeddings counted as layers)", True, _stages),
    Constraint("interleave", "layers % (pp * interleave) == 0 and micro-batches % pp == 0", True, _interleave),
    Constraint("heads % tp", "heads % tp == 0", True, _divisible("heads")),
    Constraint("ffn % tp", "ffn % tp == 0", True, _divisible("ffn")),
    Constraint("hidden % tp", "hidden % tp == 0", True, _divisible("hidden")),
    Constraint("kv_heads", "kv_heads % tp == 0 or tp % kv_heads == 0", True, _kv_heads),
    Constraint("tp in a node", "tp <= gpus per node", True, _node),
    Constraint("sequence parallel", "seq % tp == 0 with sequence parallelism", True, _sequence),
    Constraint("ZeRO with stages", "zero <= 1 with pp > 1", True, _zero),
    Constraint("ramp-up", "batch-size step % (mbs * dp) == 0", True, _rampup),
    Constraint("vocab", "vocab % (128 * tp) == 0", False, _vocabulary),
    Constraint("head_dim % 8", "head_dim % 8 == 0", False, _aligned),
    Constraint("fused softmax", "16 < seq <= 16384, seq % 4 == 0, (heads / tp * mbs) % 4 == 0", False, _fused_softmax),
    Constraint("bubble", "micro-batches >= 4 * pp", False, _filled),
)
_STRICT = tuple(c for c in CONSTRAINTS if c.strict)
