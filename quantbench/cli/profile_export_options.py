"""Options of `quantbench profile export` for planner formats, and of `blindspots`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: the format of a profile itself; the others are in `exporters.catalog`
PROFILE = "profile"

Format = Annotated[
    str, typer.Option("--format", help="profile; or for a planner: aiconfigurator, vidur, llm-analysis, calculon, csv, "
                                       "parquet.")
]  # fmt: skip
Provider = Annotated[str, typer.Option("--provider", help="Export only this provider's rows (planner formats).")]
Dtype = Annotated[str, typer.Option("--dtype", help="Export only this number format (planner formats).")]
Layout = Annotated[
    str, typer.Option("--layout", help="Export only products of this layout: nt, nn or tn (planner formats).")
]
Backend = Annotated[str, typer.Option("--backend", help="aiconfigurator: vllm, sglang or trtllm.")]
AsVersion = Annotated[str, typer.Option("--as-version", help="aiconfigurator: version under which it finds the table.")]
Model = Annotated[str, typer.Option("--model", help="vidur: model whose shapes are exported (llama-3-8b, …).")]
Fill = Annotated[bool, typer.Option("--fill", help="aiconfigurator: add modelled rows at edges between measured ones.")]
TensorParallel = Annotated[str, typer.Option("--tp", help="vidur: tensor-parallel degrees, comma separated.")]
Bound = Annotated[str, typer.Option("--bound", help="Largest error of linear interpolation between the rows.")]

Consumer = Annotated[str, typer.Option("--for", help="Planner whose interpolation is tested: aiconfigurator.")]
Target = Annotated[str, typer.Option("--of", help="Error that --bound applies to: p95 or max.")]
HeldOut = Annotated[
    bool,
    typer.Option(
        "--held-out",
        help="Test on held-out rows: keep powers of two of m, select rows to add, compare with the others.",
    ),
]
ModelRows = Annotated[int, typer.Option("--rows", help="Most rows of a run that its model is fitted to.")]
Shapes = Annotated[
    Path | None, typer.Option("--shapes", help="Write the rows to add as a CSV file for `sweep --shapes`.")
]
Docs = Annotated[
    Path | None, typer.Option("--docs", help="With --held-out: write the table between the markers of this file.")
]
