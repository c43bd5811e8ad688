"""Selects the points that a report shows (`--where`), and formats the captions of its plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from quantbench.analysis.summary import Point
from quantbench.errors import InputError, printable
from quantbench.store.record import Record
from quantbench.store.run import RunInfo
from quantbench.units import dashed

# Software that contains no kernels, although runs record its version.
_NO_LIBRARIES = ("quantbench", "python", "os", "numpy", "aiconfigurator")


def picture_caption(info: RunInfo, points: Iterable[Point | Record]) -> str:
    """Formats the caption of a plot: device, dtypes, libraries, and origin of the data.

    Example: `a100-sxm4-80gb · bf16 · sglang 0.5.10 · imported from aiconfigurator-core`.

    points: points that the plot shows.
    """
    dtypes: dict[str, None] = {}
    providers = set()
    for point in points:
        dtypes[point.workload.dtype] = None
        providers.add(point.provider)
    origin = info.origin
    if origin == "imported" and info.source:
        origin += f" from {info.source.partition(':')[0]}"
    parts = (info.device.name, ", ".join(dtypes), _libraries(info, providers), origin)
    return " · ".join(printable(part, 90) for part in parts if part)


def _libraries(info: RunInfo, providers: set[str]) -> str:
    """Returns the name and version of each library whose kernels ran, separated by commas.

    Providers other than torch and Triton are added by name. For an imported run, they are added
    only if the run's software includes no library.
    """
    unused = {*_NO_LIBRARIES}
    if not any(provider.startswith("triton") for provider in providers):
        unused.add("triton")
    found = []
    for name, version in info.software.items():
        if name not in unused and "nccl" not in name:
            found.append(f"{'cuBLAS' if name.startswith('nvidia-cublas') else name} {version}")
    if not found or info.origin != "imported":
        found += [name for name in sorted(providers) if not name.startswith(("torch", "triton"))]
    return ", ".join(found)


# Maximum number of values that an error suggests if the run lacks the requested value.
_MOST_VALUES_NAMED = 4


def parse_where(words: Iterable[str]) -> dict[str, int]:
    """Parses words such as `n=5120,k=5120` and returns the value of each axis.

    Raises InputError for a word of another form.

    >>> parse_where(["head-dim=128", "n=5120,k=4096"])
    {'head_dim': 128, 'n': 5120, 'k': 4096}
    """
    found = {}
    for word in ",".join(words).split(",") if words else ():
        name, equals, value = word.partition("=")
        if not (equals and name.strip() and re.fullmatch("[0-9]{1,19}", value.strip())):
            raise InputError("--where", repr(word), "an axis and its value, such as n=5120")
        found[name.strip().replace("-", "_")] = int(value)
    return found


def points_where(points: Sequence[Point], where: Mapping[str, int]) -> tuple[Point, ...]:
    """Returns the points that have all of the given axis values.

    where: required value of each axis.

    Raises InputError if there are no such points. The error suggests the nearest values.
    """
    left = tuple(points)
    for name, wanted in where.items():
        values = {point.axes[name] for point in left if name in point.axes}
        if wanted not in values:
            near = sorted(values, key=lambda value: abs(value - wanted))[:_MOST_VALUES_NAMED]
            axes = set().union(*(point.axes for point in points))
            expected = (
                f"an axis of the run: {', '.join(sorted(map(dashed, axes))) or 'it has none'}"
            )
            if near:
                expected = f"one of {', '.join(map(str, sorted(near)))}"
            raise InputError("--where", f"{dashed(name)}={wanted}", expected)
        left = tuple(point for point in left if point.axes.get(name) == wanted)
    return left
