"""What `quantbench advise` does and says, in order: device, what the times rest on, costs, neighbours, next command."""

from __future__ import annotations

import json
from pathlib import Path

from rich.markup import escape

from quantbench.advice import advise
from quantbench.advice.report import advice_to_json
from quantbench.cli import advise_print as show
from quantbench.cli.advise_options import AdviseArguments
from quantbench.cli.console import output, say


def run(arguments: AdviseArguments, junit: Path | None, *, as_json: bool) -> bool:
    """Advise and print. Returns whether more is wasted than --fail-over allows."""
    most, top, space = arguments.most_waste(), arguments.count(), arguments.space()
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
    for line in show.header_lines(advice, assumed):
        say(console, escape(line))
    console.print()
    console.print(show.cost_table(advice.cost))
    console.print()
    say(console, escape(show.waste_line(advice.cost)))
    if top:
        for line in show.neighbour_lines(advice):
            say(console, escape(line))
    if advice.neighbours:
        console.print()
        console.print(show.neighbours_table(advice))
    if advice.singles:
        console.print()
        console.print(show.singles_table(advice))
    if most is not None:
        console.print()
        say(console, show.gate_line(advice.cost, most))
    if junit is not None:
        say(console, f"JUnit: {escape(str(junit))}")
    console.print()
    for line in show.next_lines(advice):
        say(console, escape(line))
    return failed
