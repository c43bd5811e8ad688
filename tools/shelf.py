"""Writes a profile per GPU in public tables, with models, cliffs and findings but without rows.

The `provenance` of a profile says where the measured rows can be found. `python -m tools.shelf`
needs the extra `tables`. A GPU whose rows come from `tools.published_tables` is skipped if those
files are missing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quantbench import __version__
from quantbench.analysis.check import check_run
from quantbench.device.registry import lookup
from quantbench.importers.aiconfigurator import find_tables, origin_of, read_rows
from quantbench.importers.runs import write_run
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.build import cliffs_of, findings_of, software_of, source_of
from quantbench.profile.models import Models
from quantbench.profile.profile import Profile
from quantbench.profile.schema import Provenance
from quantbench.store.folder import Run, read_run
from tools.accuracy.tables import SHIPPED_GPUS
from tools.published_tables import DATA, PUBLISHED

_KINDS = ("gemm", "context_attention")
# Largest number of cliffs in a profile. Cliffs that many curves have in common do not count.
_MOST_CLIFFS = 50


@dataclass(frozen=True)
class Source:
    """Source of a GPU's measured rows.

    dtypes: number formats with a shipped model, the usual one first.
    words: name of the package or project that has the rows.
    again: command that imports the rows as runs; "" if there is none.
    """

    dtypes: tuple[str, ...]
    words: str
    again: str = ""


def public_runs(slug: str, folder: Path) -> tuple[list[Run], Source]:
    """Imports a GPU's tables from aiconfigurator-core as runs below `folder`.

    slug: slug of the GPU.
    Raises UnsupportedError if the package is not installed.
    """
    tables, _ = find_tables(slug, kinds=_KINDS)
    runs = []
    for table in tables:
        rows = read_rows(table, dtypes=("bf16",))
        runs.append(read_run(write_run(folder, lookup(slug), origin_of(table), rows).folder))
    runs.sort(key=lambda run: run.info.run_id)
    again = f"quantbench import aiconfigurator --system {tables[0].system}"
    return runs, Source(("bf16",), tables[0].package, again)


def published_runs(slug: str, folder: Path) -> tuple[list[Run], Source]:
    """Imports a GPU's published file (`PUBLISHED`) as a run below `folder`.

    slug: slug of the GPU.
    Raises StoreError if the file is missing.
    """
    dtypes = tuple(dtype for gpu, dtype in PUBLISHED if gpu == slug)
    table = PUBLISHED[slug, dtypes[0]]
    written = write_run(folder, lookup(slug), table.origin(slug), table.rows(slug))
    return [read_run(written.folder)], Source(dtypes, table.source)


def shelf_profile(slug: str, runs: list[Run], source: Source) -> Profile:
    """Builds a GPU's profile from models, cliffs and findings, without measured rows.

    runs: runs in which the cliffs are found.
    """
    device = lookup(slug)
    checks = [check_run(run) for run in runs]
    cliffs, num_cliffs = cliffs_of(checks, keep=_MOST_CLIFFS)
    stay = f"the measured rows stay in {source.words} and are not redistributed"
    note = f"models and findings only: {stay}"
    if source.again:
        note += f"; {source.again} makes runs of them"
    attention = AttentionModel.best(device) if device.peak("fp16") else None
    products = tuple(GemmModel.best(slug, dtype=dtype) for dtype in source.dtypes)
    return Profile(
        device,
        software_of(runs),
        Provenance(__version__, tuple(source_of(run, rows=0) for run in runs), num_cliffs, note),
        {},
        Models(products, SoftmaxModel.best(device), True, attention),
        cliffs,
        findings_of(checks),
    )


#: GPUs whose rows come from a published file
PUBLISHED_GPUS = tuple(dict.fromkeys(gpu for gpu, _ in PUBLISHED))


def main(results: Path = Path("results")) -> None:
    """Writes results/<slug>/profile.json for every GPU with public tables. This takes minutes."""
    for slug in (*SHIPPED_GPUS, *PUBLISHED_GPUS):
        published = slug in PUBLISHED_GPUS
        if published and not DATA.is_dir():
            print(f"{slug} is left out: no {DATA}")
            continue
        with TemporaryDirectory() as folder:
            read_runs = published_runs if published else public_runs
            made = shelf_profile(slug, *read_runs(slug, Path(folder)))
        target = results / slug / "profile.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        made.save(target)
        cliffs = f"{len(made.cliffs)} of {made.provenance.num_cliffs} cliffs"
        print(f"{target}: {cliffs}, {len(made.findings)} verdicts")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
