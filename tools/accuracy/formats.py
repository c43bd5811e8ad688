"""Tests GEMM models that are fitted to each packaged table, and to some tables with more rows.

`judge` appends each finished score to a file, so that an interrupted start can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from quantbench.device import lookup
from quantbench.latency.gemm.model import shipped_kin
from quantbench.latency.libraries import SYSTEMS, TABLES, libraries_of
from quantbench.units import percent
from quantbench.workload.dtypes import GEMM_DTYPES
from tools.accuracy.contests import Contest, Contestant, fitted, ours, run_contests, unfitted
from tools.accuracy.scoring import ErrorSummary, Line, over_seeds, row_count, shares
from tools.accuracy.tables import GemmTable, read_packaged
from tools.guide.markers import table

#: table by (slug of the GPU, dtype, library)
Key = tuple[str, str, str]


def _keys() -> Iterator[Key]:
    for slug, system in SYSTEMS.items():
        for dtype in GEMM_DTYPES if system in TABLES else ():
            for library in libraries_of(slug, dtype):
                yield slug, dtype, library


#: all tables; for each GPU and dtype, that of the default library comes first
KEYS: tuple[Key, ...] = tuple(_keys())
#: tables that are judged with more seeds, with more rows, and with models of other tables as prior
CLOSER: tuple[Key, ...] = (
    ("h100-sxm5-80gb", "fp8", "vllm"),
    ("b200-sxm-180gb", "fp8", "vllm"),
    ("h100-sxm5-80gb", "fp8_block", "trtllm"),
    ("b200-sxm-180gb", "nvfp4", "vllm"),
)
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_ROWS = 200
_MANY_ROWS = 1000
_CLOSER_SEEDS = (0, 1, 2)


def others_known(train_rows: int) -> Contestant:
    """Returns our model as a contestant whose prior is the shipped models of other tables.

    The prior excludes the table that the model is fitted to.
    """

    def prior(train: GemmTable) -> object:
        return shipped_kin(lookup(train.gpu), train.dtype, train.library) or "auto"

    return fitted("other tables known", train_rows, prior)


_WIDE = (unfitted(), ours(_ROWS))
_CLOSE = (_WIDE[1], ours(_MANY_ROWS), others_known(_ROWS))


def judge(work: Path, keys: Sequence[Key], report: Callable[[str], None]) -> None:
    """Judges the fits to tables, and appends each score that the file `work` lacks to it.

    work: file of JSON lines, one per table, contestant and seed.
    keys: tables to judge.
    report: function that is called with a text on the progress.
    """
    done = _scores(work)
    read = cache(lambda key: read_packaged(key[0], dtype=key[1], library=key[2]))
    defaults_first = sorted(keys, key=lambda key: libraries_of(*key[:2])[0] != key[2])
    closer = [key for key in CLOSER if key in keys]
    asked = [*product(defaults_first, _WIDE, (0,)), *product(closer, _CLOSE, _CLOSER_SEEDS)]
    for key, contestant, seed in dict.fromkeys(asked):
        name = (*key, contestant.name, contestant.train_rows, seed)
        if name in done:
            continue
        measured = read(key)
        (line,) = run_contests([(Contest(measured), [contestant])], [seed], report)
        entry = {
            "key": name,
            "version": measured.provenance["framework_version"],
            "line": asdict(line),
        }
        append_entry(work, entry)
        report(f"{name}: {line.errors}")


def append_entry(work: Path, entry: Mapping[str, Any]) -> None:
    """Appends an entry to a file of JSON lines."""
    with work.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def entries(work: Path) -> list[dict[str, Any]]:
    """Reads the entries of a file of JSON lines, none if there is no file."""
    text = work.read_text(encoding="utf-8") if work.exists() else ""
    return list(map(json.loads, text.splitlines()))


def _scores(work: Path) -> dict[tuple[str | int | None, ...], tuple[Line, str]]:
    """Reads a file of scores; returns each score and the library's version.

    The keys are (GPU, dtype, library, contestant, number of train rows, seed).
    """
    found = {}
    for entry in entries(work):
        errors = ErrorSummary(**entry["line"]["errors"])
        line = Line(**{**entry["line"], "errors": errors, "compute": None})
        found[tuple(entry["key"])] = (line, entry["version"])
    return found


def lines_table(work: Path) -> str:
    """Formats the errors on every table in a file of scores as a Markdown table.

    The fits have 200 train rows and one seed.
    """
    scores = _scores(work)
    header = ["GPU", "format", "library", "unfitted", "fitted", "interval covers", "cliffs"]
    rows = []
    medians = []
    for key in KEYS:
        found = [scores.get((*key, one.name, one.train_rows, 0)) for one in _WIDE]
        if None in found:
            continue
        (bare, version), (fit, _) = filter(None, found)
        medians.append((bare.errors.median_pct, fit.errors.median_pct))
        slug, dtype, library = key
        name = f"{_NAMES[library]} {version}"
        if library == libraries_of(slug, dtype)[0]:
            name = f"**{name}**"
        rows.append((slug, dtype, name, f"{bare.errors.median_pct:.0f}", *_fitted(fit)))
    bare_pct, fit_pct = map(median, zip(*medians, strict=True))
    words = f"{bare_pct:.0f} % unfitted, {fit_pct:.1f} % fitted"
    tables = f"{len(rows)} tables; median of their medians: {words}."
    return f"{table(header, rows, words=3)}\n{tables}\n"


def closer_table(work: Path) -> str:
    """Formats the errors on the `CLOSER` tables as a Markdown table, averaged over the seeds."""
    scores = _scores(work)
    header = ["table", "learned from", "rows", "seeds", "errors", "interval covers", "cliffs"]
    rows = []
    for key, one in product(CLOSER, _CLOSE):
        slug, dtype, library = key
        names = [(*key, one.name, one.train_rows, seed) for seed in _CLOSER_SEEDS]
        line = over_seeds([scores[name][0] for name in names if name in scores])
        known = "its rows"
        if one.name != "ours":
            known += f" and {_known(*key)}"
        counts = (row_count(one.train_rows), str(line.seeds))
        rows.append((f"{slug}, {dtype}, {_NAMES[library]}", known, *counts, *_fitted(line)))
    return table(header, rows, words=2)


def _fitted(line: Line) -> tuple[str, ...]:
    covers = "–" if line.coverage is None else percent(line.coverage)
    return str(line.errors), covers, shares(line.cliff_recall, line.cliff_precision)


def _known(slug: str, dtype: str, library: str) -> str:
    """Describes the model that `others_known` takes as prior, as text."""
    kin = shipped_kin(lookup(slug), dtype, library)
    if kin:
        return f"the model of {kin.device.name}"
    return f"{_NAMES[libraries_of(slug, dtype)[0]]}'s model"
