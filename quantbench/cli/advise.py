"""Command `advise`: predicts a transformer shape's time on a GPU, and finds faster shapes near it.

The output shows how much time each op wastes past an edge: a size after which a GEMM needs more
tiles or more waves (rounds of tiles over all SMs), or a misaligned size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.model_options import ROUTING, ShapeOptions, chosen_model, with_sizes
from quantbench.cli.options import command, option, percentage
from quantbench.cli.output import Lines, Result, check_file, plain_table
from quantbench.cli.pad import broken_lines
from quantbench.cli.times import TimesOptions
from quantbench.errors import require_choice
from quantbench.units import billions, counted, latency, percent, signed_percent

if TYPE_CHECKING:
    from quantbench.advice import Advice, Advised, OpCost, ShapeCost, Space
    from quantbench.latency.estimate import Estimate

# The table has a row for each op that wastes at least this fraction of the shape's time. The other
# ops share one line below the table.
_WORTH_A_ROW = 0.005
# In the table, waste of at least this fraction of the shape's time is red, and smaller waste
# yellow.
_STANDS_OUT = 0.01
_search = partial(option, panel="Search for better shapes")


@dataclass(frozen=True, kw_only=True)
@with_sizes("mbs", "tp", "experts", "top-k", "moe-ffn", "ep")
class AdviseOptions(TimesOptions, ShapeOptions):
    """The options of `advise` as typed; "" and None mean the default."""

    who: ClassVar[str] = "advise"

    routing: str = ROUTING
    top: int | None = _search(
        None,
        "Number of shapes to show, including those not surely faster; 0: no search (default: "
        "up to 8 that are surely "
        "faster).",
        min=0,
    )
    keep: str = _search(
        "",
        "Dimensions to keep, comma separated: hidden, heads, kv_heads, head_dim, ffn, vocab, "
        "layers, mbs.",
    )
    shapes_out: Path | None = _search(
        None,
        "JSON file for all shapes that were compared, for `sweep --shapes`.",
        "--shapes-out",
        "-o",
    )
    fail_over: str = option(
        "",
        "Largest share of time wasted past edges, such as 3%; else exit code 1.",
        panel="Check in continuous integration",
    )


@command
def advise(arguments: AdviseOptions) -> Result:
    """Predict the time of every op of a shape, the waste past tile, wave and alignment edges, and
    better shapes.
    """
    from quantbench.advice import advise as advice_on
    from quantbench.advice.advise import TOP
    from quantbench.advice.report import advice_to_json, named_shapes
    from quantbench.sweep.shape_file import SUFFIX, write_shape_file

    out = arguments.shapes_out
    allowed = None
    if arguments.fail_over:
        allowed = percentage("--fail-over", arguments.fail_over)
    space = _space(arguments.keep)
    if out is not None:
        check_file("--shapes-out", out, suffix=SUFFIX)
    times, kernels = arguments.times()
    shape, chosen = chosen_model(arguments, times.device)
    assumed = list(chosen)
    for name in ("mbs", "tp"):
        if not getattr(arguments, name):
            assumed.append(f"{name} = 1")
    if shape.dropout:
        assumed.append("dropout is not timed")
    if arguments.profile is None:
        words = arguments.words(times.device, shape.dtype, experts=bool(shape.experts))
        assumed.append(words)
    top = TOP if arguments.top is None else arguments.top
    advice = advice_on(
        shape, times, space=space, top=top, kernels=kernels, library=arguments.library
    )
    failed = allowed is not None and advice.cost.waste_share > allowed
    if out is not None:
        write_shape_file(out, named_shapes(advice))
    extra = {"assumed": assumed, "fail_over": allowed, "failed": failed}
    lines = _lines(advice, assumed, allowed, arguments)
    return Result(advice_to_json(advice) | extra, lines, exit_code=failed)


def _space(keep: str) -> Space:
    """Returns the search space for better shapes.

    keep: dimensions that must not change, comma separated.
    """
    from quantbench.advice.space import DIMENSIONS, Space

    kept = []
    for word in filter(None, keep.split(",")):
        name = word.strip().replace("-", "_")
        kept.append(require_choice(AdviseOptions.who, "--keep", name, DIMENSIONS))
    return Space(keep=tuple(dict.fromkeys(kept)))


# --- output ---------------------------------------------------------------------------------------


def _lines(
    advice: Advice, assumed: Sequence[str], allowed: float | None, arguments: AdviseOptions
) -> Lines:
    """Yields the lines and tables that the command prints.

    assumed: descriptions of assumed values.
    allowed: largest fraction of the time that may be wasted; None for no limit.
    """
    cost = advice.cost
    yield from _header_lines(advice, assumed)
    yield ""
    yield from _cost_lines(cost)
    yield ""
    yield from _waste_lines(cost)
    for words in advice.blocks:
        yield f"not whole blocks: {words}"
    # Broken rules on misaligned rows and padded heads are left out, because their waste is already
    # among the edges above.
    edges = {"rows", "head_dim"}
    yield from broken_lines([one for one in advice.broken if edges.isdisjoint(one.rule.sides)])
    if advice.tried:
        yield f"\n{_verdict(advice)}"
        yield from _advised_lines(_worth_showing(advice, all_tried=bool(arguments.top)))
        if advice.better:
            faster = {one.found.shape.heads for one in (*advice.better, *advice.alike)}
            if advice.shape.heads not in faster:
                yield f"with {advice.shape.heads} heads: no shape that was tried is faster"
    if allowed is not None:
        yield ""
        verdict = ("ok", "green")
        if cost.waste_share > allowed:
            verdict = ("FAIL", "bold red")
        yield (
            verdict,
            f": {percent(cost.waste_share)} wasted past edges, {percent(allowed)} allowed",
        )
    yield ""
    yield from _next_lines(advice, arguments.shapes_out)


def _header_lines(advice: Advice, assumed: Sequence[str]) -> Iterator[str]:
    """Yields lines that describe the shape, the device, the assumptions and unmeasured times."""
    from quantbench.advice.space import weights_bytes
    from quantbench.workload.parameters import parameters

    if advice.too_large:
        yield f"does not fit: {advice.too_large}"
    for words in advice.missing:
        yield f"not known: {words}"
    if advice.unmeasured:
        whole = sum(one.share for one in advice.unmeasured)
        said = "; ".join(f"{one.reason} ({percent(one.share)})" for one in advice.unmeasured)
        yield f"not measured, only estimated: {percent(whole)} of the time: {said}"
    shape = advice.shape
    heads = f"{counted(shape.heads, 'head')} of {shape.head_dim}"
    if shape.kv_heads != shape.heads:
        heads += f" ({shape.kv_heads} of keys and values)"
    mlp = f"{'gated ' * shape.gated}ffn {shape.ffn}"
    if shape.experts:
        dense = mlp
        mlp = f"{shape.experts} experts of {shape.moe_ffn} on ep = {shape.ep}, top {shape.top_k}"
        if shape.shared_ffn:
            mlp += f" beside shared ones of {shape.shared_ffn}"
        if shape.dense_layers:
            mlp += f", in {shape.dense_layers} of the layers {dense}"
        held = f"weights of {weights_bytes(shape) / 2**30:.0f} GiB on a GPU"
        mlp += f" ({billions(shape.active_parameters)} active; {held})"
    batch = f"micro-batches of {shape.mbs} × {shape.seq} tokens on tp = {shape.tp}"
    yield device_line(advice.device)
    yield f"times: {advice.note}"
    yield (
        f"shape: {billions(parameters(shape))} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {heads}, {mlp}, "
        f"vocab {shape.vocab}; {batch}, {shape.dtype}, {shape.attention} attention"
    )
    if assumed:
        yield f"assumed: {', '.join(assumed)}"
    if advice.tried:
        yield f"tried: {advice.space.words(shape)}"


def _cost_lines(cost: ShapeCost) -> Lines:
    """Yields a table of the ops that waste the most time, the worst first.

    The table is followed by the reasons for the waste, a line on the other ops, and the legend.
    """
    from quantbench.advice.cost import latency_per_run

    whole_us = cost.latency.latency_us
    waste_us = {}
    bad: dict[str, tuple[OpCost, ...]] = {}
    rest: dict[str, tuple[OpCost, ...]] = {}
    for name, ops in cost.by_name.items():
        waste_us[name] = sum(op.waste_us for op in ops)
        worth = waste_us[name] >= _WORTH_A_ROW * whole_us
        (bad if worth else rest)[name] = ops
    table = plain_table(["op", ">forward", ">backward", ">of time", ">wasted"])
    for name, ops in bad.items():
        style = "bold red" if waste_us[name] / whole_us >= _STANDS_OUT else "yellow"
        table.add_row(
            Text(name, style=style),
            _time([op for op in ops if op.op.phase == "forward"]),
            _time([op for op in ops if op.op.phase != "forward"]),
            percent(sum(op.total_us for op in ops) / whole_us),
            Text(percent(waste_us[name] / whole_us), style=style),
        )
    if bad:
        yield table
    for name, ops in bad.items():
        yield f"  {name}: {_why(ops)}"
    if rest:
        each = [f"{name} {latency(latency_per_run(ops).latency_us)}" for name, ops in rest.items()]
        less = f"less than {percent(_WORTH_A_ROW)}"
        together = percent(sum(waste_us[name] for name in rest) / whole_us)
        others = "the others" if bad else "all ops"
        yield f"{others}, each wasting {less} ({together} together): {', '.join(each)}"
    passes = "forward" if cost.shape.experts else "forward and backward"
    yield (
        f"times: one layer {passes} (logits: of the model). wasted: extra time against a size just "
        "below the edge. Norms, activations, communication, the optimizer and "
        "recomputation are not counted."
    )


def _time(ops: Sequence[OpCost]) -> str:
    """Formats the total time of some ops with its interval; "" if there are no ops."""
    from quantbench.advice.cost import latency_per_run

    if not ops:
        return ""
    us = latency_per_run(ops)
    return f"{latency(us.latency_us)} ({_interval(us)})"


def _interval(us: Estimate) -> str:
    """Formats the interval of an estimate as `1.76–1.97`, in the unit that `latency` chooses."""
    # A value from 999.5 would round to 1000, so the next larger unit is used. The largest is s.
    scale = 1.0
    while us.latency_us >= 999.5 * scale and scale < 1e6:
        scale *= 1e3
    ends = []
    for end in (us.low_us / scale, us.high_us / scale):
        ends.append(f"{end:.3g}" if end < 999.5 else f"{end:.0f}")
    return "–".join(ends)


def _why(ops: Sequence[OpCost]) -> str:
    """Formats the edge that wastes the most time among an op and its gradients.

    The text names the phase (forward or a gradient) if another phase has a different kind of edge.

    ops: an op and its gradients, which have the same name.
    """
    worst = max(ops, key=lambda op: op.waste_us)
    if not worst.findings:
        return ""
    edge = worst.findings[0].edge
    words = f"{edge.kind}: {edge.words}"
    if all(op.findings and op.findings[0].edge.kind == edge.kind for op in ops):
        return words
    return f"{worst.op.phase}: {words}"


def _waste_lines(cost: ShapeCost) -> Iterator[str]:
    """Yields lines with the whole shape's time, rate and waste."""
    from quantbench.advice.cost import LOWER_BOUND

    whole = cost.latency
    hours = cost.gpu_hours_per_trillion_tokens
    yield (
        f"all of it: {latency(whole.latency_us)} ({_interval(whole)}) per micro-batch on each GPU, "
        f"{cost.tflops:.0f} model TFLOP/s, {_two_digits(hours(whole.latency_us)):,} GPU-hours "
        f"per trillion tokens "
        f"({LOWER_BOUND})"
    )
    if not cost.waste_us:
        yield "nothing sits past an edge"
        return
    low = percent(cost.waste_low_us / whole.latency_us)
    high = percent(cost.waste_high_us / whole.latency_us)
    wasted = f"{percent(cost.waste_share)} ({low} to {high})"
    yield f"wasted past edges: {wasted}, {_two_digits(hours(cost.waste_us)):,} GPU-hours"


def _verdict(advice: Advice) -> str:
    """Returns a sentence on whether to keep the shape, with the reason."""
    mbs = advice.shape.mbs
    larger = [one for one in advice.better_alone if one.found.shape.mbs > mbs]
    more = ""
    if larger:
        batch = max(larger, key=_least_gain)
        more = f". A larger micro-batch is faster: {batch.changes}, by {batch.found.gain_words}"
    changes = [one for one in (*advice.better, *advice.better_alone) if one.found.shape.mbs == mbs]
    if changes:
        best = max(changes, key=_least_gain)
        said = f"{best.changes} is surely faster, by {best.found.gain_words}{more}"
        return f"Worth a change: of {advice.tried} shapes tried, {said}"
    why = "none is predicted to be"
    if advice.compared:
        why = "every gain is within the error of the times"
    priced = [one for one in advice.compared if _least_gain(one) > 0 and one.found.shape.mbs == mbs]
    if priced:
        best = max(priced, key=_least_gain)
        exchange = "without the exchange between more GPUs, which is not priced"
        why = f"{best.changes}: {best.found.gain_words} {exchange}"
    keep = "Keep it"
    if advice.too_large:
        keep = "It does not fit"
    elif advice.cost.misaligned:
        return f"{_misaligned_words(advice)}{more}"
    of = f"of {advice.tried} shapes tried none is"
    if advice.tried == 1:
        of = "the one shape tried is not"
    return f"{keep}: {of} surely faster ({why}){more}"


def _misaligned_words(advice: Advice) -> str:
    """Returns the verdict on a shape with misaligned rows if no tried shape is surely faster.

    The sentence has the time that misaligned rows waste, and the change that aligns the rows.
    """
    ops = advice.cost.misaligned
    share = percent(sum(op.waste_us for op in ops) / advice.cost.latency.latency_us)
    words = f"Do not keep it: misaligned rows waste {share} ({ops[0].edges[0].words}); "
    labels = {op.op.label for op in ops}
    mends = [one for one in advice.compared if labels.isdisjoint(one.cost.misaligned_labels)]
    if mends:
        best = max(mends, key=lambda one: one.found.gain)
        return f"{words}aligned: {best.changes}, by {best.found.gain_words}, not surely faster"
    kept = f" with {', '.join(advice.space.keep)} kept" if advice.space.keep else ""
    return f"{words}no shape tried aligns them{kept}; multiples of 8 are aligned"


def _least_gain(one: Advised) -> float:
    """Returns the lower bound of a shape's gain, for sorting."""
    return one.found.low


def _worth_showing(advice: Advice, *, all_tried: bool) -> list[Advised]:
    """Returns the shapes to show in the table.

    By default these are the surely faster shapes. If `advice.better` is not empty, the shapes in
    `advice.alike` are added: the best shape with the given number of heads, and the best with the
    given head_dim.

    all_tried: whether to return all compared shapes instead.
    """
    shown = []
    for one in advice.compared:
        beside = advice.better and one in advice.alike
        if one.found.sure or beside or all_tried:
            shown.append(one)
    return shown


def _advised_lines(advised: Sequence[Advised]) -> Lines:
    """Yields a table of better shapes, the reasons for their gains, and the legend."""
    if not advised:
        return
    table = plain_table(
        ["", "change", ">head_dim", ">gain", ">low to high", ">params"],
        title="other shapes (● best gain for the smallest change)",
        fold=("change",),
    )
    for one in advised:
        found = one.found
        table.add_row(
            "●" * found.nearest,
            one.changes,
            str(found.shape.head_dim),
            Text(signed_percent(found.gain), style="bold green" if found.sure else ""),
            f"{signed_percent(found.low)} to {signed_percent(found.high)}",
            signed_percent(found.parameters_change),
        )
    yield ""
    yield table
    for one in advised:
        yield f"  {one.changes}: {'; '.join(one.found.reasons)}"
    yield (
        "gain: more tokens per second at equal parameters, with the 90 % interval of the ratio; "
        "measure a shape whose interval holds 0 before you move"
    )


def _next_lines(advice: Advice, out: Path | None) -> Iterator[str]:
    """Yields lines with the commands that measure the compared shapes.

    out: file to which the shapes were written; None if they were not written.
    """
    others = len(advice.compared)
    what = "measures every op of this shape"
    if others > 1:
        what += f" and its {others} nearest rivals"
    elif others:
        what += " and its nearest rival"
    if advice.shape.attention != "flash":
        yield "Where one kernel runs attention: ask with --attention flash"
    if out is None:
        sweep = "quantbench sweep --shapes shapes.json"
        yield f"Next: repeat this with -o shapes.json; on such a card, {sweep} {what}"
    else:
        yield f"shapes: {out}"
        yield f"Next, on such a card ({what}): quantbench sweep --shapes {quote(str(out))}"


def _two_digits(value: float) -> int:
    """Rounds to two significant digits, because a prediction is not more accurate than that."""
    return int(float(f"{value:.2g}"))
