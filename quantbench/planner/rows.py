"""Reads tables of layouts from CSV, and builds a job and a layout from each row.

Empty cells are filled from options, else with usual values. Each filled cell is recorded with its
reason.
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

_WHO = "plan"
# Megatron's GPT vocabulary, padded for 8 tensor-parallel ranks.
_USUAL_VOCAB = 51200
_USUAL_SEQ = 2048
#: reason for an assumed micro-batch size of 1
NOT_TOLD = "not stated: the smallest"
# Further names of the column of a field.
_COLUMNS = {
    "date": ("date_note",), "calculator": ("tflops_calculator",), "layers": ("nlayers",),
    "hidden": ("nhidden",), "heads": ("nheads",), "seq": ("seq_len",), "zero": ("zero_stage",),
    "tflops": ("tflops_reported",), "precision": ("dtype",), "dp_overlap": ("run_dp_overlap",),
    "node_gbit_per_s": ("network", "run_node_gbit"),
}  # fmt: skip
_BITS_PER_BYTE = 8
# Largest number of layers of a stage, relative to the mean stage, with which a row may have stages
# of different length.
_LONGEST_STAGE = 1.25
# Columns that a fit needs, because their values change the time of a run too much to be assumed.
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


# Kinds of cells, for each of which `_READERS` has a reader.
Whole = int | None
Number = float | None
Flag = bool | None


@dataclass(frozen=True, kw_only=True)
class ExpertColumns:
    """Sizes of experts and of latent attention, as in `TransformerShape`."""

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
    """Dimensions of the model. attention: flash or unfused."""

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
    """The job and its layout.

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
    """Row of a table of layouts, with its cells as typed. None and "" stand for empty cells.

    Every column is optional.

    mem_gb: memory in GiB, as nvidia-smi shows it.
    status: how the run ended: ok, oom, fail, …
    calculator: formula of `tflops`.
    stack: software, one of `calibration.STACKS`.
    node_gbit_per_s: rate of the network adapters of a node, in Gbit/s.
    table: name of the published table.
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
    """Value that was assumed for an empty cell, with the reason."""

    name: str
    value: object
    why: str


@dataclass(frozen=True)
class Case:
    """Job and layout of a row, with the assumed values."""

    job: Job
    layout: Layout
    assumed: tuple[Assumption, ...] = ()


@dataclass(frozen=True)
class Given:
    """Values from command-line options for empty cells.

    cells: values by field of `TableRow`; None and "" stand for no value.
    rates: changes of the cluster, as `Cluster.changed` takes them.
    """

    cells: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)


def read_table(path: Path) -> tuple[TableRow, ...]:
    """Reads all rows of a CSV file.

    Raises InputError for a cell of the wrong type, for a file without known columns, and for a file
    without rows.
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
    """Raises InputError if a row lacks a value that a fit must know.

    If a usual value were assumed instead, its error would change the fitted factors.

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
    """Reads a number above 0. In a column of dp_overlap, 0 is allowed too."""
    found = row.number(column)
    if not math.isfinite(found) or found < 0 or (found == 0 and not column.endswith("dp_overlap")):
        raise row.error(column, "a number above 0")
    return found


#: type of each field, and the reader of its cells
_KINDS = {one.name: one.type for one in fields(TableRow)}
# Sizes of a model that keep the default of `TransformerShape` if they are not stated.
_MODEL_PARTS = ("kv_heads", "head_dim", "ffn", *(one.name for one in fields(ExpertColumns)))
_READERS: dict[Any, Callable[[CsvRow, str], object]] = {
    str: CsvRow.text,
    Whole: CsvRow.integer,
    Number: _positive,
    Flag: CsvRow.flag,
}


class _Filling:
    """A row, with the assumptions made for its empty cells."""

    def __init__(self, row: TableRow, given: Given) -> None:
        self.row = row
        self.given = given
        self.assumed: list[Assumption] = []

    def assume(self, name: str, value: Any, why: str) -> Any:
        """Records an assumption and returns its value."""
        self.assumed.append(Assumption(name, value, why))
        return value

    def known(self, name: str) -> Any | None:
        """Returns the value from the row, else from the options, else None."""
        value = getattr(self.row, name)
        if value not in (None, ""):
            return value
        value = self.given.cells.get(name)
        if value in (None, ""):
            return None
        return self.assume(name, value, "option")

    def stated(self, *names: str) -> dict[str, Any]:
        """Returns the known values of several fields, by name."""
        found = {name: self.known(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def usual(self, name: str, value: Any, why: str) -> Any:
        """Returns the known value, or assumes `value`.

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
        """Raises InputError for the row."""
        raise InputError(f"{_WHO}, row {self.row.row_id}", what, expected)


def case_of(row: TableRow, given: Given | None = None) -> Case:
    """Builds the job and the layout of a row.

    given: values from options for empty cells.
    Raises InputError if a required cell is unknown.
    """
    filling = _Filling(row, given or Given())
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
        mbs=filling.usual("mbs", 1, NOT_TOLD),
        cp=cp,
        **filling.stated("interleave", "ep"),
        zero=filling.usual("zero", 1, "usual"),
        recompute=filling.usual("recompute", "full", "usual where nothing is said"),
        **filling.stated("sequence_parallel"),
    )
    shape = _shape(filling, layout, where.device)
    # There are runs with stages of different length, but none with a stage that is far longer than
    # the mean.
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


def _cluster(filling: _Filling) -> Cluster:
    """Returns the cluster of a row, with its stated nodes and rates."""
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


def _shape(filling: _Filling, layout: Layout, device: DeviceSpec) -> TransformerShape:
    """Builds the model of a row."""
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
    """Returns the number of layers of a model with a stated number of parameters.

    The number is the multiple of pp whose parameters, with or without the embedding, come closest
    to the stated number.

    size_b: number of parameters, in 1e9.

    >>> layers_for(194, 14400, 250880, 6), layers_for(183, 14400, 250880, 12)
    (78, 72)
    """
    size = size_b * 1e9
    each = gpt_layer_parameters(hidden)
    # Five multiples of pp are compared. The middle one is the number without an embedding.
    last = max(1, round(size / each / pp) + 2)

    def distance(layers: int) -> float:
        beyond = layers * each - size
        return min(abs(beyond), abs(beyond + vocab * hidden))

    return min((pp * stages for stages in range(max(1, last - 4), last + 1)), key=distance)
