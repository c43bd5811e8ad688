"""Runs the modes of `quantbench plan`.

Entry points: `search_layouts`, `check_layout`, `predict_table`, `check_table`, `fit_table`. Used by the command
`plan`. Each returns whether the exit code is 1, a function that builds the JSON object, and the lines and tables of the
text output.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.cli.options import typed_words
from quantbench.cli.output import StyledLine, check_file, plain_table
from quantbench.cli.plan import PlanOptions
from quantbench.errors import InputError
from quantbench.files import write_file
from quantbench.latency.op_times import OpTimes
from quantbench.planner.calibration import STACKS, Calibration, site_json
from quantbench.planner.constraints import Violation, is_possible, violations
from quantbench.planner.fitting import fit_site, observe
from quantbench.planner.folklore import Judged, judge_folklore
from quantbench.planner.layer_time import Span
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import GIB, limit_bytes
from quantbench.planner.predict import NOT_COUNTED, Planner, Prediction, job_to_json
from quantbench.planner.row_checks import check_rows
from quantbench.planner.row_results import WORTH_A_WORD, RowResult, Summary, misses, predict_rows, summarize
from quantbench.planner.rows import read_table
from quantbench.planner.search import Found, search
from quantbench.store.environment import installed_versions, relevant_environment
from quantbench.units import percent
from quantbench.workload.parameters import parameters

ModeResult = tuple[bool, Callable[[], dict[str, Any]], Iterable[StyledLine | Table]]

_RECOMPUTE = {"full": "full", "selective": "select", "none": "no"}
_VERDICTS = {"holds": "green", "costs time": "yellow", "fails": "red", "note": "cyan"}
# Options that the suggested next command repeats, in this order.
_SAID_AGAIN = (
    "model", "config", "hidden", "heads", "kv_heads", "ffn", "layers", "seq", "vocab", "dtype", "gpus", "gpu",
    "profile", "library", "stack", "site", "cluster", "gpus_per_node", "node_gbit_per_s",
    "link_gb_per_s", "gbs", "optimizer", "attention", "softmax", "dp_overlap", "gated", "dropout",
    "untied", "head_dim", "fp8_recipe",
)  # fmt: skip


# --- search ----------------------------------------------------------------------------------------------------------


def search_layouts(arguments: PlanOptions, top: int, *, memory: bool = False) -> ModeResult:
    """Ranks every layout of a job."""
    job, space = arguments.job(), arguments.space()
    begun = time.perf_counter()
    times, calibration = arguments.times(job.cluster.device), arguments.calibration(job)
    found = search(job, times, calibration, space)
    elapsed_s = time.perf_counter() - begun
    judged, assumed = judge_folklore(job, found), arguments.assumed()

    def answer() -> dict[str, Any]:
        return {
            "job": job_to_json(job, calibration, times.note, assumed),
            "space": asdict(space), "looked_at": found.looked_at, "too_large": found.too_large, "search_s": elapsed_s,
            "layouts": [p.to_json() for p in found.ranked],
            "rules_of_thumb": [j.to_json() for j in judged],
        }  # fmt: skip

    def lines() -> Iterator[StyledLine | Table]:
        yield from header_lines(job, calibration, times.note, assumed)
        said = f"{found.looked_at} layouts keep every rule, {len(found.ranked)} of them fit; {elapsed_s:.2f} s"
        if not found.ranked and found.smallest is not None:
            layout, needed = found.smallest
            said += f". The smallest is {layout} with {needed.total_gib:.0f} GiB: more GPUs, or a smaller model"
        yield said
        if found.ranked:
            yield _layouts_table(found.ranked[:top])
            if memory:
                yield _memory_table(found.ranked[:top], calibration)
            yield from _stack_lines(arguments, job, found.ranked[0], times)
            yield from _ranking_lines(found, judged)
            yield _next_line(arguments, found.ranked[0].layout)

    return not found.ranked, answer, lines()


def _ranking_lines(found: Found, judged: Sequence[Judged]) -> Iterator[StyledLine | Table]:
    fastest = found.ranked[0]
    safe = found.safest
    if fastest.tight:
        room = f"the fastest with room to spare is {safe.layout}, {_seconds(safe.iteration.sec, '–')} s" if safe else ""
        yield f"The fastest is within 5 % of the memory limit and may fail; {room or 'none has more room'}"
    yield "\nThe fastest layout's iteration, by what takes the time:"
    for name, s in sorted(fastest.iteration.parts.items(), key=lambda part: -part[1]):
        if s >= 0.001 * fastest.sec_per_it:
            yield f"  {name.replace('_', ' '):15} {s:8.2f} s  {percent(s / fastest.sec_per_it):>6}"
    yield from (f"  {line}" for line in _bound_lines(fastest))
    yield "\nRules of thumb, held against this search:"
    for j in judged:
        yield "  ", (j.verdict, _VERDICTS[j.verdict]), f" {j.rule.text} ({j.rule.source}): {j.finding}"
        if j.verdict != "holds":
            yield f"      {j.rule.weakness}"


def _next_line(arguments: PlanOptions, layout: Layout) -> str:
    """Returns the command that checks a layout."""
    degrees = f"--dp {layout.dp} --tp {layout.tp} --pp {layout.pp} --mbs {layout.mbs} --zero {layout.zero}"
    degrees += f" --interleave {layout.interleave}" if layout.interleave > 1 else ""
    degrees += " --sequence-parallel" if layout.sequence_parallel else ""
    degrees += f" --cp {layout.cp}" if layout.cp > 1 else ""
    degrees += f" --ep {layout.ep}" if layout.ep > 1 else ""
    degrees += " --allow-uneven" if arguments.uneven else ""
    typed = " ".join(typed_words(arguments, _SAID_AGAIN))
    return f"\nNext: quantbench plan --check {typed} {degrees} --recompute {layout.recompute}"


def _stack_lines(arguments: PlanOptions, job: Job, best: Prediction, times: OpTimes) -> Iterator[str]:
    """Says how long the best layout takes with other software."""
    if arguments.site is not None:
        return
    others = []
    for stack in STACKS:
        overlap = job.dp_overlap if arguments.dp_overlap is not None else float(STACKS[stack].overlaps)
        other = replace(job, stack=stack, dp_overlap=overlap)
        if stack != job.stack and is_possible(other, best.layout):
            found = Planner(other, times, arguments.calibration(other)).predict(best.layout)
            others.append(f"{stack} {100 * (found.sec_per_it / best.sec_per_it - 1):+.0f} %")
    yield f"The same layout with other software: {', '.join(others)}"


def _memory_table(ranked: Sequence[Prediction], calibration: Calibration) -> Table:
    """Tabulates the memory of the fullest GPU by part, GiB."""
    parts = [name for name in asdict(ranked[0].memory) if name != "stage"]
    within = percent(math.expm1(calibration.memory_scatter))
    caption = f"GiB on the fullest GPU; nine in ten runs are within {within}"
    table = plain_table(("layout", ">stage", *(f">{name}" for name in parts), ">total"), caption=caption)
    for p in ranked:
        values = (getattr(p.memory, name) / GIB for name in parts)
        cells = (*(f"{value:.1f}" for value in values), f"{p.memory.total_gib:.1f}")
        table.add_row(str(p.layout), str(p.memory.stage), *cells)
    return table


def _layouts_table(ranked: Sequence[Prediction]) -> Table:
    """Tabulates layouts, the fastest first."""
    numbers = (
        "DP", "TP", "PP", "CP", "EP", "MBS", "intlv", "ZeRO", "recomp", "SP", "sec/it", "TFLOPs", "MFU", "GiB", "bubble"
    )  # fmt: skip
    table = plain_table((*(f">{name}" for name in numbers), "look at first"))
    for p in ranked:
        layout = p.layout
        table.add_row(
            *(str(getattr(layout, name)) for name in ("dp", "tp", "pp", "cp", "ep", "mbs", "interleave", "zero")),
            _RECOMPUTE.get(layout.recompute, layout.recompute), "yes" if layout.sequence_parallel else "",
            _seconds(p.iteration.sec, "–"), f"{p.tflops:.0f}", percent(p.mfu),
            Text(f"{p.memory.total / GIB:.0f}", style="yellow" if p.tight else ""), percent(p.iteration.bubble_share),
            p.iteration.bound, style="bold" if p.sec_per_it == ranked[0].sec_per_it else "",
        )  # fmt: skip
    return table


def header_lines(job: Job, calibration: Calibration, note: str, assumed: Sequence[str]) -> list[str]:
    """Formats the model, the machines, the assumptions, and the sources of constants and times."""
    shape, where = job.shape, job.cluster
    heads = f"{shape.heads} heads of {shape.head_dim} ({shape.kv_heads} of keys and values)"
    mlp = f"{'gated ' if shape.gated else ''}MLP of {shape.ffn}"
    if shape.experts:
        mlp = f"{shape.experts} {'gated ' if shape.gated else ''}experts of {shape.moe_ffn}, {shape.top_k} per token"
    vocab = f"vocab {shape.vocab} with {'one matrix' if shape.tied else 'two matrices'}"
    dropout = "dropout" if shape.dropout else "no dropout"
    link = where.intra_node(where.gpus_per_node)
    inside = link.bus_bytes[-1] / link.latency_us[-1] / 1e3
    rests = "fitted there" if calibration.fitted else calibration.provenance.get("rule", "")
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items() if name != "os")
    variables = " ".join(f"{name}={value}" for name, value in relevant_environment().items())
    return [
        f"model: {parameters(shape) / 1e9:.1f} B parameters: {shape.layers} layers of {shape.hidden}, {heads}, {mlp}, "
        f"seq {shape.seq}, {vocab}, {shape.fp8_recipe or shape.dtype}, {shape.attention} attention, {dropout}; "
        f"gbs {job.gbs}, {job.optimizer}",
        f"machines: {job.gpus} × {where.device.name}, {where.gpus_per_node} per node, {inside:.0f} GB/s inside a node, "
        f"{where.node_gb_per_s:g} GB/s between nodes ({where.name})",
        f"assumed: {', '.join(assumed)}",
        f"constants: {calibration} ({rests})",
        *([f"times: {note}"] if note else []),
        f"made with: {versions}; {variables or 'no variable set that matters'}",
    ]


def _bound_lines(p: Prediction) -> list[str]:
    """Formats time and cost of a training run at this rate, and what is not counted."""
    hours = float(f"{p.gpu_hours_per_trillion_tokens:.3g}")
    return [
        f"10^12 tokens: {p.days_per_trillion_tokens:.3g} days, {hours:,.0f} GPU-hours, MFU {percent(p.mfu)}",
        f"a lower bound on time (MFU: an upper bound), not counted: {', '.join(NOT_COUNTED)}",
    ]


def _seconds(sec: Span, between: str) -> str:
    """Formats a time with its interval: `12.34 (11.9–12.8)`."""
    decimals = 1 if sec.mid >= 10 else 2
    return f"{sec.mid:.2f} ({sec.low:.{decimals}f}{between}{sec.high:.{decimals}f})"


# --- one layout ------------------------------------------------------------------------------------------------------


def check_layout(arguments: PlanOptions, *, memory: bool = False) -> ModeResult:
    """Checks one layout against every rule, and predicts its time and memory."""
    layout = arguments.layout()
    job = arguments.job(gpus=arguments.gpus or layout.gpus)
    broken = violations(job, layout)
    strict = any(v.constraint.strict for v in broken)
    times, calibration = arguments.times(job.cluster.device), arguments.calibration(job)
    prediction = None if strict else Planner(job, times, calibration).predict(layout)
    assumed = arguments.assumed(one_layout=True)

    def answer() -> dict[str, Any]:
        return {
            "job": job_to_json(job, calibration, times.note, assumed),
            "violations": [
                {"rule": c.rule, "name": c.name, "strict": c.strict, "message": v.message}
                for v, c in ((v, v.constraint) for v in broken)
            ],
            "layout": asdict(layout),
            "prediction": None if prediction is None else prediction.to_json(),
        }

    header = header_lines(job, calibration, times.note, assumed)
    lines: list[StyledLine | Table] = [*header, *_layout_lines(layout, broken, prediction, limit_bytes(job))]
    if memory and prediction is not None:
        lines.append(_memory_table([prediction], calibration))
    return strict or (prediction is not None and not prediction.fits), answer, lines


def _layout_lines(
    layout: Layout, broken: Sequence[Violation], prediction: Prediction | None, limit: float
) -> Iterator[StyledLine]:
    strict = sum(v.constraint.strict for v in broken)
    counts = f"{strict} rules make it impossible, {len(broken) - strict} cost time"
    yield f"{layout}: {counts if broken else 'keeps every rule'}"
    for v in broken:
        yield "  ", ("impossible", "red") if v.constraint.strict else ("costs time", "yellow"), f" {v}"
    if prediction is not None:
        p, fits = prediction, ("fits", "") if prediction.fits else ("does not fit", "red")
        if p.fits and p.tight:
            fits = ("fits, but within 5 % of the limit: it may fail", "yellow")
        yield f"  memory {p.memory.total_gib:.1f} of {limit / GIB:.1f} GiB: ", fits
        yield (
            f"  {_seconds(p.iteration.sec, ' to ')} s per iteration, {p.tflops:.0f} TFLOPs per GPU, "
            f"{p.tokens_per_s:,.0f} tokens/s, {percent(p.iteration.bubble_share)} bubble, "
            f"look first at: {p.iteration.bound}"
        )
        yield from (f"  {line}" for line in _bound_lines(p))


# --- tables of layouts -----------------------------------------------------------------------------------------------


def predict_table(arguments: PlanOptions, path: Path) -> ModeResult:
    """Predicts every row of a table and compares it with its measured time."""
    results = predict_rows(read_table(path), arguments.times, arguments.calibrations, arguments.given())
    summary, missed = summarize(results), misses(results)

    def answer() -> dict[str, Any]:
        return {
            "file": str(path), "calibrations": arguments.calibrations.to_json(), "rows": [r.to_json() for r in results],
            "summary": asdict(summary),
            "missed_by_more_than_8_percent": [{**r.to_json(), "known": known} for r, known in missed],
        }  # fmt: skip

    def lines() -> Iterator[StyledLine | Table]:
        yield _rows_table(results)
        yield from _summary_lines(summary)
        if missed:
            yield "\nMissed by more than 8 %, and what is known:"
        yield from (f"  {r.row.place}: {100 * (r.error or 0):+.1f} %: {known}" for r, known in missed)
        unpredicted = [r for r in results if r.prediction is None]
        if unpredicted:
            yield f"\n{len(unpredicted)} rows are not predicted, the first: {unpredicted[0].problem}"

    return False, answer, lines()


def _rows_table(results: Sequence[RowResult]) -> Table:
    """Tabulates predicted and measured values, one line per predicted row."""
    numbers = ("row", "line", "sec/it", "measured", "error", "TFLOPs", "reported", "GiB", "stated")
    table = plain_table((*(f">{name}" for name in numbers), "layout"))
    for r in results:
        p, row = r.prediction, r.row
        if p is None:
            continue
        missed = r.error is not None and abs(r.error) > WORTH_A_WORD
        table.add_row(
            row.row_id, _or_dash(row.line), f"{p.sec_per_it:.2f}", _or_dash(row.sec_per_it),
            "" if r.error is None else Text(f"{100 * r.error:+.1f} %", style="bold red" if missed else ""),
            f"{r.tflops:.1f}", _or_dash(row.tflops),
            Text(f"{p.memory.total_gib:.0f}", style="" if p.fits else "red"),
            "OOM" if row.status == "oom" else _or_dash(row.mem_gb), str(p.layout),
        )  # fmt: skip
    return table


def _summary_lines(summary: Summary) -> Iterator[str]:
    if summary.rows:
        yield (
            f"time, {summary.rows} rows: mean error {summary.mape:.2f} %, median {summary.median:.2f} %, bias "
            f"{summary.bias:+.2f} %, rank correlation {summary.spearman:.3f}"
        )
    if summary.memory_rows:
        yield (
            f"memory, {summary.memory_rows} rows: mean error {summary.memory_mape:.1f} %; {summary.oom_seen} of "
            f"{summary.oom_rows} rows that ran out of it were predicted to; a row that ran is predicted at most "
            f"{100 * summary.worst_overrun:+.1f} % over the limit"
        )


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def fit_table(arguments: PlanOptions, path: Path, output: Path) -> ModeResult:
    """Fits the factors of a site to a table of its runs, and writes them."""
    check_file("plan --fit", output, suffix=".json")
    results = predict_rows(read_table(path), arguments.times, arguments.calibrations, arguments.given())
    cases = [(r.case, r.row.sec_per_it or 0.0) for r in results if r.error is not None and r.case is not None]
    if len({(case.job.cluster.device.name, case.job.stack) for case, _ in cases}) > 1:
        raise InputError("plan --fit", f"{path.name} has rows of several GPUs or stacks", "one site with one stack")
    prior = arguments.calibration(cases[0][0].job) if cases else arguments.calibrations.of_stack("", "")
    fit = fit_site(observe([(case, s, path.name) for case, s in cases], arguments.times), prior)
    before = 100 * sum(abs(r.error or 0.0) for r in results if r.case) / max(1, len(cases))
    write_file("plan --fit", output, json.dumps(site_json(fit.calibration), indent=1) + "\n")
    known = fit.calibration.provenance

    def lines() -> Iterator[str]:
        yield f"fitted to {len(cases)} of {len(results)} rows of {path.name}: {fit.calibration}"
        yield (
            f"mean error {before:.1f} % with the stack's factors, {known['leave_one_out_mean_error_pct']:.1f} % with "
            "each row left out of the fit"
        )
        if fit.undetermined:
            yield f"not determined by these rows, close to the stack's values: {', '.join(fit.undetermined)}"
        for a, b in fit.confounded:
            yield f"not told apart, only their joint effect is known: {a} and {b}"
        yield f"wrote {output}"
        yield f"\nNext: quantbench plan --site {output} …"

    answer = {
        "file": str(path),
        "site": site_json(fit.calibration),
        "left_out_errors_pct": [100 * e for e in fit.errors],
    }
    return False, lambda: answer, lines()


def check_table(arguments: PlanOptions, path: Path) -> ModeResult:
    """Finds impossible rows and contradictory cells of a table."""
    found = check_rows(read_table(path), arguments.times, arguments.calibrations)
    findings = [{"row_id": f.row.row_id, "line": f.row.line, "kind": f.kind, "message": f.message} for f in found]
    wrong = len({f.row.row_id for f in found})
    said = f"{wrong} rows of {path.name} have something wrong" if found else f"nothing is wrong in {path.name}"
    return bool(found), lambda: {"file": str(path), "findings": findings}, (*map(str, found), said)
