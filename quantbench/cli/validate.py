"""`quantbench validate`: how good predictions are on a measured table of the user's."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

from quantbench.cli.options import AsJson, Gpu
from quantbench.cli.output import output, plain_table, print_json, progress_bar, say
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.contests import Step, run_contests, table_contests
from quantbench.latency.scoring import COLUMNS, cells
from quantbench.units import duration


def validate(
    table: Annotated[
        Path, typer.Option("--table", help="Measured products, CSV or Parquet: m, n, k, latency (ms), gemm_dtype.")
    ],
    gpu: Gpu,
    rows: Annotated[int, typer.Option(min=20, help="Rows to learn from.")] = 200,
    seeds: Annotated[str, typer.Option(help="Random draws of those rows, comma separated.")] = "0,1,2",
    dtype: Annotated[str, typer.Option(help="Number format of the rows to use.")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Fit the GEMM model to a few rows of a measured table, predict the others, and compare with simple baselines."""
    console = output(stderr=as_json)
    drawn, spec = _seeds(seeds), lookup(gpu)
    begun_s = time.monotonic()
    with threadpool_limits(1), progress_bar(console) as show:
        plan = table_contests(table, spec.name, rows, dtype)
        count = sum(len(contestants) for _, contestants in plan)
        say(console, f"{count} contestants on {table.name} of {spec.name}; learning from {rows} rows")
        found = list(run_contests(plan, drawn, lambda step: show(step.done, step.total, _how_far(step, begun_s))))
    if as_json:
        print_json({"lines": [entry.to_json() for entry in found], "absent": []})
        return
    say(console, "errors: median / mean / p95 of |predicted / measured - 1|, in %")
    left = ("gpu", "protocol", "model")
    shown = plain_table("gpu", "protocol", *COLUMNS, right=[name for name in COLUMNS if name not in left])
    for entry in found:
        shown.add_row(entry.gpu, entry.protocol, *cells(entry))
    console.print(shown)


def _seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise InputError("validate", f"--seeds {text!r}", "integers, comma separated: 0,1,2")
    return tuple(int(part) for part in parts)


def _how_far(step: Step, begun_s: float) -> str:
    """What is being done, and the time left once that can be told."""
    if not step.done:
        return step.text
    left_s = (time.monotonic() - begun_s) / step.done * (step.total - step.done)
    return f"{step.text}, {duration(left_s)} left"
