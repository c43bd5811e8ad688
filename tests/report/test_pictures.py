"""What pictures say and draw: device, format and library in each heading, known edges alone, all inside the axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import SPEC, record, reference, run, samples
from simulator import SimulatedGpu, along, records_of
from typer.testing import CliRunner

from quantbench.analysis.check import check_run
from quantbench.analysis.curves import curves_of
from quantbench.analysis.sawtooth import drawn_edges, sawtooth
from quantbench.analysis.summary import Point, points_of
from quantbench.cli.app import app
from quantbench.launch import Launch, Tile
from quantbench.report import canvas
from quantbench.report.content import Gallery
from quantbench.report.page import build_page
from quantbench.report.source import picture_caption
from quantbench.report.sweep_result import draw_efficiency
from quantbench.store.folder import Run
from quantbench.store.record import Record
from quantbench.workload import Gemm

pytest.importorskip("seaborn", reason="pictures need seaborn")

HELD = Gemm(4096, 1, 4096)
RECORDED = Launch("ampere_gemm_128x256", tile=Tile(128, 256), blocks_per_sm=1)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved, laid out."""
    figures: list[Any] = []
    from matplotlib.figure import Figure

    usual = Figure.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        usual(figure, *args, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def stairs(
    launch: Launch | None = None, sizes: Sequence[int] = tuple(range(1024, 8192, 64)), m: int = 4096
) -> list[Record]:
    """Times of 128 × 256 tiles on 108 SMs."""
    gpu = SimulatedGpu(108, Tile(128, 256), tile_ns_per_k=30.0)  # below the peak
    return [
        record(
            Gemm(m, n, 4096), samples(gpu.time_us(Gemm(m, n, 4096)), noise=0.004, count=12, seed=n), {"n": n},
            launch=launch,
        )
        for n in sizes
    ]  # fmt: skip


def no_stairs() -> list[Record]:
    """Times that no tile explains, on one core: the likeliest tiles are many, and the assumed one is among them."""
    rng = np.random.default_rng(5)
    return [
        record(Gemm(256, n, n), samples(n**2 / 1e4 * rng.choice((1.0, 1.03)), noise=0.01, count=20, seed=n), {"n": n})
        for n in range(256, 1024, 16)
    ]


CPU = replace(SPEC, name="cpu-test", kind="cpu", sm_count=1, compute_capability=None)


def inside(figure: Any) -> list[str]:
    """Labels of lines that leave their panel; names of lines that no legend explains."""
    wrong = []
    for panel in figure.axes:
        (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
        for line in panel.get_lines():
            x, y = (np.asarray(values, dtype=float) for values in line.get_data())
            if line.get_transform() == panel.transData:
                wrong += [f"{line.get_label()} above"] * bool(np.nanmax(y) > top or np.nanmin(y) < bottom)
            wrong += [f"{line.get_label()} beside"] * bool(np.nanmax(x) > right or np.nanmin(x) < left)
    return wrong


def legend_words(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def page_pictures(made: Run, tmp_path: Path) -> None:
    build_page(made, points_of(made.records, made.info.device), Gallery(tmp_path), {})


@pytest.mark.slow
def test_every_picture_of_a_page_names_device_format_and_library(tmp_path: Path, drawn: list[Any]) -> None:
    grid = [
        record(Gemm(m, n, 4096), samples(m * n / 1e4, noise=0.004, count=12, seed=m + n), {"m": m, "n": n})
        for m in (512, 520, 1024, 1032) for n in range(1024, 2048, 128)
    ]  # fmt: skip
    references = [reference(100.0, elapsed_s) for elapsed_s in (1.0, 60.0, 120.0)]
    software = {"quantbench": "0.1.0", "torch": "2.11.0", "nvidia-cublas": "13.1.0.3", "triton": "3.6.0"}
    page_pictures(run([*grid, *references], software=software, origin="measured"), tmp_path)
    assert len(drawn) >= 5  # the lead, two axes, the map, the device
    for figure in drawn:
        assert "a100-test · bf16 · torch 2.11.0, cuBLAS 13.1.0.3 · measured" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("changes", "provider", "caption"),
    [
        (
            {"origin": "imported", "source": "pack 1.0: a/b.parquet (sglang 0.5)",
             "software": {"aiconfigurator": "pack 1.0", "sglang": "0.5"}},
            "sglang", "a100-test · bf16 · sglang 0.5 · imported from pack 1.0",
        ),
        ({"origin": "imported", "software": {}}, "vllm", "a100-test · bf16 · vllm · imported"),
        (
            {"origin": "measured", "software": {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12"}},
            "triton.matmul", "a100-test · bf16 · torch 2.11.0, triton 3.6.0 · measured",
        ),
        (
            {"origin": "measured", "software": {"torch": "2.11.0", "triton": "3.6.0"}},
            "mine:MyGemm", "a100-test · bf16 · torch 2.11.0, mine:MyGemm · measured",
        ),
    ],
)  # fmt: skip
def test_measured_and_imported_figures_are_told_apart(changes: dict[str, Any], provider: str, caption: str) -> None:
    made = run([record(Gemm(512, 512, 512), (1.0,), {"n": 512}, provider=provider)], **changes)
    assert picture_caption(made.info, points_of(made.records, SPEC)) == caption


def edges_of(made: Run) -> tuple[int, int]:
    """Tile and wave edges that are drawn."""
    check = check_run(made, rules=())
    (curve,) = curves_of(points_of(made.records, made.info.device), "n")
    tile_edges, wave_edges = drawn_edges(curve, check.tile_of)
    return len(tile_edges), len(wave_edges)


def test_edges_and_sawteeth_are_drawn_where_the_tile_is_known() -> None:
    recorded = run(stairs(RECORDED, sizes=range(1024, 2048, 256)))
    assert edges_of(recorded) == (3, 1)  # 128, 160, 192 and 224 tiles: 2, 2, 2 and 3 waves
    told = run(stairs())
    assert edges_of(told)[0] > 20
    unknown = run(no_stairs(), device=CPU)
    points = points_of(unknown.records, CPU)
    check = check_run(unknown, rules=())
    assumed = check.tile_of(points[0])
    assert assumed is not None
    assert assumed.source == "assumed"  # the analysis has a tile to offer, and the picture does not draw it
    assert edges_of(unknown) == (0, 0)
    assert sawtooth(points, "n", CPU, check.tile_of) is None
    assert sawtooth(points_of(told.records, SPEC), "n", SPEC, check_run(told, rules=()).tile_of) is not None


def test_a_tile_that_the_steps_tell_draws_no_sawtooth_below_half_a_wave() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256))
    sizes = (*range(64, 1024, 64), *range(1024, 8192, 64))
    made = run([replace(r, provider="torch.mm") for r in records_of(gpu, along("n", sizes, HELD), noise=0.005, seed=2)])
    points = points_of(made.records, SPEC)
    teeth = sawtooth(points, "n", SPEC, check_run(made, rules=()).tile_of)
    assert teeth is not None
    # 32 rows of tiles: one column of them is less than half a wave of 108, two columns are more.
    assert teeth.sizes[0] == 320


def test_a_sweeps_edges_stay_inside_and_are_in_the_legend(tmp_path: Path, drawn: list[Any]) -> None:
    made = run(stairs(RECORDED))
    points = points_of(made.records, SPEC)
    draw_efficiency(points, "n", check_run(made, rules=()).tile_of, tmp_path / "a.png", title="t", caption="c")
    (figure,) = drawn
    assert inside(figure) == []
    assert legend_words(figure) == ["torch.mm", "tile edge, torch.mm", "wave edge, torch.mm"]


def test_the_computed_sawtooth_of_a_report_stays_inside_and_is_in_the_legend(tmp_path: Path, drawn: list[Any]) -> None:
    # 27 rows of tiles: a wave more begins every 1024 columns, and each size is just past such an edge.
    page_pictures(run(stairs(RECORDED, [1024 * i + 16 for i in range(8, 14)], m=27 * 128)), tmp_path)
    (figure,) = [f for f in drawn if any("computed" in words for words in legend_words(f))]
    assert "tiles and waves, computed (128x256, recorded)" in legend_words(figure)
    assert inside(figure) == []


def test_one_legend_names_each_thing_once(tmp_path: Path, drawn: list[Any]) -> None:
    with canvas.figure(tmp_path / "p.png", (6, 3), columns=2) as panels:
        for panel in panels.flat:
            panel.plot([1, 2], [3, 4], label="measured")
        panels[0][1].plot([1, 2], [3, 4], label="predicted")
    assert legend_words(drawn[0]) == ["measured", "predicted"]


def test_a_single_size_is_a_point_of_its_own(tmp_path: Path, drawn: list[Any]) -> None:
    points: tuple[Point, ...] = points_of(run(stairs(sizes=(1024,))).records, SPEC)
    draw_efficiency(points, "n", lambda _: None, tmp_path / "a.png", title="t", caption="c")
    assert legend_words(drawn[0]) == ["torch.mm"]


def test_a_forecasts_lines_stay_inside_and_are_in_the_legend(tmp_path: Path, drawn: list[Any]) -> None:
    plot = str(tmp_path / "a.png")
    for gpu in ("a100-sxm4-80gb", "h100-sxm5-80gb"):
        words = ["predict", "--gpu", gpu, "--dim", "n=1024:8192:512", "-m", "4096", "-k", "4096", "--plot", plot]
        CliRunner().invoke(app, words, catch_exceptions=False)
    for figure, gpu, library in zip(drawn, ("a100-sxm4-80gb", "h100-sxm5-80gb"), ("SGLang", "vLLM"), strict=True):
        assert inside(figure) == []
        assert {line.get_label() for line in figure.axes[0].get_lines() if line.get_label()[0] != "_"} == set(
            legend_words(figure)
        )
        title = figure.get_suptitle()
        assert title.startswith(f"{gpu} · bf16 · predicted, with 90 % intervals")
        assert library in title
