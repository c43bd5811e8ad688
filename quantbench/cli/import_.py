"""Command `import`: imports tables of aiconfigurator and CSV files as runs, and Megatron logs as
summaries.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantbench.cli.options import argument, command, gpu_option, option, results_option
from quantbench.cli.output import Result, check_file, encoded
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.files import write_file
from quantbench.latency.libraries import slug_of, system_of

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.importers.runs import Origin, Rows
    from quantbench.importers.training_run import TrainingSummary

# Sizes of a training run that its log may state.
_SIZES = ("gpus", "dp", "tp", "pp", "mbs", "gbs", "seq")

import_ = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Import other tools' tables and logs as runs."
)


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options shared by the imports of tables."""

    results: Path = results_option()
    run_id: str | None = option(None, "Name of the run (default: made from the table's name).")
    units_are_right: bool = option(False, "Accept a table whose times are implausible for the GPU.")


@import_.command("aiconfigurator")
@command
def import_aiconfigurator(
    to: ImportOptions,
    system: str = option(..., "System, such as a100_sxm, or a device slug."),
    backend: str | None = option(None, "vllm, sglang or trtllm."),
    version: str | None = option(None, "The backend's version."),
    root: Path | None = option(None, "A systems folder instead of the package's."),
    table: list[str] | None = option(
        None, "gemm, context_attention, nccl (these by default), encoder_attention, …"
    ),
    gpu: str | None = option(None, "The GPU, for a system that is not known here."),
    rows: int = option(0, "Only so many random rows of each number format (0: all).", min=0),
    seed: int = option(0, "Seed of the random rows."),
) -> Result:
    """Import measured tables of aiconfigurator-core: products, context attention, NCCL
    collectives.
    """
    from quantbench.importers import aiconfigurator

    slug = gpu or slug_of(system_of(system))
    if slug is None:
        typed = f"--system {system} without --gpu"
        raise InputError("import aiconfigurator", typed, "a slug of `quantbench devices`")
    spec = lookup(slug)
    tables, missing = aiconfigurator.find_tables(
        system,
        backend=backend,
        version=version,
        kinds=table or aiconfigurator.DEFAULT_KINDS,
        root=root,
    )
    if to.run_id is not None and len(tables) > 1:
        given = f"--run-id {to.run_id} for {len(tables)} tables"
        raise InputError("import aiconfigurator", given, "one --table with it")

    read = []
    for found in tables:
        origin = aiconfigurator.origin_of(found, run_id=to.run_id)
        of_table = aiconfigurator.read_rows(found)
        if rows:
            of_table.sample(rows, seed)
            origin = replace(origin, run_id=to.run_id or f"{origin.run_id}-{rows}-rows-seed-{seed}")
        read.append((of_table, origin))
    return _write(to, spec, read, missing)


@import_.command("csv")
@command
def import_csv(
    to: ImportOptions,
    file: Path = argument("A CSV file with a header line; .gz and .xz are read too."),
    columns: str = option(..., "Columns of sizes and time: m=M,n=N,k=K,latency=time:ms.", "--map"),
    gpu: str = gpu_option(),
    dtype: str | None = option(None, "Number format (bf16, …), if there is no dtype column."),
    provider: str = option("imported", "Library measured, if there is no provider column."),
) -> Result:
    """Import a CSV table of measured times."""
    from quantbench.importers import csv_table

    spec = lookup(gpu)
    mapped = csv_table.parse_map(columns)
    rows = csv_table.read_rows(file, mapped, dtype=dtype, provider=provider)
    return _write(to, spec, [(rows, csv_table.origin_of(file, mapped, run_id=to.run_id))])


def _write(
    to: ImportOptions,
    spec: DeviceSpec,
    tables: Sequence[tuple[Rows, Origin]],
    missing: Sequence[str] = (),
) -> Result:
    """Writes each table as a run. missing: one line per table that was not found."""
    from quantbench.importers.disagreement import disagreements
    from quantbench.importers.runs import summary_lines, write_run

    lines = []
    summaries = []
    for rows, origin in tables:
        missing = (*missing, *disagreements(spec, rows.rows))
        summary = write_run(to.results, spec, origin, rows, units_are_right=to.units_are_right)
        summaries.append(summary)
        lines += summary_lines(summary)
    next_command = f"\nNext: quantbench check {summaries[0].folder}"
    return Result(summaries, (*lines, *missing, next_command))


# Largest relative difference of stated and computed TFLOP/s that is not mentioned.
_STATED_TOLERANCE = 0.05


def _stated_words(summary: TrainingSummary, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line if the log's TFLOP/s per GPU disagree with its sizes and times, by model FLOPs
    as by hardware FLOPs.
    """
    from quantbench.planner.formulas import hardware_flops, model_flops
    from quantbench.workload import TransformerShape

    stated = summary.tflops
    names = {one.name for one in fields(TransformerShape)}
    sizes = {name: arguments[name] for name in names & arguments.keys()}
    if (
        stated is None
        or not summary.gpus
        or not {"hidden", "heads", "layers", "seq"} <= sizes.keys()
    ):
        return
    try:
        shape = TransformerShape(**sizes)
    except InputError:
        return
    flops_per_tflop_s = summary.sec_per_it * summary.gpus * 1e12
    model = model_flops(shape, summary.gbs) / flops_per_tflop_s
    hardware = (
        hardware_flops(shape, summary.gbs, arguments.get("recompute", "none")) / flops_per_tflop_s
    )
    if all(abs(stated / one - 1) > _STATED_TOLERANCE for one in (model, hardware)):
        yield (
            f"{summary.name}: the log states {stated:.1f} TFLOP/s per GPU; its sizes and times "
            f"give {model:.1f} of model FLOPs, {hardware:.1f} of hardware FLOPs"
        )


@import_.command("megatron-log")
@command
def import_megatron_log(
    files: list[Path] = argument(
        "Logs of Megatron-LM, Megatron-DeepSpeed or NeMo (.gz and .xz too)."
    ),
    gpu: str = gpu_option(),
    gpus: int = option(0, "Number of GPUs, if not in the log.", min=0),
    tp: int = option(0, "Tensor-parallel degree, if not in the log.", min=0),
    pp: int = option(0, "Pipeline stages, if not in the log.", min=0),
    mbs: int = option(0, "Micro-batch size, if not in the log.", min=0),
    seq: int = option(0, "Sequence length, if not in the log.", min=0),
    rows: Path | None = option(
        None, "Write a table of layouts for plan --rows and --fit here (CSV)."
    ),
    results: Path = results_option(),
    run_id: str | None = option(None, "Name of the run, for one file."),
) -> Result:
    """Import training logs, also with line prefixes, restarts, several ranks and truncated
    lines.
    """
    from quantbench.importers.megatron_log import read_log
    from quantbench.importers.training_run import default_run_id, summarize, write_training
    from quantbench.report.training import training_table

    spec = lookup(gpu)
    if run_id is not None and len(files) > 1:
        typed = f"--run-id {run_id} for {len(files)} files"
        raise InputError("import training log", typed, "one file with it")
    if rows is not None:
        check_file("import --rows", rows, suffix=".csv")
    typed_sizes = {"gpus": gpus, "tp": tp, "pp": pp, "mbs": mbs}
    given = {name: value for name, value in typed_sizes.items() if value}
    summaries = []
    answer = []
    lines = []
    layouts = []
    for path in files:
        found = read_log(path)
        if seq:
            found = replace(found, arguments={**found.arguments, "seq": seq})
        name = run_id or default_run_id(path)
        summary = summarize(name, found, given)
        summaries.append(summary)
        folder = write_training(results, spec.name, name, path, found, summary)
        for reason, count in summary.left_out.items():
            lines.append(f"{summary.name}: {count} lines left out: {reason}")
        lines += [*_stated_words(summary, found.arguments), str(folder)]
        answer.append({**encoded(summary), "folder": folder})
        of_row = {"row_id": name, "gpu": spec.name, "sec_per_it": f"{summary.sec_per_it:.6g}"}
        sizes = {size: getattr(summary, size) for size in _SIZES}
        layouts.append({**of_row, **found.arguments, **sizes})
    if rows is not None:
        table = StringIO()
        columns = dict.fromkeys(chain.from_iterable(layouts))
        cells = csv.DictWriter(table, columns, lineterminator="\n")
        cells.writeheader()
        cells.writerows(layouts)
        write_file("import --rows", rows, table.getvalue())
    folders = " ".join(str(one["folder"]) for one in answer)
    next_command = f"Next: quantbench report {folders}"
    return Result(answer, (training_table(summaries), *lines, next_command))
