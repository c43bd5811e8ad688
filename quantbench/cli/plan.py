"""Command `plan`: ranks the parallel layouts of a training job over GPUs by predicted time.

The command can also check one layout (--check) or predict every layout in a CSV table (--rows).
With --fit, it fits a training site's factors to a table of its runs. The factors correct predicted
times for the site's machines and software.
"""

import sys
from dataclasses import replace
from pathlib import Path

from quantbench.cli.options import command, option
from quantbench.cli.output import Result
from quantbench.cli.plan_options import PlanOptions
from quantbench.errors import InputError

_SITE = Path("site.json")


@command
def plan(
    arguments: PlanOptions,
    rows: Path | None = option(
        None, "CSV table of layouts to predict row by row (columns as in bloom_tables.csv)."
    ),
    check: bool = option(
        False, "Check one layout; exit code 1 if a rule forbids it or it does not fit."
    ),
    fit: Path | None = option(
        None, "CSV table of your site's runs: fit the factors to it and write them to --output."
    ),
    output: Path = option(_SITE, "File for --fit.", "--output", "-o"),
    explain: bool = option(
        False,
        "Also print constants, memory by part, what the time goes to, other software and rules "
        "of thumb.",
    ),
) -> Result:
    """Rank all layouts (DP, TP, PP, CP, MBS, interleaving, ZeRO, recomputation) of a job by
    predicted time.
    """
    from quantbench.cli import plan_run, plan_tables
    from quantbench.cli.plan_setup import Setup

    modes = (("--fit", fit is not None), ("--rows", rows is not None), ("--check", check))
    asked = [word for word, typed in modes if typed]
    if len(asked) > 1:
        raise InputError("plan", f"{asked[1]} with {asked[0]}", "one of them")
    if fit is None and output != _SITE:
        raise InputError("plan", f"--output {output} without --fit", "--fit with it")
    if explain and asked not in ([], ["--check"]):
        raise InputError(
            "plan", f"--explain with {asked[0]}", "a search over layouts, or --check of one"
        )
    setup = Setup(arguments)
    if fit is not None:
        result = plan_tables.fit_table(setup, fit, output)
    elif rows is not None:
        result = plan_tables.predict_table(setup, rows)
    elif check:
        result = plan_run.check_layout(setup, explain=explain)
    else:
        result = plan_run.search_layouts(setup, explain=explain)
    return replace(result, answer={**plan_run.provenance(sys.argv[1:]), **result.answer})
