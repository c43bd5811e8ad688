"""Writes the accuracy tables of docs/accuracy.md: `python -m tools.accuracy.page
docs/accuracy.md [SECTION…]`.

The figures come from the packaged public tables (extra `tables`). Those of the section `published`
come from the files of NeuSight, DeepBench and aiter. All are computed on one core, which takes tens
of minutes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

from quantbench.device.cpu import cpu_info
from tools.accuracy import formats
from tools.accuracy.attention import AttentionTable, attention_contests, decode_table
from tools.accuracy.contests import Plan, run_contests
from tools.accuracy.gemm import packaged_contests
from tools.accuracy.moe import accuracy_table
from tools.accuracy.published import published_table
from tools.accuracy.scoring import COLUMNS, Line, cells
from tools.accuracy.tables import SHIPPED_GPUS, GemmTable
from tools.guide.markers import table as markdown_table
from tools.guide.markers import write_between

_PROTOCOLS = {
    "sites": "Held-out sites: half of the (n, k) pairs are the test, training rows come from the "
    "other half",
    "random": "Random split: training rows at random, all others are the test",
    "heads": "Held-out heads: half of the combinations of heads, key heads, head_dim and mask are "
    "the test",
}
#: number of rows that models learn from
_ROWS = 200
#: file of the scores of the section `formats` that are finished
_WORK = Path("build/formats.jsonl")
#: seeds that draw the rows that models learn from
_SEEDS = (0, 1, 2)
_print = partial(print, flush=True)
_PACKAGES = ("quantbench", "numpy", "scipy", "scikit-learn")


def gemm_origin(table: GemmTable) -> str:
    """Describes where a GEMM table comes from, as text."""
    of = table.provenance
    framework = f"{of['framework']} {of['framework_version']}, sha256 {of['sha256']:.12}"
    what = f"{of['package']}: {of['table']} ({framework})"
    return f"{len(table):,} rows of {table.dtype} from {what}"


def attention_origin(table: AttentionTable) -> str:
    """Describes where an attention table comes from, as text."""
    parts = []
    for source, of in table.provenance.items():
        rows = f"{of['rows']:,} rows of {of['provider']}"
        parts.append(f"{source}, {rows}, sha256 {of['sha256']:.12}")
    return "; ".join(parts)


def compared(plan: Plan, origin: Callable[[Any], str]) -> str:
    """Runs the contests of a plan, and formats their results as Markdown.

    There is one section per protocol and device. Notes name the tables, the versions and the CPU.

    origin: function that describes where a contest's table comes from.
    """
    by_protocol: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in run_contests(plan, _SEEDS, _print):
        by_protocol[line.protocol][line.gpu].append(line)
    parts = []
    for protocol, by_gpu in by_protocol.items():
        parts.append(f"**{_PROTOCOLS[protocol]}.**\n")
        for gpu, lines in by_gpu.items():
            parts += [f"### {gpu}\n", _section(lines)]
    notes = []
    for contest, _ in plan:
        notes.append(f"- {contest.table.gpu}: {origin(contest.table)}.")
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    made = f"- Made with {packages}; times on one core of {cpu_info().name}.\n"
    return "\n".join([*parts, *dict.fromkeys(notes), made])


def _section(lines: Sequence[Line]) -> str:
    """Formats the results of one device as a Markdown table without empty columns."""
    columns = zip(COLUMNS, *map(cells, lines), strict=True)
    head, *rows = zip(*(column for column in columns if {*column[1:]} != {"–"}), strict=True)
    return markdown_table(head, rows)


def main(page: Path, *sections: str) -> None:
    """Runs the comparisons of the named sections, or of all, and writes their tables and the
    conclusion into the page.
    """
    with threadpool_limits(1):
        for section in sections or _SECTIONS:
            for name, text in _SECTIONS[section]():
                write_between(page, name, text)
    write_between(page, "conclusion", conclusion(page.read_text(encoding="utf-8")))


def _formats() -> Iterator[tuple[str, str]]:
    formats.judge(_WORK, formats.KEYS, _print)
    yield "lines", formats.lines_table(_WORK)
    yield "closer", formats.closer_table(_WORK)


_SECTIONS: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "formats": _formats,
    "gemm": lambda: [("gemm", compared(packaged_contests(SHIPPED_GPUS, _ROWS), gemm_origin))],
    "attention": lambda: [
        ("attention", compared(attention_contests(SHIPPED_GPUS, _ROWS), attention_origin))
    ],
    "decode": lambda: [("decode", decode_table(_SEEDS, _print))],
    "moe": lambda: [("moe", accuracy_table(_SEEDS, _print))],
    "published": lambda: [("published", published_table(_SEEDS, _print))],
}


def conclusion(page: str) -> str:
    """Returns the conclusion in words, computed from the tables in the page.

    page: text of the page.
    """
    _, _, _, bare, fitted, covers, *_ = zip(*_rows(page, "lines"), strict=True)
    covered = [float(cell.rstrip(" %")) for cell in covers]
    half, most = _typical(fitted)
    lines = [
        f"- **Products**: from {_ROWS} measured rows of a GPU, format and library, half of the "
        f"times of (n, k) that were never measured are within {half:.1f} % and 19 in 20 within "
        f"{most:.0f} % (the median of {len(fitted)} tables). The 90 % intervals cover "
        f"{min(covered):.0f} to {max(covered):.0f} %, in the median {median(covered):.0f} %. "
        f"Without any row of the GPU's generation, half are within "
        f"{median(map(float, bare)):.0f} %.",
    ]
    attention = [cells[2] for cells in _rows(page, "attention") if cells[0] == "ours"]
    decoding = [cells[2] for cells in _rows(page, "decode")]
    for name, found in (("Attention", attention), ("Decoding", decoding)):
        half, most = _typical(found)
        within = f"{half:.1f} %, 19 in 20 within {most:.0f} % (the median of {len(found)} tables)"
        lines.append(
            f"- **{name}**: from {_ROWS} rows, half of the times with heads that were never "
            f"measured are within {within}."
        )
    words = []
    for row in _rows(page, "moe"):
        if row[0] == "mean":
            words.append(f"{row[3]} %, 19 in 20 within {row[4]} %, from {row[2]} rows")
    never = "half of the layers of models that were never measured"
    lines.append(f"- **Experts**: {never} are within {'; '.join(words)}.")
    return "\n".join(["", *lines, ""])


def _rows(page: str, section: str) -> list[list[str]]:
    """Returns the cells of each table row between the markers of a section, without headings."""
    text = page.partition(f"<!-- {section}:begin -->")[2].partition(f"<!-- {section}:end -->")[0]
    rows = []
    for line in text.splitlines():
        cells = line.strip("| ").split(" | ")
        if line[:1] == "|" and not cells[0].startswith(("---", "GPU", "model", "table")):
            rows.append(list(map(str.strip, cells)))
    return rows


def _typical(errors: Sequence[str]) -> tuple[float, float]:
    """Returns the median over tables of the median error and of the 95th percentile, percent.

    errors: texts of the form "median / mean / p95", one per table.
    """
    medians, _, highs = zip(*(text.split(" / ") for text in errors), strict=True)
    return median(map(float, medians)), median(float(high.split()[0]) for high in highs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
