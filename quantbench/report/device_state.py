"""The report's section on the device during the run: clock, temperature, power, and drift of the reference point.

`state_section` makes the section; `page` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.report.canvas import CLIFF_COLOUR, canvas, heading, save
from quantbench.report.content import Gallery, PictureCard, Section
from quantbench.stats import median
from quantbench.store.record import Measured, Record


@dataclass(frozen=True)
class StateTrack:
    """One quantity over the run.

    minutes, values: in order of time.
    low, high: range of single samples, where several are known at a time.
    """

    name: str
    unit: str
    minutes: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def words(self) -> str:
        """`SM clock 1410 to 1980 MHz`."""
        least, most = min(self.low or self.values), max(self.high or self.values)
        if _short(least) == _short(most):
            return f"{self.name} {_short(most)} {self.unit}"
        return f"{self.name} {_short(least)} to {_short(most)} {self.unit}"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def state_tracks(records: Sequence[Record]) -> tuple[StateTrack, ...]:
    """What was recorded of the device over time; empty for an imported run."""
    timed = sorted((r for r in records if isinstance(r.outcome, Measured)), key=lambda r: r.elapsed_s)
    found = [_clocks(timed), _of_state(timed, "temperature_c", "temperature", "°C")]
    found += [_of_state(timed, "power_w", "power", "W"), _drift(timed)]
    return tuple(track for track in found if track is not None)


def _clocks(records: Sequence[Record]) -> StateTrack | None:
    minutes, values, low, high = [], [], [], []
    for record in records:
        assert isinstance(record.outcome, Measured)
        clocks = record.outcome.measurement.clocks_mhz
        if clocks:
            minutes.append(record.elapsed_s / 60)
            values.append(median(clocks))
            low.append(min(clocks))
            high.append(max(clocks))
    if not values:
        return _of_state(records, "sm_clock_mhz", "SM clock", "MHz")
    return StateTrack("SM clock", "MHz", tuple(minutes), tuple(values), tuple(low), tuple(high))


def _of_state(records: Sequence[Record], field: str, name: str, unit: str) -> StateTrack | None:
    found = []
    for record in records:
        assert isinstance(record.outcome, Measured)
        value = getattr(record.outcome.measurement.state_after, field)
        if value is not None:
            found.append((record.elapsed_s / 60, float(value)))
    return StateTrack(name, unit, *map(tuple, zip(*found, strict=True))) if found else None


def _drift(records: Sequence[Record]) -> StateTrack | None:
    """The reference point's time against its first, in percent."""
    found = []
    first_us: dict[str, float] = {}  # of each reference: a run of many devices has several
    for record in records:
        if record.role == "reference":
            assert isinstance(record.outcome, Measured)
            us = median(record.outcome.measurement.samples_us)
            found.append((record.elapsed_s / 60, us / first_us.setdefault(record.key, us)))
    if len(found) < 2:
        return None
    return StateTrack(
        "reference point", "% against its first time", tuple(minute for minute, _ in found),
        tuple(100 * (ratio - 1) for _, ratio in found),
    )  # fmt: skip


def draw_state(tracks: Sequence[StateTrack], path: Path, caption: str) -> None:
    """Write a PNG: one panel per quantity over the minutes of the run. caption: see `canvas.heading`."""
    with canvas(len(tracks), 1, 6.8, 1.0 + 1.15 * len(tracks), sharex=True) as (figure, panels):
        for (panel,), track in zip(panels, tracks, strict=True):
            if track.low:
                panel.vlines(track.minutes, track.low, track.high, color="0.7", linewidth=1)
            line = "-" if track.name == "reference point" else ""
            panel.plot(track.minutes, track.values, f"o{line}", markersize=2.5, linewidth=0.9)
            if track.name == "reference point":
                panel.axhline(0, color=CLIFF_COLOUR, linewidth=0.7)
            panel.set_title(f"{track.name}, {track.unit}", loc="left", fontsize=9)
            panel.ticklabel_format(axis="y", useOffset=False)
        panels[-1][0].set_xlabel("minutes since the run began")
        heading(figure, "the device during the run", caption)
        save(figure, path)


def state_section(records: Sequence[Record], gallery: Gallery, origin: str, caption: str) -> Section:
    """The section of the page, with a picture where anything was recorded."""
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
    return Section("state", title, words, (PictureCard("", picture),))
