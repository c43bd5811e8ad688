"""Finds mistakes in a table of layouts: impossible rows, contradictory cells, outliers.

Checks each row against the rules of layouts, its TFLOPs against its time, batch and shape, its size
against its layers, and rows that differ only in mbs and gbs against each other. If two rows
contradict each other, the models of memory and time decide which is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from quantbench.errors import InputError
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import strict_violations
from quantbench.planner.formulas import tflops_by_calculator
from quantbench.planner.memory import memory
from quantbench.planner.predict import Prediction
from quantbench.planner.row_results import predict_cases
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
_ANYWHERE = Given(cells={"tp": 1, "pp": 1, "gpus": 1, "gbs": 1}, gpu="a100-sxm4-80gb")
# Cells besides the layout that change time or memory.
_SETTINGS = (
    "date", "zero", "precision", "gpu", "cluster", "seq", "vocab", "kv_heads", "head_dim", "ffn", "gated", "tied",
    "interleave", "recompute", "sequence_parallel", "optimizer", "attention", "softmax", "dropout",
    "stack", "cp", "dp_overlap", "node_gbit_per_s",
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
    order = {id(row): index for index, row in enumerate(rows)}
    return sorted(found, key=lambda fault: order[id(fault.row)])


def _as_typed(row: TableRow) -> Case:
    return case_of(row, uneven=False)


def _impossible(row: TableRow) -> tuple[str, ...]:
    """Returns the strict rules that the cells break. Empty cells get values that break none."""
    if row.tp is None or row.pp is None or row.mbs is None or row.gpus is None:
        return ()
    dp = row.dp or max(1, row.gpus // (row.tp * row.pp * (row.cp or 1)))
    heads = row.heads or row.tp
    cells = {
        "heads": heads,
        "hidden": 128 * heads,
        "layers": row.pp,
        "gbs": dp * row.mbs,
        "zero": 0,
        "vocab": 128 * row.tp,
    }
    try:
        case = case_of(row, replace(_ANYWHERE, cells=cells), uneven=False)
    except InputError as error:
        return (f"{error.value}; expected {error.expected}",)
    return tuple(map(str, strict_violations(case.job, case.layout)))


def _tflops(row: TableRow) -> str:
    """Returns how TFLOPs disagree with time, batch and shape; "" if they agree or cannot be
    computed.
    """
    if row.tflops is None or row.sec_per_it is None or row.gpus is None:
        return ""
    try:
        case = _as_typed(row)
    except InputError:
        return ""
    shape, gbs = case.job.shape, case.job.gbs
    computed = tflops_by_calculator(
        shape,
        gbs=gbs,
        tp=case.layout.tp,
        sec_per_it=row.sec_per_it,
        gpus=row.gpus,
        size_b=row.size_b,
    )
    usual = "simple" if "simple" in row.calculator else ""
    name = {"old": "old", "new": "megatron"}.get(row.calculator, usual)
    if name not in computed:
        return ""
    agree = [n for n, value in computed.items() if abs(row.tflops / value - 1) <= _TFLOPS_TOLERANCE]
    if name in agree:
        return ""
    text = f"TFLOPs {row.tflops:g} do not agree with {row.sec_per_it:g} s and gbs {gbs}: that is {computed[name]:.2f}"
    if agree:
        return f"{text} by the {name} calculator; they agree with the {agree[0]} one"
    return f"{text}; they would agree with gbs = {gbs * row.tflops / computed[name]:.0f} of {shape.seq} tokens"


def _size(row: TableRow) -> str:
    """Returns how the size disagrees with the shape; "" if it agrees or cannot be computed.

    The size may include embeddings or not, as published sizes do either. If the row does not state
    `tied`, it may count the embedding matrix once or twice.
    """
    if row.size_b is None or row.layers is None or row.hidden is None:
        return ""
    try:
        shape = case_of(row, _ANYWHERE, uneven=False).job.shape
    except InputError:
        return ""
    embedding = shape.vocab * shape.hidden
    shared = parameters(replace(shape, tied=True))
    counts = {None: (shared, shared + embedding), True: (shared,), False: (shared + embedding,)}[
        row.tied
    ]
    if any(
        abs(count / 1e9 / row.size_b - 1) <= _SIZE_TOLERANCE
        for count in (shared - embedding, *counts)
    ):
        return ""
    what = (
        f"{row.layers} layers of {row.hidden} with {'gated ' if shape.gated else ''}ffn {shape.ffn}"
    )
    return f"size {row.size_b:g} B does not agree with {what}: that is {billions(counts[0])}"


def _swapped(rows: Sequence[TableRow]) -> Iterator[RowFault]:
    """Yields rows whose time and TFLOPs are swapped against another row of the same layout."""
    seen = {(_layout_cells(row), row.sec_per_it, row.tflops): row for row in reversed(rows)}
    for row in rows:
        if row.tflops is None or row.sec_per_it is None or row.tflops == row.sec_per_it:
            continue
        other = seen.get((_layout_cells(row), row.tflops, row.sec_per_it))
        if other is not None and (other.line or 0) < (row.line or 0):
            text = f"{other.place} has the same layout and {other.sec_per_it:g} s, {other.tflops:g} TFLOPs"
            yield RowFault(row, "typed", f"sec/it and TFLOPs are swapped: {text}")


def _layout_cells(row: TableRow) -> tuple[object, ...]:
    return (
        row.source_file,
        row.gpus,
        row.layers,
        row.hidden,
        row.heads,
        row.dp,
        row.tp,
        row.pp,
        row.mbs,
        row.gbs,
    )


def _comparable(rows: Sequence[TableRow]) -> Iterator[tuple[TableRow, TableRow]]:
    """Yields pairs of rows that differ at most in mbs and gbs."""
    groups: dict[tuple[object, ...], list[TableRow]] = defaultdict(list)
    for row in rows:
        if row.layers and row.hidden and row.duplicate_of_line is None:
            settings = (getattr(row, name) for name in _SETTINGS)
            groups[(*_layout_cells(replace(row, mbs=None, gbs=None)), *settings)].append(row)
    for group in groups.values():
        yield from combinations(group, 2)


def _contradictions(
    a: TableRow, b: TableRow, times: TimesOf, calibrations: Calibrations
) -> Iterator[RowFault]:
    """Yields contradictions between two comparable rows, for the row with the larger prediction
    error.
    """

    def memory_error(row: TableRow) -> float:
        case = _as_typed(row)
        return abs(
            memory(
                case.job, case.layout, calibrations.of(case.job.cluster, case.job.stack)
            ).total_gib
            / (row.mem_gb or 1.0)
            - 1
        )

    def time_error(row: TableRow) -> float:
        found = predict_cases([_as_typed(row)], times, calibrations)[0]
        return (
            abs(found.sec_per_it / (row.sec_per_it or 1.0) - 1)
            if isinstance(found, Prediction)
            else 0.0
        )

    if a.mem_gb and b.mem_gb and a.mbs and b.mbs and a.gbs == b.gbs:
        apart = a.mem_gb / b.mem_gb - 1 if a.mbs <= b.mbs else b.mem_gb / a.mem_gb - 1
        if (abs(apart) if a.mbs == b.mbs else apart) > _MEMORY_TOLERANCE:
            wrong, right = _worse(a, b, memory_error)
            text = (
                f"memory {wrong.mem_gb:g} GB with MBS {wrong.mbs} contradicts {right.mem_gb:g} GB"
            )
            yield RowFault(
                wrong,
                "typed",
                f"{text} with MBS {right.mbs} of {right.place}: memory or MBS is typed wrong",
            )
    if a.sec_per_it and b.sec_per_it and a.mbs == b.mbs and a.gbs and b.gbs:
        slots = [
            c.layout.micro_batches(c.job.gbs) + c.layout.pp - 1 for c in map(_as_typed, (a, b))
        ]
        ratio = a.sec_per_it / b.sec_per_it * slots[1] / slots[0] - 1
        if a.gbs == b.gbs and abs(ratio) > _TIME_TOLERANCE:
            for row, other in ((a, b), (b, a)):
                text = f"{row.sec_per_it:g} s and {other.sec_per_it:g} s of {other.place} for the same cells"
                yield RowFault(row, "typed", f"{text}: a setting that is not listed differs")
        elif a.gbs != b.gbs and abs(ratio) > _BATCH_TOLERANCE:
            wrong, right = _worse(a, b, time_error)
            expected = (right.sec_per_it or 0) * (
                slots[0] / slots[1] if wrong is a else slots[1] / slots[0]
            )
            text = f"{wrong.sec_per_it:g} s at gbs {wrong.gbs}: micro-batches and bubble of {right.place}"
            yield RowFault(wrong, "outlier", f"{text} give {expected:.1f} s")


def _worse(
    a: TableRow, b: TableRow, error: Callable[[TableRow], float]
) -> tuple[TableRow, TableRow]:
    return (a, b) if error(a) > error(b) else (b, a)
