"""A panel for each op: in their order, along one axis, in one file that is the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quantbench.errors import StoreError
from quantbench.report.panels import draw_panels

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
