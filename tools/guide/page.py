"""Formats the results of `evidence.find` as the texts of docs/choosing-shapes.md.

Entry point: `texts`. Used by `tools.guide.__main__`.
"""

from __future__ import annotations

from statistics import median

from quantbench.launch import Tile
from quantbench.quantization import alignment_bytes
from quantbench.units import percent
from tools.guide.evidence import GpuResults, GuideResults
from tools.guide.markers import table
from tools.guide.products import DEGREES, EdgeStep, enough_tokens
from tools.guide.rules import rules_table
from tools.guide.shapes import (
    SEQ,
    TP,
    Iteration,
    head_searches,
    layer_share,
    linear_layers,
    of_sizes,
    shares,
    slots_of,
    whole_waves_step,
)

_TILE = Tile(128, 256)
_STEPS_SHOWN = (64, 128, 256, 512, 768, 1024, 2048, 4096)
_MBS_SHOWN = (1, 4)
_PRICE_TOKENS = (1024, 2048, 4096, 8192)
_WIDTH_SEQ = 4096
# Hidden sizes before and after a published search applied the rule "hidden = 864 · c".
_BEFORE, _AFTER = 14400, 13824
# Number of heads that the searches compare the others with.
_USUAL_HEADS = 64
_HOPPER = ("H100", "H200")


def texts(found: GuideResults) -> dict[str, str]:
    """Returns the text of every marker of the page, by name."""
    a100 = found.gpus["A100"]
    return {
        "sources": _sources(found),
        "rules": rules_table(found),
        **_edges(found),
        **_sizes(found, a100),
        **_heads(found),
        **_layout(found),
    }


def _sources(found: GuideResults) -> str:
    lines = [f"- {name}: {source}" for name, of in found.gpus.items() for source in of.sources]
    return "\n".join(lines) + "\n"


# --- tiles and waves ---------------------------------------------------------------------------------------------


def _edges(found: GuideResults) -> dict[str, str]:
    places = {}
    rows = []
    for m in _STEPS_SHOWN:
        steps = [of.edges.step(m) for of in found.gpus.values()]
        rows.append([f"{m} → {m + 1}", *(_step_words(step) for step in steps)])
    places["steps"] = table(["rows m", *found.gpus], rows)
    places["shapes"] = str(found.gpus["A100"].edges.step(256).shapes)
    places["candidates"] = str(len(found.gpus["A100"].edges.fits))
    places["repeats"] = _range([of.edges.repeats for of in found.gpus.values()], digits=1)
    fits = []
    for name, of in found.gpus.items():
        best, own = of.edges.fits[0], of.edges.fit(_TILE)
        resident = f"{best.tile}" + (f", {best.blocks_per_sm} per SM" if best.blocks_per_sm > 1 else "")
        fits.append([
            name, resident, f"{best.correlation:.2f}", f"{own.correlation:.2f}", _more(own.at_wave),
            _more(own.elsewhere), percent(_share_faster(of)),
        ])  # fmt: skip
        if name in _HOPPER:
            places[f"{name.lower()}.best-correlation"] = f"{best.correlation:.2f}"
            places[f"{name.lower()}.faster"] = percent(_share_faster(of))
        places[f"{name.lower()}.step-256"] = percent(of.edges.step(256).median - 1)
    places["fits"] = table(
        [
            "",
            "best single tile",
            "its correlation",
            "128x256's",
            "step at a wave of 128x256",
            "elsewhere",
            "m + 1 is faster",
        ],
        fits,
    )
    a100 = found.gpus["A100"].edges.fit(_TILE)
    places["a100.at-wave"], places["a100.elsewhere"] = _more(a100.at_wave), _more(a100.elsewhere)
    below = found.gpus["A100"].edges.below
    assert below is not None, "the table has products of less than one wave"
    places["a100.cut-begins"], places["a100.cut-fits"] = _more(below.begins), _more(below.fits)
    return places


def _step_words(step: EdgeStep) -> str:
    return f"{_more(step.median)} ({_more(step.low)} to {_more(step.high)})"


def _range(shares: list[float], digits: int = 0) -> str:
    """Formats `21 to 48 %`."""
    return f"{100 * min(shares):.{digits}f} to {100 * max(shares):.{digits}f} %"


def _more(ratio: float) -> str:
    """Formats `+30 %` or `−2 %`; these tables do not repeat more precisely than whole percent."""
    value = round(100 * (ratio - 1))
    return f"{'−' if value < 0 else '+'}{abs(value)} %" if value else "0 %"


def _share_faster(of: GpuResults) -> float:
    """Returns the share of all pairs in which one more row takes over 3 % less time."""
    pairs = sum(step.shapes for step in of.edges.steps)
    return sum(step.share_faster * step.shapes for step in of.edges.steps) / pairs


# --- hidden sizes ------------------------------------------------------------------------------------------------


def _sizes(found: GuideResults, a100: GpuResults) -> dict[str, str]:
    places = {}
    rows = []
    for name, of in found.gpus.items():
        for mbs in _MBS_SHOWN:
            counted = shares(of.spec, mbs)
            divided = of_sizes(counted, of.spec.sm_count)
            others = of_sizes(counted, of.spec.sm_count, divides=False)
            best = max(counted.values())
            rows.append([
                _with_sms(name, of), str(mbs), f"{100 * divided.mean:.1f} %", f"{100 * others.mean:.1f} %",
                f"{100 * divided.lowest:.0f} to {100 * divided.highest:.0f} %", f"{100 * best:.0f} %",
            ])  # fmt: skip
    places["sm-count"] = table(
        ["", "MBS", "hidden % SMs = 0", "all others", "range of the former", "best of all"], rows
    )
    wholes = []
    for name, of in found.gpus.items():
        step = whole_waves_step(SEQ, _TILE.block_n, _TILE.block_m, of.spec.sm_count)
        wholes.append([_with_sms(name, of), f"{step}", f"{2 * step}"])
    places["whole-waves"] = table(["", "proj and mlp_down (n = hidden)", "mlp_up (n = hidden / 2)"], wholes)
    layers = []
    for hidden in (_BEFORE, _AFTER):
        for op in linear_layers(hidden, 1):
            slots = slots_of(op, a100.spec)
            tiles = f"{slots.num_tiles} = {slots.num_waves - 1} · {slots.resident_blocks} + {slots.last_wave_tiles}"
            layers.append([
                str(hidden), op.name, f"{op.workload.n}", tiles, str(slots.num_waves),  # type: ignore[union-attr]
                f"{100 * slots.efficiency:.0f} %",
            ])  # fmt: skip
    places["layers"] = table(["hidden", "product", "n", "tiles", "waves", "slots in use"], layers)
    gains = [
        layer_share(_AFTER, mbs, a100.spec, backward=True) / layer_share(_BEFORE, mbs, a100.spec, backward=True) - 1
        for mbs in (1, 4)
    ]
    places["gain-mbs-1"], places["gain-mbs-4"] = (percent(gain) for gain in gains)
    before, after = (row.tflops for row in _search_rows(found))
    places["bloom.before"], places["bloom.after"] = f"{before:g} TFLOP/s", f"{after:g} TFLOP/s"
    places["bloom.gain"] = percent(after / before - 1)
    places["head-dim-before"] = f"{_BEFORE // 96}"
    places["alignment-before"] = str(alignment_bytes(_BEFORE // 96, "bf16"))
    low = [min(shares(a100.spec, mbs).values()) for mbs in _MBS_SHOWN]
    high = [max(shares(a100.spec, mbs).values()) for mbs in _MBS_SHOWN]
    places["a100.range-mbs-1"] = f"{100 * low[0]:.0f} to {100 * high[0]:.0f} %"
    places["a100.range-mbs-4"] = f"{100 * low[1]:.0f} to {100 * high[1]:.0f} %"
    return places


def _with_sms(name: str, of: GpuResults) -> str:
    return f"{name}, {of.spec.sm_count} SMs"


def _search_rows(found: GuideResults) -> tuple[Iteration, Iteration]:
    """Returns the first timed rows of both hidden sizes at MBS 1, from one table of the searches."""
    tried = [row for row in found.searches if row.mbs == 1 and row.hidden in (_BEFORE, _AFTER)]
    after = next(row for row in tried if row.hidden == _AFTER)
    before = next(row for row in tried if row.hidden == _BEFORE and row.section == after.section)
    return before, after


# --- heads -------------------------------------------------------------------------------------------------------


def _heads(found: GuideResults) -> dict[str, str]:
    places = {}
    rows = []
    usual = {row.hidden: row for row in head_searches(found.searches) if row.heads == _USUAL_HEADS}
    for row in head_searches(found.searches):
        base = usual[row.hidden]
        width = f"{row.head_dim:g}"
        aligned = f"{alignment_bytes(int(row.head_dim), 'fp16')} bytes"
        rows.append([
            str(row.hidden), str(row.heads), width, aligned, f"{row.seconds:g} s", _more(row.seconds / base.seconds),
        ])  # fmt: skip
    places["searches"] = table(
        ["hidden", "heads", "head_dim", "rows aligned to", "iteration", "against 64 heads"], rows
    )
    worst = next(row for row in head_searches(found.searches) if row.head_dim % 8)
    places["misaligned"] = percent(worst.seconds / usual[worst.hidden].seconds - 1)
    places["misaligned.heads"], places["misaligned.head-dim"] = str(worst.heads), f"{worst.head_dim:g}"
    places["misaligned.hidden"] = str(worst.hidden)
    with_widths = {name: of for name, of in found.gpus.items() if of.widths}
    dims = sorted({w.head_dim for of in with_widths.values() for w in of.widths})
    widths = [[name, *(_width_words(of, head_dim) for head_dim in dims)] for name, of in with_widths.items()]
    places["widths"] = table(["", *(f"heads of {head_dim}" for head_dim in dims)], widths)
    counts = []
    shown = (1, 4, 8, 16, 32, 64)
    for name, of in found.gpus.items():
        best = max(of.head_counts.values())
        counts.append([name, *(f"{100 * of.head_counts[h] / best:.0f} %" for h in shown)])
    for heads in (8, 32):
        reached = [of.head_counts[heads] / max(of.head_counts.values()) for of in found.gpus.values()]
        places[f"heads-{heads}"] = _range(reached)
    places["head-counts"] = table(["heads on the GPU", *map(str, shown)], counts)
    fours = [
        [name, *(f"{median(group):.3f} ({len(group)})" for group in (of.fours.off, of.fours.on))]
        for name, of in found.gpus.items()
        if of.fours is not None
    ]
    places["fours"] = table(["", "batch × heads no multiple of 4", "a multiple of 4"], fours)
    return places


def _width_words(of: GpuResults, head_dim: int) -> str:
    width = next((w for w in of.widths if (w.head_dim, w.seq) == (head_dim, _WIDTH_SEQ)), None)
    return "–" if width is None else f"{width.median:.2f} ({width.low:.2f} to {width.high:.2f})"


# --- tp, mbs -----------------------------------------------------------------------------------------------------


def _layout(found: GuideResults) -> dict[str, str]:
    places = {}
    rows = []
    for name, of in found.gpus.items():
        for column, what in ((True, "n split"), (False, "k split")):
            for tp in DEGREES:
                found_prices = {p.tokens: p for p in of.prices if (p.column, p.tp) == (column, tp)}
                rows.append([f"{name}, {what}, tp {tp}", *(_more(found_prices[t].price) for t in _PRICE_TOKENS)])
    places["prices"] = table(["tokens (MBS × seq)", *map(str, _PRICE_TOKENS)], rows)
    tokens = sorted({m for of in found.gpus.values() for m in of.rates})
    rates = [
        [name, *(f"{of.rates[m]:.0f}" for m in tokens), str(enough_tokens(of.rates))] for name, of in found.gpus.items()
    ]
    places["rates"] = table(["TFLOP/s at m =", *map(str, tokens), "95 % of the best from"], rates)
    places["tp"] = str(TP)
    for tokens_given in (1024, 8192):
        own = [p.price - 1 for of in found.gpus.values() for p in of.prices if (p.tp, p.tokens) == (8, tokens_given)]
        places[f"tp-8-{tokens_given}"] = _range(own).replace("-", "−")
    return places
