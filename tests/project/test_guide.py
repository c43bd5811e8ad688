"""docs/choosing-shapes.md: its arithmetic, its verdicts on literals, and that it says what the tables say."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from made_runs import SPEC, record, run

from quantbench.analysis.summary import Point, points_of
from quantbench.device import lookup
from quantbench.errors import StoreError
from quantbench.latency.tables import GemmTable
from quantbench.launch import Tile
from quantbench.store.record import Record
from quantbench.workload import Attention, Gemm
from tools.guide.formats import steps_of
from tools.guide.kernels import half_precision, hidden_sizes, named_kernels
from tools.guide.markers import fill, kept, table
from tools.guide.products import edges_of, prices, rates
from tools.guide.rules import CONFIRMED, INCONCLUSIVE, REFUTED, Effect, effect_of, words
from tools.guide.shapes import (
    fours,
    head_searches,
    iterations,
    linear_layers,
    of_sizes,
    shares,
    slots_of,
    whole_waves_step,
    widths,
)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "choosing-shapes.md"
# Kept beside the checkout, not in it.
NEUSIGHT = ROOT.parent / "shared" / "data" / "neusight_fp32.parquet"
DEEPBENCH = NEUSIGHT.with_name("deepbench_v100.csv")
SEARCHES = ROOT / "tests" / "data" / "bloom_tables.csv"
A100 = lookup("a100-sxm4-80gb")

needs_tables = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="the extra quantbench[tables] is not installed"
)


def points(records: list[Record]) -> tuple[Point, ...]:
    return points_of(run(records).records, SPEC)


# --- the page ----------------------------------------------------------------------------------------------------


def test_every_place_of_the_page_is_filled_and_every_picture_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    places = re.findall(r"<!-- ([\w.-]+):begin -->(.*?)<!-- \1:end -->", text, re.S)
    assert len(places) > 30
    assert all(value.strip() for _, value in places)
    pictures = re.findall(r"!\[[^\]]+\]\((figures/[\w.-]+)\)", text)
    assert len(pictures) == 7
    assert all((DOCS / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_the_snippets_of_the_page_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 5
    assert result.failed == 0


def test_the_commands_that_write_the_pages_can_be_imported() -> None:
    for name in ("tools.guide.__main__", "tools.guide.front", "tools.advice_examples"):
        assert callable(import_module(name).main)


@pytest.mark.slow
@needs_tables
def test_the_page_says_what_the_tables_say(tmp_path: Path) -> None:
    from tools.guide.evidence import evidence, find
    from tools.guide.formats import formats_table
    from tools.guide.page import texts

    text = PAGE.read_text(encoding="utf-8")
    elsewhere = ("named-kernels", "v100-alignment", "v100-rows")  # from tables that no package has
    tables = {name: kept(text, name) for name in elsewhere} | {
        "formats": formats_table(),
        "v100-hidden": hidden_sizes(),
    }
    assert fill(text, {**texts(find(evidence(), SEARCHES)), **tables}) == text


@pytest.mark.slow
@pytest.mark.skipif(not NEUSIGHT.exists(), reason="no ../shared beside the checkout")
def test_the_page_says_what_the_named_kernels_say() -> None:
    assert kept(PAGE.read_text(encoding="utf-8"), "named-kernels") == named_kernels(NEUSIGHT)


@pytest.mark.skipif(not DEEPBENCH.exists(), reason="no ../shared beside the checkout")
def test_the_page_says_what_deepbench_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, found in half_precision(DEEPBENCH).items():
        assert kept(text, name) == found


def test_sizes_that_the_v100s_sms_divide_use_as_many_slots_as_others() -> None:
    found = hidden_sizes()
    assert kept(PAGE.read_text(encoding="utf-8"), "v100-hidden") == found
    for line in found.splitlines()[2:]:
        divided, others = (float(cell.rstrip(" %")) for cell in line.strip("| ").split(" | ")[1:3])
        assert abs(divided - others) < 1


def test_places_are_filled_in_a_line_or_over_lines() -> None:
    page = "a <!-- x:begin --><!-- x:end --> b\n<!-- y.z:begin -->\nold\n<!-- y.z:end -->\n"
    filled = fill(page, {"x": "1", "y.z": table(["p", "q"], [["1", "2"]])})
    assert filled == (
        "a <!-- x:begin -->1<!-- x:end --> b\n"
        "<!-- y.z:begin -->\n| p | q |\n| --- | ---: |\n| 1 | 2 |\n<!-- y.z:end -->\n"
    )
    assert fill(filled, {"x": "1", "y.z": table(["p", "q"], [["1", "2"]])}) == filled
    with pytest.raises(StoreError, match=r"no value for x; expected places that the evidence fills"):
        fill(page, {"y.z": "1"})
    with pytest.raises(StoreError, match=r"no place for w; expected a place in the page"):
        fill(page, {"x": "1", "y.z": "2", "w": "3"})


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_tiles_and_waves_of_the_famous_sizes() -> None:
    # 2048 tokens are 16 rows of tiles; 13824 is 54 columns of 256: 864 = 8 · 108. 14400 needs 57: 912 = 8 · 108 + 48.
    by_name = {op.name: slots_of(op, A100) for op in linear_layers(13824, 1)}
    assert (by_name["proj"].num_tiles, by_name["proj"].num_waves, by_name["proj"].efficiency) == (864, 8, 1.0)
    worse = {op.name: slots_of(op, A100) for op in linear_layers(14400, 1)}
    assert (worse["proj"].num_tiles, worse["proj"].num_waves, worse["proj"].last_wave_tiles) == (912, 9, 48)
    assert [op.label for op in linear_layers(13824, 1, backward=True)][4:6] == ["qkv.dgrad", "qkv.wgrad"]


@pytest.mark.parametrize("sm_count", [108, 132, 148])
@pytest.mark.parametrize("rows", [1000, 2048, 8192])
def test_whole_waves_come_at_the_step_and_not_before(sm_count: int, rows: int) -> None:
    from quantbench.quantization import quantize

    step = whole_waves_step(rows, block_n=256, block_m=128, sm_count=sm_count)
    for n in range(256, 3 * step + 1, 256):
        whole = quantize(Gemm(rows, n, 64), Tile(128, 256), sm_count).wave_efficiency == 1.0
        assert whole == (n % step == 0)


def test_multiples_of_the_sm_count_fill_waves_no_better_than_others() -> None:
    counted = shares(A100, 1)
    divided, others = of_sizes(counted, 108), of_sizes(counted, 108, divides=False)
    assert (divided.sizes, others.sizes) == (38, 987)
    assert divided.mean == pytest.approx(others.mean, abs=0.01)
    assert divided.lowest < 0.8 < 0.98 < divided.highest


# --- measured ----------------------------------------------------------------------------------------------------


def test_edges_of_a_staircase_are_explained_by_its_own_tile() -> None:
    def us(m: int, n: int) -> float:
        return 10.0 * -(-(-(-m // 128) * -(-n // 256)) // 108)

    made = [
        record(Gemm(m, n, 2048), (us(m, n),), {"m": m, "n": n})
        for n in (2048, 4096, 5120, 6144, 8192, 12288)
        for m in (*range(5, 17), 128, 129, 256, 257, 1024, 1025, 2048, 2049)
    ]
    found = edges_of(points(made), SPEC)
    best = found.fits[0]
    # 128×256 alone and 128×128 by two make one staircase.
    assert {(str(f.tile), f.blocks_per_sm) for f in found.fits[:2]} == {("128x256", 1), ("128x128", 2)}
    assert best.correlation == pytest.approx(1.0)
    assert (best.elsewhere, found.repeats) == (1.0, 0.0)
    assert best.at_wave > 1.2
    assert [step.m for step in found.steps] == [128, 256, 1024, 2048]
    assert found.step(1024).shapes == 6


def test_an_effect_is_confirmed_refuted_or_neither() -> None:
    assert Effect(0.30, 0.25, 0.36, 255).verdict == CONFIRMED
    assert Effect(0.01, -0.01, 0.015, 50).verdict == REFUTED
    assert Effect(0.03, 0.01, 0.05, 50).verdict == INCONCLUSIVE
    assert effect_of([1.1] * 9) is None
    found = effect_of([1.0 + i / 100 for i in range(11)])
    assert found is not None
    assert (found.median, found.low, found.high) == pytest.approx((0.05, 0.01, 0.09))
    assert words(effect_of([1.3] * 20)) == "CONFIRMED: 30 % (30 % to 30 %)"
    assert words(None) == "NOT TESTED"


def test_steps_of_a_format_name_where_one_row_more_costs_most() -> None:
    n, m = (x.ravel() for x in np.meshgrid(np.arange(1024, 1024 + 600), [128, 129, 256, 257]))
    slow = {128: 1.0, 129: 1.2, 256: 2.0, 257: 2.1}
    us = np.array([slow[int(size)] for size in m])
    found = steps_of(GemmTable(m, n, np.full(len(m), 2048), us, "fp8", "h100-sxm5-80gb"))
    assert found is not None
    past_128, past_256, more = found.past
    assert past_128 is not None
    assert past_256 is not None
    assert (round(past_128.median, 6), round(past_256.median, 6), more) == (0.2, 0.05, None)
    assert (found.worst[0], round(found.worst[1], 6), found.cliffs) == (128, 0.2, 0.5)
    assert steps_of(GemmTable(m[:9], n[:9], np.full(9, 2048), us[:9], "fp8", "h100-sxm5-80gb")) is None


def test_widths_compare_equal_work() -> None:
    made = []
    for batch in range(1, 11):
        for heads, head_dim, us in ((32, 64, 130.0), (16, 128, 100.0)):
            work = Attention(batch, heads, 1024, 1024, head_dim, kv_heads=heads // 4)
            made.append(record(work, (us * batch,), {"mbs": batch, "heads": heads, "head_dim": head_dim}))
    (width,) = widths(points(made))
    assert (width.head_dim, width.seq, len(width.ratios)) == (64, 1024, 10)
    assert width.median == pytest.approx(1 / 1.3)


def test_fours_finds_a_cost_where_there_is_one() -> None:
    made = []
    for seq in range(2048, 2048 + 64 * 12, 64):
        for batch in (1, 4):
            for heads in (4, 6, 8):
                us = heads * batch * seq * (1.2 if batch * heads % 4 else 1.0)
                work = Attention(batch, heads, seq, seq, 128, kv_heads=1)
                made.append(record(work, (us,), {"mbs": batch, "heads": heads, "seq": seq}))
    found = fours(points(made), 2048)
    assert found is not None
    assert (len(found.off), len(found.on)) == (12, 12)
    assert found.on == pytest.approx([1.0] * 12)
    assert found.off == pytest.approx([1 / 1.2] * 12)


def test_prices_and_rates_of_products() -> None:
    made = [
        record(Gemm(m, n, 4096), (m * n / 1e4 + 100.0,), {"m": m, "n": n}) for m in (1024, 8192) for n in (2048, 4096)
    ]
    found = points(made)
    price = {(p.tokens, p.tp): p.price for p in prices(found) if p.column}
    assert price[1024, 2] == pytest.approx(2 * (209.7152 + 100) / (419.4304 + 100))
    assert set(rates(found)) == {1024, 8192}


def test_the_searches_say_what_was_transcribed() -> None:
    rows = {(row.hidden, row.heads): row for row in head_searches(iterations(SEARCHES))}
    assert rows[13824, 128].seconds == 162.72
    assert rows[13824, 128].head_dim == 108
    assert len(rows) == 14
    with pytest.raises(StoreError, match="expected the table of the searches, in a checkout"):
        iterations(ROOT / "nowhere.csv")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_no_line_begins_with_a_figures_marker(page: Path) -> None:
    """Markdown takes such a line for a block of HTML, which ends the paragraph or list that it stands in."""
    found = [line for line in page.read_text().splitlines() if re.match(r"\s*<!-- [\w.-]+:begin -->.*:end -->", line)]
    assert found == []
