"""Draws the figures of docs/choosing-shapes.md.

Entry points: the `draw_*` functions; each plots results by GPU name into one PNG (caption: see
`quantbench.report.canvas.figure`). Used by `tools.guide.__main__`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantbench.analysis.sawtooth import Sawtooth
from quantbench.report.canvas import CLIFF_COLOUR, PALETTE, figure
from tools.guide.products import Edges, Price, TileFit
from tools.guide.shapes import Width

#: colour of each GPU in every figure
COLOURS = dict(zip(("A100", "H100", "H200", "B200"), PALETTE, strict=False))
_WIDE_IN = 9.0


def draw_staircases(
    curves: Mapping[str, Sequence[tuple[int, float]]], teeth: Mapping[str, Sawtooth | None], path: Path, caption: str
) -> None:
    """Plots the measured rate over m, and the rate computed from the waves of the explaining tile.

    curves: (m, TFLOP/s) points by GPU.
    teeth: computed rates by GPU; None if no tile explains the steps.
    """
    title = "rate over m, n = k = 4096"
    with figure(path, (_WIDE_IN, 5.6), 2, 2, title=title, caption=caption, sharex=True) as panels:
        for panel, (name, points) in zip(panels.flat, curves.items(), strict=True):
            tooth = teeth[name]
            if tooth is not None:
                label = f"tiles and waves, computed ({tooth.tile})"
                panel.plot(tooth.sizes, tooth.tflops, "--", color="0.45", linewidth=0.9, label=label)
            panel.plot(
                *zip(*points, strict=True),
                "o-",
                color=COLOURS[name],
                markersize=3,
                linewidth=1,
                label=f"{name}, measured",
            )
            panel.set_ylim(bottom=0)
            panel.set_title(name, loc="left", fontsize=10, fontweight="bold")
        for panel in panels[:, 0]:
            panel.set_ylabel("TFLOP/s")
        for panel in panels[-1]:
            panel.set_xlabel("m (tokens)")


def draw_steps(edges: Mapping[str, Edges], sizes: Sequence[int], path: Path, caption: str) -> None:
    """Plots the cost of one more row at each edge: median and 10 to 90 % range over shapes. sizes: values of m."""
    title = "what one row more costs"
    with figure(path, (_WIDE_IN, 4.0), title=title, caption=caption, legend=False) as panels:
        panel = panels[0][0]
        for i, (name, found) in enumerate(edges.items()):
            chosen = [found.step(m) for m in sizes]
            x = [place + 0.18 * (i - 1.5) for place in range(len(sizes))]
            low, high = ([100 * (getattr(s, end) - 1) for s in chosen] for end in ("low", "high"))
            panel.vlines(x, low, high, color=COLOURS[name], linewidth=4, alpha=0.35)
            panel.plot(x, [100 * (s.median - 1) for s in chosen], "o", color=COLOURS[name], markersize=4.5, label=name)
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.set_xticks(range(len(sizes)), [f"{m}→{m + 1}" for m in sizes], rotation=60, fontsize=8)
        panel.set_xlabel("m")
        panel.set_ylabel("more time for one row more, %")
        panel.grid(visible=False, axis="x")
        panel.legend(fontsize=9, ncols=4)


def draw_waves(fits: Mapping[str, TileFit], path: Path, caption: str) -> None:
    """Plots the cost of one more row with and without a new wave: median and quartiles."""
    title = "what one row more costs, with and without one wave more"
    with figure(path, (6.4, 3.4), title=title, caption=caption, legend=False) as panels:
        panel = panels[0][0]
        for i, (name, fit) in enumerate(fits.items()):
            for shift, middle, quartiles, mark in (
                (-0.12, fit.elsewhere, fit.quartiles_elsewhere, "o"),
                (0.12, fit.at_wave, fit.quartiles_at_wave, "s"),
            ):
                low, high = (100 * (value - 1) for value in quartiles)
                panel.vlines(i + shift, low, high, color=COLOURS[name], linewidth=6, alpha=0.35)
                panel.plot(i + shift, 100 * (middle - 1), mark, color=COLOURS[name], markersize=6)
        panel.plot([], [], "o", color="0.4", label="same number of waves")
        panel.plot([], [], "s", color="0.4", label="one wave more (or several)")
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.set_xticks(range(len(fits)), list(fits))
        panel.set_ylabel("more time for one row more, %")
        panel.grid(visible=False, axis="x")
        panel.legend(fontsize=9)


def draw_widths(found: Mapping[str, Sequence[Width]], path: Path, caption: str) -> None:
    """Plots attention speed relative to head_dim 128 over the sequence length; a panel per head_dim."""
    head_dims = sorted({width.head_dim for widths in found.values() for width in widths})
    title = "speed of heads by their width"
    with figure(
        path, (_WIDE_IN, 3.5), 1, len(head_dims), title=title, caption=caption, legend=False, sharey=True
    ) as panels:
        for panel, head_dim in zip(panels[0], head_dims, strict=True):
            for i, (name, widths) in enumerate(found.items()):
                own = [w for w in widths if w.head_dim == head_dim]
                if own:
                    x = [w.seq * (1 + 0.04 * (i - 1.5)) for w in own]
                    panel.vlines(
                        x, [w.low for w in own], [w.high for w in own], color=COLOURS[name], alpha=0.4, linewidth=4
                    )
                    panel.plot(
                        x, [w.median for w in own], "o-", color=COLOURS[name], markersize=4, linewidth=1, label=name
                    )
            panel.axhline(1, color="0.4", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set_title(f"heads of {head_dim}", loc="left", fontsize=10, fontweight="bold")
            panel.set_xlabel("sequence length")
        panels[0][0].set_ylabel("speed against heads of 128")
        panels[0][0].set_ylim(bottom=0)
        panels[0][-1].legend(fontsize=9)


def draw_head_counts(found: Mapping[str, Mapping[int, float]], path: Path, caption: str) -> None:
    """Plots the share of each GPU's best rate over the number of heads. found: TFLOP/s by number of heads."""
    title = "rate over the number of heads"
    with figure(path, (6.4, 3.5), title=title, caption=caption, legend=False) as panels:
        panel = panels[0][0]
        for name, rates in found.items():
            best = max(rates.values())
            y = [100 * rate / best for rate in rates.values()]
            panel.plot(list(rates), y, "o-", color=COLOURS[name], markersize=4, linewidth=1.1, label=name)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_ylim(0, 105)
        panel.set_xlabel("heads on one GPU × samples")
        panel.set_ylabel("of the best rate, %")
        panel.legend(fontsize=9)


def draw_prices(found: Mapping[str, Sequence[Price]], tokens: Sequence[int], path: Path, caption: str) -> None:
    """Plots the GPU time lost by splitting over tp; a panel per GPU and split dimension, a line per token count."""
    title = "GPU time lost by splitting over tp"
    with figure(
        path, (_WIDE_IN, 4.8), 2, len(found), title=title, caption=caption, legend=False, sharex=True, sharey=True
    ) as panels:
        for line, (column, what) in enumerate(((True, "n split (qkv, up)"), (False, "k split (proj, down)"))):
            for panel, (name, prices) in zip(panels[line], found.items(), strict=True):
                _draw_price_panel(panel, [p for p in prices if p.column == column], tokens)
                panel.set_title(f"{name}: {what}", loc="left", fontsize=8.5)
        for panel in panels[:, 0]:
            panel.set_ylabel("GPU time lost, %")
        for panel in panels[-1]:
            panel.set_xlabel("tp")
        panels[0][0].legend(fontsize=7.5, title="tokens", title_fontsize=7.5)


def _draw_price_panel(panel: Any, prices: Sequence[Price], tokens: Sequence[int]) -> None:
    import matplotlib as mpl

    shades = mpl.colormaps["viridis"]
    for i, count in enumerate(tokens):
        own = [p for p in prices if p.tokens == count]
        y = [100 * (p.price - 1) for p in own]
        panel.plot(
            [p.tp for p in own], y, "o-", color=shades(i / len(tokens)), markersize=3.5, linewidth=1, label=count
        )
    panel.axhline(0, color="0.4", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks([p.tp for p in prices[:: len(tokens)]], [str(p.tp) for p in prices[:: len(tokens)]])


def draw_hidden_sizes(found: Mapping[int, Mapping[int, float]], divisor: int, path: Path, caption: str) -> None:
    """Plots the share of block slots in use over hidden sizes; a panel per MBS, multiples of `divisor` marked."""
    title = "share of block slots in use"
    with figure(
        path, (_WIDE_IN, 1.1 + 1.9 * len(found)), len(found), title=title, caption=caption, legend=False, sharex=True
    ) as panels:
        for (panel,), (mbs, shares) in zip(panels, found.items(), strict=True):
            panel.plot(list(shares), [100 * s for s in shares.values()], color="0.6", linewidth=0.7, zorder=1)
            divided = {hidden: share for hidden, share in shares.items() if hidden % divisor == 0}
            panel.plot(
                list(divided), [100 * s for s in divided.values()], "o", color=CLIFF_COLOUR, markersize=4,
                label=f"hidden % {divisor} = 0",
            )  # fmt: skip
            panel.set_title(f"MBS {mbs}", loc="left", fontsize=9.5)
            panel.set_ylabel("slots in use, %")
        panels[0][0].legend(fontsize=9, loc="lower right")
        panels[-1][0].set_xlabel("hidden")
