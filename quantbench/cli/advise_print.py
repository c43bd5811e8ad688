"""Advice as lines and tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.table import Table
from rich.text import Text

from quantbench.advice import Advice, Advised, OpCost, ShapeCost
from quantbench.advice.cost import LOWER_BOUND, latency_per_run
from quantbench.cli.devices import device_line
from quantbench.cli.output import plain_table
from quantbench.latency.estimate import Estimate
from quantbench.planner.formulas import parameters
from quantbench.units import latency, percent, signed_percent

#: tables with their reasons beside them need so many columns; narrower, the reasons follow in lines of their own
WIDE = 140
#: what the gain of a table is
GAIN_LINE = "gain: more tokens per second at equal parameters, with the 90 % interval of the ratio"
# Ops that waste less of the whole time share a line.
_WORTH_A_ROW = 0.005
# A waste of more than this share of the whole time stands out in red, a smaller one in yellow.
_STANDS_OUT = 0.01


def unmeasured_lines(advice: Advice) -> list[str]:
    """What of the time rests on no measurement: the first line where there is any, so that nobody reads past it."""
    if not advice.unmeasured:
        return []
    whole = sum(one.share for one in advice.unmeasured)
    said = "; ".join(f"{one.reason} ({percent(one.share)})" for one in advice.unmeasured)
    return [f"not measured, only estimated: {percent(whole)} of the time: {said}"]


def header_lines(advice: Advice, assumed: Sequence[str]) -> list[str]:
    """What is asked about, on what, and what the times rest on."""
    shape = advice.shape
    heads = f"{shape.heads} head{'' if shape.heads == 1 else 's'} of {shape.head_dim}"
    if shape.kv_heads != shape.heads:
        heads += f" ({shape.kv_heads} of keys and values)"
    attention = f"{shape.attention} attention"
    mlp = f"{'gated ' if shape.gated else ''}ffn {shape.ffn}"
    batch = f"micro-batches of {shape.mbs} × {shape.seq} tokens on tp = {shape.tp}"
    lines = [
        device_line(advice.device),
        f"times: {advice.note}",
        f"shape: {parameters(shape) / 1e9:.3g} B parameters: {shape.layers} layers of {shape.hidden}, {heads}, {mlp}, "
        f"vocab {shape.vocab}; {batch}, {shape.dtype}, {attention}",
    ]
    tried = [f"tried: {advice.space.words}"] if advice.tried else []
    return [*lines, *([f"assumed: {', '.join(assumed)}"] if assumed else []), *tried]


def stands_out(cost: ShapeCost, ops: Sequence[OpCost]) -> bool:
    """Whether ops waste enough of the whole time for a row of their own."""
    return sum(op.waste_us for op in ops) >= _WORTH_A_ROW * cost.latency.latency_us


def cost_table(cost: ShapeCost, *, reasons: bool) -> Table:
    """A line per op that wastes something worth it, the worst first. reasons: whether to say why beside it."""
    numbers = ("forward", "backward", "of time", "wasted", *(("GPU-h per 1T",) if reasons else ()))
    table = plain_table("op", *numbers, *(("why",) if reasons else ()), right=numbers)
    for name, ops in cost.by_name.items():
        if not stands_out(cost, ops):
            continue
        waste_us = sum(op.waste_us for op in ops)
        share = waste_us / cost.latency.latency_us
        style = "bold red" if share >= _STANDS_OUT else "yellow"
        hours = cost.gpu_hours_per_trillion_tokens(waste_us)
        more = (f"{_two_digits(hours):,}", Text(_why(ops))) if reasons else ()
        table.add_row(
            Text(name, style=style),
            _time([op for op in ops if op.op.phase == "forward"]),
            _time([op for op in ops if op.op.phase != "forward"]),
            percent(sum(op.total_us for op in ops) / cost.latency.latency_us),
            Text(percent(share), style=style),
            *more,
        )
    return table


def cost_lines(cost: ShapeCost, *, reasons: bool) -> list[str]:
    """The ops that are in no row of the table, what its figures are, and the reasons where they are not in it."""
    by_name = {name: ops for name, ops in cost.by_name.items() if stands_out(cost, ops)}
    rest = {name: ops for name, ops in cost.by_name.items() if name not in by_name}
    said = []
    if by_name and reasons:
        said += [f"  {name}: {_why(ops)}" for name, ops in by_name.items()]
    if rest:
        wasted = sum(op.waste_us for ops in rest.values() for op in ops) / cost.latency.latency_us
        times = ", ".join(f"{name} {latency(latency_per_run(ops).latency_us)}" for name, ops in rest.items())
        others = "the others" if by_name else "all ops"
        said.append(f"{others}, each wasting less than {percent(_WORTH_A_ROW)} ({percent(wasted)} together): {times}")
    hours = "" if reasons or not by_name else " GPU-h per 1T: that in GPU-hours over 10^12 tokens, of all tp GPUs."
    said.append(
        "times: one layer forward and backward (logits: of the model). wasted: extra time against a size just below "
        f"the edge.{hours} Norms, activations, communication, the optimizer and recomputation are not counted."
    )
    return said


def _time(ops: Sequence[OpCost]) -> str:
    us = latency_per_run(ops)
    return f"{latency(us.latency_us)} ({_without_unit(us)})"


def _without_unit(us: Estimate) -> str:
    """`1.76–1.97`, in the unit that the middle is shown in."""
    scale = 1.0 if us.latency_us < 999.5 else 1e3 if us.latency_us < 999.5e3 else 1e6
    low, high = (f"{x / scale:.3g}" if x / scale < 999.5 else f"{x / scale:.0f}" for x in (us.low_us, us.high_us))
    return f"{low}–{high}"


def _why(ops: Sequence[OpCost]) -> str:
    worst = max(ops, key=lambda op: op.waste_us)
    if not worst.findings:
        return ""
    finding = worst.findings[0]
    same = sum(bool(op.findings) and op.findings[0].edge.kind == finding.edge.kind for op in ops)
    where = "" if same == len(ops) else f"{worst.op.phase}: "
    return f"{where}{finding.edge.kind}: {finding.edge.words}"


def waste_lines(cost: ShapeCost) -> list[str]:
    """The sums: time, rate, waste."""
    whole, hours = cost.latency, cost.gpu_hours_per_trillion_tokens
    said = (
        f"all of it: {latency(whole.latency_us)} ({_without_unit(whole)}) per micro-batch on each GPU, "
        f"{cost.tflops:.0f} TFLOP/s, {_two_digits(hours(whole.latency_us)):,} GPU-hours per trillion tokens "
        f"({LOWER_BOUND})"
    )
    if not cost.waste_us:
        return [said, "nothing sits past an edge"]
    low, high = cost.waste_low_us / whole.latency_us, cost.waste_high_us / whole.latency_us
    wasted = f"{percent(cost.waste_share)} ({percent(low)} to {percent(high)})"
    return [said, f"wasted past edges: {wasted}, {_two_digits(hours(cost.waste_us)):,} GPU-hours"]


def repaired_line(advice: Advice) -> str:
    """Which repaired shape the rest is about."""
    words = f"{advice.shape.heads} heads, hidden {advice.shape.hidden}, {advice.shape.layers} layers"
    return f"all that follows is of the one predicted to be the fastest per token and parameter: {words}"


def verdict_line(advice: Advice) -> str:
    """Whether to keep the shape, and why."""
    batch = max((one for one in advice.better_alone if one.found.shape.mbs > advice.shape.mbs), default=None,
                key=lambda one: one.found.low)  # fmt: skip
    more = f". A larger micro-batch is faster: {batch.changes}, by {batch.found.gain_words}" if batch else ""
    changes = [one for one in (*advice.better, *advice.better_alone) if one.found.shape.mbs == advice.shape.mbs]
    if not changes:
        why = "every gain is within the error of the times" if advice.compared else "none is predicted to be"
        return f"Keep it: of {advice.tried} shapes tried none is surely faster ({why}){more}"
    best = max(changes, key=lambda one: one.found.low)
    gain = best.found.gain_words
    return f"Worth a change: of {advice.tried} shapes tried, {best.changes} is surely faster, by {gain}{more}"


def advised_table(title: str, advised: Sequence[Advised], *, marks: bool, reasons: bool) -> Table:
    """Shapes held against the one asked about. marks: a dot before those that no nearer shape equals; reasons: a column
    of why each is faster."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    if marks:
        table.add_column("", no_wrap=True)
    table.add_column("change", overflow="fold")
    for name in ("head_dim", "gain", "low to high", "params", *(("wasted",) if reasons else ())):
        table.add_column(name, justify="right", no_wrap=True)
    if reasons:
        table.add_column("why", overflow="fold")
    for a in advised:
        gain = Text(signed_percent(a.found.gain), style="bold green" if a.found.sure else "")
        bounds = f"{signed_percent(a.found.low)} to {signed_percent(a.found.high)}"
        more = (percent(a.cost.waste_share), Text("; ".join(a.found.reasons))) if reasons else ()
        dot = ["●" if a.found.nearest else ""] if marks else []
        table.add_row(
            *dot, a.changes, str(a.found.shape.head_dim), gain, bounds, signed_percent(a.found.more), *more
        )  # fmt: skip
    return table


def reason_lines(advised: Sequence[Advised]) -> list[str]:
    """Why each is better, for tables that do not say it."""
    return [f"  {a.changes}: {'; '.join(a.found.reasons)}" for a in advised]


def gate_line(cost: ShapeCost, most: float) -> tuple[str | tuple[str, str], ...]:
    """Whether the gate holds, as parts for `say`."""
    verdict = ("FAIL", "bold red") if cost.waste_share > most else ("ok", "green")
    return verdict, f": {percent(cost.waste_share)} wasted past edges, {percent(most)} allowed"


def next_lines(advice: Advice, out: Path | None) -> list[str]:
    """How to measure exactly what was compared. out: the file that holds it; None where none was written."""
    others = len(advice.compared)
    rivals = f" and its {others} nearest rivals" if others > 1 else " and its nearest rival" if others else ""
    what = f"measures every op of this shape{rivals}"
    again = [] if advice.shape.attention == "flash" else ["Where one kernel runs attention: ask with --attention flash"]
    if out is None:
        return [
            *again,
            f"Next: repeat this with -o shapes.json; on such a card, quantbench sweep --shapes shapes.json {what}",
        ]
    return [*again, f"shapes: {out}", f"Next, on such a card ({what}): quantbench sweep --shapes {quote(str(out))}"]


def _two_digits(value: float) -> int:
    """Rounded to the two digits that a prediction deserves."""
    return int(float(f"{value:.2g}"))
