"""Command `import`: imports tables of measured times as runs, and summarizes training logs.

Imported runs are labelled with their origin and can be used like measured runs. The training logs
are those of Megatron-LM and its relatives.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quantbench.cli.options import argument, command, gpu_option, option, results_option
from quantbench.cli.output import Result, check_file, plain_table
from quantbench.device import lookup
from quantbench.errors import InputError, one_line
from quantbench.files import write_file
from quantbench.latency.libraries import slug_of, system_of
from quantbench.report.terminal import filled, shown
from quantbench.units import with_interval

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.importers.runs import Origin, Rows
    from quantbench.importers.training_run import TrainingSummary

import_ = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Import tables as runs; summarize training logs.",
)


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of every command that imports tables."""

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
    layout: str = option("", "Layout of products (nt: linear layers), if there is no column."),
    provider: str = option("imported", "Library measured, if there is no provider column."),
) -> Result:
    """Import a CSV table of measured times."""
    from quantbench.importers import csv_table

    spec = lookup(gpu)
    mapped = csv_table.parse_map(columns)
    rows = csv_table.read_rows(file, mapped, dtype=dtype, layout=layout, provider=provider)
    origin = csv_table.origin_of(file, mapped, layout=layout, run_id=to.run_id)
    notes = []
    if mapped.kind == "gemm" and not layout and "layout" not in mapped.columns:
        notes.append("layout nn assumed; linear layers: --layout nt, or --map …,layout=column")
    return _write(to, spec, [(rows, origin)], notes)


def _write(
    to: ImportOptions,
    spec: DeviceSpec,
    tables: Sequence[tuple[Rows, Origin]],
    missing: Sequence[str] = (),
) -> Result:
    """Writes each table as a run, and returns the summaries of the runs.

    tables: rows and origin of each table.
    missing: one line for each table that was not found, and other notes. The lines are printed
        after the summaries.
    """
    from quantbench.importers.disagreement import disagreements
    from quantbench.importers.runs import summary_lines, write_run

    lines = []
    summaries = []
    for rows, origin in tables:
        missing = (*missing, *disagreements(spec, rows.rows))
        summary = write_run(to.results, spec, origin, rows, units_are_right=to.units_are_right)
        summaries.append(summary)
        lines += summary_lines(summary)
    folder = summaries[0].folder
    next_command = f"\nNext: quantbench check {folder}"
    export = f"profile export {folder} --format aiconfigurator -o systems"
    return Result(summaries, (*lines, *missing, f"{next_command}, or {export}"))


# Largest relative difference between a log's TFLOP/s and the computed TFLOP/s that is not reported.
_STATED_TOLERANCE = 0.05


def _stated_words(summary: TrainingSummary) -> Iterator[str]:
    """Yields a line if the TFLOP/s per GPU in a log contradict the sizes and times in the log.

    The model FLOPs and the hardware FLOPs (with recomputation) are computed from the log. The
    line is yielded if the log's TFLOP/s match neither. If the log lacks a size, nothing is yielded.
    """
    from quantbench.planner.formulas import hardware_flops, model_flops
    from quantbench.workload import TransformerShape

    stated = summary.tflops
    arguments = summary.arguments
    names = {one.name for one in fields(TransformerShape)}
    sizes = {name: arguments[name] for name in names & arguments.keys()}
    gpus = arguments.get("gpus")
    needed = {"hidden", "heads", "layers", "seq"}
    if stated is None or not gpus or not needed <= sizes.keys():
        return
    try:
        shape = TransformerShape(**sizes)
    except InputError:
        return
    gbs = arguments["gbs"]
    flops_per_tflop_s = summary.sec_per_it * gpus * 1e12
    model = model_flops(shape, gbs) / flops_per_tflop_s
    recompute = arguments.get("recompute", "none")
    hardware = hardware_flops(shape, gbs, recompute) / flops_per_tflop_s
    if all(abs(stated / one - 1) > _STATED_TOLERANCE for one in (model, hardware)):
        yield (
            f"{summary.name}: the log states {stated:.1f} TFLOP/s per GPU; its sizes and times "
            f"give {model:.1f} of model FLOPs, {hardware:.1f} of hardware FLOPs"
        )


def _log_cells(log: TrainingSummary) -> dict[str, str]:
    """Formats a log's summary as table cells, by column name.

    Unknown values are dashes. A `>` at the start of a name aligns the column to the right.
    """
    tokens = None
    if log.tokens_per_s is not None and log.tokens_per_s_within is not None:
        tokens = with_interval(log.tokens_per_s, log.tokens_per_s_within.half_width)
    loss = None
    if log.last_loss is not None:
        loss = f"{log.first_loss:.3g} → {log.last_loss:.3g}"
        if log.nan_losses:
            loss += f" ({log.nan_losses} nan)"
    cells = {
        "log": log.name,
        ">GPUs": log.arguments.get("gpus"),
        ">TP": log.arguments.get("tp"),
        ">PP": log.arguments.get("pp"),
        ">MBS": log.arguments.get("mbs"),
        ">GBS": log.arguments["gbs"],
        ">iterations": log.iterations,
        ">restarts": log.restarts,
        ">sec/it": f"{log.sec_per_it:.4g}",
        ">tokens/s": tokens,
        ">hardware TFLOP/s": shown(log.tflops, "{:.1f}".format, "–"),
        ">loss": loss,
    }
    return {name: shown(cell, unknown="–") for name, cell in cells.items()}


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
) -> Result:
    """Summarize training logs, also with line prefixes, restarts, several ranks and truncated
    lines.
    """
    from quantbench.importers.megatron_log import read_log
    from quantbench.importers.training_run import fastest, summarize

    spec = lookup(gpu)
    if rows is not None:
        check_file("import --rows", rows, suffix=".csv")
    sizes = {"gpus": gpus, "tp": tp, "pp": pp, "mbs": mbs, "seq": seq}
    given = {name: value for name, value in sizes.items() if value}
    summaries = []
    lines = []
    layouts = []
    for path in files:
        found = read_log(path)
        found = replace(found, arguments={**found.arguments, **given})
        summary = summarize(one_line(str(path)), found)
        summaries.append(summary)
        for reason, count in summary.left_out.items():
            lines.append(f"{summary.name}: {count} lines left out: {reason}")
        lines += _stated_words(summary)
        of_row = {"row_id": summary.name, "gpu": spec.name}
        of_row["sec_per_it"] = f"{summary.sec_per_it:.6g}"
        layouts.append({**of_row, **summary.arguments})
    untold = "the logs do not give GPUs and tokens: --gpus, --seq and the layout state them"
    lines.append(fastest(summaries) or untold)
    if rows is None:
        lines.append("\nNext: add --rows layouts.csv to write these layouts for quantbench plan")
    else:
        table = StringIO()
        columns = dict.fromkeys(chain.from_iterable(layouts))
        cells = csv.DictWriter(table, columns, lineterminator="\n")
        cells.writeheader()
        cells.writerows(layouts)
        write_file("import --rows", rows, table.getvalue())
        lines.append(f"\nNext: quantbench plan --rows {rows}, or plan --fit {rows} --stack …")
    logs = plain_table(*filled(list(map(_log_cells, summaries))))
    return Result(summaries, (logs, *lines))
