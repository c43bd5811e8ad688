"""Reads tables of training runs from CSV, and builds a job and a layout from each row.

`read_table` reads the rows, and `case_of` builds the job and the layout of one row. Empty cells are
filled from command-line options, else with usual values. Each filled value is recorded with its
reason (`Assumption`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from quantbench.device import default_attention, lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.importers.csv_table import CsvFile, CsvRow
from quantbench.latency.interconnect import Cluster, cluster, reference_cluster
from quantbench.planner.calibration import software
from quantbench.planner.layout import PRECISIONS, Job, Layout, partition_of
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import gpt_layer_parameters, padded_vocab
from quantbench.workload.recipes import RECIPES

# Subject of error messages.
_WHO = "plan"
# Vocabulary size to assume: Megatron's GPT vocabulary, padded for 8 tensor-parallel ranks.
_USUAL_VOCAB = 51200
# Sequence length to assume, in tokens.
_USUAL_SEQ = 2048
#: reason for an assumed micro-batch size of 1
SMALLEST_MBS_REASON = "not stated: the smallest"
# Alternative CSV column names of fields of `TableRow`.
_COLUMNS = {
    "date": ("date_note",), "calculator": ("tflops_calculator",), "layers": ("nlayers",),
    "hidden": ("nhidden",), "heads": ("nheads",), "seq": ("seq_len",), "zero": ("zero_stage",),
    "tflops": ("tflops_reported",), "precision": ("dtype",), "dp_overlap": ("run_dp_overlap",),
    "node_gbit_per_s": ("network", "run_node_gbit"),
}  # fmt: skip
_BITS_PER_BYTE = 8
# Uneven pipeline stages are assumed only if the longest stage has at most this many times the mean
# number of layers.
_LONGEST_STAGE = 1.25
# Columns that a fit requires. Their values change a run's time too much to be assumed.
_NEEDED_BY_A_FIT = (
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "ffn",
    "gated",
    "seq",
    "vocab",
    "mbs",
    "recompute",
    "sec_per_it",
)


# Types of cells. `_READERS` has a reader for each type.
Whole = int | None
Number = float | None
Flag = bool | None


@dataclass(frozen=True, kw_only=True)
class ExpertColumns:
    """Columns of sizes of experts and of latent attention, as in `TransformerShape`."""

    experts: Whole = None
    top_k: Whole = None
    moe_ffn: Whole = None
    shared_ffn: Whole = None
    dense_layers: Whole = None
    q_rank: Whole = None
    kv_rank: Whole = None
    rope_dim: Whole = None
    value_dim: Whole = None
    expert_groups: Whole = None
    top_groups: Whole = None


@dataclass(frozen=True, kw_only=True)
class ModelColumns(ExpertColumns):
    """Columns of the model's dimensions. attention: flash or unfused."""

    layers: Whole = None
    hidden: Whole = None
    heads: Whole = None
    kv_heads: Whole = None
    head_dim: Whole = None
    ffn: Whole = None
    seq: Whole = None
    vocab: Whole = None
    gated: Flag = None
    tied: Flag = None
    dropout: Flag = None
    attention: str = ""


@dataclass(frozen=True, kw_only=True)
class JobColumns:
    """Columns of the job and its layout.

    precision: 16-bit training dtype, one of PRECISIONS.
    fp8_recipe: key of `workload.recipes.RECIPES`.
    dp_overlap: as in `Job`.
    """

    precision: str = ""
    fp8_recipe: str = ""
    optimizer: str = ""
    recompute: str = ""
    zero: Whole = None
    dp: Whole = None
    tp: Whole = None
    pp: Whole = None
    cp: Whole = None
    ep: Whole = None
    mbs: Whole = None
    gbs: Whole = None
    interleave: Whole = None
    sequence_parallel: Flag = None
    dp_overlap: Number = None


@dataclass(frozen=True)
class TableRow(ModelColumns, JobColumns):
    """Row of a table of training runs. None and "" stand for empty cells.

    All columns are optional. Fields that are not listed, here and in the base classes, have the
    names of fields of `TransformerShape`, `Layout` or `Job`.

    row_id: number or name of the row.
    table: name of the published table.
    source_file, section, line: where the row is in its source document.
    duplicate_of_line: `line` of an equal row; None if the row is unique.
    status: outcome of the run: ok, oom (out of memory), fail, …
    sec_per_it: measured time per iteration, in s.
    mem_gb: measured memory in GiB, as nvidia-smi shows it.
    tflops: reported TFLOP/s per GPU.
    calculator: formula of `tflops` (see `formulas.tflops_by_calculator`).
    gpu: name of the GPU.
    cluster: name of the cluster.
    nodes: number of nodes.
    node_gbit_per_s: network bandwidth of a node, in Gbit/s.
    size_b: number of parameters in 1e9.
    stack: name of the training software in `calibration.STACKS`.
    """

    row_id: str
    source_file: str = ""
    section: str = ""
    date: str = ""
    gpu: str = ""
    calculator: str = ""
    status: str = ""
    cluster: str = ""
    stack: str = ""
    table: str = ""
    line: Whole = None
    nodes: Whole = None
    gpus: Whole = None
    duplicate_of_line: Whole = None
    size_b: Number = None
    mem_gb: Number = None
    sec_per_it: Number = None
    tflops: Number = None
    node_gbit_per_s: Number = None


@dataclass(frozen=True)
class Assumption:
    """Value that was assumed for an empty cell.

    name: field that has the value.
    why: reason for the value.
    """

    name: str
    value: object
    why: str


@dataclass(frozen=True)
class Case:
    """Job and layout of a training run, with the values that were assumed for them."""

    job: Job
    layout: Layout
    assumed: tuple[Assumption, ...] = ()


@dataclass(frozen=True)
class Given:
    """Values from command-line options, for cells that are empty in the table.

    cells: values by field of `TableRow`; None and "" stand for no value.
    rates: sizes and rates of the cluster, by argument of `Cluster.changed`.
    """

    cells: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)


def read_table(path: Path) -> tuple[TableRow, ...]:
    """Reads all rows of a CSV file. Unknown columns are ignored.

    Raises InputError for a cell of the wrong type, and for a file without rows or without any
    whole-number column of `TableRow`.
    """
    file = CsvFile(_WHO, path)
    columns: dict[str, str] = {}
    for name in _KINDS:
        names = (name, *_COLUMNS.get(name, ()))
        found = next((one for one in names if one in file.columns), None)
        if found is not None:
            columns[name] = found
    if not any(_KINDS[name] == Whole for name in columns):
        what = f"{path.name} has none of the columns of a table of layouts"
        raise InputError(_WHO, what, f"some of {', '.join(_KINDS)}")
    rows = []
    for number, row in enumerate(file.rows(), start=1):
        values: dict[str, Any] = {"row_id": str(number)}
        for name, column in columns.items():
            if row.text(column):
                values[name] = _READERS[_KINDS[name]](row, column)
        rows.append(TableRow(**values))
    if not rows:
        raise InputError(_WHO, f"{path.name} has no rows", "at least one")
    return tuple(rows)


def require_stated(rows: Sequence[TableRow], given: Given, where: str) -> None:
    """Raises InputError if a value that a fit requires is neither in a row nor in an option.

    Assumed values are not allowed here, because their errors would distort the fitted factors.

    where: name of the table, for messages.
    """
    missing = []
    for name in _NEEDED_BY_A_FIT:
        values = (given.cells.get(name) or getattr(row, name) for row in rows)
        if any(value in (None, "") for value in values):
            missing.append(name)
    if missing:
        what = f"{where} lacks {', '.join(missing)}"
        raise InputError("plan --fit", what, "these columns, or options of these names")


def _positive(row: CsvRow, column: str) -> float:
    """Reads a number above 0. In the columns of dp_overlap, 0 is also allowed."""
    found = row.number(column)
    if not math.isfinite(found) or found < 0 or (found == 0 and not column.endswith("dp_overlap")):
        raise row.error(column, "a number above 0")
    return found


# Type of each field of `TableRow`, and the reader of each type.
_KINDS = {one.name: one.type for one in fields(TableRow)}
# Fields of `TransformerShape` that keep their default if neither the row nor an option gives them.
_MODEL_PARTS = ("kv_heads", "head_dim", "ffn", *(one.name for one in fields(ExpertColumns)))
_READERS: dict[Any, Callable[[CsvRow, str], object]] = {
    str: CsvRow.text,
    Whole: CsvRow.integer,
    Number: _positive,
    Flag: CsvRow.flag,
}


class _RowValues:
    """Looks up a row's values, fills empty cells, and records each filled value in `assumed`."""

    def __init__(self, row: TableRow, given: Given) -> None:
        self.row = row
        self.given = given
        self.assumed: list[Assumption] = []

    def assume(self, name: str, value: Any, why: str) -> Any:
        """Records an assumption and returns its value."""
        self.assumed.append(Assumption(name, value, why))
        return value

    def known(self, name: str) -> Any | None:
        """Returns the value from the row, else from the options (recorded), else None."""
        value = getattr(self.row, name)
        if value not in (None, ""):
            return value
        value = self.given.cells.get(name)
        if value in (None, ""):
            return None
        return self.assume(name, value, "option")

    def stated(self, *names: str) -> dict[str, Any]:
        """Returns the known values of several fields, by name. Unknown values are left out."""
        found = {name: self.known(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def usual(self, name: str, value: Any, why: str) -> Any:
        """Returns the known value, else assumes and records `value`.

        why: reason for the assumed value.
        """
        found = self.known(name)
        return self.assume(name, value, why) if found is None else found

    def need(self, name: str) -> Any:
        """Returns the known value. Raises InputError if there is none."""
        value = self.known(name)
        if value is None:
            self.missing(f"no {name}", f"a value in the row, or --{name}")
        return value

    def missing(self, what: str, expected: str) -> NoReturn:
        """Raises InputError for the row.

        what: description of the problem.
        expected: value that would be valid.
        """
        raise InputError(f"{_WHO}, row {self.row.row_id}", what, expected)


def case_of(row: TableRow, given: Given | None = None) -> Case:
    """Builds the job and the layout of a row.

    given: values from options for empty cells; None for no such values.

    Raises InputError if a required value is missing or a value is invalid.
    """
    filling = _RowValues(row, given or Given())
    where = _cluster(filling)
    tp = filling.need("tp")
    pp = filling.need("pp")
    cp = filling.known("cp") or 1
    dp = filling.known("dp")
    if dp is None:
        gpus = filling.need("gpus")
        dp = filling.assume("dp", max(1, gpus // (tp * pp * cp)), "gpus / (tp · pp · cp)")
    else:
        gpus = filling.usual("gpus", dp * tp * pp * cp, "dp · tp · pp · cp")
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        mbs=filling.usual("mbs", 1, SMALLEST_MBS_REASON),
        cp=cp,
        **filling.stated("interleave", "ep"),
        zero=filling.usual("zero", 1, "usual"),
        recompute=filling.usual("recompute", "full", "usual where nothing is said"),
        **filling.stated("sequence_parallel"),
    )
    shape = _shape(filling, layout, where.device)
    # Some published runs have stages of different length, but none has a stage that is much longer
    # than the mean.
    even_enough = -(-shape.layers // pp) * pp <= _LONGEST_STAGE * shape.layers
    partition = partition_of(shape.layers, pp, uneven=even_enough)
    if partition == "uneven":
        filling.assume(
            "partition", "uneven", f"{shape.layers} layers do not divide over {pp} stages"
        )
    stack = filling.known("stack") or ""
    overlaps = software(stack).overlaps
    job = Job(
        shape,
        where,
        gpus,
        filling.need("gbs"),
        optimizer=filling.usual("optimizer", "fused_adam", "usual"),
        dp_overlap=filling.usual(
            "dp_overlap", float(overlaps), f"usual of {stack or 'an unknown stack'}"
        ),
        stack=stack,
    )
    return Case(job, replace(layout, partition=partition), tuple(filling.assumed))


def _cluster(filling: _RowValues) -> Cluster:
    """Returns the cluster of a row, with node size and rates from options and from the row."""
    row = filling.row
    name = filling.known("cluster")
    gpu = filling.known("gpu")
    if name:
        found = cluster(name, lookup(gpu) if gpu else None)
    elif gpu:
        found = reference_cluster(lookup(gpu))
        filling.assume("cluster", found.name, "the reference system of that GPU")
    else:
        filling.missing("no GPU", "a value in the column gpu, or --gpu")
    changes = dict(filling.given.rates)
    if row.nodes and row.gpus and row.gpus % row.nodes == 0:
        changes.setdefault("gpus_per_node", row.gpus // row.nodes)
    if row.node_gbit_per_s:
        changes["node_gb_per_s"] = row.node_gbit_per_s / _BITS_PER_BYTE
    return found.changed(**changes)


def _shape(filling: _RowValues, layout: Layout, device: DeviceSpec) -> TransformerShape:
    """Builds the model of a row, for the row's layout and GPU."""
    seq = filling.usual("seq", _USUAL_SEQ, "usual")
    vocab = filling.usual("vocab", _USUAL_VOCAB, "usual")
    hidden = filling.need("hidden")
    heads = filling.need("heads")
    layers = filling.known("layers")
    if layers is None:
        size_b = filling.row.size_b
        if size_b is None:
            filling.missing("no layers and no size", "nlayers or size_b, or --layers")
        layers = filling.assume(
            "layers", layers_for(size_b, hidden, vocab, layout.pp), "from the size, whole stages"
        )
    if (hidden % heads and not filling.row.head_dim) or heads % layout.tp:
        what = f"hidden = {hidden}, heads = {heads}, tp = {layout.tp}"
        filling.missing(what, "hidden divisible by heads and heads by tp")
    recipe = require_choice(_WHO, "fp8_recipe", filling.known("fp8_recipe") or "", ("", *RECIPES))
    dtype = RECIPES[recipe].forward if recipe else filling.known("precision") or ""
    if recipe and device.peak(dtype) is None:
        filling.missing(f"fp8_recipe = {recipe} on {device.name}", "a GPU with such products")
    if not recipe and dtype not in PRECISIONS:
        dtype = "fp16" if device.peak("bf16") is None else "bf16"
        filling.assume("precision", dtype, "usual on this GPU")
    return TransformerShape(
        hidden=hidden,
        heads=heads,
        seq=seq,
        vocab=padded_vocab(vocab, layout.tp),
        layers=layers,
        **filling.stated("tied", *_MODEL_PARTS, "gated"),
        dtype=dtype,
        fp8_recipe=recipe,
        attention=filling.usual("attention", default_attention(device), "usual on this GPU"),
        dropout=filling.usual("dropout", False, "usual today"),
    )


def layers_for(size_b: float, hidden: int, vocab: int, pp: int) -> int:
    """Returns the number of layers of a GPT whose number of parameters is given.

    The result is the multiple of pp that comes closest to the given number of parameters, counted
    with or without the embedding.

    size_b: number of parameters in 1e9.
    vocab: size of the vocabulary.

    >>> layers_for(194, 14400, 250880, 6), layers_for(183, 14400, 250880, 12)
    (78, 72)
    """
    size = size_b * 1e9
    each = gpt_layer_parameters(hidden)
    # Five multiples of pp are compared. The middle one is the best if the embedding is not counted.
    last = max(1, round(size / each / pp) + 2)

    def distance(layers: int) -> float:
        """Returns the smaller difference in parameters: with or without the embedding."""
        beyond = layers * each - size
        return min(abs(beyond), abs(beyond + vocab * hidden))

    return min((pp * stages for stages in range(max(1, last - 4), last + 1)), key=distance)
