"""Checks layouts against the divisibility and framework rules of Megatron-DeepSpeed.

Sources: Megatron-LM (megatron/arguments.py, fused_softmax.py), DeepSpeed's pipeline engine, and the
    sanity checks in
the BigScience documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantbench.megatron import softmax_objections
from quantbench.planner.calibration import STACKS
from quantbench.planner.layout import Job, Layout
from quantbench.quantization import ALIGNED_ELEMENTS
from quantbench.units import percent
from quantbench.workload import Softmax
from quantbench.workload.parameters import padded_vocab


@dataclass(frozen=True)
class Constraint:
    """Rule for layouts: short name for tables, condition as text, and whether a layout that breaks
    it cannot run.
    """

    name: str
    rule: str
    strict: bool = True


@dataclass(frozen=True)
class Violation:
    """Rule broken by a layout. message: the conflict and the suggested change."""

    constraint: Constraint
    message: str

    def __str__(self) -> str:
        return f"{self.constraint.name}: {self.message}"


_GPUS = Constraint("gpus", "dp * tp * pp * cp == gpus")
_BATCH = Constraint("gbs", "gbs % (mbs * dp) == 0")
_STAGES = Constraint("stages", "layers % pp == 0 (or layers + 2 with embeddings counted as layers)")
_INTERLEAVE = Constraint(
    "interleave",
    "layers (+ 2) % (pp * interleave) == 0 unless stages are uneven, and micro-batches % pp == 0",
)
_DIVISIBLE = tuple(
    Constraint(f"{name} % tp", f"{name} % tp == 0") for name in ("heads", "ffn", "hidden")
)
_KV_HEADS = Constraint("kv_heads", "kv_heads % tp == 0 or tp % kv_heads == 0")
_NODE = Constraint("tp in a node", "tp <= gpus per node")
_SEQUENCE = Constraint("sequence parallel", "seq % tp == 0 with sequence parallelism")
_CONTEXT = Constraint("context parallel", "seq % (2 * cp * tp) == 0")
_EXPERTS = Constraint("experts", "experts % ep == 0, (dp * cp * tp) % ep == 0")
_ZERO = Constraint(
    "ZeRO with stages", "zero <= 1 with pp > 1, unless the stack combines them (torchtitan)"
)
_VOCAB = Constraint("vocab", "vocab % (128 * tp) == 0", strict=False)
_ALIGNED = Constraint("head_dim % 8", "head_dim % 8 == 0", strict=False)
_SOFTMAX = Constraint(
    "fused softmax", "16 < seq <= 16384, seq % 4 == 0, (heads / tp * mbs) % 4 == 0", strict=False
)
_BUBBLE = Constraint("bubble", "micro-batches >= 4 * pp", strict=False)
CONSTRAINTS = (
    _GPUS, _BATCH, _STAGES, _INTERLEAVE, *_DIVISIBLE, _KV_HEADS, _NODE, _SEQUENCE, _CONTEXT, _EXPERTS,
    _ZERO, _VOCAB, _ALIGNED, _SOFTMAX, _BUBBLE,
)  # fmt: skip
#: names of strict rules specific to one framework; other frameworks run layouts that break them
OF_SOFTWARE = frozenset(rule.name for rule in (_BATCH, _INTERLEAVE, _NODE, _ZERO))


def violations(job: Job, layout: Layout) -> tuple[Violation, ...]:
    """Returns every rule that the layout breaks, strict ones first, in the order of CONSTRAINTS."""
    return (*strict_violations(job, layout), *(Violation(*found) for found in _costly(job, layout)))


def strict_violations(job: Job, layout: Layout) -> tuple[Violation, ...]:
    """Returns every strict rule that the layout breaks, in the order of CONSTRAINTS."""
    return tuple(Violation(*found) for found in _strictly_broken(job, layout))


def is_possible(job: Job, layout: Layout) -> bool:
    """Returns True if the layout breaks no strict rule."""
    return next(_strictly_broken(job, layout), None) is None


def _strictly_broken(job: Job, layout: Layout) -> Iterator[tuple[Constraint, str]]:
    """Yields (rule, message) for every broken strict rule."""
    shape, dp, tp, pp, mbs = job.shape, layout.dp, layout.tp, layout.pp, layout.mbs
    if layout.gpus != job.gpus:
        rest, cp = tp * pp * layout.cp, f" · cp {layout.cp}" if layout.cp > 1 else ""
        names = f"tp · pp{' · cp' if cp else ''}"
        change = (
            f"take {names} that divides {job.gpus}"
            if job.gpus % rest
            else f"take dp = {job.gpus // rest}"
        )
        yield (
            _GPUS,
            f"dp {dp} · tp {tp} · pp {pp}{cp} = {layout.gpus} GPUs, and there are {job.gpus}; {change}",
        )
    left_over = job.gbs % (mbs * dp)
    if left_over:
        text = f"gbs {job.gbs} is no multiple of mbs {mbs} · dp {dp} = {mbs * dp} ({left_over} left over)"
        yield (
            _BATCH,
            f"{text}; take gbs = {_multiples(job.gbs, mbs * dp)}, or an mbs that divides gbs / dp",
        )
    message = _stages(shape.layers, layout)
    if message:
        yield _STAGES, message
    if layout.interleave > 1:
        message = _interleave(shape.layers, layout, layout.micro_batches(job.gbs))
        if message:
            yield _INTERLEAVE, message
    for rule, name in zip(_DIVISIBLE, ("heads", "ffn", "hidden"), strict=True):
        value = getattr(shape, name)
        if value % tp:
            text = f"{name} {value} is no multiple of tp {tp}; take a tp that divides it"
            yield rule, f"{text}, or {name} = {_multiples(value, tp)}"
    kv = shape.kv_heads
    if kv % tp and tp % kv:
        text = f"kv_heads {kv} and tp {tp}: neither divides the other"
        yield _KV_HEADS, f"{text}; take a tp that divides {kv}, or a multiple of it"
    limit = job.cluster.gpus_per_node
    if tp > limit:
        text = f"tp {tp} reaches beyond a node of {limit} GPUs, over its network"
        yield _NODE, f"{text}; take tp <= {limit} and more pp"
    if layout.sequence_parallel and shape.seq % tp:
        text = f"sequence parallelism needs seq {shape.seq} divisible by tp {tp}"
        yield _SEQUENCE, f"{text}; take seq = {_multiples(shape.seq, tp)}"
    chunks = 2 * layout.cp * (tp if layout.sequence_parallel else 1)
    if layout.cp > 1 and shape.seq % chunks:
        text = f"seq {shape.seq} cannot be cut into {chunks} chunks for cp {layout.cp}"
        yield _CONTEXT, f"{text}; take seq = {_multiples(shape.seq, chunks)}"
    ranks = layout.replicas * tp
    if layout.ep > 1 and (not shape.experts or shape.experts % layout.ep):
        change = f"a divisor of {shape.experts}" if shape.experts else "ep = 1"
        yield _EXPERTS, f"{shape.experts} experts cannot be shared by ep {layout.ep}; take {change}"
    elif ranks % layout.ep:
        text = f"ep {layout.ep} of {ranks} tensor- and data-parallel GPUs"
        yield _EXPERTS, f"{text}; take a divisor of {ranks}"
    stack = STACKS.get(job.stack)
    if layout.zero > 1 and pp > 1 and not (stack is not None and stack.stages_with_zero):
        text = f"ZeRO-{layout.zero} shards what pipeline stages accumulate over micro-batches, and"
        text += f" {job.stack or 'DeepSpeed'} refuses it with pp {pp}"
        yield _ZERO, f"{text}; take zero = 1, pp = 1, or a stack that combines them (torchtitan)"


def _stages(layers: int, layout: Layout) -> str:
    """Returns why the layers do not divide into the layout's stages; "" if they do."""
    pp, counted = layout.pp, layers
    if layers < pp:
        return f"{layers} layers cannot fill {pp} stages; take pp = {layers} or less"
    if layout.partition == "uneven" or pp == 1:
        return ""
    if layout.partition == "embedding":
        counted = layers + 2
        what = f"{layers} layers and 2 embeddings over {pp} stages; take layers + 2 = {_multiples(counted, pp)}"
    else:
        what = f"{layers} layers over {pp} stages leave {layers % pp} over; take layers = {_multiples(layers, pp)}, or "
        what += f"a pp that divides {layers}, or stages of different length (--allow-uneven)"
    return what if counted % pp else ""


def chunk_layers(layers: int, layout: Layout) -> int:
    """Returns the layers to divide into chunks, with the embeddings if the partition counts
    them.
    """
    return layers + 2 if layout.partition == "embedding" else layers


def _interleave(layers: int, layout: Layout, micro_batches: int) -> str:
    """Returns why the layout's stages cannot be interleaved; "" if they can."""
    pp, chunks = layout.pp, layout.interleave
    if pp == 1:
        return f"interleave {chunks} without pipeline stages; take interleave = 1"
    counted = chunk_layers(layers, layout)
    if layout.partition == "uneven" and layers < pp * chunks:
        return f"{layers} layers cannot fill {pp} stages of {chunks} chunks; take interleave = {layers // pp} or less"
    if layout.partition != "uneven" and counted % (pp * chunks):
        each = counted // pp
        what = f"{layers} layers{' and 2 embeddings' if counted > layers else ''}"
        change = f"an interleave that divides {each}" if each > 1 else "interleave = 1"
        return f"{what} cannot be cut into {pp} stages of {chunks} equal chunks; take {change}"
    if micro_batches % pp:
        return (
            f"interleaving runs micro-batches in groups of pp {pp}, and there are {micro_batches}; take a gbs or mbs "
            f"that gives {_multiples(micro_batches, pp)}, or interleave = 1"
        )
    return ""


def _costly(job: Job, layout: Layout) -> Iterator[tuple[Constraint, str]]:
    """Yields (rule, message) for every broken rule that is not strict."""
    shape, tp = job.shape, layout.tp
    padded = padded_vocab(shape.vocab, tp)
    if shape.vocab != padded:
        yield (
            _VOCAB,
            f"vocab {shape.vocab} is no multiple of 128 · tp = {128 * tp}; Megatron pads it to {padded}",
        )
    if shape.head_dim % ALIGNED_ELEMENTS:
        better = [
            h for h in range(tp, 2 * shape.heads, tp) if shape.hidden % (h * ALIGNED_ELEMENTS) == 0
        ]
        choice = (
            f"; heads = {min(better, key=lambda h: abs(h - shape.heads))} is aligned"
            if better
            else ""
        )
        text = f"head_dim {shape.head_dim} is no multiple of {ALIGNED_ELEMENTS}, so rows of q, k and v are not 16-byte"
        yield _ALIGNED, f"{text} aligned and attention's products run several times slower{choice}"
    if shape.attention != "flash" and shape.softmax == "megatron":
        batch, mask = max(1, shape.heads // tp) * layout.mbs, "causal" if shape.causal else "full"
        reasons = softmax_objections(
            Softmax(
                batch, shape.seq, shape.seq, dtype=shape.dtype, mask=mask, mask_batch=layout.mbs
            )
        )
        if reasons:
            text = f"the fused softmax does not run: {'; '.join(reasons)}"
            yield _SOFTMAX, f"{text}; take heads, tp or mbs that put this right"
    count = layout.micro_batches(job.gbs)
    if layout.pp > 1 and count < 4 * layout.pp:
        idle = (layout.pp - 1) / (count * layout.interleave + layout.pp - 1)
        text = f"{count} micro-batches through {layout.pp} stages leave each idle {percent(idle)} of the time"
        yield _BUBBLE, f"{text}; take a smaller mbs or pp, a larger gbs, or interleaving"


def _multiples(value: int, divisor: int) -> str:
    """Formats the multiples of `divisor` around a value.

    >>> _multiples(192, 128), _multiples(70, 12)
    ('128 or 256', '60 or 72')
    """
    low = value // divisor * divisor
    return f"{low + divisor}" if low == 0 else f"{low} or {low + divisor}"
