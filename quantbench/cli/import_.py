"""`quantbench import aiconfigurator | vidur | csv | megatron-log`: import other tools' tables and logs as runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli.options import AsJson, Gpu, Results, grouped
from quantbench.cli.output import check_file, output, print_json, say
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.importers import aiconfigurator, csv_table, vidur
from quantbench.importers.megatron_log import read_log
from quantbench.importers.runs import ImportSummary, summary_lines, write_run
from quantbench.importers.training_run import default_run_id, summarize, write_training
from quantbench.latency.tables import slug_of, system_of
from quantbench.report.training import draw_throughput, training_table

import_ = typer.Typer(no_args_is_help=True, help="Import other tools' tables and logs as runs.")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """How a table becomes a run."""

    results: Results = Path("results")
    run_id: Annotated[str | None, typer.Option(help="Name of the run (default: made from the table's name).")] = None
    units_are_right: Annotated[
        bool, typer.Option("--units-are-right", help="Keep times that are far from what the GPU should take.")
    ] = False
    as_json: AsJson = False


@import_.command("aiconfigurator")
@grouped
def import_aiconfigurator(
    to: ImportOptions,
    system: Annotated[str, typer.Option("--system", help="a100_sxm and so on, or a device slug.")],
    backend: Annotated[str | None, typer.Option("--backend", help="vllm, sglang or trtllm.")] = None,
    version: Annotated[str | None, typer.Option("--version", help="The backend's version.")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="A systems folder instead of the package's.")] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="gemm, context_attention, nccl (these by default), encoder_attention, …"),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="Only rows of these dtypes.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU, for a system that is not known here.")] = None,
) -> None:
    """Import measured tables of aiconfigurator-core: products, context attention, NCCL collectives."""
    slug = gpu or slug_of(system_of(system))
    if slug is None:
        raise InputError("import aiconfigurator", f"--system {system} without --gpu", "a slug of `quantbench devices`")
    spec = lookup(slug)
    tables, missing = aiconfigurator.find_tables(
        system, backend=backend, version=version, kinds=table or aiconfigurator.DEFAULT_KINDS, root=root
    )
    if to.run_id is not None and len(tables) > 1:
        raise InputError(
            "import aiconfigurator", f"--run-id {to.run_id} for {len(tables)} tables", "one --table with it"
        )
    summaries: list[ImportSummary] = []
    for found in tables:
        rows = aiconfigurator.read_rows(found, dtypes=dtype or ())
        origin = aiconfigurator.origin_of(found, run_id=to.run_id)
        summaries.append(write_run(to.results, spec, origin, rows, units_are_right=to.units_are_right))
        if not to.as_json:
            _print(summaries[-1:])
    if to.as_json:
        _print_json(summaries)
        return
    for text in missing:
        say(output(), text)
    _print_next(summaries)


@import_.command("vidur")
@grouped
def import_vidur(
    to: ImportOptions,
    file: Annotated[Path, typer.Argument(help="mlp.csv, attention.csv, all_reduce.csv or send_recv.csv.")],
    gpu: Gpu,
    dtype: Annotated[str, typer.Option("--dtype", help="Number format that was profiled (not in the file).")] = "fp16",
) -> None:
    """Import a Vidur profile."""
    spec = lookup(gpu)
    kind, rows = vidur.read_rows(file, dtype=dtype)
    origin = vidur.origin_of(file, kind, run_id=to.run_id)
    _report([write_run(to.results, spec, origin, rows, units_are_right=to.units_are_right)], to.as_json)


@import_.command("csv")
@grouped
def import_csv(
    to: ImportOptions,
    file: Annotated[Path, typer.Argument(help="A CSV file with a header line; .gz and .xz are read too.")],
    columns: Annotated[
        str,
        typer.Option("--map", help="Columns of sizes and time: m=M,n=N,k=K,latency=time:ms."),
    ],
    gpu: Gpu,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Number format (bf16, …) without a dtype column.")
    ] = None,
    provider: Annotated[str, typer.Option("--provider", help="Library measured, without such a column.")] = "imported",
) -> None:
    """Import a CSV table of measured times."""
    spec = lookup(gpu)
    mapped = csv_table.parse_map(columns)
    rows = csv_table.read_rows(file, mapped, dtype=dtype, provider=provider)
    origin = csv_table.origin_of(file, mapped, run_id=to.run_id)
    _report([write_run(to.results, spec, origin, rows, units_are_right=to.units_are_right)], to.as_json)


@import_.command("megatron-log")
def import_megatron_log(
    files: Annotated[list[Path], typer.Argument(help="Logs of Megatron-LM or Megatron-DeepSpeed (.gz and .xz too).")],
    gpu: Gpu,
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs, if not in the log.")] = 0,
    tp: Annotated[int, typer.Option(min=0, help="Tensor-parallel degree, if not in the log.")] = 0,
    pp: Annotated[int, typer.Option(min=0, help="Pipeline stages, if not in the log.")] = 0,
    mbs: Annotated[int, typer.Option(min=0, help="Micro-batch size, if not in the log.")] = 0,
    seq: Annotated[int, typer.Option(min=0, help="Sequence length, if not in the log.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens per second by layout over GPUs here (PNG).")] = None,
    results: Results = Path("results"),
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the run, for one file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import training logs, also with line prefixes, restarts, several ranks and truncated lines."""
    spec = lookup(gpu)
    if run_id is not None and len(files) > 1:
        raise InputError("import megatron-log", f"--run-id {run_id} for {len(files)} files", "one file with it")
    if plot is not None and plot.suffix != ".png":
        raise InputError("import megatron-log", f"--plot {plot}", "a name that ends in .png")
    if plot is not None:
        check_file("import megatron-log --plot", plot)
    given = {name: value for name, value in {"gpus": gpus, "tp": tp, "pp": pp, "mbs": mbs}.items() if value}
    summaries, folders = [], []
    for path in files:
        found = read_log(path)
        if seq:
            found = replace(found, arguments={**found.arguments, "seq": seq})
        name = run_id or default_run_id(path)
        summary = summarize(name, found, given)
        summaries.append(summary)
        folders.append(write_training(results, spec.name, name, path, found, summary))
    if plot is not None:
        draw_throughput(summaries, plot)
    if as_json:
        print_json([{**asdict(s), "folder": f} for s, f in zip(summaries, folders, strict=True)])
        return
    console = output()
    console.print(training_table(summaries))
    for summary, folder in zip(summaries, folders, strict=True):
        for reason, count in summary.left_out.items():
            say(console, f"{summary.name}: {count} lines left out: {reason}")
        say(console, f"{folder}")
    if plot is not None:
        say(console, f"picture: {plot}")
    say(console, f"Next: quantbench report {' '.join(str(folder) for folder in folders)}")


def _report(summaries: Sequence[ImportSummary], as_json: bool) -> None:
    if as_json:
        _print_json(summaries)
    else:
        _print(summaries)
        _print_next(summaries)


def _print(summaries: Sequence[ImportSummary]) -> None:
    console = output()
    for summary in summaries:
        for line in summary_lines(summary):
            say(console, line)


def _print_next(summaries: Sequence[ImportSummary]) -> None:
    say(output(), f"\nNext: quantbench check {summaries[0].folder}")


def _print_json(summaries: Sequence[ImportSummary]) -> None:
    print_json([asdict(summary) for summary in summaries])
