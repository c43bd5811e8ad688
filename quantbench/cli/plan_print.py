"""Plans as lines and tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from rich.table import Table
from rich.text import Text

from quantbench.cli.output import plain_table
from quantbench.cli.plan_options import PlanOptions
from quantbench.planner.calibration import Calibration
from quantbench.planner.constraints import Violation
from quantbench.planner.folklore import Judged
from quantbench.planner.formulas import parameters
from quantbench.planner.layer_time import Span
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import GIB
from quantbench.planner.predict import Prediction
from quantbench.planner.row_results import WORTH_A_WORD, RowResult, Summary
from quantbench.planner.search import Found, ShapeFound
from quantbench.store.environment import installed_versions, relevant_environment
from quantbench.units import percent

_RECOMPUTE = {"full": "full", "selective": "select", "none": "no"}
_VERDICTS = {"holds": "green", "costs time": "yellow", "fails": "red", "note": "cyan"}
# What `next_command` repeats of the words that were typed, in this order.
_SAID_AGAIN = (
    "model", "config", "hidden", "heads", "kv_heads", "ffn", "layers", "seq", "vocab", "dtype", "gpus", "gpu",
    "profile", "cluster", "gpus_per_node", "node_gbit_per_s", "link_gb_per_s", "gbs", "optimizer",
    "attention", "softmax", "rampup_step", "dp_overlap",
)  # fmt: skip
# A layout within this of the limit may fail on a day when another allocation order fragments more.
_NEARLY_FULL = 0.95


def header_lines(job: Job, calibration: Calibration, note: str, assumed: Sequence[str]) -> list[str]:
    """What is planned for, on what, what was assumed, and what the times rest on."""
    shape, where = job.shape, job.cluster
    heads = f"{shape.heads} heads of {shape.head_dim}"
    dropout = "dropout" if shape.dropout else "no dropout"
    rests = "fitted there" if calibration.fitted else calibration.provenance.get("rule", "")
    return [
        f"model: {parameters(shape) / 1e9:.1f} B parameters: {shape.layers} layers of {shape.hidden}, {heads}, "
        f"seq {shape.seq}, vocab {shape.vocab}, {shape.dtype}, {shape.attention} attention, {dropout}; "
        f"gbs {job.gbs}, {job.optimizer}",
        f"machines: {job.gpus} × {where.device.name}, {where.gpus_per_node} per node, {where.node_gb_per_s:g} GB/s "
        f"between nodes ({where.name})",
        f"assumed: {', '.join(assumed)}",
        f"constants: {calibration} ({rests})",
        f"times: {note}",
        f"made with: {made_with_line()}",
    ]


def made_with_line() -> str:
    """Versions and the variables that matter; `--json` has the command line besides."""
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items() if name != "os")
    variables = " ".join(f"{name}={value}" for name, value in relevant_environment().items())
    return f"{versions}; {variables or 'no variable set that matters'}"


def search_line(job: Job, found: Found, elapsed_s: float) -> str:
    """How much was looked at, and what became of it."""
    text = f"{found.looked_at} layouts keep every rule, {len(found.ranked)} of them fit; {elapsed_s:.2f} s"
    if found.ranked or found.smallest is None:
        return text
    layout, needed = found.smallest
    return f"{text}. The smallest is {layout} with {needed.total_gib:.0f} GiB: more GPUs, or a smaller model"


def layouts_table(ranked: Sequence[Prediction], limit_bytes: float) -> Table:
    """One line per layout, the fastest first."""
    numbers = ("DP", "TP", "PP", "MBS", "intlv", "ZeRO", "recomp", "SP", "sec/it", "TFLOPs", "MFU", "GiB", "bubble")
    table = plain_table(*numbers, "look at first", right=numbers)
    best = ranked[0].sec_per_it if ranked else 1.0
    for p in ranked:
        layout, sec = p.layout, p.iteration.sec
        full = p.memory.total > _NEARLY_FULL * limit_bytes
        table.add_row(
            str(layout.dp), str(layout.tp), str(layout.pp), str(layout.mbs), str(layout.interleave), str(layout.zero),
            _RECOMPUTE[layout.recompute], "yes" if layout.sequence_parallel else "",
            _seconds(sec, "–"), f"{p.tflops:.0f}", percent(p.mfu),
            Text(f"{p.memory.total / GIB:.0f}", style="yellow" if full else ""), percent(p.iteration.bubble_share),
            p.iteration.bound, style="bold" if p.sec_per_it == best else "",
        )  # fmt: skip
    return table


def parts_lines(found: Prediction) -> list[str]:
    """Seconds by what they go to, the largest first."""
    parts = sorted(found.iteration.parts.items(), key=lambda part: -part[1])
    total = found.sec_per_it
    return [
        f"{name.replace('_', ' '):15} {s:8.2f} s  {percent(s / total):>6}" for name, s in parts if s >= 0.001 * total
    ]


def rules_lines(judged: Sequence[Judged]) -> list[tuple[str | tuple[str, str], ...]]:
    """Each rule with its verdict, and below it where it goes wrong; as parts for `say`."""
    lines: list[tuple[str | tuple[str, str], ...]] = []
    for j in judged:
        lines.append(((j.verdict, _VERDICTS[j.verdict]), f" {j.rule.text} ({j.rule.source}): {j.finding}"))
        if j.verdict != "holds":
            lines.append((f"    {j.rule.weakness}",))
    return lines


def check_line(broken: Sequence[Violation]) -> str:
    """How many rules a layout breaks."""
    strict = sum(v.constraint.strict for v in broken)
    if not broken:
        return "keeps every rule"
    return f"{strict} rules make it impossible, {len(broken) - strict} cost time"


def prediction_line(p: Prediction) -> str:
    """One layout in one line."""
    return (
        f"{_seconds(p.iteration.sec, ' to ')} s per iteration, {p.tflops:.0f} TFLOPs per GPU, "
        f"{p.tokens_per_s:,.0f} tokens/s, {percent(p.iteration.bubble_share)} bubble, "
        f"look first at: {p.iteration.bound}"
    )


def bound_lines(p: Prediction) -> list[str]:
    """What the rate comes to over a training run, and what it leaves out."""
    hours = float(f"{p.gpu_hours_per_trillion_tokens:.3g}")
    return [
        f"10^12 tokens: {p.days_per_trillion_tokens:.3g} days, {hours:,.0f} GPU-hours, MFU {percent(p.mfu)}",
        f"a lower bound on time (MFU: an upper bound), not counted: {', '.join(p.not_counted)}",
    ]


def _seconds(sec: Span, between: str) -> str:
    """With its interval, and the same decimals in every row of a table."""
    decimals = 1 if sec.mid >= 10 else 2
    return f"{sec.mid:.2f} ({sec.low:.{decimals}f}{between}{sec.high:.{decimals}f})"


def next_command(arguments: PlanOptions, layout: Layout) -> str:
    """How to look closer at a layout: the words that were typed, with its degrees."""
    typed = [f"--{name.replace('_', '-')} {quote(str(getattr(arguments, name)))}" for name in _SAID_AGAIN
             if getattr(arguments, name)]  # fmt: skip
    typed += ["--gated"] if arguments.gated else []
    typed += [] if arguments.dropout is None else ["--dropout" if arguments.dropout else "--no-dropout"]
    degrees = f"--dp {layout.dp} --tp {layout.tp} --pp {layout.pp} --mbs {layout.mbs} --zero {layout.zero}"
    degrees += f" --interleave {layout.interleave}" if layout.interleave > 1 else ""
    degrees += " --sequence-parallel" if layout.sequence_parallel else ""
    degrees += " --allow-uneven" if arguments.allow_uneven else ""
    return f"quantbench plan --check {' '.join(typed)} {degrees} --recompute {layout.recompute}"


def shapes_table(found: Sequence[ShapeFound], budget: float) -> Table:
    """One line per shape, the fastest first."""
    numbers = ("hidden", "heads", "head_dim", "layers", "B params", "sec/it", "scaled", "of best", "TFLOPs", "GiB")
    table = plain_table(*numbers, "layout", right=numbers)
    best = min((f.scaled_s for f in found), default=1.0)
    for f in found:
        table.add_row(
            str(f.shape.hidden), str(f.shape.heads), str(f.shape.head_dim), str(f.shape.layers),
            f"{f.parameters / 1e9:.1f}", f"{f.best.sec_per_it:.2f}", f"{f.scaled_s:.2f}",
            f"+{100 * (f.scaled_s / best - 1):.1f} %", f"{f.best.tflops:.0f}", f"{f.best.memory.total_gib:.0f}",
            str(f.best.layout),
        )  # fmt: skip
    table.caption = f"scaled: time at {budget / 1e9:.1f} B parameters"
    return table


def best_by_hidden(found: Sequence[ShapeFound]) -> list[ShapeFound]:
    """The fastest shape of each hidden size, hidden ascending."""
    best: dict[int, ShapeFound] = {}
    for f in found:
        best.setdefault(f.shape.hidden, f)
    return [best[hidden] for hidden in sorted(best)]


def rows_table(results: Sequence[RowResult]) -> Table:
    """One line per predicted row: predicted beside measured."""
    numbers = ("row", "line", "sec/it", "measured", "error", "TFLOPs", "reported", "GiB", "stated")
    table = plain_table(*numbers, "layout", right=numbers)
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


def summary_lines(summary: Summary) -> list[str]:
    """How good the predictions are."""
    lines = []
    if summary.rows:
        lines.append(
            f"time, {summary.rows} rows: mean error {summary.mape:.2f} %, median {summary.median:.2f} %, bias "
            f"{summary.bias:+.2f} %, rank correlation {summary.spearman:.3f}"
        )
    if summary.memory_rows:
        lines.append(
            f"memory, {summary.memory_rows} rows: mean error {summary.memory_mape:.1f} %; {summary.oom_seen} of "
            f"{summary.oom_rows} rows that ran out of it were predicted to; a row that ran is predicted at most "
            f"{100 * summary.worst_overrun:+.1f} % over the limit"
        )
    return lines


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
