"""`quantbench check RUN`: find cliffs and their causes, and test the rules of thumb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantbench.errors import InputError

if TYPE_CHECKING:
    from quantbench.analysis.check import Check
    from quantbench.analysis.rules import RuleOfThumb
    from quantbench.device.spec import DeviceSpec


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
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Find the sizes after which the time jumps, explain the jumps, and test the rules of thumb.

    Every device has cliffs: the exit code is 1 only with --fail-above.
    """
    from quantbench.analysis.check import check_run
    from quantbench.analysis.rules import RULES, rule_named
    from quantbench.cli.check_output import check_to_json
    from quantbench.cli.writable import check_folder
    from quantbench.report.source import read_one_run
    from quantbench.units import parse_duration_s

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
        print(json.dumps(check_to_json(found), indent=1, allow_nan=False))
    else:
        _say(found)
    if fail_above is not None and any(cliff.low > fail_above for cliff in found.cliffs):
        raise typer.Exit(1)


def _measure(rule: RuleOfThumb, results: Path, budget: str, *, as_json: bool) -> Path:
    """Run a rule's experiment on the device at hand; the folder of its run."""
    import signal
    from dataclasses import replace

    from quantbench.cli.console import output, say
    from quantbench.cli.sweep_options import SweepArguments, sweep_options
    from quantbench.cli.sweep_run import measure
    from quantbench.sweep.child import WorkerProcess
    from quantbench.sweep.options import SweepOptions
    from quantbench.sweep.session import SweepSession

    def options(spec: DeviceSpec) -> SweepOptions:
        plan = rule.experiment(spec)
        usual = sweep_options(SweepArguments(plan.dims, {}, budget=budget), spec.kind)
        return replace(usual, held=plan.held, providers=plan.providers, skip_impossible=True)

    console = output(stderr=as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(console, f"experiment {rule.id}: {rule.predicate} ({rule.claim})")
    with SweepSession.new(options, results, WorkerProcess) as session:
        measure(console, session)
        return session.folder


def _say(found: Check) -> None:
    from quantbench.analysis.rules import untested_lines
    from quantbench.cli.check_output import cliff_table, head_lines, period_lines, rule_table
    from quantbench.cli.console import output, say
    from quantbench.cli.devices import device_line
    from quantbench.errors import printable

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
