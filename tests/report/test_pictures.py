"""What pictures say and draw: device, format and library in each heading, known edges alone, all
inside the axes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import SPEC, record, run, samples
from simulator import SimulatedGpu, records_of

from quantbench.analysis.check import check_run
from quantbench.analysis.curves import curves_of
from quantbench.analysis.summary import points_of, rows_of
from quantbench.errors import StoreError
from quantbench.launch import Launch, Tile
from quantbench.report import canvas
from quantbench.report.source import picture_caption
from quantbench.report.sweep_result import draw_run, sizes_table, wave_edges
from quantbench.store.folder import Run
from quantbench.store.record import GridPosition, Record
from quantbench.workload import Gemm

pytest.importorskip("seaborn", reason="pictures need seaborn")

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
    """Times that no tile explains, on one core: the likeliest tiles are many, and the assumed one
    is among them.
    """
    rng = np.random.default_rng(5)
    return [
        record(
            Gemm(256, n, n),
            samples(n**2 / 1e4 * rng.choice((1.0, 1.03)), noise=0.01, count=20, seed=n),
            {"n": n},
        )
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
                wrong += [f"{line.get_label()} above"] * bool(
                    np.nanmax(y) > top or np.nanmin(y) < bottom
                )
            wrong += [f"{line.get_label()} beside"] * bool(
                np.nanmax(x) > right or np.nanmin(x) < left
            )
    return wrong


@pytest.mark.parametrize(
    ("changes", "provider", "caption"),
    [
        (
            {"origin": "imported", "source": "pack 1.0: a/b.parquet (sglang 0.5)",
             "software": {"aiconfigurator": "pack 1.0", "sglang": "0.5"}},
            "sglang", "a100-test · bf16 · sglang 0.5 · imported from pack 1.0",
        ),
        (
            {"origin": "measured", "software": {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12"}},
            "triton.matmul", "a100-test · bf16 · torch 2.11.0, triton 3.6.0 · measured",
        ),
    ],
)  # fmt: skip
def test_measured_and_imported_figures_are_told_apart(
    changes: dict[str, Any], provider: str, caption: str
) -> None:
    made = run([record(Gemm(512, 512, 512), (1.0,), {"n": 512}, provider=provider)], **changes)
    assert picture_caption(made.info, points_of(made.records, SPEC)) == caption


def edges_of(made: Run) -> list[int]:
    (curve,) = curves_of(points_of(made.records, made.info.device), "n")
    return wave_edges(curve, check_run(made, rules=()).tile_of)


def test_wave_edges_are_drawn_where_the_tile_and_its_waves_are_known() -> None:
    # 32 rows of tiles: a wave more begins after 3 · 256 columns, and after 6, 10, 13, … times 256.
    assert edges_of(run(stairs(RECORDED, sizes=range(1024, 2048, 256)))) == [1536]
    assert len(edges_of(run(stairs()))) > 5
    assert edges_of(run(stairs(replace(RECORDED, blocks_per_sm=2)))) == []
    assert edges_of(run(stairs(replace(RECORDED, blocks_per_sm=None)))) == []
    unknown = run(no_stairs(), device=CPU)
    assumed = check_run(unknown, rules=()).tile_of(points_of(unknown.records, CPU)[0])
    assert (
        assumed.source == "assumed"
    )  # the analysis has a tile to offer, and the picture does not draw it
    assert edges_of(unknown) == []


def test_rates_on_a_cpu_are_in_gflop_per_s() -> None:
    made = run([record(Gemm(256, 256, 256), (1000.0,), {"n": 256})], device=CPU)
    (point,) = points_of(made.records, CPU)
    assert canvas.rate(point) == pytest.approx(2 * 256**3 / 1e6)
    assert canvas.rate_unit(point) == "GFLOP/s"
    table = sizes_table(rows_of([point]), check_run(made, rules=()))
    assert table.head[1:5] == (">ops", ">time", ">GFLOP/s", ">GB/s")
    assert ">of peak" not in table.head
    assert table.rows[0][3] == "33.6"


def test_a_sweeps_picture_has_a_panel_for_each_op_and_one_legend(
    tmp_path: Path, drawn: list[Any]
) -> None:
    made = [
        replace(r, places=(GridPosition(r.places[0].axes, op),))
        for op in ("qkv", "mlp_down")
        for r in stairs(RECORDED)
    ]
    swept = replace(run([*made, *stairs(sizes=(1024,))]), folder=tmp_path)
    path = draw_run(swept, check_run(swept, rules=()), "n")
    first = path.read_bytes()
    (figure,) = drawn
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["qkv", "mlp_down", "gemm", ""]
    assert [panel.axison for panel in figure.axes] == [True, True, True, False]
    assert inside(figure) == []
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "torch.mm",
        "wave edge, torch.mm",
    ]
    assert (
        figure.get_suptitle()
        == "efficiency over n: run\na100-test · bf16 · torch 2.11.0 · simulated"
    )
    draw_run(swept, check_run(swept, rules=()), "n")
    assert path.read_bytes() == first  # equal data gives equal files


def test_a_picture_that_cannot_be_written_is_an_error_of_its_own(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError) as caught,
        canvas.figure(tmp_path / "none" / "p.png", (6, 3), title="some $title$", caption=""),
    ):
        pass
    assert caught.value.operation == "write picture"


@pytest.mark.parametrize("num_curves", [1, 2, 3, 5, 13])
@pytest.mark.parametrize("most", [1, 2, 4])
def test_typical_curves_are_different_and_evenly_spread(num_curves: int, most: int) -> None:
    gpu = SimulatedGpu(108, Tile(128, 256), tile_ns_per_k=30)
    sizes = [
        (n, m) for n in range(1024, 1024 * (num_curves + 1), 1024) for m in range(512, 3072, 512)
    ]
    places = [({"m": m, "n": n}, Gemm(m, n, 4096)) for n, m in sizes]
    short = [
        ({"m": 512, "n": 8}, Gemm(512, 8, 4096))
    ]  # a curve of one point is left out of longer ones
    records = records_of(gpu, [*places, *short], noise=0.0, seed=1)
    curves = curves_of(points_of(records, SPEC), "m", fewest=1)
    chosen = [dict(curve.held)["n"] // 1024 for curve in canvas.typical(curves, most)]
    if num_curves < most:
        assert set(chosen) - {0} == set(range(1, num_curves + 1))
        return
    steps = [after - before for before, after in pairwise(chosen)]
    assert len(chosen) == most
    assert min(steps, default=1) >= 1
    assert max(steps, default=1) - min(steps, default=1) <= 1
    # The smallest third by work shows no steps; it is drawn only if too few curves remain without
    # it.
    assert chosen[0] - 1 in (round((num_curves - 1) / 3), num_curves - most)
