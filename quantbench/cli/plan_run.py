"""Searches the layouts of a training job, or checks one layout, for the command `plan`.

A layout is a way to divide the job over the GPUs, such as the degrees of tensor and pipeline
parallelism. `search_layouts` ranks the layouts that fit into memory. `check_layout` runs
`plan --check`.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.alignment_rules import Broken, broken_by_shape
from quantbench.cli.options import typed_words
from quantbench.cli.output import Lines, Result, plain_table, warning
from quantbench.cli.pad import first_broken_lines
from quantbench.cli.plan_options import LAYOUT_OPTIONS
from quantbench.cli.plan_setup import Setup
from quantbench.latency.interconnect import GENERIC
from quantbench.latency.op_times import OpTimes
from quantbench.planner.calibration import STACKS, Calibration
from quantbench.planner.constraints import is_possible, violations
from quantbench.planner.folklore import Judged, judge_folklore
from quantbench.planner.layer_time import TimeInterval, divided
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import GIB, limit_bytes
from quantbench.planner.predict import NOT_COUNTED, Planner, Prediction, job_to_json
from quantbench.planner.search import Found, search
from quantbench.store.environment import installed_versions, relevant_environment
from quantbench.units import billions, percent
from quantbench.workload.parameters import parameters

# Maximum number of layouts in the table, and maximum number of further layouts in the line below.
_LAYOUTS = 5
_OTHERS = 8
# Message size for which the bandwidth inside a node is printed.
_LARGE_MESSAGE_BYTES = 2**30
_VERDICTS = {"holds": "green", "costs time": "yellow", "fails": "red", "note": "cyan"}


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the header of a plan's JSON: format, command line, versions and environment.

    arguments: words of the command line.
    """
    return {
        "format": "quantbench-plan",
        "version": 1,
        "command": list(arguments),
        "software": installed_versions(),
        "environment": relevant_environment(),
    }


def search_layouts(setup: Setup, *, explain: bool) -> Result:
    """Ranks the job's layouts that fit into memory by predicted time.

    explain: whether to print also sources, memory and time by part, other software and rules of
        thumb.
    """
    job = setup.job()
    space = setup.space()
    begun = time.perf_counter()
    times = setup.times_of(job.cluster.device)
    calibration = setup.calibration(job)
    found = search(job, times, calibration, space)
    elapsed_s = time.perf_counter() - begun
    judged = judge_folklore(job, found, space)
    assumed = setup.assumed()
    fastest = next(iter(found.ranked), None)
    broken = _broken_sizes(job, fastest)
    wide = _in_16_bits(job, fastest, times, calibration)
    answer = {
        "job": job_to_json(job, calibration, times.note, assumed),
        "space": space,
        "looked_at": found.looked_at,
        "too_large": found.too_large,
        "search_s": elapsed_s,
        "layouts": map(Prediction.to_json, found.ranked),
        "broken": [one.words for one in broken],
        "in_16_bits": wide and wide.to_json(),
        "rules_of_thumb": map(Judged.to_json, judged),
    }

    def lines() -> Lines:
        yield from first_broken_lines(broken)
        yield from header_lines(job, assumed)
        if explain:
            yield from _source_lines(calibration, times)
        said = (
            f"{found.looked_at} layouts keep every rule, {len(found.ranked)} of them fit; "
            f"{elapsed_s:.2f} s"
        )
        if not found.ranked and found.smallest is not None:
            layout, needed = found.smallest
            said += (
                f". The smallest is {layout} with {needed.total_gib:.0f} GiB: more GPUs, "
                f"or a smaller model"
            )
        yield said
        if fastest is not None:
            yield from _ranking_lines(found)
            yield from _wide_lines(fastest, wide, calibration)
            if explain:
                yield from _explaining_lines(setup, job, found, judged, times)
            yield _next_line(setup, fastest.layout)

    return Result(answer, lines(), exit_code=not found.ranked)


def _broken_sizes(job: Job, p: Prediction | None) -> list[Broken]:
    """Returns the sizes at which GEMMs of an 8- or 4-bit recipe crash or have misaligned rows.

    The number of rows per expert is left out, because Megatron pads this number
    (moe_router_padding_for_fp8). Without a recipe or a layout, nothing is returned.

    p: prediction for the layout that divides the shape.
    """
    if p is None or not job.shape.fp8_recipe:
        return []
    own = divided(job.shape, p.layout.tp, p.layout.mbs)
    if own.experts:
        own = replace(own, ep=p.layout.ep, expert_tp=1)
    found: dict[str, Broken] = {}
    for one in broken_by_shape(own, library="torch", device=job.cluster.device):
        sides = one.rule.sides
        crashes = one.rule.effect == "crashes" and "rows of an expert" not in sides
        if crashes or "rows" in sides:
            found.setdefault(one.name, one)
    return list(found.values())


def _in_16_bits(
    job: Job, p: Prediction | None, times: OpTimes, calibration: Calibration
) -> Prediction | None:
    """Predicts the same layout with GEMMs in 16 bits instead of the job's 8- or 4-bit recipe.

    Returns None if the job has no recipe or if there is no layout.
    """
    shape = job.shape
    if p is None or not shape.fp8_recipe:
        return None
    wide = replace(job, shape=replace(shape, dtype=shape.attention_dtype, fp8_recipe=""))
    return Planner(wide, times, calibration).predict(p.layout)


def _wide_lines(p: Prediction, wide: Prediction | None, calibration: Calibration) -> Iterator[str]:
    """Yields a line that compares a prediction with the same layout in 16 bits.

    wide: prediction from `_in_16_bits`; None for no line.
    """
    if wide is None:
        return
    fits = "" if wide.fits else ", does not fit"
    yield (
        f"the same in 16 bits, with this software: {_seconds(wide.iteration.sec, '–')} s, "
        f"{_more(wide, p)}{fits}; advise compares single products, without norms, traffic and the "
        f"factor of 8- and 4-bit ones (here {calibration.quantized_factor:.2f}; below 1: faster "
        "than the model of single products)"
    )


def _ranking_lines(found: Found) -> Lines:
    """Yields the table of the best layouts, and remarks on layouts that are not in the table.

    The table has the best combinations of TP, PP, CP and EP, each with its fastest layout.
    """
    fastest = found.ranked[0]
    by_degrees: dict[str, Prediction] = {}
    for p in found.ranked:
        by_degrees.setdefault(_degrees(p.layout), p)
    best = list(by_degrees.values())
    yield _layouts_table(best[:_LAYOUTS])
    others = best[_LAYOUTS : _LAYOUTS + _OTHERS]
    if others:
        words = ", ".join(f"{_degrees(p.layout)} {_more(p, fastest)}" for p in others)
        yield f"the best of other degrees: {words}"
    alike = sum(_degrees(p.layout) == _degrees(fastest.layout) for p in found.ranked) - 1
    if alike:
        yield (
            f"{alike} more layouts fit with the degrees of the first, in other "
            f"micro-batches, chunks, ZeRO, …: --json"
        )
    if fastest.tight:
        room = "none has more room"
        safe = found.safest
        if safe:
            took = _seconds(safe.iteration.sec, "–")
            room = f"the fastest with room to spare is {safe.layout}, {took} s"
        yield f"The fastest is within 5 % of the memory limit and may fail; {room}"
    yield from _bound_lines(fastest)


def _degrees(layout: Layout) -> str:
    """Formats the degrees TP and PP of a layout, and CP and EP if they exceed 1: `TP4 PP8`."""
    words = f"TP{layout.tp} PP{layout.pp}"
    if layout.cp > 1:
        words += f" CP{layout.cp}"
    if layout.ep > 1:
        words += f" EP{layout.ep}"
    return words


def _more(p: Prediction, best: Prediction) -> str:
    """Formats how much longer an iteration takes than in the best prediction: `+3.1 %`."""
    return f"{100 * (p.sec_per_it / best.sec_per_it - 1):+.1f} %"


def _layouts_table(best: Sequence[Prediction]) -> Table:
    """Tabulates layouts with their predicted times, rates and memory, the best one first."""
    degrees = (">DP", ">TP", ">PP", ">CP", ">EP", ">MBS", ">intlv", ">ZeRO", ">recomp", ">SP")
    numbers = (">sec/it", ">more", ">model TFLOP/s", ">MFU", ">GiB", ">bubble")
    table = plain_table((*degrees, *numbers, "look at first"))
    for p in best:
        layout = p.layout
        table.add_row(
            *(str(getattr(layout, name)) for name in LAYOUT_OPTIONS[:8]),
            layout.recompute,
            "yes" * layout.sequence_parallel,
            _seconds(p.iteration.sec, "–"),
            _more(p, best[0]),
            f"{p.model_tflops:.0f}",
            percent(p.mfu),
            Text(f"{p.memory.total_gib:.0f}", style="yellow" if p.tight else ""),
            percent(p.iteration.bubble_share),
            p.iteration.bound,
            style="bold" if p is best[0] else "",
        )
    return table


def _explaining_lines(
    setup: Setup, job: Job, found: Found, judged: Sequence[Judged], times: OpTimes
) -> Lines:
    """Yields what --explain adds to a search, apart from sources.

    For the fastest layout, this is the time by part, the memory by part, and the time with other
    software. The verdicts on rules of thumb follow.
    """
    fastest = found.ranked[0]
    yield "\nThe fastest layout's iteration, by what takes the time:"
    for name, s in sorted(fastest.iteration.parts.items(), key=lambda part: -part[1]):
        if s >= 0.001 * fastest.sec_per_it:  # smaller parts are left out
            yield f"  {name.replace('_', ' '):15} {s:8.2f} s  {percent(s / fastest.sec_per_it):>6}"
    yield _memory_table(fastest, setup.calibration(job))
    if setup.options.site is None:
        others = ", ".join(_other_stacks(setup, job, fastest, times))
        yield f"The same layout with other software: {others}"
    yield "\nRules of thumb, held against this search:"
    for j in judged:
        said = f" {j.rule.text} ({j.rule.source}): {j.finding}"
        yield "  ", (j.verdict, _VERDICTS[j.verdict]), said
        if j.verdict != "holds":
            yield f"      {j.rule.weakness}"


def _other_stacks(setup: Setup, job: Job, best: Prediction, times: OpTimes) -> Iterator[str]:
    """Yields how much longer the best layout takes with each other software stack.

    Stacks that do not allow the layout are left out.
    """
    typed = setup.options.dp_overlap
    for name, stack in STACKS.items():
        other = replace(
            job, stack=name, dp_overlap=float(stack.overlaps) if typed is None else typed
        )
        if name != job.stack and is_possible(other, best.layout):
            found = Planner(other, times, setup.calibration(other)).predict(best.layout)
            yield f"{name} {_more(found, best)}"


def _next_line(setup: Setup, layout: Layout) -> str:
    """Returns a line with the command that checks a layout."""
    without = (*LAYOUT_OPTIONS, "allow_uneven")
    names = [one.name for one in fields(setup.options) if one.name not in without]
    typed = typed_words(setup.options, names)
    for name in LAYOUT_OPTIONS:
        value = getattr(layout, name)
        if value is True:
            typed.append(f"--{name.replace('_', '-')}")
        elif name in ("dp", "tp", "pp", "mbs", "zero", "recompute") or value not in (1, False):
            typed.append(f"--{name} {value}")
    if setup.uneven:
        typed.append("--allow-uneven")
    return f"\nNext: quantbench plan --check {' '.join(typed)}"


def _memory_table(p: Prediction, calibration: Calibration) -> Table:
    """Tabulates the fullest GPU's memory by part, in GiB."""
    parts = p.memory.parts_gib
    within = percent(math.expm1(calibration.memory_scatter))
    caption = f"GiB on the fullest GPU; nine in ten runs are within {within}"
    table = plain_table((">stage", *(f">{name}" for name in parts), ">total"), caption=caption)
    values = (f"{gib:.1f}" for gib in parts.values())
    table.add_row(str(p.memory.stage), *values, f"{p.memory.total_gib:.1f}")
    return table


def header_lines(job: Job, assumed: Sequence[str]) -> Lines:
    """Yields lines that describe the model, the machines and the assumptions.

    A warning follows if the link rates are generic, because no system with the GPU is known.
    """
    shape, where = job.shape, job.cluster
    gated = "gated " if shape.gated else ""
    mlp = f"{gated}MLP of {shape.ffn}"
    if shape.experts:
        mlp = f"{shape.experts} {gated}experts of {shape.moe_ffn}, {shape.top_k} per token"
    link = where.intra_node(where.gpus_per_node)
    inside = _LARGE_MESSAGE_BYTES / link.time_s(_LARGE_MESSAGE_BYTES) / 1e9
    yield (
        f"model: {billions(parameters(shape))} parameters: {shape.layers} layers of "
        f"{shape.hidden}, {shape.heads} "
        f"heads of {shape.head_dim} ({shape.kv_heads} of keys and values), {mlp}, seq "
        f"{shape.seq}, vocab {shape.vocab} "
        f"with {'one matrix' if shape.tied else 'two matrices'}, "
        f"{shape.fp8_recipe or shape.dtype}, {shape.attention} "
        f"attention, {'dropout' if shape.dropout else 'no dropout'}; gbs {job.gbs} on {job.gpus} × "
        f"{where.device.name}, {where.gpus_per_node} per node, {inside:.0f} GB/s inside a node, "
        f"{where.node_gb_per_s:g} GB/s between nodes ({where.name})"
    )
    yield f"assumed: {', '.join(assumed)}"
    if where.name == GENERIC and "changed by options" not in where.source:
        yield warning(
            f"no system with {where.device.name} is known: its links are generic; "
            f"--link-gb-per-s (inside a node) and "
            "--node-gbit-per-s (between nodes) state yours"
        )


def _source_lines(calibration: Calibration, times: OpTimes) -> Iterator[str]:
    """Yields lines with the sources of the constants and op times, and the versions in use."""
    rests = "fitted there" if calibration.fitted else calibration.provenance.get("rule", "")
    installed = installed_versions()
    versions = ", ".join(f"{name} {installed[name]}" for name in installed if name != "os")
    variables = " ".join(f"{name}={value}" for name, value in relevant_environment().items())
    yield f"constants: {calibration} ({rests})"
    if times.note:
        yield f"times: {times.note}"
    yield f"made with: {versions}; {variables or 'no variable set that matters'}"


def _bound_lines(p: Prediction) -> Iterator[str]:
    """Yields lines with the days and GPU-hours for 10^12 tokens, and the costs not counted."""
    hours = float(f"{p.gpu_hours_per_trillion_tokens:.3g}")
    yield (
        f"10^12 tokens: {p.days_per_trillion_tokens:.3g} days, {hours:,.0f} GPU-hours, MFU "
        f"{percent(p.mfu)}"
    )
    yield f"a lower bound on time (MFU: an upper bound), not counted: {', '.join(NOT_COUNTED)}"


def _seconds(sec: TimeInterval, between: str) -> str:
    """Formats a time in seconds with its interval, such as `12.34 (11.9–12.8)`.

    between: text between the lower and the upper bound.
    """
    decimals = 1 if sec.mid >= 10 else 2
    return f"{sec.mid:.2f} ({sec.low:.{decimals}f}{between}{sec.high:.{decimals}f})"


def check_layout(setup: Setup, *, explain: bool) -> Result:
    """Checks one layout against every rule, and predicts the layout's time and memory.

    The prediction is left out if a rule makes the layout impossible.

    explain: whether to print also sources and memory by part.
    """
    layout = setup.layout()
    job = setup.job(gpus=setup.options.gpus or layout.gpus)
    broken = violations(job, layout)
    strict = sum(v.strict for v in broken)
    times = setup.times_of(job.cluster.device)
    calibration = setup.calibration(job)
    assumed = setup.assumed(one_layout=True)
    prediction = None
    if not strict:
        prediction = Planner(job, times, calibration).predict(layout)
    broken_sizes = _broken_sizes(job, prediction)
    wide = _in_16_bits(job, prediction, times, calibration)
    answer = {
        "job": job_to_json(job, calibration, times.note, assumed),
        "violations": broken,
        "layout": layout,
        "prediction": prediction and prediction.to_json(),
        "broken": [one.words for one in broken_sizes],
        "in_16_bits": wide and wide.to_json(),
    }

    def lines() -> Lines:
        yield from first_broken_lines(broken_sizes)
        yield from header_lines(job, assumed)
        if explain:
            yield from _source_lines(calibration, times)
        counts = "keeps every rule"
        if broken:
            counts = f"{strict} rules make it impossible, {len(broken) - strict} cost time"
        yield f"{layout}: {counts}"
        for v in broken:
            effect = ("costs time", "yellow")
            if v.strict:
                effect = ("impossible", "red")
            yield "  ", effect, f" {v}"
        if prediction is not None:
            yield from _prediction_lines(prediction, limit_bytes(job))
            yield from _wide_lines(prediction, wide, calibration)
            if explain:
                yield _memory_table(prediction, calibration)

    return Result(answer, lines(), exit_code=prediction is None or not prediction.fits)


def _prediction_lines(p: Prediction, limit: float) -> Lines:
    """Yields lines with a layout's memory, its time and its rates.

    limit: memory limit of a GPU, in bytes.
    """
    fits = ("does not fit", "red")
    if p.fits and p.tight:
        fits = ("fits, but within 5 % of the limit: it may fail", "yellow")
    elif p.fits:
        fits = ("fits", "")
    yield f"  memory {p.memory.total_gib:.1f} of {limit / GIB:.1f} GiB: ", fits
    yield (
        f"  {_seconds(p.iteration.sec, ' to ')} s per iteration, {p.model_tflops:.0f} model "
        f"TFLOP/s per GPU "
        f"({p.hardware_tflops:.0f} with recomputation), {p.tokens_per_s:,.0f} tokens/s, "
        f"{percent(p.iteration.bubble_share)} bubble, look first at: {p.iteration.bound}"
    )
    for line in _bound_lines(p):
        yield f"  {line}"
