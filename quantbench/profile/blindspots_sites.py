"""The places between a measured table's rows, and what a model expects there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quantbench.profile.blindspots import FloatArray, IntArray, Site, places_between, through_rows
from quantbench.profile.blindspots_replay import Measured

#: sizes m, n, k (places,) → µs
Ask = Callable[[IntArray, IntArray, IntArray], FloatArray]


def sites_between(table: Measured, ask: Ask) -> list[Site]:
    """Each (n, k) with two rows or more: both sides of the edges between them, by a model moved through the rows.

    The model is asked once for all of them.
    """
    places = [(rows, places_between(table.m[rows])) for rows in table.sites() if len(rows) > 1]
    if not places:
        return []
    expected = ask(
        np.concatenate([m for _, m in places]),
        np.concatenate([np.full(len(m), table.n[rows[0]]) for rows, m in places]),
        np.concatenate([np.full(len(m), table.k[rows[0]]) for rows, m in places]),
    )
    sites, start = [], 0
    for rows, m in places:
        in_table = np.isin(m, table.m[rows])
        moved = through_rows(m, expected[start : start + len(m)], in_table, table.latency_us[rows])
        sites.append(Site(int(table.n[rows[0]]), int(table.k[rows[0]]), m, moved, in_table))
        start += len(m)
    return sites
