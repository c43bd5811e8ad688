"""The report's section on the device during the run: clock, temperature, power, and drift of the reference point.

`state_section` makes the section; `page` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from quantbench.measurement import Measurement
from quantbench.report.canvas import CLIFF_COLOUR, canvas
from quantbench.report.content import Gallery, PictureCard, Section
from quantbench.stats import median
from quantbench.store.record import Measured, Record

_REFERENCE = "reference point"


class _Sample(NamedTuple):
    """One quantity at one time of the run. low, high: range of single samples."""

    minute: float
    value: float
    low: float
    high: float


def _state(field: str) -> Callable[[Measurement], Sequence[float]]:
    """Reads a field of the device's state after a measurement; empty where it is not known."""
    return lambda measurement: [v] if (v := getattr(measurement.state_after, field)) is not None else []


def _tracks(records: Sequence[Record]) -> dict[tuple[str, str], list[_Sample]]:
    """What was recorded of the device over time, by name and unit; empty for an imported run."""
    timed = sorted((r for r in records if isinstance(r.outcome, Measured)), key=lambda r: r.elapsed_s)

    def track(read: Callable[[Measurement], Sequence[float]]) -> list[_Sample]:
        read_at = [(r.elapsed_s / 60, read(r.outcome.measurement)) for r in timed if isinstance(r.outcome, Measured)]
        return [_Sample(minute, median(found), min(found), max(found)) for minute, found in read_at if found]

    found = {
        ("SM clock", "MHz"): track(lambda m: m.clocks_mhz) or track(_state("sm_clock_mhz")),
        ("temperature", "°C"): track(_state("temperature_c")),
        ("power", "W"): track(_state("power_w")),
        (_REFERENCE, "% against its first time"): _drift(timed),
    }
    return {name: samples for name, samples in found.items() if samples}


def _drift(records: Sequence[Record]) -> list[_Sample]:
    """The reference point's time against its first, in percent; empty where it was measured once."""
    found = []
    first_us: dict[str, float] = {}  # of each reference: a run of many devices has several
    for record in records:
        if record.role == "reference" and isinstance(record.outcome, Measured):
            us = median(record.outcome.measurement.samples_us)
            drift = 100 * (us / first_us.setdefault(record.key, us) - 1)
            found.append(_Sample(record.elapsed_s / 60, drift, drift, drift))
    return found if len(found) > 1 else []


def _range_words(name: str, unit: str, samples: Sequence[_Sample]) -> str:
    """`SM clock 1410 to 1980 MHz`."""
    extremes = (min(sample.low for sample in samples), max(sample.high for sample in samples))
    least, most = (f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" for value in extremes)
    return f"{name} {most} {unit}" if least == most else f"{name} {least} to {most} {unit}"


def _draw(tracks: dict[tuple[str, str], list[_Sample]], path: Path, caption: str) -> None:
    """Write a PNG: one panel per quantity over the minutes of the run. caption: see `canvas.canvas`."""
    size_in, title = (6.8, 1.0 + 1.15 * len(tracks)), "the device during the run"
    with canvas(path, size_in, len(tracks), title=title, caption=caption, sharex=True) as panels:
        for (panel,), ((name, unit), samples) in zip(panels, tracks.items(), strict=True):
            minutes, values, low, high = zip(*samples, strict=True)
            if low != high:
                panel.vlines(minutes, low, high, color="0.7", linewidth=1)
            panel.plot(minutes, values, "o-" if name == _REFERENCE else "o", markersize=2.5, linewidth=0.9)
            if name == _REFERENCE:
                panel.axhline(0, color=CLIFF_COLOUR, linewidth=0.7)
            panel.set_title(f"{name}, {unit}", loc="left", fontsize=9)
            panel.ticklabel_format(axis="y", useOffset=False)
        panels[-1][0].set_xlabel("minutes since the run began")


def state_section(records: Sequence[Record], gallery: Gallery, origin: str, caption: str) -> Section:
    """The section of the page, with a picture where anything was recorded at several times."""
    title = "The device during the run"
    tracks = _tracks(records)
    if not tracks:
        why = "imported figures come without it" if origin == "imported" else "this device does not tell"
        return Section("state", title, f"Clock, temperature, power and drift are not known: {why}.")
    words = "; ".join(_range_words(*name, samples) for name, samples in tracks.items())
    if len({sample.minute for samples in tracks.values() for sample in samples}) < 2:
        return Section("state", title, words)
    path = gallery.path("device-state")
    _draw(tracks, path, caption)
    picture = gallery.picture(path, "clock, temperature, power and drift over the minutes of the run")
    return Section("state", title, words, (PictureCard("", picture),))
