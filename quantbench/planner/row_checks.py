"""Finds mistakes in a table of layouts: impossible rows, contradictory cells, outliers.

Checks each row against the rules of layouts, its TFLOPs against its time, batch and shape, its size
against its layers, and rows that differ only in mbs and gbs against each other. If two rows
contradict each other, the models of memory and time decide which is wrong.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter

from quantbench.errors import InputError
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import strict_violations
from quantbench.planner.row_results import calculator_of, predict_rows, tflops_of
from quantbench.planner.rows import Case, Given, TableRow, case_of
from quantbench.units import billions
from quantbench.workload.parameters import parameters

# TFLOPs are printed with four or five digits, and sizes rounded to 1e9.
_TFLOPS_TOLERANCE = 0.005
_SIZE_TOLERANCE = 0.04
# The memory that nvidia-smi shows for one layout varies by a GB or two between days.
_MEMORY_TOLERANCE = 0.08
# Repeated runs of one layout differ by up to 0.5 %.
_TIME_TOLERANCE = 0.05
# Micro-batches and bubble alone predict the growth of time with the batch to within 2 %.
_BATCH_TOLERANCE = 0.10
# Values for empty cells that do not affect the model's size.
_ANYWHERE = Given({"tp": 1, "pp": 1, "gpus": 1, "gbs": 1, "heads": 1, "gpu": "a100-sxm4-80gb"})
_MODEL_AND_DEGREES = ("source_file", "gpus", "layers", "hidden", "heads", "dp", "tp", "pp")
_layout_cells = attrgetter(*_MODEL_AND_DEGREES, "mbs", "gbs")
# All cells but mbs and gbs that change time or memory.
_settings = attrgetter(
    *_MODEL_AND_DEGREES,
    "date", "zero", "precision", "gpu", "cluster", "seq", "vocab", "kv_heads", "head_dim", "ffn",
    "gated", "tied", "interleave", "recompute", "sequence_parallel", "optimizer", "attention",
    "dropout", "stack", "cp", "dp_overlap", "node_gbit_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class RowFault:
    """Mistake in a row.

    kind: impossible (the layout cannot run), typed (cells contradict each other or another row),
        outlier (cells agree, but the time contradicts that of a comparable row).
    message: the contradiction, and the value expected.
    """

    row: TableRow
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.row.place}: {self.kind}: {self.message}"


def check_rows(
    rows: Sequence[TableRow], times: TimesOf, calibrations: Calibrations
) -> list[RowFault]:
    """Returns every mistake found, in the order of the rows."""
    found: list[RowFault] = []
    for row in rows:
        found += [RowFault(row, "impossible", text) for text in _impossible(row)]
        found += [RowFault(row, "typed", text) for text in (_tflops(row), _size(row)) if text]
    found += _swapped(rows)
    for row, other in _comparable(rows):
        found += _contradictions(row, other, times, calibrations)
    return sorted(found, key=lambda fault: rows.index(fault.row))


def _as_typed(row: TableRow, given: Given | None = None) -> Case | None:
    """Returns the case of a row with stages of equal length; None if the cells do not say it."""
    try:
        return case_of(row, given, uneven=False)
    except InputError:
        return None


def _impossible(row: TableRow) -> list[str]:
    """Returns the strict rules that the cells break. Empty cells get values that break none."""
    if row.tp is None or row.pp is None or row.mbs is None or row.gpus is None:
        return []
    dp = row.dp or max(1, row.gpus // (row.tp * row.pp * (row.cp or 1)))
    heads = row.heads or row.tp
    cells = {"heads": heads, "hidden": 128 * heads, "layers": row.pp, "gbs": dp * row.mbs}
    cells |= {"zero": 0, "vocab": 128 * row.tp}
    try:
        case = case_of(row, Given(_ANYWHERE.cells | cells), uneven=False)
    except InputError as error:
        return [f"{error.value}; expected {error.expected}"]
    return list(map(str, strict_violations(case.job, case.layout)))


def _tflops(row: TableRow) -> str:
    """Returns how TFLOPs disagree with time, batch and shape; "" if they agree or cannot be
    computed.
    """
    case = _as_typed(row)
    if case is None or row.tflops is None or row.sec_per_it is None:
        return ""
    computed = tflops_of(row, case, row.sec_per_it)
    name = calculator_of(row)
    if name not in computed:
        return ""
    agree = [n for n, value in computed.items() if abs(row.tflops / value - 1) <= _TFLOPS_TOLERANCE]
    if name in agree:
        return ""
    gbs = case.job.gbs
    text = f"TFLOPs {row.tflops:g} do not agree with {row.sec_per_it:g} s and gbs {gbs}"
    text += f": that is {computed[name]:.2f}"
    if agree:
        return f"{text} by the {name} calculator; they agree with the {agree[0]} one"
    would = gbs * row.tflops / computed[name]
    return f"{text}; they would agree with gbs = {would:.0f} of {case.job.shape.seq} tokens"


def _size(row: TableRow) -> str:
    """Returns how the size disagrees with the shape; "" if it agrees or cannot be computed.

    The size may include embeddings or not, as published sizes do either. If the row does not state
    `tied`, it may count the embedding matrix once or twice.
    """
    case = _as_typed(row, _ANYWHERE)
    if case is None or row.size_b is None or row.layers is None:
        return ""
    shape = case.job.shape
    embedding = shape.vocab * shape.hidden
    shared = parameters(replace(shape, tied=True))
    counts = [shared, shared + embedding]
    if row.tied is not None:
        counts = [counts[not row.tied]]
    for count in (shared - embedding, *counts):
        if abs(count / 1e9 / row.size_b - 1) <= _SIZE_TOLERANCE:
            return ""
    gated = "gated " if shape.gated else ""
    what = f"{row.layers} layers of {row.hidden} with {gated}ffn {shape.ffn}"
    return f"size {row.size_b:g} B does not agree with {what}: that is {billions(counts[0])}"


def _swapped(rows: Sequence[TableRow]) -> Iterator[RowFault]:
    """Yields rows whose time and TFLOPs are swapped against another row of the same layout."""
    seen: dict[object, TableRow] = {}
    for row in rows:
        cells = _layout_cells(row)
        other = seen.get((cells, row.tflops, row.sec_per_it))
        if other is not None and row.tflops is not None and row.tflops != row.sec_per_it:
            text = f"{other.place} has the same layout"
            text += f" and {other.sec_per_it:g} s, {other.tflops:g} TFLOPs"
            yield RowFault(row, "typed", f"sec/it and TFLOPs are swapped: {text}")
        if row.sec_per_it is not None:
            seen.setdefault((cells, row.sec_per_it, row.tflops), row)


def _comparable(rows: Sequence[TableRow]) -> Iterator[tuple[TableRow, TableRow]]:
    """Yields pairs of rows that differ at most in mbs and gbs."""
    groups: dict[object, list[TableRow]] = defaultdict(list)
    for row in rows:
        if row.layers and row.hidden and row.duplicate_of_line is None:
            groups[_settings(row)].append(row)
    for group in groups.values():
        yield from combinations(group, 2)


def _contradictions(
    a: TableRow, b: TableRow, times: TimesOf, calibrations: Calibrations
) -> Iterator[RowFault]:
    """Yields contradictions between two comparable rows, for the row with the larger prediction
    error.
    """

    def by_error(name: str) -> list[TableRow]:
        """Returns both rows, the one with the larger `RowResult.<name>` last."""
        found = predict_rows((b, a), times, calibrations)
        found.sort(key=lambda result: abs(getattr(result, name) or 0.0))
        return [result.row for result in found]

    if a.mem_gb and b.mem_gb and a.mbs and b.mbs and a.gbs == b.gbs:
        low, high = sorted((a, b), key=lambda row: row.mbs or 0)
        apart = (low.mem_gb or 0) / (high.mem_gb or 1) - 1
        if a.mbs == b.mbs:
            apart = abs(apart)
        if apart > _MEMORY_TOLERANCE:
            right, wrong = by_error("memory_error")
            text = f"memory {wrong.mem_gb:g} GB with MBS {wrong.mbs} contradicts"
            text += f" {right.mem_gb:g} GB with MBS {right.mbs} of {right.place}"
            yield RowFault(wrong, "typed", f"{text}: memory or MBS is typed wrong")
    if a.sec_per_it and b.sec_per_it and a.mbs == b.mbs and a.gbs and b.gbs:
        ratio = a.sec_per_it / b.sec_per_it * _slots(b) / _slots(a) - 1
        if a.gbs == b.gbs and abs(ratio) > _TIME_TOLERANCE:
            for row, other in ((a, b), (b, a)):
                text = f"{row.sec_per_it:g} s and {other.sec_per_it:g} s of {other.place}"
                text += " for the same cells: a setting that is not listed differs"
                yield RowFault(row, "typed", text)
        elif a.gbs != b.gbs and abs(ratio) > _BATCH_TOLERANCE:
            right, wrong = by_error("error")
            expected = (right.sec_per_it or 0) * _slots(wrong) / _slots(right)
            text = f"{wrong.sec_per_it:g} s at gbs {wrong.gbs}"
            text += f": micro-batches and bubble of {right.place} give {expected:.1f} s"
            yield RowFault(wrong, "outlier", text)


def _slots(row: TableRow) -> int:
    """Returns the slots of a pipeline per iteration: those of the micro-batches and of filling."""
    case = case_of(row, uneven=False)
    return case.layout.micro_batches(case.job.gbs) + case.layout.pp - 1
