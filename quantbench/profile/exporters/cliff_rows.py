"""Both sides of every known cliff as rows: a consumer that draws straight lines needs them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quantbench.errors import UnsupportedError
from quantbench.profile.blindspots import choose, sites_between, sorted_table
from quantbench.profile.exporters.modelled import GemmTimes, moved_through
from quantbench.profile.exporters.options import Exported
from quantbench.profile.parts import KnownCliff
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Gemm

#: rows beside the measured ones are marked by this in the place of a kernel
MARK = "quantbench_model_at_cliff"
BETWEEN = "quantbench_model_between"


def known_cliff_rows(profile: Profile, table: Table, out: Exported) -> list[tuple[int, int, int, float, str, str]]:
    """(m, n, k, µs, dtype, mark) of rows that `table` (products of one provider and layout) lacks.

    A cliff of one curve has its two workloads, which were measured: nothing is missing there unless they are of other
    rows than the table's. A cliff of many curves along m stands at each (n, k) whose rows reach past it.
    """
    own = _Rows(table)
    wanted = {key for cliff in profile.cliffs for key in own.sides(cliff) if key not in own.have}
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
            site = table.where((table["n"] == n) & (table["k"] == k) & (table["dtype"] == dtype))
            m = np.array(sorted(key[0] for key in wanted if key[1:] == (n, k, dtype)), dtype=np.int64)
            found += [
                (int(x), n, k, float(us), dtype, MARK)
                for x, us in zip(m, moved_through(times, m, n, k, site["m"], site["latency_us"]), strict=True)
            ]
    if found:
        out.notes.append(f"{len(found):,} rows on both sides of known cliffs are modelled (kernel_source {MARK})")
    return found


def rows_between(
    profile: Profile, table: Table, bound: float, have: set[tuple[int, int, int, str]], out: Exported
) -> list[tuple[int, int, int, float, str, str]]:
    """(m, n, k, µs, dtype, mark) of modelled rows between the table's, so many that straight lines stay within `bound`
    of what the model, moved through the rows, expects. have: (m, n, k, dtype) of rows that are there already."""
    found = []
    for dtype in sorted(set(table["dtype"].tolist())):
        own = table.where(table["dtype"] == dtype)
        times = GemmTimes(profile, dtype)
        sites = sites_between(sorted_table(own["m"], own["n"], own["k"], own["latency_us"]), times.latency_us)
        picked = choose(sites, bound, "max")
        for site, added in zip(picked.sites, picked.added, strict=True):
            rows = zip(site.m[added].tolist(), site.expected_us[added].tolist(), strict=True)
            found += [
                (m, site.n, site.k, us, dtype, BETWEEN) for m, us in rows if (m, site.n, site.k, dtype) not in have
            ]
    out.notes.append(f"{len(found):,} rows between measured ones are modelled (kernel_source {BETWEEN})")
    return found


class _Rows:
    """A table's rows: have: (m, n, k, dtype) of each."""

    def __init__(self, table: Table) -> None:
        self.have: set[tuple[int, int, int, str]] = set()
        #: whose rows: (provider, variant as cliffs name it) → (n, k, dtype) → smallest and largest m
        self._reach: dict[tuple[str, str], dict[tuple[int, int, str], tuple[int, int]]] = {}
        for row in table.rows():
            m, site = row["m"], (row["n"], row["k"], row["dtype"])
            self.have.add((m, *site))
            sites = self._reach.setdefault((row["provider"], f"gemm {row['dtype']} {row['layout']}"), {})
            low, high = sites.get(site, (m, m))
            sites[site] = (min(low, m), max(high, m))

    def sides(self, cliff: KnownCliff) -> Iterator[tuple[int, int, int, str]]:
        """(m, n, k, dtype) on both sides of a cliff, where it is one of the rows' provider, layout and dtype."""
        sites = self._reach.get((cliff.provider, cliff.variant))
        if sites is None:
            return
        for work in (cliff.before, cliff.after):
            if isinstance(work, Gemm) and work.batch == 1:
                yield work.m, work.n, work.k, work.dtype
        if cliff.before is not None or cliff.axis != "m":
            return
        for (n, k, dtype), (low, high) in sites.items():
            if low <= cliff.at and cliff.next <= high:
                yield cliff.at, n, k, dtype
                yield cliff.next, n, k, dtype
