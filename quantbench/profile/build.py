"""Making a profile of runs: tables, fitted models, cliffs and findings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantbench import __version__
from quantbench.profile.fit import models_of
from quantbench.profile.found import checks_of, cliffs_of, findings_of
from quantbench.profile.parts import Provenance, RunSource
from quantbench.profile.rows import cache_state, check_alike, tables_of

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile
    from quantbench.store.folder import Run


def build(made: type[Profile], runs: Sequence[Run], *, fit: bool, seed: int) -> Profile:
    """See `Profile.from_runs`."""
    check_alike(runs)
    ordered = sorted(runs, key=lambda run: run.info.run_id)
    tables, given = tables_of(ordered)
    sources = tuple(source_of(run, rows=given[run.info.run_id]) for run in ordered)
    checks = checks_of(ordered)
    cliffs, num_cliffs = cliffs_of(checks)
    device = ordered[0].info.device
    return made(
        device=device,
        software=software_of(ordered),
        provenance=Provenance(__version__, sources, num_cliffs),
        tables=tables,
        models=models_of(device, tables, fit=fit, seed=seed),
        cliffs=cliffs,
        findings=findings_of(checks),
    )


def source_of(run: Run, *, rows: int) -> RunSource:
    """Where figures come from; rows: of the run's that the profile holds."""
    keys = hashlib.sha256("\n".join(record.key for record in run.records).encode()).hexdigest()
    return RunSource(run.info.run_id, run.info.origin, run.info.source, cache_state(run), len(run.records), rows, keys)


def software_of(runs: Sequence[Run]) -> dict[str, str]:
    """Versions by name; where runs differ, all of them."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.info.software.items():
            found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(found[name])) for name in sorted(found)}
