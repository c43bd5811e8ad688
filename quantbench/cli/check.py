"""Command `check`: finds cliffs and their causes in a run, and tests rules of thumb.

A cliff is a size after which the time jumps. With --experiment, the command first measures the
points that a rule of thumb needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantbench.alignment_rules import AlignmentRule, broken_rules
from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, json_option, option
from quantbench.cli.output import Lines, check_folder, encoded, output, print_result, say
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, one_line, printable
from quantbench.report.terminal import cliffs_table, section_lines
from quantbench.store.record import Failed, Measured
from quantbench.units import axis_words, counted, parse_duration_s, percent
from quantbench.workload import Attention, Gemm

if TYPE_CHECKING:
    from quantbench.analysis.check import RunCheck
    from quantbench.analysis.jumps import Cliff
    from quantbench.analysis.rules import RuleOfThumb
    from quantbench.store.folder import Run
    from quantbench.sweep.options import SweepOptions

# Maximum number of cliffs in the printed table. --json has all.
_MOST_CLIFFS = 20
# Maximum number of cliffs that the message of --fail-above names.
_MOST_NAMED = 3


@command
def check(
    run: Path | None = argument("Folder of a run.", metavar="[RUN]", default=None),
    experiment: str = option(
        "", "Measure only the points this rule needs, then test it: k-8, mbs-2, …", metavar="RULE"
    ),
    results: Path = option(Path("results"), "Folder for the run of --experiment."),
    budget: str = option("", "Time for an experiment: 8m, 90s, none (default: 4m; CPU 60s)."),
    fail_above: float | None = option(
        None, "Exit with 1 if the lower bound of a cliff's ratio exceeds this, such as 1.2."
    ),
    as_json: bool = json_option(),
) -> None:
    """Find the sizes after which the time jumps, explain the jumps, and test the rules of thumb.

    Every device has cliffs: the exit code is 1 only with --fail-above, and 2 if nothing could be
    judged.
    """
    from quantbench.analysis.check import check_run
    from quantbench.analysis.rules import RULES, rule_named
    from quantbench.store.folder import read_one_run

    if fail_above is not None and not 1 < fail_above < float("inf"):
        raise InputError("--fail-above", repr(fail_above), "a ratio above 1, such as 1.2")
    if (run is None) == (not experiment):
        given = "a run and --experiment" if experiment else "no run"
        raise InputError("check", given, "the folder of a run, or --experiment with a rule")
    if run is not None and budget:
        raise InputError("check", f"--budget {budget} with a run", "--budget with --experiment")
    if run is not None and results != Path("results"):
        raise InputError("check", f"--results {results} with a run", "--results with --experiment")
    if budget not in ("", "none"):
        parse_duration_s("--budget", budget)
    rules = RULES
    folder = run
    if folder is None:
        rules = (rule_named(experiment),)
        check_folder("--results", results)
        folder = _measure(rules[0], results, budget, as_json=as_json)
    found = check_run(read_one_run(folder), rules=rules)
    print_result(as_json, lambda: _answer(found), _lines(found))
    if fail_above is not None and (broken := _failed_everywhere(found.run)):
        raise InputError(
            "check --fail-above",
            f"{folder}: every point of {', '.join(broken)} failed",
            "a run in which each provider was measured",
        )
    if fail_above is not None and not found.num_curves:
        said = (
            f"{folder} has {counted(found.num_points, 'measured point')}, none with close "
            f"neighbours"
        )
        raise InputError("check --fail-above", said, "a run in which a cliff could be found")
    if not found.num_points:
        raise typer.Exit(2)
    limit = fail_above or float("inf")
    above = [cliff for cliff in found.cliffs if cliff.low > limit]
    if above:
        say(output(stderr=as_json), one_line(_above_words(above, limit)))
        raise typer.Exit(1)


def _above_words(cliffs: Sequence[Cliff], limit: float) -> str:
    """Formats the message of --fail-above, which names the highest cliffs.

    cliffs: cliffs whose ratio has a lower bound above `limit`.
    """
    words = []
    for cliff in sorted(cliffs, key=lambda one: -one.low)[:_MOST_NAMED]:
        place = axis_words({cliff.axis: f"{cliff.at} to {cliff.next}", **cliff.held}, " = ")
        words.append(f"{cliff.op} {cliff.provider} {', '.join(place)}: at least {cliff.low:.2f}")
    text = f"--fail-above {limit:g}: {counted(len(cliffs), 'cliff')} surely higher"
    return f"{text}, first {'; '.join(words)}"


def _failed_everywhere(run: Run) -> list[str]:
    """Returns the providers with failed points but no measured point, sorted by name."""
    points = [record for record in run.records if record.role == "point"]
    failed = {one.provider for one in points if isinstance(one.outcome, Failed)}
    measured = {one.provider for one in points if isinstance(one.outcome, Measured)}
    return sorted(failed - measured)


def _measure(rule: RuleOfThumb, results: Path, budget: str, *, as_json: bool) -> Path:
    """Measures the points that test a rule of thumb on this machine, and returns the run folder.

    results: folder in which the run folder is created.
    budget: text of --budget.
    """
    from quantbench.cli.sweep_options import SweepArguments, sweep_options
    from quantbench.cli.sweep_run import measure, stop_on_sigterm
    from quantbench.sweep.child import WorkerProcess
    from quantbench.sweep.session import SweepSession

    def options(spec: DeviceSpec) -> SweepOptions:
        plan = rule.experiment(spec)
        usual = sweep_options(SweepArguments(dim=list(plan.dims), budget=budget), spec.torch_kind)
        return replace(usual, held=plan.held, providers=plan.providers)

    console = output(stderr=as_json)
    stop_on_sigterm()
    say(console, f"experiment {rule.id}: {rule.statement} ({rule.claim})")
    with SweepSession.new(options, results, WorkerProcess) as session:
        measure(console, session)
        return session.folder


def _lines(found: RunCheck) -> Lines:
    """Yields the lines and tables that the command prints: cliffs, rules and broken rules."""
    from quantbench.analysis.summary import floor_lines
    from quantbench.report.sections import rules_section, steps_section

    info = found.run.info
    yield device_line(info.device)
    if info.origin != "measured":
        source = f": {printable(info.source)}" if info.source else ""
        yield (f"{info.origin.upper()} DATA", "bold"), source
    elif info.how_ended != "complete":
        rest = f"the rest: quantbench sweep --resume {found.run.folder}"
        yield f"this run did not end as planned ({info.how_ended}); {rest}"
    yield from map(printable, (*found.run.warnings, *_head_lines(found)))
    if not found.num_points:
        yield "no measured points: no cliffs can be found and no rules tested"
        return
    if found.cliffs and not found.common:
        more = len(found.cliffs) - _MOST_CLIFFS
        title = "cliffs"
        if more > 0:
            title = f"the {_MOST_CLIFFS} largest cliffs ({more:,} more in --json)"
        words = []
        for cliff in found.cliffs[:_MOST_CLIFFS]:
            why = f"{cliff.cause.kind}: {cliff.cause.words}"
            if cliff.cause.evidence != "identity":
                why += f" ({cliff.cause.evidence})"
            words.append((cliff, why))
        yield from ("", cliffs_table(words, title))
    for section in filter(None, (steps_section(found), rules_section(found.rules, info.device))):
        yield ""
        yield from section_lines(section)
    for (rule, dtype), number in _broken_rules(found).most_common():
        what = f"{' or '.join(rule.sides)} of {dtype} off the multiples of {rule.multiple}"
        effect = f"{rule.effect} in {rule.whose} ({rule.claim})"
        yield f"{counted(number, 'shape')} with {what}: {effect}"
    points = []
    for curve in chain.from_iterable(found.curves.values()):
        points += [(p.latency_us, p) for p in curve.points]
    yield from floor_lines(points)
    yield f"\nnext: quantbench report {found.run.folder}"


def _head_lines(found: RunCheck) -> list[str]:
    """Returns lines that count points, rejected times, curves, and cliffs by cause."""
    from quantbench.analysis.summary import rejected_lines

    records = [record for record in found.run.records if record.role == "point"]
    missing = sum(not isinstance(record.outcome, Measured) for record in records)
    counts = counted(found.num_points, "measured point")
    if missing:
        counts += f", {missing} skipped or failed"
    verdict = "no two neighbouring sizes are close enough to detect a step between them"
    if found.num_curves:
        counts += f", {counted(found.num_curves, 'curve')} with close neighbours"
        if found.noise is not None:
            counts += f"; standard error of a point ±{percent(found.noise)}"
        where = "above its trend and the noise anywhere"
        verdict = f"no cliff: the time does not jump by 3 % or more {where}"
    if found.cliffs:
        kinds = Counter(cliff.cause.kind for cliff in found.cliffs)
        causes = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        falls = f"{counted(len(found.falls), 'place')} where a larger size is faster"
        verdict = f"{counted(len(found.cliffs), 'cliff')} ({causes}); {falls}"
    return [counts, *rejected_lines(records), verdict]


def _broken_rules(found: RunCheck) -> Counter[tuple[AlignmentRule, str]]:
    """Counts the distinct shapes in a run that break an alignment rule of their library.

    The keys are (rule, dtype).
    """
    # The library is the first part of a provider's name, as in `torch.mm`. User-defined kernels
    # (`module:Class`) have no alignment rules.
    works = dict.fromkeys(
        (record.workload, record.provider.partition(".")[0])
        for record in found.run.records
        if record.role == "point"
        and isinstance(record.workload, Gemm | Attention)
        and ":" not in record.provider
    )
    return Counter(
        (rule, work.dtype)
        for work, library in works
        for rule in dict.fromkeys(
            one.rule for one in broken_rules(work, library=library, device=found.run.info.device)
        )
    )


def _answer(found: RunCheck) -> dict[str, Any]:
    """Returns the result that --json prints."""
    from quantbench.analysis.summary import rejected_lines

    info = found.run.info
    broken = _broken_rules(found).items()
    return {
        "run": found.run.folder,
        "device": info.device.name,
        "origin": info.origin,
        "source": info.source,
        "how_ended": info.how_ended,
        "left_out": rejected_lines(found.run.records),
        "broken_rules": [
            {"rule": rule, "dtype": dtype, "shapes": number} for (rule, dtype), number in broken
        ],
        **encoded(found),
    }
