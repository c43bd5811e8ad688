"""The report in a real browser: it renders, nothing is cut off at 1280 and 400 pixels, nothing is
asked of the network, and the console stays empty. Skipped where there is no Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, find_browser
from made_runs import HOSTILE, record, reference, run, samples, stairs

from quantbench.launch import Launch, Tile
from quantbench.report.page import write_report
from quantbench.store.folder import Run
from quantbench.store.record import Failed
from quantbench.workload import Gemm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_browser() is None, reason="no Chromium here (apt-get install chromium)"
    ),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    assert path is not None
    with browser(path, tmp_path_factory.mktemp("profile")) as found:
        yield found


def grid() -> Run:
    """Two axes, two ops, kernels, a device that drifts, and texts that are long and hostile."""
    made = [reference(50.0 + i / 10, elapsed_s=20.0 * i) for i in range(6)]
    long_name = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn" * 3
    for hidden in range(2048, 6144, 512):
        for mbs in (1, 2, 4, 8):
            for op, n in (("qkv", 3 * hidden), ("mlp_up", 4 * hidden)):
                us = samples(
                    hidden / 10 * (1.2 if hidden % 1024 else 1.0),
                    noise=0.003,
                    count=12,
                    seed=hidden + n + mbs,
                )
                launch = Launch(
                    long_name if hidden < 4096 else HOSTILE,
                    tile=Tile(128, 256 if hidden < 4096 else 128),
                )
                axes = {"hidden": hidden, "mbs": mbs}
                made.append(
                    record(
                        Gemm(2048 * mbs, n, hidden),
                        us,
                        axes,
                        op=op,
                        launch=launch,
                        elapsed_s=hidden / 50,
                    )
                )
    made.append(record(Gemm(8, 8, 8), Failed("error", HOSTILE), {"hidden": 64, "mbs": 1}))
    return run(made, software={"torch": "2.11.0+cu130", "os": "Linux-" + "x" * 120}, source=HOSTILE)


@pytest.mark.parametrize("name", ["stairs", "grid", "empty"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, False), (400, True)])
def test_the_page_fits_loads_nothing_and_complains_of_nothing(
    opened: Browser, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    made = {
        "stairs": lambda: run(stairs(range(2048, 6144, 64))),
        "grid": grid,
        "empty": lambda: run([]),
    }[name]()
    page = write_report(made, tmp_path).page
    # Folded parts are looked at as well.
    page.write_text(
        page.read_text(encoding="utf-8").replace("<details>", "<details open>"), encoding="utf-8"
    )
    shown = opened.show(page, width, dark=dark)
    assert shown.problems == []
    assert [url for url in shown.requests if not url.startswith("data:")] == [
        page.resolve().as_uri()
    ]
    assert shown.layout["inner"] == width
    assert shown.layout["scroll"] <= width
    assert shown.layout["beyond"] == []
    assert shown.layout["broken"] == []
    assert shown.layout["images"] == page.read_text(encoding="utf-8").count("<img ")
    assert "SIMULATED" in shown.layout["text"]


def test_the_answer_is_on_the_first_screen(opened: Browser, tmp_path: Path) -> None:
    page = write_report(run(stairs(range(2048, 6144, 64))), tmp_path).page
    for width, height in ((1280, 800), (400, 800)):
        shown = opened.show(page, width, height)
        above = "the first screen holds the answer, the worst row and its remedy"
        text = shown.layout["text"]
        assert "3392" in text
        assert shown.layout["answer_bottom"] <= height, above
        assert shown.layout["first_row_bottom"] <= height, above


def test_pointing_at_a_size_tells_what_ran_there(opened: Browser, tmp_path: Path) -> None:
    page = write_report(grid(), tmp_path).page
    with opened.tab(page, 1280) as tab:
        assert tab.shown.problems == []
        plots = tab.evaluate("document.querySelectorAll('[data-chart] .uplot').length")
        assert plots == page.read_text(encoding="utf-8").count("data-chart=") > 0
        over = "[...document.querySelectorAll('.u-over')].at(1).getBoundingClientRect()"
        where = tab.evaluate(f"[{over}.left + {over}.width / 3, {over}.top + 50]")
        tab.evaluate(f"scrollTo(0, {where[1]} - 200)")
        where = tab.evaluate(f"[{over}.left + {over}.width / 3, {over}.top + 50]")
        tab.browser._ask(
            "Input.dispatchMouseEvent", tab.session, type="mouseMoved", x=where[0], y=where[1]
        )
        said = tab.evaluate("[...document.querySelectorAll('.said')].at(1).textContent")
        assert "hidden" in said
        assert "ms" in said or "µs" in said
        assert "grade" in said
        assert "onerror" not in tab.evaluate("[...document.images].map(i => i.outerHTML).join()")
