"""Tests models that are fitted to the published tables of NeuSight, DeepBench and aiter.

`published_table` formats the errors for docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from quantbench.units import percent
from tools.accuracy.contests import (
    Contest,
    Splitter,
    Table,
    at_random,
    of_groups,
    ours,
    run_contests,
    unfitted,
)
from tools.accuracy.scoring import Split
from tools.guide.markers import table as markdown
from tools.published_tables import (
    AITER,
    NEUSIGHT,
    PUBLISHED,
    SOFTMAX_GPUS,
    read_published,
    read_softmax,
)

#: NeuSight's shorter times are not judged, because a third of each or more is launch overhead
_LEAST_US = 200.0
_MOST_TESTED = 2500
_HEAD = (
    "GPU",
    "format",
    "library",
    "rows",
    "rows learned from",
    "unfitted",
    "fitted",
    "90 % interval covers",
)


def few_tested(
    table: Table, train_rows: int, seed: int, *, split: Splitter, least_us: float = 0.0
) -> Split:
    """Splits a table, and keeps at most _MOST_TESTED random test rows.

    least_us: test rows must take longer than this, microseconds.
    """
    found = split(table, train_rows, seed)
    kept = found.test[table.latency_us[found.test] > least_us]
    return Split(found.train, np.random.default_rng(seed).permutation(kept)[:_MOST_TESTED])


def cases() -> Iterator[tuple[str, Contest, int]]:
    """Yields (dtype, contest, number of train rows) for every contest on a published table."""
    random = partial(few_tested, split=at_random)
    sites = partial(few_tested, split=of_groups)
    for (gpu, dtype), source in PUBLISHED.items():
        table = read_published(gpu, dtype)
        if source is NEUSIGHT:
            long = table.latency_us > _LEAST_US
            single = table.take(long & (table.sizes["batch"] == 1))
            batched = table.take(long & (table.sizes["batch"] > 1))
            yield dtype, Contest(single, "linear, above 200 µs", random), 200
            yield dtype, Contest(batched, "batched, above 200 µs", random), 400
        elif source is AITER:
            contest = Contest(table, "held-out (n, k)", sites)
            yield dtype, contest, 200
            yield dtype, contest, len(of_groups(table, None, 0).train)
        else:
            yield dtype, Contest(table, "all", random), 100
    above = partial(random, least_us=_LEAST_US)
    for gpu in SOFTMAX_GPUS:
        softmax = read_softmax(gpu)
        yield "fp32", Contest(softmax, "softmax", random), 200
        yield "fp32", Contest(softmax, f"softmax, above {_LEAST_US:.0f} µs", above), 200


def published_table(seeds: Sequence[int], progress: Callable[[str], None]) -> str:
    """Formats the errors on the published tables as a Markdown table.

    Errors (median / mean / p95, percent) and coverage are averages over the seeds.

    progress: function that is called with a text before each fit.
    """
    rows = []
    sources = {}
    for dtype, contest, count in cases():
        bare, fit = run_contests([(contest, (unfitted(), ours(count)))], seeds, progress)
        of = contest.table.provenance
        library = f"{of['framework']} {of['framework_version']}"
        figures = (f"{count:,}", f"{bare.errors.median_pct:.0f}", str(fit.errors))
        covers = percent(fit.coverage or 0.0)
        rows.append((bare.gpu, dtype, library, contest.protocol, *figures, covers))
        sources[of["table"]] = f"- {of['table']}: {of['package']}, sha256 {of['sha256'][:12]}."
    drawn = f"Seeds: {', '.join(map(str, seeds))}."
    return "\n".join([markdown(_HEAD, rows, words=4), drawn, "", *sources.values(), ""])
