"""Checks parallel layouts against the rules of the model and of the training framework.

`violations` returns each broken rule with a suggested change. A layout that breaks a strict rule
cannot run. A layout that breaks a costly rule runs, but slower than a similar layout that keeps the
rule. Most rules are those of Megatron-DeepSpeed. Sources: Megatron-LM (megatron/arguments.py,
fused_softmax.py), DeepSpeed's pipeline engine, and the sanity checks in BigScience's documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quantbench.megatron import fused_softmax_failures
from quantbench.planner.calibration import software
from quantbench.planner.layout import Job, Layout
from quantbench.units import percent
from quantbench.workload import Softmax
from quantbench.workload.dtypes import ALIGNED_ELEMENTS
from quantbench.workload.ops import multiples_around
from quantbench.workload.parameters import padded_vocab

# Conditions of the strict and of the costly rules, by rule name.
_STRICT = {
    "gpus": "dp * tp * pp * cp == gpus",
    "gbs": "gbs % (mbs * dp) == 0",
    "stages": "layers % pp == 0 (or layers + 2 with embeddings counted as layers)",
    "interleave": "layers (+ 2) % (pp * interleave) == 0 unless stages are uneven, and "
    "micro-batches % pp == 0",
    "heads % tp": "heads % tp == 0",
    "ffn % tp": "ffn % tp == 0",
    "hidden % tp": "hidden % tp == 0",
    "kv_heads": "kv_heads % tp == 0 or tp % kv_heads == 0",
    "tp in a node": "tp <= gpus per node",
    "sequence parallel": "seq % tp == 0 with sequence parallelism",
    "context parallel": "seq % (2 * cp) == 0, % (2 * cp * tp) with sequence parallelism",
    "experts": "experts % ep == 0, (dp * cp * tp) % ep == 0",
    "ZeRO with stages": "zero <= 1 with pp > 1, unless the stack combines them (torchtitan)",
}
_COSTLY = {
    "vocab": "vocab % (128 * tp) == 0",
    "head_dim % 8": "head_dim % 8 == 0",
    "fused softmax": "16 < seq <= 16384, seq % 4 == 0, (heads / tp * mbs) % 4 == 0",
    "bubble": "micro-batches >= 4 * pp",
}
#: Strict rules that only some frameworks have. A layout that breaks such a rule may run in another
#: framework.
OF_SOFTWARE = ("gbs", "interleave", "tp in a node", "ZeRO with stages")


@dataclass(frozen=True)
class Violation:
    """A rule that a layout breaks.

    name: name of the rule.
    rule: condition that a layout must meet.
    strict: True if a layout that breaks the rule cannot run, False if it only runs slower.
    message: description of the conflict, and the suggested change.
    """

    name: str
    rule: str
    strict: bool
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


def violations(job: Job, layout: Layout) -> list[Violation]:
    """Returns all rules that the layout breaks, strict rules first."""
    found = strict_violations(job, layout)
    for name, message in _costly(job, layout):
        found.append(Violation(name, _COSTLY[name], False, message))
    return found


def strict_violations(job: Job, layout: Layout) -> list[Violation]:
    """Returns all strict rules that the layout breaks."""
    broken = _strictly_broken(job, layout)
    return [Violation(name, _STRICT[name], True, message) for name, message in broken]


def is_possible(job: Job, layout: Layout) -> bool:
    """Returns whether the layout breaks no strict rule."""
    return next(_strictly_broken(job, layout), None) is None


def _strictly_broken(job: Job, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields (name, message) for every strict rule that the layout breaks."""
    shape = job.shape
    tp = layout.tp
    pp = layout.pp
    if layout.gpus != job.gpus:
        rest = tp * pp * layout.cp
        factors = f"tp {tp} · pp {pp}"
        names = "tp · pp"
        if layout.cp > 1:
            factors += f" · cp {layout.cp}"
            names += " · cp"
        change = f"dp = {job.gpus // rest}"
        if job.gpus % rest:
            change = f"{names} that divides {job.gpus}"
        text = f"dp {layout.dp} · {factors} = {layout.gpus} GPUs, and there are {job.gpus}"
        yield "gpus", f"{text}; take {change}"
    step = layout.mbs * layout.dp
    left_over = job.gbs % step
    if left_over:
        text = f"gbs {job.gbs} is no multiple of mbs {layout.mbs} · dp {layout.dp} = {step}"
        change = f"take gbs = {multiples_around(job.gbs, step)}, or an mbs that divides gbs / dp"
        yield "gbs", f"{text} ({left_over} left over); {change}"
    message = _stages(shape.layers, layout)
    if message:
        yield "stages", message
    if layout.interleave > 1:
        message = _interleave(shape.layers, layout, layout.micro_batches(job.gbs))
        if message:
            yield "interleave", message
    for name in ("heads", "ffn", "hidden"):
        value = getattr(shape, name)
        if value % tp:
            text = f"{name} {value} is no multiple of tp {tp}; take a tp that divides it"
            yield f"{name} % tp", f"{text}, or {name} = {multiples_around(value, tp)}"
    kv = shape.kv_heads
    if kv % tp and tp % kv:
        text = f"kv_heads {kv} and tp {tp}: neither divides the other"
        yield "kv_heads", f"{text}; take a tp that divides {kv}, or a multiple of it"
    limit = job.cluster.gpus_per_node
    if tp > limit:
        text = f"tp {tp} reaches beyond a node of {limit} GPUs, over its network"
        yield "tp in a node", f"{text}; take tp <= {limit} and more pp"
    if layout.sequence_parallel and shape.seq % tp:
        text = f"sequence parallelism needs seq {shape.seq} divisible by tp {tp}"
        yield "sequence parallel", f"{text}; take seq = {multiples_around(shape.seq, tp)}"
    chunks = 2 * layout.cp * (tp if layout.sequence_parallel else 1)
    if layout.cp > 1 and shape.seq % chunks:
        text = f"seq {shape.seq} cannot be cut into {chunks} chunks for cp {layout.cp}"
        yield "context parallel", f"{text}; take seq = {multiples_around(shape.seq, chunks)}"
    ranks = layout.replicas * tp
    if layout.ep > 1 and (not shape.experts or shape.experts % layout.ep):
        change = f"a divisor of {shape.experts}" if shape.experts else "ep = 1"
        text = f"{shape.experts} experts cannot be shared by ep {layout.ep}"
        yield "experts", f"{text}; take {change}"
    elif ranks % layout.ep:
        text = f"ep {layout.ep} of {ranks} tensor- and data-parallel GPUs"
        yield "experts", f"{text}; take a divisor of {ranks}"
    if layout.zero > 1 and pp > 1 and not software(job.stack).stages_with_zero:
        text = f"ZeRO-{layout.zero} shards what pipeline stages accumulate over micro-batches, and"
        text += f" {job.stack or 'DeepSpeed'} refuses it with pp {pp}"
        change = "take zero = 1, pp = 1, or a stack that combines them (torchtitan)"
        yield "ZeRO with stages", f"{text}; {change}"


def _stages(layers: int, layout: Layout) -> str:
    """Returns why the layers do not divide into the layout's stages; "" if they do.

    layers: number of layers of the model.
    """
    pp = layout.pp
    if layers < pp:
        return f"{layers} layers cannot fill {pp} stages; take pp = {layers} or less"
    counted = chunk_layers(layers, layout)
    if layout.partition == "uneven" or counted % pp == 0:
        return ""
    multiples = multiples_around(counted, pp)
    if counted > layers:
        what = f"{layers} layers and 2 embeddings over {pp} stages"
        return f"{what}; take layers + 2 = {multiples}"
    what = f"{layers} layers over {pp} stages leave {layers % pp} over; take layers = {multiples}"
    change = f"a pp that divides {layers}, or stages of different length (--allow-uneven)"
    return f"{what}, or {change}"


def chunk_layers(layers: int, layout: Layout) -> int:
    """Returns the number of layers that a layout divides into stages and chunks.

    With the partition `embedding`, embedding and logits count as one layer each.

    layers: number of layers of the model.
    """
    return layers + 2 if layout.partition == "embedding" else layers


def _interleave(layers: int, layout: Layout, micro_batches: int) -> str:
    """Returns why the layout's stages cannot be interleaved; "" if they can.

    An interleaved stage computes several chunks of layers from different depths of the model.

    layers: number of layers of the model.
    micro_batches: micro-batches per pipeline and iteration.
    """
    pp = layout.pp
    chunks = layout.interleave
    if pp == 1:
        return f"interleave {chunks} without pipeline stages; take interleave = 1"
    counted = chunk_layers(layers, layout)
    if layout.partition == "uneven":
        if layers < pp * chunks:
            what = f"{layers} layers cannot fill {pp} stages of {chunks} chunks"
            return f"{what}; take interleave = {layers // pp} or less"
    elif counted % (pp * chunks):
        each = counted // pp
        what = f"{layers} layers{' and 2 embeddings' if counted > layers else ''}"
        change = f"an interleave that divides {each}" if each > 1 else "interleave = 1"
        return f"{what} cannot be cut into {pp} stages of {chunks} equal chunks; take {change}"
    if micro_batches % pp:
        what = (
            f"interleaving runs micro-batches in groups of pp {pp}, and there are {micro_batches}"
        )
        change = f"a gbs or mbs that gives {multiples_around(micro_batches, pp)}, or interleave = 1"
        return f"{what}; take {change}"
    return ""


def _costly(job: Job, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yields (name, message) for every costly rule that the layout breaks."""
    shape = job.shape
    tp = layout.tp
    padded = padded_vocab(shape.vocab, tp)
    if shape.vocab != padded:
        text = f"vocab {shape.vocab} is no multiple of 128 · tp = {128 * tp}"
        yield "vocab", f"{text}; Megatron pads it to {padded}"
    if shape.head_dim % ALIGNED_ELEMENTS:
        text = f"head_dim {shape.head_dim} is no multiple of {ALIGNED_ELEMENTS}, so rows of q, k"
        text += " and v are not 16-byte aligned and attention's products run several times slower"
        counts = range(tp, 2 * shape.heads, tp)
        better = [heads for heads in counts if shape.hidden % (heads * ALIGNED_ELEMENTS) == 0]
        if better:
            nearest = min(better, key=lambda heads: abs(heads - shape.heads))
            text += f"; heads = {nearest} is aligned"
        yield "head_dim % 8", text
    if shape.attention != "flash" and shape.softmax == "megatron":
        reasons = fused_softmax_failures(
            Softmax(
                max(1, shape.heads // tp) * layout.mbs,
                shape.seq,
                shape.seq,
                dtype=shape.dtype,
                mask="causal" if shape.causal else "full",
                mask_batch=layout.mbs,
            )
        )
        if reasons:
            text = f"the fused softmax does not run: {'; '.join(reasons)}"
            yield "fused softmax", f"{text}; take heads, tp or mbs that put this right"
    count = layout.micro_batches(job.gbs)
    if layout.pp > 1 and count < 4 * layout.pp:
        idle = (layout.pp - 1) / (count * layout.interleave + layout.pp - 1)
        text = f"{count} micro-batches through {layout.pp} stages leave each idle"
        text += f" {percent(idle)} of the time"
        yield "bubble", f"{text}; take a smaller mbs or pp, a larger gbs, or interleaving"
