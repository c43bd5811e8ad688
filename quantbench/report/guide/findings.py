"""Everything the guide says, worked out once for all GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantbench.analysis.curve_fits import fit_curves
from quantbench.analysis.curves import curves_of
from quantbench.analysis.periods import find_periods
from quantbench.analysis.point_noise import repeatability
from quantbench.analysis.sawtooth import Sawtooth, sawtooth
from quantbench.analysis.summary import Point
from quantbench.analysis.tiles import tile_finder
from quantbench.device.spec import DeviceSpec
from quantbench.report.guide.edges import Edges, edges_of
from quantbench.report.guide.evidence import Evidence
from quantbench.report.guide.heads import Fours, Width, fours, head_counts, widths
from quantbench.report.guide.searches import Iteration, iterations
from quantbench.report.guide.shrink import Price, prices, rates, token_ratios
from quantbench.workload import Gemm

#: the product whose curve is drawn: a square layer of hidden 4096
SHOWN_N, SHOWN_K = 4096, 4096
_SHOWN_M = range(64, 4353 + 1)
#: sequence lengths that heads are judged at
HEADS_SEQ, FOURS_SEQ = 2048, 2048
#: one sample of 2048 tokens against four of them
FEW_TOKENS, MANY_TOKENS = 2048, 8192


@dataclass(frozen=True)
class Of:
    """What was found on one GPU. curve: (m, TFLOP/s) of the product that is drawn; teeth: what the waves of the tile
    that explains the table's steps would give, None where no tile explains them.
    few_tokens: time per token at FEW_TOKENS over that at MANY_TOKENS."""

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
class Findings:
    """By GPU, and the end-to-end rows of the hand searches."""

    gpus: dict[str, Of] = field(default_factory=dict)
    searches: tuple[Iteration, ...] = ()


def find(found: Iterable[Evidence], searches: Path) -> Findings:
    """Work everything out, one GPU at a time."""
    return Findings({one.name: _of(one) for one in found}, iterations(searches))


def _of(one: Evidence) -> Of:
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
    return Of(
        spec=one.spec, edges=edges_of(one.gemm, one.spec), curve=tuple((p.axes["m"], p.tflops) for p in shown),
        teeth=_teeth(one, shown), prices=prices(one.gemm), rates=rates(one.gemm),
        few_tokens=token_ratios(one.gemm, FEW_TOKENS, MANY_TOKENS), widths=widths(one.attention),
        head_counts=head_counts(one.attention, HEADS_SEQ), fours=fours(one.attention, FOURS_SEQ),
        rows=len(one.gemm) + len(one.attention), sources=one.sources,
    )  # fmt: skip


def _teeth(one: Evidence, shown: Sequence[Point]) -> Sawtooth | None:
    curves = curves_of(one.gemm, "m")
    periods = find_periods(fit_curves(curves, repeatability(one.gemm_run.records)), one.spec)
    family = next(curve.family for curve in curves if shown[0] in curve.points)
    return sawtooth(shown, "m", one.spec, tile_finder(one.spec, periods)(family))
