"""Writes docs/choosing-shapes.md and its figures from the packaged public tables.

Entry point: `write_guide`, or `python -m tools.guide [docs [folder of published tables]]`. Run by `make docs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quantbench.errors import QuantbenchError, StoreError
from quantbench.launch import Tile
from tools.guide import figures
from tools.guide.evidence import DTYPE, GuideResults, evidence, find, sources_caption
from tools.guide.formats import formats_table
from tools.guide.kernels import half_precision, hidden_sizes, named_kernels
from tools.guide.markers import fill, kept
from tools.guide.page import texts
from tools.guide.products import SMALLEST_M, TOKENS
from tools.guide.shapes import shares

PAGE = "choosing-shapes.md"
_SEARCHES = Path("tests/data/bloom_tables.csv")
_STEPS_DRAWN = (64, 128, 192, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 4352)


def write_guide(docs: Path, published: Path | None = None) -> list[Path]:
    """Fills docs/choosing-shapes.md and draws docs/figures/choosing-*.png. Returns the written paths.

    published: folder of NeuSight's and DeepBench's tables, which no package has; without it, what the page says of
        them is kept.
    """
    page = docs / PAGE
    try:
        before = page.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError("guide", f"{page} ({error.strerror})", "the docs folder of a checkout") from None
    found = find(evidence(), docs.parent / _SEARCHES)
    if published is None:
        tables = {name: kept(before, name) for name in ("named-kernels", "v100-alignment", "v100-rows")}
    else:
        named = named_kernels(published / "neusight_fp32.parquet")
        tables = {"named-kernels": named, **half_precision(published / "deepbench_v100.csv")}
    tables |= {"formats": formats_table(), "v100-hidden": hidden_sizes()}
    page.write_text(fill(before, {**texts(found), **tables}), encoding="utf-8")
    return [page, *draw_figures(found, docs / "figures")]


def draw_figures(found: GuideResults, folder: Path) -> list[Path]:
    """Draws every figure of the page. Returns their paths."""
    gpus = found.gpus
    paths = {
        name: folder / f"choosing-{name}.png"
        for name in ("staircases", "steps", "waves", "hidden", "widths", "heads", "tp")
    }
    products, attention = (
        sources_caption({name: one.sources[which] for name, one in gpus.items()}, DTYPE) for which in (0, 1)
    )
    figures.draw_staircases(
        {n: g.curve for n, g in gpus.items()}, {n: g.teeth for n, g in gpus.items()}, paths["staircases"], products
    )
    figures.draw_steps(
        {n: g.edges for n, g in gpus.items()}, [m for m in _STEPS_DRAWN if m >= SMALLEST_M], paths["steps"], products
    )
    figures.draw_waves({n: g.edges.fit(Tile(128, 256)) for n, g in gpus.items()}, paths["waves"], products)
    a100 = gpus["A100"].spec
    computed = f"A100 ({a100.sm_count} SMs) · any 16-bit format · computed for 128x256 tiles, nothing measured"
    figures.draw_hidden_sizes({mbs: shares(a100, mbs) for mbs in (1, 4)}, a100.sm_count, paths["hidden"], computed)
    figures.draw_widths({n: g.widths for n, g in gpus.items()}, paths["widths"], attention)
    figures.draw_head_counts({n: g.head_counts for n, g in gpus.items()}, paths["heads"], attention)
    figures.draw_prices({n: g.prices for n, g in gpus.items()}, TOKENS, paths["tp"], products)
    return list(paths.values())


def main() -> None:
    """Writes the page and prints the written paths."""
    given = [Path(text) for text in sys.argv[1:]] or [Path("docs")]
    try:
        for path in write_guide(*given):
            print(path)
    except QuantbenchError as error:
        print(f"quantbench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
