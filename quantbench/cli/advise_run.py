"""What `quantbench advise` does and says, in order: device, what the times rest on, costs, neighbours, next command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quantbench.advice import Advice, Advised, advise
from quantbench.advice.report import advice_to_json, named_shapes
from quantbench.cli import advise_print as show
from quantbench.cli.advise_options import AdviseArguments
from quantbench.cli.console import output, say
from quantbench.cli.writable import check_file
from quantbench.errors import InputError
from quantbench.sweep.shape_file import SUFFIX, write_shape_file


def run(arguments: AdviseArguments, junit: Path | None, *, as_json: bool) -> bool:
    """Advise and print. Returns whether more is wasted than --fail-over allows."""
    most, top, space = arguments.most_waste(), arguments.count(), arguments.space()
    out = arguments.shapes_out
    if junit is not None:
        check_file("write JUnit", junit)
    if out is not None:
        if out.suffix != SUFFIX:
            raise InputError("--shapes-out", str(out), f"a name that ends in {SUFFIX}, by which sweep knows it")
        check_file("write shapes", out)
    times, kernels = arguments.times()
    shape, repair, assumed = arguments.shape(times.device, space)
    advice = advise(shape, times, space=space, top=top, repair=repair, kernels=kernels)
    failed = most is not None and advice.cost.waste_share > most
    if junit is not None:
        from quantbench.advice.junit import write_junit

        write_junit(advice.cost, most, junit)
    if out is not None:
        write_shape_file(out, named_shapes(advice))
    if as_json:
        answer = {**advice_to_json(advice), "assumed": list(assumed), "fail_over": most, "failed": failed}
        print(json.dumps(answer, indent=1))
        return failed
    console = output()
    _say(console, advice, assumed, every=bool(arguments.top))
    if most is not None:
        console.print()
        say(console, *show.gate_line(advice.cost, most))
    if junit is not None:
        say(console, f"JUnit: {junit!s}")
    console.print()
    for line in show.next_lines(advice, out):
        say(console, line)
    return failed


def _say(console: Console, advice: Advice, assumed: Sequence[str], *, every: bool) -> None:
    """What it costs and what is better. every: shapes that are not surely faster are shown as well."""
    wide = console.width >= show.WIDE
    for line in (*show.unmeasured_lines(advice), *show.header_lines(advice, assumed)):
        say(console, line)
    if advice.repair is not None:
        console.print()
        say(console, f"repaired: {advice.repair.words}")
        say(console, show.repaired_line(advice))
        _say_advised(console, "the others, against it", advice.repaired, wide)
    console.print()
    if any(show.stands_out(advice.cost, ops) for ops in advice.cost.by_name.values()):
        console.print(show.cost_table(advice.cost, reasons=wide))
    for line in (*show.cost_lines(advice.cost, reasons=not wide), "", *show.waste_lines(advice.cost)):
        say(console, line)
    if not advice.tried:
        return
    say(console, f"\n{show.verdict_line(advice)}")
    named = {one.found.shape for one in advice.better}
    alone = [one for one in advice.better_alone if one.found.shape not in named]
    _say_advised(console, "better shapes (● best gain for the smallest change)", advice.better, wide, marks=True)
    _say_advised(console, "better with one change alone", alone, wide)
    if every:
        unsure = dict.fromkeys((*advice.neighbours, *advice.singles))
        rest = [one for one in unsure if not one.found.sure and one.found.shape not in named]
        _say_advised(console, "candidates, none of them surely faster: measure before you move", rest, wide)
    if advice.better or alone or every or advice.repaired:
        say(console, show.GAIN_LINE)


def _say_advised(console: Console, title: str, advised: Sequence[Advised], wide: bool, *, marks: bool = False) -> None:
    if not advised:
        return
    console.print()
    console.print(show.advised_table(title, advised, marks=marks, reasons=wide))
    if not wide:
        for line in show.reason_lines(advised):
            say(console, line)
