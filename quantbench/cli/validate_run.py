"""What `quantbench validate` does and says: what will be judged, progress with the time left, the tables, the file."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from quantbench.cli.console import output, say
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.tables import SHIPPED_GPUS
from quantbench.units import duration
from quantbench.validate.adaptive import ADAPTIVE_GPUS, adaptive_contests
from quantbench.validate.attention_data import read_attention
from quantbench.validate.attention_runner import attention_lines
from quantbench.validate.gemm_runner import Plan, Step, run_contests
from quantbench.validate.origins import attention_origins, gemm_origins
from quantbench.validate.plan import packaged_contests, table_contests
from quantbench.validate.scores import Absent, Line
from quantbench.validate.table import around_markers, lines_to_json, markdown, terminal_table, write_between

# Where the output is no terminal, a line of progress is printed at most this often.
_PLAIN_PROGRESS_EVERY_S = 15.0


def run(
    *, table: Path | None, gpus: Sequence[str], rows: int, seeds: str, dtype: str, attention: bool, adaptive: bool,
    docs: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Judge, print, and write into `docs` where it is given. On one core, so that the times are one core's."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

    if docs is not None:
        sections = ["adaptive" if adaptive else "gemm"]
        if attention and table is None and not adaptive:
            sections.append("attention")
        for section in sections:
            around_markers(docs, section)
    with threadpool_limits(1):
        _run(table, gpus, rows, _seeds(seeds), dtype, attention, adaptive, docs, as_json)


def _run(
    table: Path | None, gpus: Sequence[str], rows: int, drawn: Sequence[int], dtype: str, attention: bool,
    adaptive: bool, docs: Path | None, as_json: bool,
) -> None:  # fmt: skip
    console = output(stderr=as_json)
    plan = _plan(table, [lookup(gpu).name for gpu in gpus], rows, dtype, adaptive=adaptive)
    devices = tuple(dict.fromkeys(contest.device.name for contest, _ in plan))
    say(console, f"{sum(len(c) for _, c in plan)} contestants on {', '.join(devices)}; learning from {rows} rows")
    lines: list[Line] = []
    absent: list[Absent] = []
    with _shown(console) as show:
        for found in run_contests(plan, drawn, show):
            if isinstance(found, Line):
                lines.append(found)
            else:
                absent.append(found)
    on_attention: list[Line] = []
    if attention and table is None and not adaptive:
        with _shown(console) as show:
            on_attention = list(attention_lines(devices, rows, drawn, show))
    if docs is not None:
        made_from = gemm_origins((contest.device.name, contest.table) for contest, _ in plan)
        write_between(docs, "adaptive" if adaptive else "gemm", markdown(lines, absent, made_from))
        if on_attention:
            made_from = attention_origins((device, read_attention(device)) for device in devices)
            write_between(docs, "attention", markdown(on_attention, [], made_from))
    if as_json:
        answer = {**lines_to_json(lines, absent), "attention": lines_to_json(on_attention, [])["lines"]}
        print(json.dumps(answer, indent=1))
        return
    _say(console, lines, absent, on_attention, docs)


def _plan(table: Path | None, gpus: Sequence[str], rows: int, dtype: str, *, adaptive: bool) -> Plan:
    if table is not None:
        if len(gpus) != 1:
            raise InputError("validate", f"--table {table} with {len(gpus)} --gpu", "one --gpu: where it was measured")
        return table_contests(table, gpus[0], rows, dtype)
    if adaptive:
        return adaptive_contests(tuple(gpus) or ADAPTIVE_GPUS, rows, dtype)
    return packaged_contests(tuple(gpus) or SHIPPED_GPUS, rows, dtype)


def _say(
    console: Console, lines: Sequence[Line], absent: Sequence[Absent], on_attention: Sequence[Line], docs: Path | None
) -> None:
    say(console, "errors: median / mean / p95 of |predicted / measured - 1|, in %")
    console.print(terminal_table(lines))
    for one in absent:
        say(console, f"{one.gpu}: {one.model} is left out: {one.reason}")
    if on_attention:
        say(console, "\nattention")
        console.print(terminal_table(on_attention))
    if docs is not None:
        say(console, f"\nwritten into {docs}")


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
