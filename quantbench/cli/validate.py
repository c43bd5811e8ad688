"""`quantbench validate`: measure the accuracy of the latency models on measured tables."""

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
        list[str] | None, typer.Option("--gpu", help="Only this device; with --table, the device it was measured on.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Training rows.")] = 200,
    seeds: Annotated[str, typer.Option(help="Seeds that select the training rows, comma separated.")] = "0,1,2",
    dtype: Annotated[str, typer.Option(help="Number format of the rows used.")] = "bf16",
    attention: Annotated[bool, typer.Option(help="Test the attention model too.")] = True,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Compare adaptive with random selection of points instead.")
    ] = False,
    docs: Annotated[
        Path | None, typer.Option(help="Write the tables between the markers of this file (docs/accuracy.md).")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Test the predictions on the packaged tables or on your own table, beside simple and other tools' predictors
    that get the same training rows."""
    from quantbench.cli.validate_run import run

    run(
        table=table, gpus=tuple(gpu or ()), rows=rows, seeds=seeds, dtype=dtype, attention=attention,
        adaptive=adaptive, docs=docs, as_json=as_json,
    )  # fmt: skip
