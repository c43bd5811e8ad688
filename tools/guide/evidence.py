"""Imports the public tables of four GPUs and computes the results in docs/choosing-shapes.md.

Entry points: `evidence` (imported tables, one GPU at a time) and `find` (results for `page`, `rules` and `figures`).
Used by `tools.guide.__main__`; `front` uses `gemm_table`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from quantbench.analysis.curves import curves_of, fit_curves, repeatability
from quantbench.analysis.periods import find_periods, tile_finder
from quantbench.analysis.sawtooth import Sawtooth, sawtooth
from quantbench.analysis.summary import Point, points_of
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.importers import aiconfigurator
from quantbench.importers.runs import write_run
from quantbench.store.folder import Run, read_run
from quantbench.workload import Gemm
from tools.guide.products import Edges, Price, edges_of, prices, rates, token_ratios
from tools.guide.shapes import Fours, Iteration, Width, fours, head_counts, iterations, widths

#: names of the guide's GPUs, by slug
GPUS = {
    "a100-sxm4-80gb": "A100",
    "h100-sxm5-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "b200-sxm-180gb": "B200",
}
#: dtype of all results in the guide
DTYPE = "bf16"


@dataclass(frozen=True)
class Evidence:
    """Imported tables of one GPU.

    gemm_run: run with the GEMM table.
    gemm, attention: points of the two tables.
    sources: package, table and version of the GEMM and the attention table.
    """

    name: str
    spec: DeviceSpec
    gemm_run: Run
    gemm: tuple[Point, ...]
    attention: tuple[Point, ...]
    sources: tuple[str, ...]


def evidence() -> Iterator[Evidence]:
    """Yields the tables of one GPU at a time, to keep only one in memory. Needs the extra `tables`."""
    for slug, name in GPUS.items():
        spec = lookup(slug)
        with TemporaryDirectory() as folder:
            gemm = gemm_table(slug, Path(folder))
            attention = _import(slug, spec, "context_attention", Path(folder))
        yield Evidence(
            name, spec, gemm, points_of(gemm.records, spec), points_of(attention.records, spec),
            (gemm.info.source, attention.info.source),
        )  # fmt: skip


def gemm_table(slug: str, folder: Path) -> Run:
    """Imports the GEMM table of one GPU into `folder`. Raises UnsupportedError without the extra `tables`."""
    return _import(slug, lookup(slug), "gemm", folder)


def _import(slug: str, spec: DeviceSpec, kind: str, folder: Path) -> Run:
    (table,), _ = aiconfigurator.find_tables(slug, kinds=(kind,))
    rows = aiconfigurator.read_rows(table, dtypes=(DTYPE,))
    return read_run(write_run(folder, spec, aiconfigurator.origin_of(table), rows).folder)


def sources_caption(sources: Mapping[str, str], dtype: str) -> str:
    """Formats the caption of a plot of several GPUs: `bf16 · A100: sglang 0.5.10 · imported from aiconfigurator-core`.

    sources: source by GPU, each in the form `package: table (library)`.

    >>> sources_caption({"A100": "pack 1: a/b (sglang 0.5)", "H100": "pack 1: c/d (sglang 0.5)"}, "bf16")
    'bf16 · A100, H100: sglang 0.5 · imported from pack 1'
    """
    libraries: dict[str, list[str]] = {}
    for gpu, source in sources.items():
        libraries.setdefault(source.rpartition("(")[2].rstrip(")"), []).append(gpu)
    packages = ", ".join(dict.fromkeys(source.partition(":")[0] for source in sources.values()))
    ran = "; ".join(f"{', '.join(gpus)}: {library}" for library, gpus in libraries.items())
    return f"{dtype} · {ran} · imported from {packages}"


#: n and k of the GEMM whose curve is drawn: a square layer of hidden 4096
SHOWN_N, SHOWN_K = 4096, 4096
_SHOWN_M = range(64, 4353 + 1)
#: sequence lengths for the rules on head counts
HEADS_SEQ, FOURS_SEQ = 2048, 2048
#: tokens of one sample, and of four samples
FEW_TOKENS, MANY_TOKENS = 2048, 8192


@dataclass(frozen=True)
class GpuResults:
    """Results for one GPU.

    spec: device constants.
    edges: cost of one more row.
    curve: (m, TFLOP/s) of the GEMM that is drawn.
    teeth: rates computed from the waves of the explaining tile; None if no tile explains the table.
    prices, rates: see `products`.
    few_tokens: ratios of time per token at FEW_TOKENS to that at MANY_TOKENS, one per GEMM.
    widths, head_counts, fours: see `shapes`.
    rows: number of rows in both tables.
    sources: see `Evidence`.
    """

    spec: DeviceSpec
    edges: Edges
    curve: tuple[tuple[int, float], ...]
    teeth: Sawtooth | None
    prices: tuple[Price, ...]
    rates: dict[int, float]
    few_tokens: tuple[float, ...]
    widths: tuple[Width, ...]
    head_counts: dict[int, float]
    fours: Fours | None
    rows: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class GuideResults:
    """All results on the page.

    gpus: results by GPU name.
    searches: end-to-end times from the published manual searches.
    """

    gpus: dict[str, GpuResults] = field(default_factory=dict)
    searches: tuple[Iteration, ...] = ()


def find(found: Iterable[Evidence], searches: Path) -> GuideResults:
    """Computes the results, one GPU at a time. searches: CSV file of the published manual searches."""
    return GuideResults({one.name: _of(one) for one in found}, iterations(searches))


def _of(one: Evidence) -> GpuResults:
    shown = sorted(
        (
            p
            for p in one.gemm
            if isinstance(p.workload, Gemm)
            and (p.workload.n, p.workload.k) == (SHOWN_N, SHOWN_K)
            and p.workload.m in _SHOWN_M
        ),
        key=lambda p: p.axes["m"],
    )
    return GpuResults(
        spec=one.spec, edges=edges_of(one.gemm, one.spec), curve=tuple((p.axes["m"], p.tflops) for p in shown),
        teeth=_teeth(one, shown), prices=prices(one.gemm), rates=rates(one.gemm),
        few_tokens=token_ratios(one.gemm, FEW_TOKENS, MANY_TOKENS), widths=widths(one.attention),
        head_counts=head_counts(one.attention, HEADS_SEQ), fours=fours(one.attention, FOURS_SEQ),
        rows=len(one.gemm) + len(one.attention), sources=one.sources,
    )  # fmt: skip


def _teeth(one: Evidence, shown: Sequence[Point]) -> Sawtooth | None:
    curves = curves_of(one.gemm, "m")
    periods = find_periods(fit_curves(curves, repeatability(one.gemm_run.records)), one.spec)
    return sawtooth(shown, "m", one.spec, tile_finder(one.spec, periods))
