"""A panel for each op: in their order, along one axis, in one file that is the same each time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from simulator import SimulatedGpu, along, records_of

from quantbench.analysis.blocks import tile_in_use
from quantbench.analysis.curves import curves_of
from quantbench.analysis.sawtooth import drawn_edges
from quantbench.analysis.summary import points_of
from quantbench.device import lookup
from quantbench.errors import StoreError
from quantbench.launch import Launch, Tile
from quantbench.report.canvas import draw_panels, typical
from quantbench.workload import Gemm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

pytest.importorskip("seaborn", reason="pictures need seaborn")


def test_ops_are_drawn_once_each_in_their_order(tmp_path: Path) -> None:
    drawn: list[tuple[str, Axes]] = []
    draw_panels(
        ["mlp_down", "qkv", "logits", "qkv"], lambda panel, op: drawn.append((op, panel)), "head_dim",
        tmp_path / "new" / "p.png", title="some $title$", caption="a100 · bf16",
    )  # fmt: skip
    assert [op for op, _ in drawn] == ["qkv", "mlp_down", "logits"]
    assert [panel.get_title(loc="left") for _, panel in drawn] == ["qkv", "mlp_down", "logits"]
    figure = drawn[0][1].figure
    assert [panel.axison for panel in figure.axes] == [True, True, True, False]
    # The lowest panel of each column says what runs along x.
    assert [panel.get_xlabel() for panel in figure.axes[:3]] == ["", "head-dim", "head-dim"]
    assert [panel.xaxis.get_tick_params()["labelbottom"] for panel in figure.axes[:3]] == [False, True, True]
    assert figure.get_suptitle() == "some ?title?\na100 · bf16"
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_panels_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        draw_panels(["qkv"], lambda panel, op: panel.plot([1, 2], [3, 4]), "n", tmp_path / name, title="t", caption="c")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_picture_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"^write picture: .*p\.png \(.*\); expected a folder that can be written$"):
        draw_panels(["qkv"], lambda panel, op: None, "n", tmp_path / "file" / "p.png", title="t", caption="c")


def test_wave_edges_are_drawn_only_where_waves_are_known() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256), tile_ns_per_k=30)  # 75 % of an A100

    def drawn(blocks_per_sm: int | None) -> int:
        spec = lookup("a100-sxm4-80gb")
        launch = Launch("made up", tile=Tile(128, 256), blocks_per_sm=blocks_per_sm)
        records = records_of(gpu, along("n", range(1024, 8193, 256), Gemm(4096, 1, 4096)), noise=0.0, seed=1)
        points = points_of([replace(record, launch=launch) for record in records], spec)
        (curve,) = curves_of(points, "n")
        tile_edges, wave_edges = drawn_edges(curve, lambda point: tile_in_use(spec, "bf16", point.launch))
        assert len(tile_edges) > 20
        return len(wave_edges)

    assert drawn(1) > 5
    assert drawn(2) == drawn(None) == 0


@pytest.mark.parametrize("num_curves", range(1, 14))
@pytest.mark.parametrize("most", [1, 2, 4])
def test_typical_curves_are_different_and_evenly_spread(num_curves: int, most: int) -> None:
    gpu = SimulatedGpu(108, Tile(128, 256), tile_ns_per_k=30)
    sizes = [(n, m) for n in range(1024, 1024 * (num_curves + 1), 1024) for m in range(512, 3072, 512)]
    places = [({"m": m, "n": n}, Gemm(m, n, 4096)) for n, m in sizes]
    short = [({"m": 512, "n": 8}, Gemm(512, 8, 4096))]  # a curve of one point is left out of longer ones
    records = records_of(gpu, [*places, *short], noise=0.0, seed=1)
    curves = curves_of(points_of(records, lookup("a100-sxm4-80gb")), "m", fewest=1)
    chosen = [dict(curve.held)["n"] // 1024 for curve in typical(curves, most)]
    if num_curves < most:
        assert set(chosen) - {0} == set(range(1, num_curves + 1))
        return
    steps = [after - before for before, after in pairwise(chosen)]
    assert len(chosen) == most
    assert min(steps, default=1) >= 1
    assert max(steps, default=1) - min(steps, default=1) <= 1
    assert most == 1 or chosen[-1] == num_curves
    # The smallest third by work shows no steps; it is drawn only if too few curves remain without it.
    assert chosen[0] - 1 in (round((num_curves - 1) / 3), num_curves - most)
