"""Command `validate`: measures the prediction error on a table of measured GEMMs (`profile validate` checks a file).

Entry point: `validate`, loaded by `app`.
"""

from __future__ import annotations

import time
from pathlib import Path

from quantbench.cli.options import command, gpu_option, integers, json_option, option
from quantbench.cli.output import output, plain_table, print_result, progress_bar, say
from quantbench.device import lookup
from quantbench.units import duration


@command
def validate(
    table: Path = option(..., "Measured products, CSV or Parquet: m, n, k, latency (ms), gemm_dtype."),
    gpu: str = gpu_option(),
    rows: int = option(200, "Number of training rows.", min=20),
    seeds: str = option("0,1,2", "Seeds for drawing the training rows, comma separated."),
    dtype: str = option("bf16", "Number format of the rows to use."),
    as_json: bool = json_option(),
) -> None:
    """Fit the GEMM model to a few rows of a measured table, predict the others, and compare with simple baselines."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    from quantbench.latency.contests import Step, run_contests, table_contests
    from quantbench.latency.scoring import COLUMNS, cells

    def show_step(step: Step) -> None:
        left_s = (time.monotonic() - begun_s) / step.done * (step.total - step.done) if step.done else 0.0
        show_bar(step.done, step.total, f"{step.text}, {duration(left_s)} left" if step.done else step.text)

    drawn = integers("--seeds", seeds, low=0)
    console, spec = output(stderr=as_json), lookup(gpu)
    begun_s = time.monotonic()
    with threadpool_limits(1), progress_bar(console) as show_bar:
        plan = table_contests(table, spec.name, rows, dtype)
        count = sum(len(contestants) for _, contestants in plan)
        say(console, f"{count} contestants on {table.name} of {spec.name}; learning from {rows} rows")
        lines = list(run_contests(plan, drawn, show_step))
    columns = (name if name in ("gpu", "protocol", "model") else f">{name}" for name in COLUMNS)
    shown = plain_table(("gpu", "protocol", *columns), [(line.gpu, line.protocol, *cells(line)) for line in lines])
    errors = "errors: median / mean / p95 of |predicted / measured - 1|, in %"
    print_result(as_json, lambda: {"lines": [line.to_json() for line in lines], "absent": []}, (errors, shown))
