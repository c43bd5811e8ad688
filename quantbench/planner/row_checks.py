"""Looking for mistakes in a table of layouts: rows that cannot be, cells that contradict each other, outliers.

A row is held against the rules of layouts, its TFLOPs against its own time, batch and shape, its size against its
layers, and rows that differ in one cell only against each other. Where two rows contradict each other, the models of
memory and time tell which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.interconnect import cluster, reference_cluster
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import violations
from quantbench.planner.context import Given, case_of
from quantbench.planner.formulas import CALCULATORS, parameters, simple_tflops
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import memory
from quantbench.planner.predict import Prediction, predict_cases
from quantbench.planner.table import TableRow
from quantbench.workload import TransformerShape

#: figures are printed with four or five digits, and sizes rounded to 1e9
_TFLOPS_TOLERANCE = 0.005
_SIZE_TOLERANCE = 0.04
# nvidia-smi's figure of one layout varies by a GB or two between days.
_MEMORY_TOLERANCE = 0.08
# Runs of one layout repeat within 0.5 %; beyond this two of them were not the same.
_TIME_TOLERANCE = 0.05
# Micro-batches and bubble alone explain how time grows with the batch to within 2 %; beyond this something else.
_BATCH_TOLERANCE = 0.10
# Cells that a size does not depend on, for rows that lack them.
_ANYWHERE = Given(cells={"tp": 1, "pp": 1, "gpus": 1, "gbs": 1}, gpu="a100-sxm4-80gb", as_typed=True)
#: besides the layout, what tells runs apart
_SETTINGS = (
    "date", "zero", "precision", "gpu", "cluster", "seq", "vocab", "kv_heads", "head_dim", "ffn", "gated", "tied",
    "interleave", "recompute", "sequence_parallel", "optimizer", "attention", "softmax", "dropout",
)  # fmt: skip
_CALCULATORS = {"old": "old", "new": "megatron"}


@dataclass(frozen=True)
class RowFault:
    """Something wrong with a row. kind: impossible (no such run can be), typed (cells contradict each other or another
    row), outlier (cells agree, the time does not fit its neighbours). message: what, and what would agree."""

    row: TableRow
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.row.place}: {self.kind}: {self.message}"


def check_rows(rows: Sequence[TableRow], times: TimesOf, calibrations: Calibrations) -> list[RowFault]:
    """Every finding, in the rows' order."""
    found: list[RowFault] = []
    for row in rows:
        found += [RowFault(row, "impossible", text) for text in _impossible(row)]
        found += [RowFault(row, "typed", text) for text in (*_tflops(row), *_size(row))]
    found += _swapped(rows)
    found += _pairs(rows, times, calibrations)
    order = {id(row): index for index, row in enumerate(rows)}
    return sorted(found, key=lambda finding: order[id(finding.row)])


def _impossible(row: TableRow) -> Iterable[str]:
    """Strict rules that the cells break. What a row does not say is taken so that it breaks none."""
    if row.tp is None or row.pp is None or row.mbs is None or row.gpus is None:
        return ()
    dp = row.dp or max(1, row.gpus // (row.tp * row.pp))
    heads = row.heads or row.tp
    try:
        shape = TransformerShape(
            hidden=row.hidden or heads * 128, heads=heads, kv_heads=(row.heads and row.kv_heads) or 0,
            head_dim=row.head_dim or 0, ffn=row.ffn or 0, gated=bool(row.gated), layers=row.layers or row.pp,
            vocab=128 * row.tp,
        )  # fmt: skip
    except InputError as error:
        return (f"{error.value}; expected {error.expected}",)
    where = reference_cluster(lookup(row.gpu)) if row.gpu else cluster("dgx-a100")
    per_node = row.gpus // row.nodes if row.nodes else max(where.gpus_per_node, row.tp)
    layout = Layout(dp=dp, tp=row.tp, pp=row.pp, mbs=row.mbs, zero=0 if row.zero is None else row.zero)
    job = Job(shape, where.changed(gpus_per_node=per_node), row.gpus, row.gbs or dp * row.mbs)
    if (shape.layers + 2) % row.pp == 0 and shape.layers % row.pp:
        layout = replace(layout, partition="embedding")
    return [str(v) for v in violations(job, layout) if v.constraint.strict]


def _tflops(row: TableRow) -> Iterable[str]:
    """Whether TFLOPs agree with time, batch and shape as typed."""
    if row.tflops is None or row.sec_per_it is None or row.gpus is None:
        return ()
    stated = row.calculator
    try:
        case = case_of(row, Given(as_typed=True))
    except InputError:
        return ()
    shape, gbs = case.job.shape, case.job.gbs
    computed = {
        name: calculator.tflops(shape, gbs=gbs, tp=case.layout.tp, sec_per_it=row.sec_per_it, gpus=row.gpus)
        for name, calculator in CALCULATORS.items()
        if calculator.objection(shape) is None
    }
    if row.size_b is not None:
        computed["simple"] = simple_tflops(
            size_b=row.size_b, seq=shape.seq, gbs=gbs, sec_per_it=row.sec_per_it, gpus=row.gpus
        )
    name = _CALCULATORS.get(stated, "simple" if "simple" in stated else "")
    if name not in computed:
        return ()
    ratio = row.tflops / computed[name]
    if abs(ratio - 1) <= _TFLOPS_TOLERANCE:
        return ()
    text = f"TFLOPs {row.tflops:g} do not agree with {row.sec_per_it:g} s and gbs {gbs}: that is {computed[name]:.2f}"
    other = next((n for n, value in computed.items() if abs(row.tflops / value - 1) <= _TFLOPS_TOLERANCE), None)
    if other is not None:
        return (f"{text} by the {name} calculator; they agree with the {other} one",)
    implied = gbs * ratio
    return (f"{text}; they would agree with gbs = {implied:.0f} of {shape.seq} tokens",)


def _size(row: TableRow) -> Iterable[str]:
    """Whether the size agrees with the shape, embeddings counted or not: people state both. A row that does not say
    whether embedding and logits share one matrix may mean either."""
    if row.size_b is None or row.layers is None or row.hidden is None:
        return ()
    try:
        # An MLP that a document only guesses at contradicts nothing.
        shape = replace(case_of(row, _ANYWHERE).job.shape, ffn=row.ffn or 4 * row.hidden)
    except InputError:
        return ()
    embedding = shape.vocab * shape.hidden
    shared = parameters(replace(shape, tied=True))
    counts = {None: (shared, shared + embedding), True: (shared,), False: (shared + embedding,)}[row.tied]
    if any(abs(count / 1e9 / row.size_b - 1) <= _SIZE_TOLERANCE for count in (shared - embedding, *counts)):
        return ()
    what = f"{row.layers} layers of {row.hidden} with {'gated ' if shape.gated else ''}ffn {shape.ffn}"
    return (f"size {row.size_b:g} B does not agree with {what}: that is {counts[0] / 1e9:.3g} B",)


def _swapped(rows: Sequence[TableRow]) -> Iterable[RowFault]:
    """Rows whose time and TFLOPs are another row's TFLOPs and time."""
    seen = {(_layout_cells(row), row.sec_per_it, row.tflops): row for row in reversed(rows)}
    for row in rows:
        if row.tflops is None or row.sec_per_it is None or row.tflops == row.sec_per_it:
            continue
        other = seen.get((_layout_cells(row), row.tflops, row.sec_per_it))
        if other is not None and (other.line or 0) < (row.line or 0):
            text = f"{other.place} has the same layout and {other.sec_per_it:g} s, {other.tflops:g} TFLOPs"
            yield RowFault(row, "typed", f"sec/it and TFLOPs are swapped: {text}")


def _layout_cells(row: TableRow) -> tuple[object, ...]:
    return (row.source_file, row.gpus, row.layers, row.hidden, row.heads, row.dp, row.tp, row.pp, row.mbs, row.gbs)


def _pairs(rows: Sequence[TableRow], times: TimesOf, calibrations: Calibrations) -> Iterable[RowFault]:
    """Rows that contradict one another, and which of the two the models do not believe."""
    groups: dict[tuple[object, ...], list[TableRow]] = defaultdict(list)
    for row in rows:
        if row.layers and row.hidden and row.duplicate_of_line is None:
            settings = (getattr(row, name) for name in _SETTINGS)
            groups[(*_layout_cells(replace(row, mbs=None, gbs=None)), *settings)].append(row)
    for group in groups.values():
        for index, row in enumerate(group):
            for other in group[index + 1 :]:
                yield from _contradictions(row, other, times, calibrations)


def _contradictions(a: TableRow, b: TableRow, times: TimesOf, calibrations: Calibrations) -> Iterable[RowFault]:
    def memory_of(row: TableRow) -> float:
        case = case_of(row, Given(as_typed=True))
        return abs(memory(case.job, case.layout, calibrations.of(case.job.cluster)).total_gib / (row.mem_gb or 1.0) - 1)

    def time_of(row: TableRow) -> float:
        found = predict_cases([case_of(row, Given(as_typed=True))], times, calibrations)[0]
        return abs(found.sec_per_it / (row.sec_per_it or 1.0) - 1) if isinstance(found, Prediction) else 0.0

    if a.mem_gb and b.mem_gb and a.mbs and b.mbs and a.gbs == b.gbs:
        small, large = (a, b) if a.mbs <= b.mbs else (b, a)
        assert small.mem_gb is not None
        assert large.mem_gb is not None
        apart = small.mem_gb / large.mem_gb - 1
        if (a.mbs == b.mbs and abs(apart) > _MEMORY_TOLERANCE) or (a.mbs != b.mbs and apart > _MEMORY_TOLERANCE):
            wrong, right = _worse(a, b, memory_of)
            text = (
                f"memory {wrong.mem_gb:g} GB with MBS {wrong.mbs} contradicts {right.mem_gb:g} GB with MBS {right.mbs}"
            )
            yield RowFault(wrong, "typed", f"{text} of {right.place}: memory or MBS is typed wrong")
    if a.sec_per_it and b.sec_per_it and a.mbs == b.mbs and a.gbs and b.gbs:
        case_a, case_b = case_of(a, Given(as_typed=True)), case_of(b, Given(as_typed=True))
        slots = [c.layout.micro_batches(c.job.gbs) + c.layout.pp - 1 for c in (case_a, case_b)]
        ratio = a.sec_per_it / b.sec_per_it * slots[1] / slots[0] - 1
        if a.gbs == b.gbs and abs(ratio) > _TIME_TOLERANCE:
            for row, other in ((a, b), (b, a)):
                text = f"{row.sec_per_it:g} s and {other.sec_per_it:g} s of {other.place} for the same cells"
                yield RowFault(row, "typed", f"{text}: a setting that is not listed differs")
        elif a.gbs != b.gbs and abs(ratio) > _BATCH_TOLERANCE:
            wrong, right = _worse(a, b, time_of)
            expected = (right.sec_per_it or 0) * (slots[0] / slots[1] if wrong is a else slots[1] / slots[0])
            text = f"{wrong.sec_per_it:g} s at gbs {wrong.gbs}: micro-batches and bubble of {right.place}"
            yield RowFault(wrong, "outlier", f"{text} give {expected:.1f} s")


def _worse(a: TableRow, b: TableRow, error: Callable[[TableRow], float]) -> tuple[TableRow, TableRow]:
    """(the row that a model believes less, the other)."""
    return (a, b) if error(a) > error(b) else (b, a)
