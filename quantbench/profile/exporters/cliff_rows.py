"""Both sides of every known cliff as rows: a consumer that draws straight lines needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quantbench.errors import UnsupportedError
from quantbench.profile.exporters.modelled import GemmTimes, moved_through
from quantbench.profile.exporters.options import Exported
from quantbench.profile.parts import KnownCliff
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Gemm

#: rows beside the measured ones are marked by this in the place of a kernel
MARK = "quantbench_model_at_cliff"


def known_cliff_rows(profile: Profile, table: Table, out: Exported) -> list[tuple[int, int, int, float, str, str]]:
    """(m, n, k, µs, dtype, mark) of rows that `table` (products of one provider and layout) lacks.

    A cliff of one curve has its two workloads, which were measured: nothing is missing there unless they are of other
    rows than the table's. A cliff of many curves along m stands at each (n, k) whose rows reach past it.
    """
    have = {(r["m"], r["n"], r["k"], r["dtype"]) for r in table.rows()}
    wanted = {key for cliff in profile.cliffs for key in _sides(cliff, table) if key not in have}
    if not wanted:
        return []
    found = []
    for dtype in sorted({key[3] for key in wanted}):
        try:
            times = GemmTimes(profile, dtype)
        except UnsupportedError as error:
            out.notes.append(f"both sides of cliffs that were not measured are left out: {error}")
            continue
        for n, k in sorted({key[1:3] for key in wanted if key[3] == dtype}):
            own = table.where((table["n"] == n) & (table["k"] == k) & (table["dtype"] == dtype))
            m = np.array(sorted(key[0] for key in wanted if key[1:] == (n, k, dtype)), dtype=np.int64)
            found += [
                (int(x), n, k, float(us), dtype, MARK)
                for x, us in zip(m, moved_through(times, m, n, k, own["m"], own["latency_us"]), strict=True)
            ]
    if found:
        out.notes.append(f"{len(found):,} rows on both sides of known cliffs are modelled (kernel_source {MARK})")
    return found


def _sides(cliff: KnownCliff, table: Table) -> Iterator[tuple[int, int, int, str]]:
    """(m, n, k, dtype) on both sides of a cliff, where it is one of the table's provider, layout and a dtype of its."""
    rows = [r for r in table.rows() if _is_of(cliff, r)]
    if not rows:
        return
    for work in (cliff.before, cliff.after):
        if isinstance(work, Gemm) and work.batch == 1:
            yield work.m, work.n, work.k, work.dtype
    if cliff.before is not None or cliff.axis != "m":
        return
    sites: dict[tuple[int, int, str], list[int]] = {}
    for row in rows:
        sites.setdefault((row["n"], row["k"], row["dtype"]), []).append(row["m"])
    for (n, k, dtype), sizes in sites.items():
        if min(sizes) <= cliff.at and cliff.next <= max(sizes):
            yield cliff.at, n, k, dtype
            yield cliff.next, n, k, dtype


def _is_of(cliff: KnownCliff, row: dict[str, Any]) -> bool:
    return cliff.provider == row["provider"] and cliff.variant == f"gemm {row['dtype']} {row['layout']}"
