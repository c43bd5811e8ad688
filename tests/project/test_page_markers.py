"""Pages of docs/: snippets run, places are filled."""

import doctest
import re
from pathlib import Path

import pytest
from commands import ROOT

from quantbench.errors import StoreError
from tools.guide.markers import fill, table

PAGE = ROOT / "docs" / "choosing-shapes.md"


def test_the_snippets_of_the_page_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 5
    assert result.failed == 0


def test_places_are_filled_in_a_line_or_over_lines() -> None:
    page = "a <!-- x:begin --><!-- x:end --> b\n<!-- y.z:begin -->\nold\n<!-- y.z:end -->\n"
    filled = fill(page, {"x": "1", "y.z": table(["p", "q"], [["1", "2"]])})
    assert filled == (
        "a <!-- x:begin -->1<!-- x:end --> b\n"
        "<!-- y.z:begin -->\n| p | q |\n| --- | ---: |\n| 1 | 2 |\n<!-- y.z:end -->\n"
    )
    assert fill(filled, {"x": "1", "y.z": table(["p", "q"], [["1", "2"]])}) == filled
    with pytest.raises(StoreError, match=r"no value for x; expected places that are filled"):
        fill(page, {"y.z": "1"})
    with pytest.raises(StoreError, match=r"no place for w; expected a place in the page"):
        fill(page, {"x": "1", "y.z": "2", "w": "3"})


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_no_line_begins_with_a_figures_marker(page: Path) -> None:
    """Markdown takes such a line for a block of HTML, which ends the paragraph or list that it
    stands in.
    """
    found = [
        line
        for line in page.read_text().splitlines()
        if re.match(r"\s*<!-- [\w.-]+:begin -->.*:end -->", line)
    ]
    assert found == []
