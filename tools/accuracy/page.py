"""Writes the accuracy tables of docs/accuracy.md: `python -m tools.accuracy.page docs/accuracy.md`.

Every figure is computed on one core from the packaged public tables (extra `tables`), those of the
section `published` from the files of NeuSight, DeepBench and aiter (`tables.PUBLISHED`); takes tens
of minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

from quantbench.device.cpu import cpu_info
from tools.accuracy import formats
from tools.accuracy.attention import AttentionTable, attention_lines, decode_table, read_attention
from tools.accuracy.contests import Step, run_contests
from tools.accuracy.gemm import Absent, packaged_contests
from tools.accuracy.moe import accuracy_table
from tools.accuracy.published import published_table
from tools.accuracy.scoring import COLUMNS, Line, cells
from tools.accuracy.tables import SHIPPED_GPUS, PackagedTable, read_packaged
from tools.guide.markers import table as markdown_table
from tools.guide.markers import write_between

_PROTOCOLS = {
    "sites": "held-out sites: half of the (n, k) pairs are the test, training rows come from the other half",
    "random": "random split: training rows at random, all others are the test",
    "heads": "held-out heads: half of the combinations of heads, key heads, head_dim and mask are the test",
}
#: rows to learn from, and seeds that draw them
_ROWS, _SEEDS = 200, (0, 1, 2)
_PACKAGES = ("quantbench", "numpy", "scipy", "scikit-learn")


def gemm_origins(tables: Iterable[PackagedTable]) -> list[str]:
    """Describes each device's GEMM table, and the versions and CPU used."""
    lines = []
    for of in tables:
        what = f"{of.package}: {of.file} ({of.framework} {of.version}, sha256 {of.sha256[:12]})"
        lines.append(f"{of.gpu}: {len(of):,} rows of {of.dtype} from {what}")
    return [*lines, _made_with()]


def attention_origins(tables: Iterable[tuple[str, AttentionTable]]) -> list[str]:
    """Describes each device's attention tables, and the versions and CPU used."""
    lines = []
    for gpu, table in tables:
        parts = [
            f"{source}, {of['rows']:,} rows of {of['provider']}, sha256 {str(of['sha256'])[:12]}"
            for source, of in table.sources.items()
        ]
        lines.append(f"{gpu}: {'; '.join(parts)}")
    return [*lines, _made_with()]


def _made_with() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"Made with {packages}; times on one core of {cpu_info().name}"


def markdown(lines: Sequence[Line], absent: Sequence[Absent], origins: Sequence[str] = ()) -> str:
    """Formats one section per protocol and device, then the absent contestants, then `origins`
    (sources).
    """
    parts = []
    for protocol, meaning in _PROTOCOLS.items():
        of_protocol = [entry for entry in lines if entry.protocol == protocol]
        if not of_protocol:
            continue
        parts.append(f"**{meaning[0].upper()}{meaning[1:]}.**\n")
        for gpu in dict.fromkeys(entry.gpu for entry in of_protocol):
            parts.append(f"### {gpu}\n")
            parts.append(_section([entry for entry in of_protocol if entry.gpu == gpu]))
    parts += [f"- {a.gpu}: {a.model} is left out: {a.reason}." for a in absent]
    parts += [f"- {origin}." for origin in origins]
    return "\n".join(parts).rstrip() + "\n"


def _section(lines: Sequence[Line]) -> str:
    rows = [cells(entry) for entry in lines]
    # Omit empty columns.
    kept = [i for i in range(len(COLUMNS)) if any(row[i] != "–" for row in rows)]
    return markdown_table([COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows])


def main() -> None:
    """Runs the comparisons of some sections, and writes their tables and the conclusion into the
    page.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--section", action="append", choices=_SECTIONS, help="only this; may be repeated"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/formats.jsonl"), help="finished scores of formats"
    )
    asked = parser.parse_args()
    with threadpool_limits(1):
        for section in asked.section or _SECTIONS:
            for name, text in _SECTIONS[section](asked.work):
                write_between(asked.page, name, text)
    write_between(asked.page, "conclusion", conclusion(asked.page.read_text(encoding="utf-8")))


def _formats(work: Path) -> Iterator[tuple[str, str]]:
    formats.judge(work, formats.KEYS, _print)
    yield "lines", formats.lines_table(work)
    yield "closer", formats.closer_table(work)


def _gemm(work: Path) -> Iterator[tuple[str, str]]:
    plan, absent = packaged_contests(SHIPPED_GPUS, _ROWS, "bf16")
    lines = list(run_contests(plan, _SEEDS, _say))
    yield "gemm", markdown(lines, absent, gemm_origins(read_packaged(gpu) for gpu in SHIPPED_GPUS))


def _attention(work: Path) -> Iterator[tuple[str, str]]:
    lines = list(attention_lines(SHIPPED_GPUS, _ROWS, _SEEDS, _say))
    origins = attention_origins((gpu, read_attention(gpu)) for gpu in SHIPPED_GPUS)
    yield "attention", markdown(lines, [], origins)


_SECTIONS: dict[str, Callable[[Path], Iterable[tuple[str, str]]]] = {
    "formats": _formats,
    "gemm": _gemm,
    "attention": _attention,
    "decode": lambda work: [("decode", decode_table(_print))],
    "moe": lambda work: [("moe", accuracy_table(_SEEDS, _print))],
    "published": lambda work: [("published", published_table(_SEEDS, _print))],
}


def conclusion(page: str) -> str:
    """Returns the page's conclusion in words, from its tables."""
    products = [(cells[3], cells[4], cells[5]) for cells in _rows(page, "lines")]
    attention = [cells[2] for cells in _rows(page, "attention") if cells[0] == "ours"]
    decoding = [cells[2] for cells in _rows(page, "decode")]
    experts = [cells for cells in _rows(page, "moe") if cells[0] == "mean"]
    covered = [float(covers.rstrip(" %")) for _, _, covers in products]
    half, most = _typical([fitted for _, fitted, _ in products])
    lines = [
        f"**Products**: from {_ROWS} measured rows of a GPU, format and library, half of the times of (n, k) that were "
        f"never measured are within {half:.1f} % and 19 in 20 within {most:.0f} % (the median of {len(products)} "
        f"tables). The 90 % intervals cover {min(covered):.0f} to {max(covered):.0f} %, in the median "
        f"{median(covered):.0f} %. Without any row of the GPU's generation, half are within "
        f"{median(float(bare) for bare, _, _ in products):.0f} %.",
    ]
    for name, found in (("Attention", attention), ("Decoding", decoding)):
        half, most = _typical(found)
        lines.append(
            f"**{name}**: from {_ROWS} rows, half of the times with heads that were never measured are within "
            f"{half:.1f} %, 19 in 20 within {most:.0f} % (the median of {len(found)} tables)."
        )
    words = [
        f"{cells[3]} %, 19 in 20 within {cells[4]} %, from {cells[2]} rows" for cells in experts
    ]
    lines.append(
        f"**Experts**: half of the layers of models that were never measured are within {'; '.join(words)}."
    )
    return "\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _rows(page: str, section: str) -> list[list[str]]:
    """Returns the cells of the tables' rows between the markers of a section."""
    text = page.partition(f"<!-- {section}:begin -->")[2].partition(f"<!-- {section}:end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return [cells for cells in rows if not cells[0].startswith(("---", "GPU", "model", "table"))]


def _typical(errors: Sequence[str]) -> tuple[float, float]:
    """Returns the medians of the first and the last of "median / mean / p95"."""
    found = [[float(part.split()[0]) for part in text.split(" / ")] for text in errors]
    return median(one[0] for one in found), median(one[2] for one in found)


def _print(text: str) -> None:
    print(text, flush=True)


def _say(step: Step) -> None:
    _print(f"{100 * step.done / step.total:3.0f} % {step.text}")


if __name__ == "__main__":
    main()
