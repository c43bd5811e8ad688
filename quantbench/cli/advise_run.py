"""What `quantbench advise` does and says, in order: device, what the times rest on, costs, neighbours, next command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quantbench.advice import Advised, advise
from quantbench.advice.report import advice_to_json
from quantbench.cli import advise_print as show
from quantbench.cli.advise_options import AdviseArguments
from quantbench.cli.console import output, say
from quantbench.cli.writable import check_file


def run(arguments: AdviseArguments, junit: Path | None, *, as_json: bool) -> bool:
    """Advise and print. Returns whether more is wasted than --fail-over allows."""
    most, top, space = arguments.most_waste(), arguments.count(), arguments.space()
    if junit is not None:
        check_file("write JUnit", junit)
    times = arguments.times()
    shape, assumed = arguments.shape(times.device)
    advice = advise(shape, times, space=space, top=top)
    failed = most is not None and advice.cost.waste_share > most
    if junit is not None:
        from quantbench.advice.junit import write_junit  # comes with what compares runs, and with scipy

        write_junit(advice.cost, most, junit)
    if as_json:
        answer = {**advice_to_json(advice), "assumed": list(assumed), "fail_over": most, "failed": failed}
        print(json.dumps(answer, indent=1))
        return failed
    console = output()
    wide = console.width >= show.WIDE
    for line in show.header_lines(advice, assumed):
        say(console, line)
    console.print()
    console.print(show.cost_table(advice.cost, reasons=wide))
    for line in (*show.cost_lines(advice.cost, reasons=not wide), "", *show.waste_lines(advice.cost)):
        say(console, line)
    if top:
        say(console, f"\n{show.neighbours_line(advice)}")
    _say_advised(console, advice.neighbours, show.neighbours_table(advice, reasons=wide), wide)
    _say_advised(console, advice.singles, show.singles_table(advice, reasons=wide), wide)
    if most is not None:
        console.print()
        say(console, *show.gate_line(advice.cost, most))
    if junit is not None:
        say(console, f"JUnit: {junit!s}")
    console.print()
    for line in show.next_lines(advice):
        say(console, line)
    return failed


def _say_advised(console: Console, advised: Sequence[Advised], table: Table, wide: bool) -> None:
    if not advised:
        return
    console.print()
    console.print(table)
    if not wide:
        for line in show.reason_lines(advised):
            say(console, line)
