"""From a row of a table to a job and a layout: empty cells are filled from what is known of the document, from options,
or from what is usual, in that order, and each filling is recorded."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.device import default_attention, lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.interconnect import Cluster, cluster, reference_cluster
from quantbench.planner.formulas import layer_parameters
from quantbench.planner.layout import ALIGNED_ELEMENTS, Assumption, Case, Job, Layout, padded_vocab
from quantbench.planner.table import TableRow
from quantbench.workload import TransformerShape
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

_WHO = "plan --rows"
_RATE = re.compile(r"[0-9]+ tokens/s")
# Megatron's GPT vocabulary, padded for 8 tensor-parallel ranks.
_USUAL_VOCAB = 51200
_USUAL_SEQ = 2048
_USUAL_HEAD_DIM = 128
#: why a micro-batch size is 1 that nobody knows
NOT_TOLD = "not told: the smallest"
#: hidden over layers of GPT-3 175B (12288 / 96), for a model of which only the size is known
_USUAL_ASPECT = 128


@dataclass(frozen=True)
class Given:
    """What options say about rows that do not say it themselves; None and "" leave it open.

    cells: our cell names → values. cluster, gpu: by name. as_typed: leave known typing mistakes uncorrected.
    """

    cells: dict[str, Any] = field(default_factory=dict)
    cluster: str = ""
    gpu: str = ""
    gpus_per_node: int | None = None
    node_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    dp_overlap: float = 0.0
    as_typed: bool = False


class _Filling:
    """A row's cells with what filled the empty ones."""

    def __init__(self, row: TableRow, given: Given) -> None:
        self.row = row
        self.context = _context_of(row)
        self.given = given
        self.assumed: list[Assumption] = []

    def corrected(self) -> None:
        """Put right what the document shows to be typed wrong."""
        for correction in self.context.get("correction", ()):
            if not self.given.as_typed and correction["line"] == self.row.line:
                typed = getattr(self.row, correction["cell"])
                self.row = replace(self.row, **{correction["cell"]: correction["value"]})
                why = f"typed {typed}: {correction['why']}"
                self.assumed.append(Assumption(correction["cell"], correction["value"], why))

    def assume(self, name: str, value: Any, why: str) -> Any:
        """Note a filling."""
        self.assumed.append(Assumption(name, value, why))
        return value

    def known(self, name: str) -> Any | None:
        """The row's own cell, the document's, or the options'; None where nobody knows."""
        value = getattr(self.row, name, None)
        if value not in (None, ""):
            return value
        for section in self.context.get("section", ()):
            if self.row.section.startswith(section["begins"]) and name in section["defaults"]:
                found = section["defaults"][name]
                return self.assume(name, found["value"], found["why"])
        found = self.context.get("defaults", {}).get(name)
        if found is not None:
            return self.assume(name, found["value"], found["why"])
        if self.given.cells.get(name) not in (None, ""):
            return self.assume(name, self.given.cells[name], "option")
        return None

    def need(self, name: str, option: str) -> Any:
        """As `known`; raises InputError where nobody knows."""
        value = self.known(name)
        if value is None:
            raise InputError(f"{_WHO}, {self.row.place}", f"no {name}", f"a value in the row, or {option}")
        return value


def case_of(row: TableRow, given: Given | None = None) -> Case:
    """The job and the layout that a row describes. Raises InputError for what nobody knows."""
    filling = _Filling(row, given or Given())
    filling.corrected()
    where = _cluster(filling)
    tp, pp = filling.need("tp", "--tp"), filling.need("pp", "--pp")
    gpus, dp = filling.known("gpus"), filling.known("dp")
    if gpus is None and dp is None:
        gpus = filling.need("gpus", "--gpus")
    if dp is None:
        dp = filling.assume("dp", max(1, gpus // (tp * pp)), "gpus / (tp · pp)")
    if gpus is None:
        gpus = filling.assume("gpus", dp * tp * pp, "dp · tp · pp")
    mbs = filling.known("mbs") or filling.assume("mbs", 1, NOT_TOLD)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, mbs=mbs,
        interleave=filling.known("interleave") or 1,
        zero=_zero(filling),
        recompute=filling.known("recompute") or filling.assume("recompute", "full", "usual where nothing is said"),
        sequence_parallel=bool(filling.known("sequence_parallel") or False),
        partition="layers",
    )  # fmt: skip
    shape = _shape(filling, layout, where.device)
    if shape.layers % pp and not (shape.layers + 2) % pp:
        layout = replace(layout, partition="embedding")
    job = Job(
        shape, where, gpus, filling.need("gbs", "--gbs"),
        optimizer=filling.known("optimizer") or filling.assume("optimizer", "fused_adam", "usual"),
        dp_overlap=filling.given.dp_overlap,
    )  # fmt: skip
    return Case(job, layout, tuple(filling.assumed))


def _cluster(filling: _Filling) -> Cluster:
    row, given, context = filling.row, filling.given, filling.context
    name = row.gpu or given.gpu
    named = context.get("cluster")
    if named is not None:
        found = cluster(filling.assume("cluster", named["value"], named["why"]))
        if name and lookup(name).name != found.device.name:
            found = cluster(named["value"], lookup(name))
    elif row.cluster or given.cluster:
        found = cluster(row.cluster or given.cluster, lookup(name) if name else None)
    elif name:
        found = reference_cluster(lookup(name))
        filling.assume("cluster", found.name, "the reference system of that GPU")
    else:
        raise InputError(f"{_WHO}, {row.place}", "no GPU", "a value in the column gpu, or --gpu")
    per_node = given.gpus_per_node
    if per_node is None and row.nodes and row.gpus and row.gpus % row.nodes == 0:
        per_node = row.gpus // row.nodes
    return found.changed(
        gpus_per_node=None if per_node == found.gpus_per_node else per_node,
        node_gb_per_s=given.node_gb_per_s,
        link_gb_per_s=given.link_gb_per_s,
    )


def _zero(filling: _Filling) -> int:
    stage = filling.known("zero")
    return filling.assume("zero", 1, "usual") if stage is None else stage  # type: ignore[no-any-return]


def _shape(filling: _Filling, layout: Layout, device: DeviceSpec) -> TransformerShape:
    seq = filling.known("seq") or filling.assume("seq", _USUAL_SEQ, "usual")
    vocab = filling.known("vocab") or filling.assume("vocab", _USUAL_VOCAB, "usual")
    hidden, layers, size_b = filling.known("hidden"), filling.known("layers"), filling.row.size_b
    if hidden is None:
        hidden = _hidden(filling, layers, size_b, layout.tp)
    if layers is None:
        if size_b is None:
            raise InputError(f"{_WHO}, {filling.row.place}", "no layers and no size", "nlayers or size_b, or --layers")
        layers = filling.assume("layers", layers_for(size_b, hidden, vocab, layout.pp), "from the size, whole stages")
    heads = filling.known("heads")
    if heads is None:
        by_hidden = filling.context.get("heads", {}).get(str(hidden))
        if by_hidden is not None:
            heads = filling.assume("heads", by_hidden["value"], by_hidden["why"])
        else:
            heads = filling.assume("heads", usual_heads(hidden, layout.tp), f"head_dim near {_USUAL_HEAD_DIM}")
    if (hidden % heads and not filling.row.head_dim) or heads % layout.tp:
        what = f"hidden = {hidden}, heads = {heads}, tp = {layout.tp}"
        raise InputError(f"{_WHO}, {filling.row.place}", what, "hidden divisible by heads and heads by tp")
    dtype = filling.known("precision")
    if dtype not in ("fp16", "bf16"):
        old = device.peak("bf16") is None
        dtype = filling.assume("precision", "fp16" if old else "bf16", "usual on this GPU")
    attention = filling.known("attention") or filling.assume(
        "attention", default_attention(device), "usual on this GPU"
    )
    dropout = filling.known("dropout")
    if dropout is None:
        dropout = filling.assume("dropout", False, "usual today")
    tied = filling.known("tied")
    return TransformerShape(
        hidden=hidden, heads=heads, kv_heads=filling.known("kv_heads") or 0, head_dim=filling.known("head_dim") or 0,
        ffn=filling.known("ffn") or 0, gated=bool(filling.known("gated")), seq=seq,
        vocab=padded_vocab(vocab, layout.tp), tied=TransformerShape.tied if tied is None else tied, layers=layers,
        dtype=dtype, attention=require_choice(_WHO, "attention", attention, ATTENTIONS), dropout=dropout,
        softmax=require_choice(_WHO, "softmax", filling.known("softmax") or SOFTMAXES[0], SOFTMAXES),
    )  # fmt: skip


def _hidden(filling: _Filling, layers: int | None, size_b: float | None, tp: int) -> int:
    if size_b is None:
        raise InputError(f"{_WHO}, {filling.row.place}", "no hidden and no size", "nhidden or size_b, or --hidden")
    count = size_b * 1e9
    guess = (count / 12 / layers) ** 0.5 if layers else (count * _USUAL_ASPECT / 12) ** (1 / 3)
    multiple = _USUAL_HEAD_DIM * tp
    hidden = max(multiple, round(guess / multiple) * multiple)
    return int(filling.assume("hidden", hidden, "from the size, at GPT-3's proportions"))


def layers_for(size_b: float, hidden: int, vocab: int, pp: int) -> int:
    """Layers that give a model of `size_b` 1e9 parameters, in whole stages: the number nearest to the size with or
    without the embedding, since people state both.

    >>> layers_for(194, 14400, 250880, 6), layers_for(183, 14400, 250880, 12)
    (78, 72)
    """
    each, embedding = layer_parameters(hidden), vocab * hidden
    last = max(1, round(size_b * 1e9 / each / pp) + 2)

    def distance(layers: int) -> float:
        return min(abs(layers * each - size_b * 1e9), abs(layers * each + embedding - size_b * 1e9))

    return min((pp * stages for stages in range(max(1, last - 4), last + 1)), key=distance)


def usual_heads(hidden: int, tp: int) -> int:
    """Heads whose width is nearest to 128 among those that divide hidden, are divisible by tp and aligned.

    >>> usual_heads(12288, 8), usual_heads(1600, 1)
    (96, 10)
    """
    widths = [hidden // heads for heads in range(tp, hidden + 1, tp) if hidden % heads == 0 and hidden // heads <= 4096]
    aligned = [width for width in widths if width % ALIGNED_ELEMENTS == 0] or widths
    if not aligned:
        raise InputError(_WHO, f"hidden = {hidden} with tp = {tp}", "hidden divisible by tp")
    return hidden // min(aligned, key=lambda width: (abs(width - _USUAL_HEAD_DIM), width))


def known_of(row: TableRow) -> str:
    """What is known of a row beyond its cells: noted in the document, in the table or here; "" for nothing. The rate
    that its time was published as is nothing beyond."""
    notes = "" if _RATE.fullmatch(row.notes) else row.notes
    texts = [known["text"] for known in _context_of(row).get("known", ()) if row.line in known["lines"]]
    return "; ".join(filter(None, (*texts, row.source_error, notes)))


def document_of(row: TableRow) -> str:
    """The document that a row comes from, as far as it is known."""
    return str(_context_of(row).get("document", row.source_file))


def uncounted(row: TableRow) -> str | None:
    """Why a row's error says nothing about a prediction, in words, or None."""
    if row.duplicate_of_line is not None:
        return f"repeats line {row.duplicate_of_line}"
    return next((u["why"] for u in _context_of(row).get("uncounted", ()) if u["line"] == row.line), None)


def _context_of(row: TableRow) -> dict[str, Any]:
    for context in _contexts():
        if row.source_file.startswith(context["source_file"]):
            return context
    return {}


@cache
def _contexts() -> tuple[dict[str, Any], ...]:
    text = (files("quantbench.planner") / "contexts.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["context"])
