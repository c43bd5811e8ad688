"""`quantbench validate`: how good predictions are on a measured table of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o


def validate(
    table: Annotated[
        Path, typer.Option("--table", help="Measured products, CSV or Parquet: m, n, k, latency (ms), gemm_dtype.")
    ],
    gpu: Annotated[str, typer.Option("--gpu", help="The device that the table was measured on.")],
    rows: Annotated[int, typer.Option(min=20, help="Rows to learn from.")] = 200,
    seeds: Annotated[str, typer.Option(help="Random draws of those rows, comma separated.")] = "0,1,2",
    dtype: Annotated[str, typer.Option(help="Number format of the rows to use.")] = "bf16",
    as_json: o.AsJson = False,
) -> None:
    """Fit the GEMM model to a few rows of a measured table, predict the others, and compare with simple baselines."""
    from quantbench.cli.validate_run import run

    run(table, gpu, rows=rows, seeds=seeds, dtype=dtype, as_json=as_json)
