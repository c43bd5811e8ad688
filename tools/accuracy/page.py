"""Writes the accuracy tables of docs/accuracy.md: `python -m tools.accuracy.page docs/accuracy.md`.

Every figure is computed on one core from the packaged public tables (extra `tables`), with --published from the files
of NeuSight, DeepBench and aiter (`tables.PUBLISHED`); takes tens of minutes.
--published and --moe write the sections of those names, --formats the first two: one line per GPU, dtype
and library. It keeps what it computed in --work, outside of the checkout, to go on from there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

from quantbench.device.cpu import cpu_info
from quantbench.latency.libraries import SYSTEMS
from tools.accuracy import formats
from tools.accuracy.attention import AttentionTable, attention_lines, read_attention
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
    """Formats one section per protocol and device, then the absent contestants, then `origins` (sources)."""
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
    """Runs the comparisons and writes their tables between the markers of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--gpu", action="append", help="only this device; may be repeated")
    parser.add_argument("--rows", type=int, default=200, help="rows to learn from")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--moe", action="store_true", help="instead: layers of experts")
    parser.add_argument("--formats", action="store_true", help="instead: every GPU, format and library")
    parser.add_argument("--work", type=Path, help="with --formats: file of finished scores; --gpu: make only this")
    parser.add_argument("--published", action="store_true", help="instead: tables of NeuSight, DeepBench and aiter")
    asked = parser.parse_args()
    if asked.formats and not asked.work:
        parser.error("--formats needs --work FILE")
    with threadpool_limits(1):
        if asked.formats:
            formats.judge(asked.work, [key for key in formats.KEYS if key[0] in (asked.gpu or SYSTEMS)], _print)
            if not asked.gpu:
                write_between(asked.page, "lines", formats.lines_table(asked.work))
                write_between(asked.page, "closer", formats.closer_table(asked.work))
            return
        if asked.published:
            write_between(asked.page, "published", published_table(asked.seeds, _print))
            return
        if asked.moe:
            write_between(asked.page, "moe", accuracy_table(asked.seeds, _print))
            return
        _write(asked.page, tuple(asked.gpu or ()), asked.rows, asked.seeds)


def _write(page: Path, gpus: Sequence[str], rows: int, seeds: Sequence[int]) -> None:
    gpus = gpus or SHIPPED_GPUS
    plan, absent = packaged_contests(gpus, rows, "bf16")
    lines = list(run_contests(plan, seeds, _say))
    made_from = gemm_origins(read_packaged(gpu) for gpu in gpus)
    write_between(page, "gemm", markdown(lines, absent, made_from))
    attention = list(attention_lines(gpus, rows, seeds, _say))
    made_from = attention_origins((gpu, read_attention(gpu)) for gpu in gpus)
    write_between(page, "attention", markdown(attention, [], made_from))


def _print(text: str) -> None:
    print(text, flush=True)


def _say(step: Step) -> None:
    _print(f"{100 * step.done / step.total:3.0f} % {step.text}")


if __name__ == "__main__":
    main()
