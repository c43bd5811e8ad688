"""What `quantbench validate` does and prints: what is compared, progress with the time left, the table."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from quantbench.cli.console import output, say
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.contests import Step, run_contests, table_contests
from quantbench.latency.scoring import COLUMNS, Absent, Line, cells, lines_to_json
from quantbench.units import duration

# Where the output is no terminal, a line of progress is printed at most this often.
_PLAIN_PROGRESS_EVERY_S = 15.0


def run(table: Path, gpu: str, *, rows: int, seeds: str, dtype: str, as_json: bool) -> None:
    """Judge and print. On one core, so that the times are one core's."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

    console = output(stderr=as_json)
    drawn, spec = _seeds(seeds), lookup(gpu)
    with threadpool_limits(1), _shown(console) as show:
        plan = table_contests(table, spec.name, rows, dtype)
        count = sum(len(contestants) for _, contestants in plan)
        say(console, f"{count} contestants on {table.name} of {spec.name}; learning from {rows} rows")
        found = list(run_contests(plan, drawn, show))
    lines = [one for one in found if isinstance(one, Line)]
    if as_json:
        print(json.dumps(lines_to_json(lines, [one for one in found if isinstance(one, Absent)]), indent=1))
        return
    say(console, "errors: median / mean / p95 of |predicted / measured - 1|, in %")
    shown = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("gpu", "protocol", *COLUMNS):
        shown.add_column(name, justify="left" if name in ("gpu", "protocol", "model") else "right")
    for entry in lines:
        shown.add_row(entry.gpu, entry.protocol, *cells(entry))
    console.print(shown)


def _seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise InputError("validate", f"--seeds {text!r}", "integers, comma separated: 0,1,2")
    return tuple(int(part) for part in parts)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[Step], None]]:
    """A bar on a terminal; now and then a line where there is none."""
    started_s = time.monotonic()

    def left(step: Step) -> str:
        if step.done == 0:
            return ""
        return f", {duration((time.monotonic() - started_s) / step.done * (step.total - step.done))} left"

    if not console.is_terminal:
        last_s = [started_s]

        def line(step: Step) -> None:
            if time.monotonic() - last_s[0] >= _PLAIN_PROGRESS_EVERY_S:
                last_s[0] = time.monotonic()
                say(console, f"  {step.text}{left(step)}")

        yield line
        return
    with Progress(
        BarColumn(20), TextColumn("{task.description}", markup=False), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda step: bar.update(
            task, completed=step.done, total=step.total, description=f"{step.text}{left(step)}"
        )
