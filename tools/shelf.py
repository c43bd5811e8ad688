"""Writes profiles of the GPUs that public tables cover, with models, cliffs and verdicts but without measured rows.

Entry point: `main`, or `python -m tools.shelf` (extra `tables`). The `provenance` of a profile names the rows' package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from quantbench import __version__
from quantbench.analysis.check import check_run
from quantbench.device.registry import lookup
from quantbench.importers.aiconfigurator import TableFile, find_tables, origin_of, read_rows
from quantbench.importers.runs import write_run
from quantbench.latency.attention import AttentionModel
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.build import cliffs_of, findings_of, software_of, source_of
from quantbench.profile.fit import known_model
from quantbench.profile.models import Models
from quantbench.profile.parts import Provenance
from quantbench.profile.profile import Profile
from quantbench.store.folder import Run, read_run
from tools.accuracy.tables import SHIPPED_GPUS

_KINDS = ("gemm", "context_attention")
# Maximum number of cliffs in a profile, besides those that many curves have in common.
_MOST_CLIFFS = 50


def public_runs(slug: str, folder: Path) -> tuple[list[Run], list[TableFile]]:
    """Imports the public tables of a GPU as runs below `folder`. Raises UnsupportedError without their package."""
    tables, _ = find_tables(slug, kinds=_KINDS)
    runs = [
        read_run(write_run(folder, lookup(slug), origin_of(table), read_rows(table, dtypes=("bf16",))).folder)
        for table in tables
    ]
    return sorted(runs, key=lambda run: run.info.run_id), tables


def shelf_profile(slug: str, runs: list[Run], tables: list[TableFile]) -> Profile:
    """Builds a GPU's profile without rows: models, cliffs and findings."""
    device = lookup(slug)
    checks = [check_run(run) for run in runs]
    cliffs, num_cliffs = cliffs_of(checks, most=_MOST_CLIFFS)
    package = tables[0].package
    note = (
        f"models and findings only: the measured rows stay in {package} and are not redistributed; "
        f"quantbench import aiconfigurator --system {tables[0].system} makes runs of them"
    )
    models = Models((known_model(slug, "bf16", 0),), SoftmaxModel.best(device), True, AttentionModel.best(device))
    sources = tuple(source_of(run, rows=0) for run in runs)
    return Profile(
        device,
        software_of(runs),
        Provenance(__version__, sources, num_cliffs, note),
        {},
        models,
        cliffs,
        findings_of(checks),
    )


def main(results: Path = Path("results")) -> None:
    """Writes results/<slug>/profile.json for every GPU with public tables; takes about a minute."""
    for slug in SHIPPED_GPUS:
        with TemporaryDirectory() as folder:
            made = shelf_profile(slug, *public_runs(slug, Path(folder)))
        target = results / slug / "profile.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        made.save(target)
        print(f"{target}: {len(made.cliffs)} of {made.provenance.num_cliffs} cliffs, {len(made.findings)} verdicts")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
