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
Provider = Annotated[str, typer.Option("--provider", help="Whose figures, where there are several (planner formats).")]
Dtype = Annotated[str, typer.Option("--dtype", help="Only these products and attention (planner formats).")]
Layout = Annotated[str, typer.Option("--layout", help="Only products of it: nt, nn or tn (planner formats).")]
Backend = Annotated[str, typer.Option("--backend", help="aiconfigurator: vllm, sglang or trtllm.")]
AsVersion = Annotated[str, typer.Option("--as-version", help="aiconfigurator: the version it will look up.")]
Model = Annotated[str, typer.Option("--model", help="vidur: for whose shapes (llama-3-8b, …).")]
Fill = Annotated[bool, typer.Option("--fill", help="aiconfigurator: modelled rows at edges between measured ones.")]
TensorParallel = Annotated[str, typer.Option("--tp", help="vidur: tensor-parallel degrees, comma separated.")]
Bound = Annotated[str, typer.Option("--bound", help="Modelled rows stand so close that straight lines keep within it.")]

Consumer = Annotated[str, typer.Option("--for", help="Whose straight lines: aiconfigurator.")]
Target = Annotated[str, typer.Option("--of", help="What is to be within the bound: p95 or max.")]
HeldOut = Annotated[
    bool, typer.Option("--held-out", help="Instead: thin the rows to powers of two in m, choose, hold out the others.")
]
ModelRows = Annotated[int, typer.Option("--rows", help="Rows that a run's model is fitted to, at most.")]
Shapes = Annotated[
    Path | None, typer.Option("--shapes", help="Write the rows to add as a CSV file for `sweep --shapes`.")
]
Docs = Annotated[
    Path | None, typer.Option("--docs", help="With --held-out: write the table between the markers of this file.")
]
