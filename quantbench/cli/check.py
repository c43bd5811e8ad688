"""Command `check`: finds cliffs and their causes in a run, and tests rules of thumb; `analysis.check` does the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, json_option, option
from quantbench.cli.output import StyledLine, check_folder, output, plain_table, print_result, say
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, printable
from quantbench.units import parse_duration_s, percent

if TYPE_CHECKING:
    from quantbench.analysis.check import Check
    from quantbench.analysis.periods import Period
    from quantbench.analysis.rules import RuleOfThumb
    from quantbench.sweep.options import SweepOptions

# Number of cliffs shown; --json has all.
_MOST_CLIFFS = 20
_MOST_SAME = 8
# Number of comparisons in the JSON of a verdict; a run has thousands.
_MOST_EVIDENCE = 200

_VERDICT_STYLE = {"CONFIRMED": "green", "REFUTED": "red", "INCONCLUSIVE": "yellow"}


@command
def check(
    run: Path | None = argument("Folder of a run.", metavar="[RUN]", default=None),
    experiment: str = option(
        "", "Measure only the points this rule needs, then test it: k-8, mbs-2, …", metavar="RULE"
    ),
    results: Path = option(Path("results"), "Folder for the run of --experiment."),
    budget: str = option("", "Time for an experiment: 8m, 90s, none (default: 4m; CPU 75s)."),
    blind: bool = option(False, "Do not use the device's number of SMs."),
    fail_above: float | None = option(
        None, "Exit with 1 if the lower bound of a cliff's ratio exceeds this, such as 1.2."
    ),
    as_json: bool = json_option(),
) -> None:
    """Find the sizes after which the time jumps, explain the jumps, and test the rules of thumb.

    Every device has cliffs: the exit code is 1 only with --fail-above.
    """
    from quantbench.analysis.check import check_run
    from quantbench.analysis.rules import RULES, rule_named
    from quantbench.report.source import read_one_run

    if fail_above is not None and not 1 < fail_above < float("inf"):
        raise InputError("--fail-above", repr(fail_above), "a ratio above 1, such as 1.2")
    if (run is None) == (not experiment):
        given = "a run and --experiment" if experiment else "no run"
        raise InputError("check", given, "the folder of a run, or --experiment with a rule")
    if run is not None and budget:
        raise InputError("check", f"--budget {budget} with a run", "--budget with --experiment")
    if budget not in ("", "none"):
        parse_duration_s("--budget", budget)
    rules = (rule_named(experiment),) if experiment else RULES
    if experiment:
        check_folder("--results", results)
    folder = run if run is not None else _measure(rules[0], results, budget, as_json=as_json)
    found = check_run(read_one_run(folder), rules=rules, blind=blind)
    print_result(as_json, lambda: check_to_json(found), _lines(found))
    if fail_above is not None and any(cliff.low > fail_above for cliff in found.cliffs):
        raise typer.Exit(1)


def _measure(rule: RuleOfThumb, results: Path, budget: str, *, as_json: bool) -> Path:
    """Runs a rule's experiment on the device at hand and returns the folder of its run."""
    from quantbench.cli.sweep import SweepArguments, sweep_options
    from quantbench.cli.sweep_run import measure, stop_on_sigterm
    from quantbench.sweep.child import WorkerProcess
    from quantbench.sweep.session import SweepSession

    def options(spec: DeviceSpec) -> SweepOptions:
        plan = rule.experiment(spec)
        usual = sweep_options(SweepArguments(dim=list(plan.dims), budget=budget), spec.torch_kind)
        return replace(usual, held=plan.held, providers=plan.providers, skip_impossible=True)

    console = output(stderr=as_json)
    stop_on_sigterm()
    say(console, f"experiment {rule.id}: {rule.predicate} ({rule.claim})")
    with SweepSession.new(options, results, WorkerProcess) as session:
        measure(console, session)
        return session.folder


def _lines(found: Check) -> Iterator[StyledLine | Table]:
    from quantbench.analysis.rules import untested_lines

    info = found.run.info
    yield device_line(info.device)
    if info.origin != "measured":
        source = f": {printable(info.source)}" if info.source else ""
        yield (f"{info.origin.upper()} DATA", "bold"), source
    yield from map(printable, (*found.run.warnings, *_head_lines(found)))
    if not found.num_points:
        yield "no measured points: no cliffs can be found and no rules tested"
        return
    if found.common or found.cliffs:
        yield ""
        yield _common_table(found) if found.common else _single_table(found)
    several = len(found.periods) > 1
    for period in found.periods:
        yield (f"{period.op} {period.provider} {period.variant}: " if several else "") + _period_words(period)
    if found.kernels:
        yield ""
        yield _kernel_table(found)
    if any(verdict.verdict != "NOT TESTED" for verdict in found.rules):
        yield ""
        yield _rule_table(found)
    yield from untested_lines(found.rules, info.device)
    yield f"\nnext: quantbench report {found.run.folder}"


def _head_lines(found: Check) -> list[str]:
    """Counts points, curves, cliffs and the causes of the cliffs."""
    from quantbench.store.record import Measured

    records = [record for record in found.run.records if record.role == "point"]
    missing = sum(not isinstance(record.outcome, Measured) for record in records)
    lines = [f"{_counted(found.num_points, 'measured point')}" + (f", {missing} skipped or failed" if missing else "")]
    if not found.num_curves:
        lines.append("no two neighbouring sizes are close enough to detect a step between them")
        return lines
    noise = "" if found.noise is None else f"; standard error of a point ±{percent(found.noise)}"
    lines[0] += f", {_counted(found.num_curves, 'curve')} with close neighbours{noise}"
    if not found.cliffs:
        lines.append("no cliff: the time does not jump by 3 % or more above its trend and the noise anywhere")
    else:
        kinds = Counter(cliff.cause.kind for cliff in found.cliffs)
        causes = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        falls = f"{_counted(len(found.falls), 'place')} where a larger size is faster"
        lines.append(f"{_counted(len(found.cliffs), 'cliff')} ({causes}); {falls}")
    return lines


def _counted(number: int, what: str) -> str:
    """Formats a count: `1 point`, `2,000 points`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _common_table(found: Check) -> Table:
    """Tabulates the cliffs that many curves share."""
    several = len({(c.op, c.provider, c.variant) for c in found.common}) > 1
    waves = any(c.stepping for c in found.common)
    split = (">with a new wave", ">without") if waves else ()
    title = "cliffs: median over all compute-bound curves"
    table = plain_table((">size", ">time", ">curves", *split, "significant cliffs by cause"), title=title)
    for c in found.common[:_MOST_CLIFFS]:
        which = f" of {c.provider} {c.variant}" if several else ""
        table.add_row(
            f"{_axis(c.axis)} = {c.at} to {c.next}", f"{c.ratio:.2f}x ({c.low:.2f} to {c.high:.2f})",
            str(c.num_curves), *((_ratio_of(c.stepping), _ratio_of(c.level)) if waves else ()), c.cause_words + which,
        )  # fmt: skip
    return table


def _ratio_of(part: tuple[float, int] | None) -> str:
    return "" if part is None else f"{part[0]:.2f}x of {part[1]}"


def _single_table(found: Check) -> Table:
    """Tabulates the largest cliffs."""
    more = len(found.cliffs) - _MOST_CLIFFS
    title = "cliffs" if more <= 0 else f"the {_MOST_CLIFFS} largest cliffs ({more:,} more in --json)"
    table = plain_table((">size", ">time", "op", "why"), title=title)
    for cliff in found.cliffs[:_MOST_CLIFFS]:
        held = "".join(f", {_axis(name)} = {value}" for name, value in cliff.held.items())
        source = "" if cliff.cause.evidence == "identity" else f" ({cliff.cause.evidence})"
        table.add_row(
            f"{_axis(cliff.axis)} = {cliff.at} to {cliff.next}{held}",
            f"{cliff.ratio:.2f}x ({cliff.low:.2f} to {cliff.high:.2f})", f"{cliff.op} {cliff.provider}",
            f"{cliff.cause.kind}: {cliff.cause.words}{source}",
        )  # fmt: skip
    return table


def _axis(name: str) -> str:
    return name.replace("_", "-")


def _period_words(period: Period) -> str:
    """Describes the tile that explains the steps of a family of curves, or why there is none."""
    from quantbench.analysis.periods import explanation_words

    r = period.recovered
    spaced = "" if period.spacing is None else f", a step every {period.spacing:.4g} of {_axis(period.axis)}"
    match r.verdict:
        case "clear":
            same = [explanation_words(e, period.sm_count) for e in r.best if e != period.chosen]
            listed = "; ".join(same[:_MOST_SAME]) + ("; …" if len(same) > _MOST_SAME else "")
            other = f"; the same staircase: {listed}" if same else ""
            sure = f"explains {percent(r.explained)} of the variation around the trend, {period.sure_words}"
            return f"the steps match a {period.tile_words} ({sure}){spaced}{other}"
        case "no waves":
            return "no waves: the times do not rise in the steps of any tile"
        case "no single tile":
            best = explanation_words(r.best[0], period.sm_count)
            share = f"{percent(r.explained)} of the variation around the trend"
            return f"no single tile explains the steps: the best, a {best}, explains {share}"
        case _:
            likely = "; ".join(explanation_words(e, period.sm_count) for e in (r.best[0], *r.rivals)[:_MOST_SAME])
            return f"several tiles may explain the steps{spaced}: {likely}"


def _kernel_table(found: Check) -> Table:
    """Tabulates the tile and wave edges of named kernels."""
    title = f"kernels: time of 1, 2, 3, … blocks per SM ({found.run.info.device.sm_count} SMs), in times of one block"
    columns = (
        "kernel",
        ">points",
        ">tile",
        "time by blocks per SM",
        "rises after blocks",
        "partly filled tiles",
        ">rows off 16 B",
    )
    table = plain_table(columns, title=title)
    for kernel in found.kernels:
        edges = ", ".join(f"{edge.blocks} {edge.ratio:.2f}x" for edge in kernel.edges)
        filled = f"{percent(kernel.fill_low or 0)} to {percent(kernel.fill_high or 0)} full"
        error = 2 * (kernel.unaligned_error or 0)
        table.add_row(
            f"{kernel.kernel} {kernel.provider}", f"{kernel.num_points:,}",
            f"{kernel.tile.block_m}x{kernel.tile.block_n}",
            " ".join("–" if wave is None else f"{wave:.1f}" for wave in kernel.waves[1::2]), edges,
            f"cost as full ones ({filled})" if kernel.whole_tiles else "",
            "" if kernel.unaligned is None else f"{100 * kernel.unaligned:+.1f} ±{100 * error:.1f} %",
        )  # fmt: skip
    return table


def _rule_table(found: Check) -> Table:
    """Tabulates the verdicts of the rules that the run tests."""
    from quantbench.analysis.rules import rule_named

    columns = ("rule", "verdict", "effect", "pairs", "what the rule says, and why it was (not) confirmed")
    table = plain_table(columns, title="rules: time per unit of work, rule broken / rule kept")
    for verdict in found.rules:
        if verdict.verdict == "NOT TESTED":
            continue
        rule = rule_named(verdict.rule)
        behind = f" ({verdict.reason})" if verdict.reason else ""
        if not behind and verdict.predicted is not None:
            behind = f" (tiles and waves alone: {verdict.predicted:.3f}x)"
        table.add_row(
            rule.id, Text(verdict.verdict, style=_VERDICT_STYLE[verdict.verdict]),
            "" if verdict.effect is None else f"{verdict.effect:.3f}x ({verdict.low:.3f} to {verdict.high:.3f})",
            f"{verdict.num_pairs:,}" if verdict.num_pairs else "", f"{rule.predicate}: {rule.claim}{behind}",
        )  # fmt: skip
    return table


def check_to_json(found: Check) -> dict[str, Any]:
    """Converts a whole check to JSON objects."""
    from quantbench.analysis.rules import rule_named
    from quantbench.report.sweep_result import cliff_to_json

    info = found.run.info
    common = []
    for one in found.common:
        data = asdict(one)
        for name in ("stepping", "level"):
            data[f"{name}_ratio"], data[f"{name}_curves"] = data.pop(name) or (None, 0)
        common.append({**data, "cause": one.cause, "causes": dict(one.causes)})
    rules = []
    for verdict in found.rules:
        rule = rule_named(verdict.rule)
        rules.append(
            {
                "id": rule.id, "predicate": rule.predicate, "claim": rule.claim, "verdict": verdict.verdict,
                "effect": verdict.effect, "low": verdict.low, "high": verdict.high, "pairs": verdict.num_pairs,
                "predicted": verdict.predicted, "evidence": verdict.evidence[:_MOST_EVIDENCE],
                "evidence_total": len(verdict.evidence), "reason": verdict.reason,
            }
        )  # fmt: skip
    return {
        "run": str(found.run.folder), "device": info.device.name, "origin": info.origin, "source": info.source,
        "points": found.num_points, "curves": found.num_curves, "noise": found.noise,
        "cliffs": [cliff_to_json(cliff) for cliff in found.cliffs],
        "falls": [cliff_to_json(cliff) for cliff in found.falls],
        "common": common,
        "period": None if found.period is None else _period_to_json(found.period),
        "periods": [_period_to_json(period) for period in found.periods],
        "rules": rules, "kernels": [asdict(kernel) | {"whole_tiles": kernel.whole_tiles} for kernel in found.kernels],
    }  # fmt: skip


def _period_to_json(period: Period) -> dict[str, Any]:
    r, chosen = period.recovered, period.chosen
    per_sm = None if chosen is None else chosen.per_sm(period.sm_count)
    # If the number of SMs does not divide the resident blocks, or is unknown, report one block on each of as many SMs.
    sm_count = None if chosen is None else period.sm_count if per_sm else chosen.resident_blocks
    return {
        "axis": period.axis, "op": period.op, "provider": period.provider, "variant": period.variant,
        "verdict": r.verdict, "tile": None if chosen is None else f"{chosen.block_m}x{chosen.block_n}",
        "sm_count": sm_count, "blocks_per_sm": None if chosen is None else per_sm or 1,
        "resident_blocks": None if chosen is None else chosen.resident_blocks,
        "confidence": r.confidence, "explained": r.explained, "spacing": period.spacing,
        "spacing_error": period.spacing_error, "curves": period.num_curves,
        "same": [asdict(explanation) for explanation in r.best],
        "rivals": [asdict(explanation) for explanation in r.rivals],
    }  # fmt: skip
