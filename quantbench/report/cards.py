"""The parts of a report that are pictures: curves with their cliffs, maps, the device, jumps over many shapes."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from quantbench.analysis.curves import Curve
from quantbench.analysis.periods import Period
from quantbench.analysis.summary import Point, Row, op_order
from quantbench.analysis.tiles import Family, TileOf, tile_finder
from quantbench.device.spec import DeviceSpec
from quantbench.report.content import Card, KernelLabel, Picture, Section, Table
from quantbench.report.device_state import draw_state, state_tracks
from quantbench.report.heat_map import draw_heat_map, heat_maps
from quantbench.report.marks import Mark, place_key
from quantbench.report.op_figure import MOST_NUMBERED, draw_op, kernel_colours, kernel_label
from quantbench.report.series import typical
from quantbench.report.step_spread import draw_step_spreads, step_spreads
from quantbench.report.words import printable
from quantbench.store.record import Record
from quantbench.units import percent

# Curves in one picture, and pictures for one axis (the ops that take most time).
_MOST_CURVES = 4
_MOST_OPS = 12
_MOST_KERNELS = 10
#: what a picture of these points names: see `source.picture_caption`
Caption = Callable[[Sequence[Point]], str]
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Gallery:
    """Names the pictures of one report, draws each into its folder and embeds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def path(self, *parts: str) -> Path:
        """A file of its own for a picture; parts may hold anything."""
        name = "report-" + "-".join(filter(None, (_NO_NAME.sub("-", part).strip("-.")[:40] for part in parts)))
        taken = {path.name for path in self.files}
        number = next(i for i in range(1, len(taken) + 2) if self._numbered(name, i) not in taken)
        path = self.folder / self._numbered(name, number)
        self.files.append(path)
        return path

    @staticmethod
    def _numbered(name: str, number: int) -> str:
        return f"{name}.png" if number == 1 else f"{name}-{number}.png"

    def picture(self, path: Path, alt: str) -> Picture:
        """The drawn file as part of the page."""
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        return Picture(path.name, f"data:image/png;base64,{data}", alt)


def axis_section(
    axis: str,
    every: Sequence[Curve],
    marks: Sequence[Mark],
    spec: DeviceSpec,
    periods: Sequence[Period],
    gallery: Gallery,
    caption: Caption,
) -> Section | None:
    """Curves of each op along one axis; None where nothing varies along it. every: all curves along the axis."""
    if not every:
        return None
    name = axis.replace("_", "-")
    curves, still = _that_vary(every)
    spent: dict[str, float] = {}
    for curve in curves:
        spent[curve.op] = spent.get(curve.op, 0.0) + sum(p.latency_us * p.count for p in curve.points)
    ops = sorted(sorted(spent, key=lambda op: -spent[op])[:_MOST_OPS], key=op_order)
    note = f"the {len(ops)} of {len(spent)} ops that take most time" if len(spent) > len(ops) else ""
    if still:
        note += f"{'; ' if note else ''}{', '.join(still)}: the same product at every {name}"
    cards = [
        _op_card(axis, op, [c for c in curves if c.op == op], marks, spec, tile_finder(spec, periods), gallery, caption)
        for op in ops
    ]
    return Section(f"axis-{_NO_NAME.sub('-', axis)}", f"Efficiency over {name}", note, tuple(cards))


def _that_vary(curves: Sequence[Curve]) -> tuple[list[Curve], list[str]]:
    """Curves of several products, each once where another axis makes no difference to them; and the ops that are one
    product all along the axis."""
    found: dict[tuple[str, ...], Curve] = {}
    for curve in curves:
        keys = tuple(point.key for point in curve.points)
        if len(set(keys)) > 1:
            found.setdefault((curve.op, *keys), curve)
    vary = {curve.op for curve in found.values()}
    return list(found.values()), sorted({curve.op for curve in curves} - vary, key=op_order)


def _op_card(
    axis: str,
    op: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    spec: DeviceSpec,
    tile_of: Callable[[Family], TileOf],
    gallery: Gallery,
    caption: Caption,
) -> Card:
    drawn = typical(curves, _MOST_CURVES)
    points = [point for curve in drawn for point in curve.points]
    there = {place_key(point) for point in points}
    own = sorted((m for m in marks if m.axis == axis and place_key(m.after) in there), key=lambda m: -m.ratio)
    chosen = sorted(own[:MOST_NUMBERED], key=lambda m: m.after.axes[axis])
    numbered = list(enumerate(chosen, start=1))
    colours = kernel_colours(points)
    path = gallery.path(axis, op)
    title = f"{op} over {axis.replace('_', '-')}"
    draw_op(drawn, numbered, colours, spec, path, title=title, caption=caption(points), tile_of=tile_of)
    note = "" if len(drawn) == len(curves) else f"{len(drawn)} of {len(curves)} curves, from smaller to larger work"
    if len(own) > len(chosen):
        note += f"{'; ' if note else ''}the {len(chosen)} largest of {len(own)} cliffs are numbered"
    return Card(
        "", gallery.picture(path, f"share of peak of {op} over {axis}, measured, with {len(own)} cliffs"), note,
        cliffs_table(numbered, axis), _kernels(points, colours),
    )  # fmt: skip


def cliffs_table(numbered: Sequence[tuple[int, Mark]], axis: str) -> Table | None:
    """What the numbers in a picture stand for."""
    if not numbered:
        return None
    rows = []
    for number, mark in numbered:
        place = f"{mark.before.axes[axis]} → {mark.after.axes[axis]}"
        held = " ".join(f"{name}={value}" for name, value in mark.held.items())
        rows.append((str(number), f"{place} {held}".strip(), _cost(mark), printable(mark.cause)))
    return Table(("#", axis.replace("_", "-"), "time", "cause"), tuple(rows))


def _cost(mark: Mark) -> str:
    """`+31 % (30 % to 32 %)`."""
    return f"+{percent(mark.ratio - 1)} ({percent(mark.low - 1)} to {percent(mark.high - 1)})"


def _kernels(points: Sequence[Point], colours: dict[str, str]) -> tuple[KernelLabel, ...]:
    found = {p.launch.kernel: p.launch for p in points if p.launch is not None}
    labels = [KernelLabel(colours[name], printable(kernel_label(launch), 40), printable(name, 120))
              for name, launch in found.items()]  # fmt: skip
    if len(labels) > _MOST_KERNELS:
        more = f"{len(labels) - _MOST_KERNELS} more kernels"
        return (*labels[:_MOST_KERNELS], KernelLabel("transparent", more, more))
    return tuple(labels)


def maps_section(rows: Sequence[Row], axes: Sequence[str], gallery: Gallery, caption: Caption) -> Section | None:
    """Share of peak over two axes at once; None for a run of one axis."""
    cards = []
    for heat in heat_maps(rows, axes):
        path = gallery.path("map", heat.x_axis, heat.y_axis)
        draw_heat_map(heat, path, caption([point for row in heat.rows for point in row.points]))
        x, y = heat.x_axis.replace("_", "-"), heat.y_axis.replace("_", "-")
        cards.append(Card(f"Share of peak over {x} and {y}", gallery.picture(path, f"heat map over {x} and {y}")))
    return Section("maps", "Heat maps over two sizes", cards=tuple(cards)) if cards else None


def spread_card(curves: Sequence[Curve], axis: str, gallery: Gallery, caption: str) -> Card | None:
    """The jumps between neighbouring sizes over all shapes, which are `curves` along the axis; None where there are too
    few shapes or no neighbours."""
    spreads = step_spreads(curves)
    if not spreads:
        return None
    path = gallery.path("jumps", axis)
    draw_step_spreads(spreads, axis, path, caption)
    shapes = max(s.curves for s in spreads)
    name = axis.replace("_", "-")
    title = f"Jumps between neighbouring values of {name}, over {shapes} shapes"
    return Card(title, gallery.picture(path, f"jump of the time per work at each step of {name}"))


def state_section(records: Sequence[Record], gallery: Gallery, origin: str, caption: str) -> Section:
    """Clock, temperature, power and drift through the run."""
    title = "The device during the run"
    tracks = state_tracks(records)
    if not tracks:
        why = "imported figures come without it" if origin == "imported" else "this device does not tell"
        return Section("state", title, f"Clock, temperature, power and drift are not known: {why}.")
    words = "; ".join(track.words for track in tracks)
    if len({minute for track in tracks for minute in track.minutes}) < 2:
        return Section("state", title, words)
    path = gallery.path("device-state")
    draw_state(tracks, path, caption)
    picture = gallery.picture(path, "clock, temperature, power and drift over the minutes of the run")
    return Section("state", title, words, (Card("", picture),))
