"""From the texts of `--dim` to a grid of axes on a device: ranges that nobody typed, and points beside edges."""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.device.spec import DeviceSpec
from quantbench.sweep.axes import Axis, parse_axis
from quantbench.sweep.edges import with_edges
from quantbench.sweep.shapes import DEFAULT_VALUES, Held, check_axes


@dataclass(frozen=True)
class Grid:
    """Axes with their edges among their values. loose: some of these nobody typed (the range is a default, or edges
    were added), so that sizes that cannot be are left out instead of refused."""

    axes: tuple[Axis, ...]
    loose: bool


def parse_grid(dims: tuple[str, ...], held: Held, spec: DeviceSpec, who: str = "sweep") -> Grid:
    """The grid of `dims`, each `hidden` or `hidden=1024:4096`. held: its defaults filled in; who: the command whose
    words these are, for its errors."""
    axes = []
    defaulted = False
    for text in dims:
        dim, given, values = text.partition("=")
        if not given and dim in DEFAULT_VALUES[spec.kind]:
            values, defaulted = DEFAULT_VALUES[spec.kind][dim], True
        axes.append(parse_axis(f"{dim}={values}"))
    check_axes(tuple(axes), who)
    edged = with_edges(tuple(axes), held, spec)
    check_axes(edged, who)
    return Grid(edged, defaulted or any(axis.edges for axis in axes))
