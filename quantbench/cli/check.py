"""`quantbench check RUN`: find cliffs and their causes, and test the rules of thumb."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from quantbench.analysis.check import Check, check_run
from quantbench.analysis.cliffs import CommonCliff
from quantbench.analysis.periods import Period, explanation_words
from quantbench.analysis.rules import RULES, RuleOfThumb, Verdict, rule_named, untested_lines
from quantbench.cli.devices import device_line
from quantbench.cli.options import AsJson
from quantbench.cli.output import check_folder, output, plain_table, print_json, say
from quantbench.cli.sweep import measure
from quantbench.cli.sweep_options import SweepArguments, sweep_options
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, printable
from quantbench.report.source import read_one_run
from quantbench.report.sweep_result import cliff_to_json
from quantbench.store.record import Measured
from quantbench.sweep.child import WorkerProcess
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.session import SweepSession
from quantbench.units import parse_duration_s, percent

# The largest cliffs are shown; --json has them all.
_MOST_CLIFFS = 20
_MOST_SAME = 8
# Records of so many comparisons stand for a verdict; a table has thousands.
_MOST_EVIDENCE = 200

_VERDICT_STYLE = {"CONFIRMED": "green", "REFUTED": "red", "INCONCLUSIVE": "yellow"}


def check(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run.")] = None,
    experiment: Annotated[
        str,
        typer.Option(metavar="RULE", help="Measure only the points this rule needs, then test it: k-8, mbs-2, …"),
    ] = "",
    results: Annotated[Path, typer.Option(help="Folder for the run of --experiment.")] = Path("results"),
    budget: Annotated[str, typer.Option(help="Time for an experiment: 8m, 90s, none (default: 4m; CPU 75s).")] = "",
    blind: Annotated[bool, typer.Option("--blind", help="Do not use the device's number of SMs.")] = False,
    fail_above: Annotated[
        float | None, typer.Option(help="Exit with 1 if the lower bound of a cliff's ratio exceeds this, such as 1.2.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the sizes after which the time jumps, explain the jumps, and test the rules of thumb.

    Every device has cliffs: the exit code is 1 only with --fail-above.
    """

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
    if as_json:
        print_json(check_to_json(found))
    else:
        _say(found)
    if fail_above is not None and any(cliff.low > fail_above for cliff in found.cliffs):
        raise typer.Exit(1)


def _measure(rule: RuleOfThumb, results: Path, budget: str, *, as_json: bool) -> Path:
    """Run a rule's experiment on the device at hand; the folder of its run."""

    def options(spec: DeviceSpec) -> SweepOptions:
        plan = rule.experiment(spec)
        usual = sweep_options(SweepArguments(dim=list(plan.dims), budget=budget), spec.kind)
        return replace(usual, held=plan.held, providers=plan.providers, skip_impossible=True)

    console = output(stderr=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(console, f"experiment {rule.id}: {rule.predicate} ({rule.claim})")
    with SweepSession.new(options, results, WorkerProcess) as session:
        measure(console, session)
        return session.folder


def _say(found: Check) -> None:

    console = output()
    info = found.run.info
    say(console, device_line(info.device))
    if info.origin != "measured":
        source = f": {printable(info.source)}" if info.source else ""
        say(console, (f"{info.origin.upper()} DATA", "bold"), source)
    for line in (*found.run.warnings, *head_lines(found)):
        say(console, printable(line))
    if not found.num_points:
        say(console, "no measured points: no cliffs can be found and no rules tested")
        return
    table = cliff_table(found)
    if table is not None:
        console.print()
        console.print(table)
    for line in period_lines(found):
        say(console, line)
    rules = rule_table(found)
    if rules is not None:
        console.print()
        console.print(rules)
    for line in untested_lines(found.rules, info.device):
        say(console, line)
    console.print()
    say(console, f"next: quantbench report {found.run.folder!s}")


def head_lines(found: Check) -> list[str]:
    """Number of points, curves and cliffs, and the causes of the cliffs."""
    records = [record for record in found.run.records if record.role == "point"]
    missing = sum(not isinstance(record.outcome, Measured) for record in records)
    lines = [f"{counted(found.num_points, 'measured point')}" + (f", {missing} skipped or failed" if missing else "")]
    if not found.num_curves:
        lines.append("no two neighbouring sizes are close enough to detect a step between them")
        return lines
    noise = "" if found.noise is None else f"; standard error of a point ±{percent(found.noise)}"
    lines[0] += f", {counted(found.num_curves, 'curve')} with close neighbours{noise}"
    if not found.cliffs:
        lines.append("no cliff: the time does not jump by 3 % or more above its trend and the noise anywhere")
    else:
        kinds = Counter(cliff.cause.kind for cliff in found.cliffs)
        causes = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        falls = f"{counted(len(found.falls), 'place')} where a larger size is faster"
        lines.append(f"{counted(len(found.cliffs), 'cliff')} ({causes}); {falls}")
    return lines


def counted(number: int, what: str) -> str:
    """`1 point`, `2,000 points`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cliff_table(found: Check) -> Table | None:
    """Cliffs that many curves share if there are many curves, else the largest cliffs; None without cliffs."""
    return _common_table(found) if found.common else _single_table(found) if found.cliffs else None


def _common_table(found: Check) -> Table:
    several = len({(c.op, c.provider, c.variant) for c in found.common}) > 1
    waves = any(c.stepping for c in found.common)
    names = (
        "size",
        "time",
        "curves",
        *(("with a new wave", "without") if waves else ()),
        "significant cliffs by cause",
    )
    table = plain_table(*names, right=names[:-1], title="cliffs: median over all compute-bound curves")
    for c in found.common[:_MOST_CLIFFS]:
        split = (_ratio_of(c.stepping), _ratio_of(c.level)) if waves else ()
        which = f" of {c.provider} {c.variant}" if several else ""
        table.add_row(
            f"{_axis(c.axis)} = {c.at} to {c.next}", f"{c.ratio:.2f}x ({c.low:.2f} to {c.high:.2f})",
            str(c.num_curves), *split, c.cause_words + which,
        )  # fmt: skip
    return table


def _ratio_of(part: tuple[float, int] | None) -> str:
    return "" if part is None else f"{part[0]:.2f}x of {part[1]}"


def _single_table(found: Check) -> Table:
    more = len(found.cliffs) - _MOST_CLIFFS
    title = "cliffs" if more <= 0 else f"the {_MOST_CLIFFS} largest cliffs ({more:,} more in --json)"
    table = plain_table("size", "time", "op", "why", right=("size", "time"), title=title)
    for cliff in found.cliffs[:_MOST_CLIFFS]:
        held = "".join(f", {_axis(name)} = {value}" for name, value in cliff.held.items())
        source = "" if cliff.cause.evidence == "identity" else f" ({cliff.cause.evidence})"
        table.add_row(
            f"{_axis(cliff.axis)} = {cliff.at} to {cliff.next}{held}",
            f"{cliff.ratio:.2f}x ({cliff.low:.2f} to {cliff.high:.2f})",
            f"{cliff.op} {cliff.provider}",
            f"{cliff.cause.kind}: {cliff.cause.words}{source}",
        )
    return table


def _axis(name: str) -> str:
    return name.replace("_", "-")


def period_lines(found: Check) -> list[str]:
    """One sentence for each family of curves: the tile that explains its steps, if any."""
    several = len(found.periods) > 1
    return [(f"{p.op} {p.provider} {p.variant}: " if several else "") + _period_words(p) for p in found.periods]


def _period_words(period: Period) -> str:
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


def rule_table(found: Check) -> Table | None:
    """The rules that the run tests, with their verdicts; None where it tests none (see `untested_lines`)."""
    tested = [verdict for verdict in found.rules if verdict.verdict != "NOT TESTED"]
    if not tested:
        return None

    table = plain_table(
        "rule", "verdict", "effect", "pairs", "what the rule says, and why it was (not) confirmed",
        title="rules: time per unit of work, rule broken / rule kept",
    )  # fmt: skip
    for verdict in tested:
        rule = rule_named(verdict.rule)
        table.add_row(
            rule.id,
            Text(verdict.verdict, style=_VERDICT_STYLE[verdict.verdict]),
            "" if verdict.effect is None else f"{verdict.effect:.3f}x ({verdict.low:.3f} to {verdict.high:.3f})",
            f"{verdict.num_pairs:,}" if verdict.num_pairs else "",
            f"{rule.predicate}: {rule.claim}{_behind(verdict)}",
        )
    return table


def _behind(verdict: Verdict) -> str:
    if verdict.reason:
        return f" ({verdict.reason})"
    return "" if verdict.predicted is None else f" (tiles and waves alone: {verdict.predicted:.3f}x)"


def check_to_json(found: Check) -> dict[str, Any]:
    """The whole check as JSON objects."""
    info = found.run.info
    return {
        "run": str(found.run.folder), "device": info.device.name, "origin": info.origin, "source": info.source,
        "points": found.num_points, "curves": found.num_curves, "noise": found.noise,
        "cliffs": [cliff_to_json(cliff) for cliff in found.cliffs],
        "falls": [cliff_to_json(cliff) for cliff in found.falls],
        "common": [_common_to_json(common) for common in found.common],
        "period": None if found.period is None else _period_to_json(found.period),
        "periods": [_period_to_json(period) for period in found.periods],
        "rules": [_verdict_to_json(verdict) for verdict in found.rules],
    }  # fmt: skip


def _common_to_json(common: CommonCliff) -> dict[str, Any]:
    data = asdict(common)
    for name in ("stepping", "level"):
        part = data.pop(name)
        data[f"{name}_ratio"], data[f"{name}_curves"] = part or (None, 0)
    return {**data, "cause": common.cause, "causes": dict(common.causes)}


def _period_to_json(period: Period) -> dict[str, Any]:
    r, chosen = period.recovered, period.chosen
    per_sm = None if chosen is None else chosen.per_sm(period.sm_count)
    # Where the SMs were not used, one block on each is as good a reading as any.
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


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    rule = rule_named(verdict.rule)
    return {
        "id": rule.id, "predicate": rule.predicate, "claim": rule.claim, "verdict": verdict.verdict,
        "effect": verdict.effect, "low": verdict.low, "high": verdict.high, "pairs": verdict.num_pairs,
        "predicted": verdict.predicted, "evidence": list(verdict.evidence[:_MOST_EVIDENCE]),
        "evidence_total": len(verdict.evidence), "reason": verdict.reason,
    }  # fmt: skip
