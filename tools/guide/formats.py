"""Builds the table of docs/choosing-shapes.md on number formats and libraries: what one row more costs, and where most.

Entry points: `formats_table`, used by `tools.guide.__main__`; `FormatSteps` and `steps_of`, the figures of one table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantbench.latency.libraries import libraries_of
from quantbench.latency.scoring import cliff_pairs
from quantbench.latency.tables import GemmTable
from quantbench.stats import median
from quantbench.units import percent
from tools.accuracy.tables import read_packaged
from tools.guide.markers import table
from tools.guide.rules import Effect, effect_of, words

#: devices and formats of the table, with every library that was measured
GPUS = {
    "a100-sxm4-80gb": "A100", "h100-sxm5-80gb": "H100", "h200-sxm-141gb": "H200", "l40s-48gb": "L40S",
    "b200-sxm-180gb": "B200",
}  # fmt: skip
FORMATS = ("bf16", "fp8", "fp8_block", "nvfp4")
#: largest step that is no cliff, as in docs/accuracy.md
_CLIFF = 0.10
_PAST = (128, 256)
_FEWEST = 1000


@dataclass(frozen=True)
class FormatSteps:
    """Cost of one more row in one table, from m = 128 on, for n and k of at least 1024.

    past: effect of being one past 128, one past 256, and one past a larger measured m.
    worst: the m after which one row more costs most, and its median cost.
    cliffs: share of all steps above 10 %.
    """

    past: tuple[Effect | None, ...]
    worst: tuple[int, float]
    cliffs: float


def steps_of(found: GemmTable) -> FormatSteps | None:
    """Computes the steps of a table; None if it has hardly any m and m + 1."""
    low, high = cliff_pairs(found.m, found.n, found.k)
    ratios = found.latency_us[high] / found.latency_us[low]
    m = found.m[low]
    even = m % 2 == 0  # from an even m to an odd one
    m, ratios = m[even], ratios[even]
    if len(m) < _FEWEST:
        return None
    past = [effect_of(ratios[m == size].tolist()) for size in _PAST]
    past.append(effect_of(ratios[m > max(_PAST)].tolist()))
    by_m = {int(size): median(ratios[m == size].tolist()) - 1 for size in np.unique(m)}
    worst = max(by_m, key=lambda size: by_m[size])
    return FormatSteps(tuple(past), (worst, by_m[worst]), float(np.mean(ratios > 1 + _CLIFF)))


def formats_table() -> str:
    """Formats one row per GPU, format and library. Needs the extra `tables`."""
    rows = []
    for slug, name in GPUS.items():
        for dtype in FORMATS:
            for library in libraries_of(slug, dtype):
                found = steps_of(read_packaged(slug, dtype=dtype, library=library))
                if found is None:
                    continue
                size, cost = found.worst
                most = f"{size} → {size + 1}: {percent(cost)}"
                rows.append([name, dtype, library, *map(words, found.past), most, percent(found.cliffs)])
    head = ["GPU", "format", "library", "one past 128", "one past 256", "one past more", "most", "steps over 10 %"]
    return table(head, rows, numeric=False)
