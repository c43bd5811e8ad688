"""`quantbench profile`: make, read and export the profile of a GPU, the file that planners load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o
from quantbench.cli import profile_export_options as e

profile = typer.Typer(no_args_is_help=True, help="Make, read and export a GPU's tables, models and cliffs as one file.")

File = Annotated[Path, typer.Argument(help="A profile's JSON file.", metavar="FILE")]
Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders of runs of one device, or the device's own folder with all of them.", metavar="RUN…"),
]


@profile.command(short_help="Make a profile or a planner's files from runs.")
def export(
    runs: Runs,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File (of other formats: folder) to write.")
    ] = None,
    to: e.Format = e.PROFILE,
    fit: Annotated[bool, typer.Option(help="Fit models to the rows (otherwise use shipped models).")] = True,
    provider: e.Provider = "",
    dtype: e.Dtype = "",
    layout: e.Layout = "",
    backend: e.Backend = "vllm",
    version: e.AsVersion = "quantbench",
    model: e.Model = "",
    tp: e.TensorParallel = "1",
    fill: e.Fill = False,
    bound: e.Bound = "5%",
    as_json: o.AsJson = False,
) -> None:
    """Write the tables, fitted models, cliffs and rule verdicts of a device's runs to one file, or convert runs or a
    profile to a planner's format."""
    if to != e.PROFILE:
        from quantbench.cli.profile_export import export_format

        export_format(
            runs, to, output, provider=provider, dtype=dtype, layout=layout, backend=backend, version=version,
            model=model, tensor_parallel=tp, fill=fill, bound=bound, fit=fit, as_json=as_json,
        )  # fmt: skip
        return
    from quantbench.cli.profile_run import export_profile

    export_profile(runs, output, fit, as_json)


@profile.command(short_help="Interpolation error of a planner's table.")
def blindspots(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a profile's JSON file.", metavar="RUN")],
    consumer: e.Consumer,
    bound: e.Bound = "5%",
    target: e.Target = "p95",
    held_out: e.HeldOut = False,
    rows: e.ModelRows = 1000,
    shapes: e.Shapes = None,
    docs: e.Docs = None,
    as_json: o.AsJson = False,
) -> None:
    """Interpolation error of a planner between the rows of its table, and the fewest extra measurements that fix it."""
    from quantbench.cli.profile_blindspots import run_blindspots

    run_blindspots(run, consumer, bound, target, held_out, rows, shapes, docs, as_json)


@profile.command(short_help="Show a profile's contents and accuracy.")
def show(file: File, as_json: o.AsJson = False) -> None:
    """Show the device, the measured rows, the accuracy of the models, and the largest cliffs."""
    from quantbench.cli.profile_run import show_profile

    show_profile(file, as_json)


@profile.command(short_help="Check that a profile is complete and unchanged.")
def validate(file: File, as_json: o.AsJson = False) -> None:
    """Check a profile's digest, version, types, and every figure against the hardware's peak."""
    from quantbench.cli.profile_run import validate_profile

    validate_profile(file, as_json)


@profile.command(short_help="Look up the time of an operation.")
def query(
    file: File,
    gemm: Annotated[list[str] | None, typer.Option("--gemm", help="m,n,k or m,n,k,batch; may be given often.")] = None,
    softmax: Annotated[list[str] | None, typer.Option("--softmax", help="batch,rows,cols.")] = None,
    attention: Annotated[
        list[str] | None, typer.Option("--attention", help="batch,heads,seq,head_dim or with kv_heads at the end.")
    ] = None,
    collective: Annotated[
        list[str] | None, typer.Option("--collective", help="op,bytes,gpus or op,bytes,gpus,nodes.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format (default: the profile's own).")] = "",
    layout: Annotated[str, typer.Option(help="nn, nt or tn (default: the profile's own).")] = "",
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    as_json: o.AsJson = False,
) -> None:
    """The time of a shape with its interval: measured, interpolated between measured shapes, or modelled."""
    from quantbench.cli.profile_query import query_profile

    asked = {"gemm": gemm or [], "softmax": softmax or [], "attention": attention or [], "collective": collective or []}
    query_profile(file, asked, dtype, layout, direction, as_json)
