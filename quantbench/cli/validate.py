"""`quantbench validate`: how good the latency models are, rerun on measured tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o


def validate(
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Your own table, CSV or Parquet: columns m, n, k, latency (ms), gemm_dtype."),
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="Only this device; with --table, where it was measured.")
    ] = None,
    rows: Annotated[int, typer.Option(min=20, help="Rows to learn from.")] = 200,
    seeds: Annotated[str, typer.Option(help="Which draws of those rows, comma separated.")] = "0,1,2",
    dtype: Annotated[str, typer.Option(help="Which rows of the table.")] = "bf16",
    attention: Annotated[bool, typer.Option(help="Judge the attention model as well.")] = True,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Instead: adaptive against random choice.")] = False,
    docs: Annotated[
        Path | None, typer.Option(help="Write the tables between the markers of this file (docs/accuracy.md).")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Rerun the accuracy protocols on the packaged tables, or on a table of yours, against simple and foreign
    predictors given the same rows."""
    from quantbench.cli.validate_run import run

    run(
        table=table, gpus=tuple(gpu or ()), rows=rows, seeds=seeds, dtype=dtype, attention=attention,
        adaptive=adaptive, docs=docs, as_json=as_json,
    )  # fmt: skip
