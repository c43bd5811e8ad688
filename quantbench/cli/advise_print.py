"""Advice as lines and tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from quantbench.advice import Advice, Advised, OpCost, ShapeCost
from quantbench.advice.cost import latency_per_run
from quantbench.cli.devices import device_line
from quantbench.planner.formulas import parameters
from quantbench.planner.op_times import Latency
from quantbench.units import latency, percent

#: tables with their reasons beside them need so many columns; narrower, the reasons follow in lines of their own
WIDE = 140
# A waste of more than this share of the whole time stands out in red, a smaller one in yellow.
_STANDS_OUT = 0.01


def header_lines(advice: Advice, assumed: Sequence[str]) -> list[str]:
    """What is asked about, on what, and what the times rest on."""
    shape = advice.shape
    heads = f"{shape.heads} head{'' if shape.heads == 1 else 's'} of {shape.head_dim}"
    if shape.kv_heads != shape.heads:
        heads += f" ({shape.kv_heads} of keys and values)"
    attention = "flash attention" if shape.fused_attention else "scores, softmax and context as Megatron runs them"
    mlp = f"{'gated ' if shape.gated else ''}ffn {shape.ffn}"
    batch = f"micro-batches of {shape.mbs} × {shape.seq} tokens on tp = {shape.tp}"
    lines = [
        device_line(advice.device),
        f"times: {advice.note}",
        f"shape: {parameters(shape) / 1e9:.3g} B parameters: {shape.layers} layers of {shape.hidden}, {heads}, {mlp}, "
        f"vocab {shape.vocab}; {batch}, {shape.dtype}, {attention}",
    ]
    return [*lines, *([f"assumed: {', '.join(assumed)}"] if assumed else [])]


def cost_table(cost: ShapeCost, *, reasons: bool) -> Table:
    """A line per op, what wastes most first. reasons: whether to say why beside it."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("op", no_wrap=True)
    for name in ("forward", "backward", "of time", "wasted", *(("GPU-h per 1T",) if reasons else ())):
        table.add_column(name, justify="right", no_wrap=True)
    if reasons:
        table.add_column("why", overflow="fold")
    for name, ops in cost.by_name.items():
        waste_us = sum(op.waste_us for op in ops)
        share = waste_us / cost.latency.mid
        style = "" if not waste_us else "bold red" if share >= _STANDS_OUT else "yellow"
        hours = cost.gpu_hours_per_trillion_tokens(waste_us)
        more = (f"{_two_digits(hours):,}" if waste_us else "", Text(_why(ops))) if reasons else ()
        table.add_row(
            Text(name, style=style),
            _time([op for op in ops if op.op.phase == "forward"]),
            _time([op for op in ops if op.op.phase != "forward"]),
            percent(sum(op.total_us for op in ops) / cost.latency.mid),
            Text(percent(share) if waste_us else "", style=style),
            *more,
        )
    return table


def cost_lines(cost: ShapeCost, *, reasons: bool) -> list[str]:
    """What the table's figures are, and the reasons where they are not in it."""
    hours = "" if reasons else " GPU-h per 1T: that in GPU-hours over 10^12 tokens, of all tensor-parallel GPUs."
    said = [
        "times: of one layer (logits: of the model), 90 % intervals. wasted: beyond what the same arithmetic takes at "
        f"the rate just before the edge.{hours} Norms, activations, communication and recomputation are not counted.",
    ]
    if reasons:
        said += [f"  {name}: {_why(ops)}" for name, ops in cost.by_name.items() if _why(ops)]
    return said


def _time(ops: Sequence[OpCost]) -> str:
    us = latency_per_run(ops)
    return f"{latency(us.mid)} ({_without_unit(us)})"


def _without_unit(us: Latency) -> str:
    """`1.76–1.97`, in the unit that the middle is shown in."""
    scale = 1.0 if us.mid < 999.5 else 1e3 if us.mid < 999.5e3 else 1e6
    low, high = (f"{x / scale:.3g}" if x / scale < 999.5 else f"{x / scale:.0f}" for x in (us.low, us.high))
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
        f"all of it: {latency(whole.mid)} ({_without_unit(whole)}) per micro-batch on each GPU, "
        f"{cost.tflops:.0f} TFLOP/s, {_two_digits(hours(whole.mid)):,} GPU-hours per trillion tokens"
    )
    if not cost.waste_us:
        return [said, "nothing sits past an edge"]
    low, high = cost.waste_low_us / whole.mid, cost.waste_high_us / whole.mid
    wasted = f"{percent(cost.waste_share)} ({percent(low)} to {percent(high)})"
    return [said, f"wasted past edges: {wasted}, {_two_digits(hours(cost.waste_us)):,} GPU-hours"]


def neighbours_line(advice: Advice) -> str:
    """How many shapes were looked at and what their gain means."""
    within = percent(advice.space.tolerance)
    tried = f"{advice.tried} shapes within ±{within} of the parameters were tried"
    found = (*advice.neighbours, *advice.singles)
    if not found:
        return f"{tried}: none is predicted to be faster. Keep it"
    doubt = "" if any(a.found.low > 0 for a in found) else ". None of them is surely faster"
    return (
        f"{tried}. gain: more tokens per second at equal parameters (time per token and parameter), with the 90 % "
        f"interval of the ratio{doubt}"
    )


def neighbours_table(advice: Advice, *, reasons: bool) -> Table:
    """Better shapes: first those that no nearer shape equals. reasons: whether to say why beside them."""
    title = "better shapes near it (●: no nearer shape gains as much)"
    return _advised_table(title, advice.neighbours, marks=True, reasons=reasons)


def singles_table(advice: Advice, *, reasons: bool) -> Table:
    """The best change of one thing alone."""
    return _advised_table("one change alone", advice.singles, marks=False, reasons=reasons)


def _advised_table(title: str, advised: Sequence[Advised], *, marks: bool, reasons: bool) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("change", overflow="fold")
    for name in ("head_dim", "gain", "low to high", "params", *(("wasted",) if reasons else ())):
        table.add_column(name, justify="right", no_wrap=True)
    if reasons:
        table.add_column("why", overflow="fold")
    for a in advised:
        unsure = a.found.low <= 0
        gain = Text(_signed(a.found.gain), style="" if unsure else "bold green")
        bounds = f"{_signed(a.found.low)} to {_signed(a.found.high)}"
        more = (percent(a.cost.waste_share), Text("; ".join(a.found.reasons))) if reasons else ()
        table.add_row(
            "●" if marks and a.found.nearest else "", a.changes, str(a.found.shape.head_dim), gain, bounds,
            _signed(a.found.more), *more,
        )  # fmt: skip
    return table


def reason_lines(advised: Sequence[Advised]) -> list[str]:
    """Why each is better, for tables that do not say it."""
    return [f"  {a.changes}: {'; '.join(a.found.reasons)}" for a in advised]


def gate_line(cost: ShapeCost, most: float) -> tuple[str | tuple[str, str], ...]:
    """Whether the gate holds, as parts for `say`."""
    verdict = ("FAIL", "bold red") if cost.waste_share > most else ("ok", "green")
    return verdict, f": {percent(cost.waste_share)} wasted past edges, {percent(most)} allowed"


def next_lines(advice: Advice) -> list[str]:
    """How to measure the best of it on such a card, and what else may be asked."""
    shape = advice.shape
    sizes = sorted({shape.hidden, *(a.found.shape.hidden for a in advice.neighbours[:3])})
    held = f"--tp {shape.tp} --mbs {shape.mbs} --seq {shape.seq} --vocab {shape.vocab} --dtype {shape.dtype}"
    if len(sizes) == 1:  # else heads and the MLP follow hidden
        held += f" --heads {shape.heads} --kv-heads {shape.kv_heads} --head-dim {shape.head_dim} --ffn {shape.ffn}"
    held += " --gated" if shape.gated else ""
    lines = [f"Next: on such a card, quantbench sweep --dim hidden={','.join(map(str, sizes))} {held} --direction both"]
    if not shape.fused_attention:
        lines.append("Where one fused kernel runs attention, ask again with --attention flash")
    return lines


def _signed(share: float) -> str:
    return f"{'−' if share < 0 else '+'}{percent(abs(share))}"


def _two_digits(value: float) -> int:
    """Rounded to the two digits that a prediction deserves."""
    return int(float(f"{value:.2g}"))
