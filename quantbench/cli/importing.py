"""`quantbench import aiconfigurator | vidur | csv`: import other tools' tables as runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantbench.errors import InputError

if TYPE_CHECKING:
    from quantbench.importers.runs import ImportSummary

_Results = Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")]
_RunId = Annotated[str | None, typer.Option("--run-id", help="Name of the run (default: made from the table's name).")]
_Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
_UnitsAreRight = Annotated[
    bool, typer.Option("--units-are-right", help="Keep times that are far from what the GPU should take.")
]
_Gpu = Annotated[
    str, typer.Option("--gpu", help="GPU that was measured: h100, a100-40gb or a slug of `quantbench devices`.")
]


def import_aiconfigurator(
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
    results: _Results = Path("results"),
    run_id: _RunId = None,
    units_are_right: _UnitsAreRight = False,
    as_json: _Json = False,
) -> None:
    """Import measured tables of aiconfigurator-core: products, context attention, NCCL collectives."""
    from quantbench.device import lookup
    from quantbench.importers import aiconfigurator
    from quantbench.importers.runs import write_run
    from quantbench.latency.tables import slug_of, system_of

    slug = gpu or slug_of(system_of(system))
    if slug is None:
        raise InputError("import aiconfigurator", f"--system {system} without --gpu", "a slug of `quantbench devices`")
    spec = lookup(slug)
    tables, missing = aiconfigurator.find_tables(
        system, backend=backend, version=version, kinds=table or aiconfigurator.DEFAULT_KINDS, root=root
    )
    if run_id is not None and len(tables) > 1:
        raise InputError("import aiconfigurator", f"--run-id {run_id} for {len(tables)} tables", "one --table with it")
    summaries: list[ImportSummary] = []
    for found in tables:
        rows = aiconfigurator.read_rows(found, dtypes=dtype or ())
        origin = aiconfigurator.origin_of(found, run_id=run_id)
        summaries.append(write_run(results, spec, origin, rows, units_are_right=units_are_right))
        if not as_json:
            _print(summaries[-1:])
    if as_json:
        _print_json(summaries)
        return
    for text in missing:
        typer.echo(text)
    _print_next(summaries)


def import_vidur(
    file: Annotated[Path, typer.Argument(help="mlp.csv, attention.csv, all_reduce.csv or send_recv.csv.")],
    gpu: _Gpu,
    dtype: Annotated[str, typer.Option("--dtype", help="Number format that was profiled (not in the file).")] = "fp16",
    results: _Results = Path("results"),
    run_id: _RunId = None,
    units_are_right: _UnitsAreRight = False,
    as_json: _Json = False,
) -> None:
    """Import a Vidur profile."""
    from quantbench.device import lookup
    from quantbench.importers import vidur
    from quantbench.importers.runs import write_run

    spec = lookup(gpu)
    kind, rows = vidur.read_rows(file, dtype=dtype)
    origin = vidur.origin_of(file, kind, run_id=run_id)
    _report([write_run(results, spec, origin, rows, units_are_right=units_are_right)], as_json)


def import_csv(
    file: Annotated[Path, typer.Argument(help="A CSV file with a header line; .gz and .xz are read too.")],
    columns: Annotated[
        str,
        typer.Option("--map", help="Columns of sizes and time: m=M,n=N,k=K,latency=time:ms."),
    ],
    gpu: _Gpu,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Number format (bf16, …) without a dtype column.")
    ] = None,
    provider: Annotated[str, typer.Option("--provider", help="Library measured, without such a column.")] = "imported",
    results: _Results = Path("results"),
    run_id: _RunId = None,
    units_are_right: _UnitsAreRight = False,
    as_json: _Json = False,
) -> None:
    """Import a CSV table of measured times."""
    from quantbench.device import lookup
    from quantbench.importers import csv_table
    from quantbench.importers.runs import write_run

    spec = lookup(gpu)
    mapped = csv_table.parse_map(columns)
    rows = csv_table.read_rows(file, mapped, dtype=dtype, provider=provider)
    origin = csv_table.origin_of(file, mapped, run_id=run_id)
    _report([write_run(results, spec, origin, rows, units_are_right=units_are_right)], as_json)


def _report(summaries: Sequence[ImportSummary], as_json: bool) -> None:
    if as_json:
        _print_json(summaries)
    else:
        _print(summaries)
        _print_next(summaries)


def _print(summaries: Sequence[ImportSummary]) -> None:
    from quantbench.cli.console import output, say
    from quantbench.importers.runs import summary_lines

    console = output()
    for summary in summaries:
        for line in summary_lines(summary):
            say(console, line)


def _print_next(summaries: Sequence[ImportSummary]) -> None:
    from quantbench.cli.console import output, say

    say(output(), f"\nNext: quantbench check {summaries[0].folder}")


def _print_json(summaries: Sequence[ImportSummary]) -> None:
    print(json.dumps([{**asdict(s), "folder": str(s.folder)} for s in summaries], indent=1))
