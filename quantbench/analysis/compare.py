"""Compares two runs point by point and classifies each point as slower, faster, same or unclear.

A point is slower or faster if a rank test on its samples finds a change of the time larger than the
tolerance. The tolerance is the user's margin, or a larger allowance that covers the noise of the
reference points. One false regression fails a build, so Holm's correction limits the probability of
any false finding over all points. A point is the same only if the whole 95 % interval of its time
ratio lies within the margin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import hypot

from quantbench.analysis.significance import RatioTest, Wander, holm, rank_test, wander
from quantbench.analysis.summary import is_accepted
from quantbench.errors import InputError, require_choice
from quantbench.measurement import Measurement
from quantbench.quantization import kernel_change_words
from quantbench.stats import CONFIDENCE, median
from quantbench.store.differences import Difference, differences, origins_of
from quantbench.store.folder import Run
from quantbench.store.record import Failed, GridPosition, Measured, Record, Skipped


def obstacles(a: Run, b: Run) -> tuple[str, ...]:
    """Returns the reasons why two runs must not be compared; empty if there are none.

    Runs must be of the same device, and of the same origin (measured, simulated or imported).
    """
    found = []
    if a.info.device.name != b.info.device.name:
        found.append(f"different devices, {a.info.device.name} and {b.info.device.name}")
    if origins_of(a) != origins_of(b):
        found.append(f"{origins_of(a)} figures against {origins_of(b)} ones")
    return tuple(found)


MATCHES = ("key", "workload")


@dataclass(frozen=True)
class Matched:
    """Two records of the same workload, one from run a and one from run b.

    place: first grid point of the workload in run b, or in run a if run b has none.
    workload: description of the workload.
    keys, providers: keys and providers of the two records, a first.
    a, b: the two records.
    """

    place: GridPosition
    workload: str
    keys: tuple[str, str]
    providers: tuple[str, str]
    a: Record = field(repr=False)
    b: Record = field(repr=False)


def _matched_pair(a: Record, b: Record) -> Matched:
    """Combines two records of one workload into a pair."""
    place = next(iter((*b.places, *a.places)), GridPosition({}, b.workload.kind))
    return Matched(place, str(b.workload), (a.key, b.key), (a.provider, b.provider), a, b)


_Key = tuple[object, ...]


def _matched_points(
    a: Run, b: Run, options: CompareOptions
) -> tuple[tuple[Matched, ...], tuple[Matched, ...], int, int]:
    """Matches the points of two runs.

    Returns four values:
    - the points measured in both runs;
    - the points measured in a that failed in b;
    - the number of points measured only in a;
    - the number of points measured only in b.

    A measurement that was rejected as impossible counts as not measured.
    """
    ours, theirs = _same_kernels_apart(
        _side(a, options.by, options.provider_a, "A"), _side(b, options.by, options.provider_b, "B")
    )
    pairs = []
    lost = []
    only_a = 0
    for key, record in ours.items():
        other = theirs.get(key)
        if not _counts(record):
            continue
        if other is not None and _counts(other):
            pairs.append(_matched_pair(record, other))
        elif other is not None and isinstance(other.outcome, Failed):
            lost.append(_matched_pair(record, other))
        else:
            only_a += 1
    only_b = sum(map(_counts, theirs.values())) - len(pairs)
    return tuple(pairs), tuple(lost), only_a, only_b


def _counts(record: Record) -> bool:
    """Returns whether a record has a measurement that was not rejected."""
    return is_accepted(record.outcome)


def _side(run: Run, by: str, provider: str, name: str) -> dict[_Key, list[Record]]:
    """Groups the points of one run by key or by workload.

    by: `key` or `workload` (see `CompareOptions`).
    provider: provider whose points are used; "" for all providers.
    name: `A` or `B`, for error messages.

    Raises InputError if the run has no point of the provider. With `workload`, also raises
    InputError if several providers ran the same workload.
    """
    option = f"--provider-{name.lower()}"
    found: dict[_Key, list[Record]] = defaultdict(list)
    for record in run.records:
        if record.role == "point" and provider in ("", record.provider):
            found[(record.key if by == "key" else record.workload,)].append(record)
    if provider and not found:
        there = ", ".join(sorted({record.provider for record in run.records})) or "nothing"
        raise InputError("compare", f"{option} {provider}", f"one of run {name}'s: {there}")
    for records in found.values() if by == "workload" else ():
        # A provider that skipped the workload does not count.
        providers = {one.provider for one in records if not isinstance(one.outcome, Skipped)}
        if len(providers) > 1:
            several = ", ".join(sorted(providers))
            what = f"run {name} has {several} for {records[0].workload}"
            raise InputError("compare", what, f"{option} with one of them")
    return found


def _same_kernels_apart(
    a: dict[_Key, list[Record]], b: dict[_Key, list[Record]]
) -> tuple[dict[_Key, Record], dict[_Key, Record]]:
    """Returns one record per key for each run.

    If a key has several measured records in either run, the kernel name becomes part of the key.
    An imported table with one row per kernel has such keys. A record without a usable measurement
    is used only if no record of the same key has a usable measurement.
    """
    several = set()
    for key, records in (*a.items(), *b.items()):
        if sum(map(_counts, records)) > 1:
            several.add(key)
    return _one_each(a, several), _one_each(b, several)


def _one_each(side: dict[_Key, list[Record]], several: set[_Key]) -> dict[_Key, Record]:
    """Returns the first record of each key, or of each kernel for the keys in `several`.

    In the second case the kernel name is appended to the key. Records with a usable measurement
    come first.
    """
    found: dict[_Key, Record] = {}
    for key, records in side.items():
        for record in [*filter(_counts, records)] or records[:1]:
            kernel = record.launch.kernel if record.launch else ""
            found.setdefault((*key, kernel) if key in several else key, record)
    return found


CHANGES = ("slower", "faster", "same", "unclear")
METHOD = (
    "Mann-Whitney rank test on the raw samples, Holm's correction over all points at 5 %; "
    "intervals are the same test's, each at 95 %; what the SM clock may explain is no change"
)

# Maximum length in characters of a kernel name in `Compared.why`; longer names are cut.
_LONGEST_KERNEL = 10_000
_MODES = "timed in mode {} in A and {} in B, which differ by the time between events and kernel"
# The rank test has no 95 % interval for so few samples.
_FEW = "{} against {} samples: too few for an interval"
_SINGLE = "single figures without a spread"


@dataclass(frozen=True)
class CompareOptions:
    """Options of `compare_runs`.

    margin: largest relative change of the time that does not matter to the user.
    by: how points are matched: by `key` (same workload, provider and timing options) or by
        `workload` (any provider and timing options).
    provider_a, provider_b: provider whose points are used from run a or from run b; default all
        providers. With `workload`, it is required if several providers ran the same workload.
    force: whether to compare runs even if they are of different devices or origins.
    """

    margin: float = 0.01
    by: str = "key"
    provider_a: str = ""
    provider_b: str = ""
    force: bool = False

    def __post_init__(self) -> None:
        require_choice("compare", "by", self.by, MATCHES)
        if not 0 <= self.margin < 1:
            raise InputError(
                "compare", f"--margin {self.margin!r}", "a share below 1, such as 0.01 or 1%"
            )


@dataclass(frozen=True)
class Compared(Matched):
    """One point measured in both runs.

    a_us, b_us: median time in each run, in µs.
    ratio: time in b over time in a; above 1 if b is slower.
    low, high: 95 % interval of the ratio; None if there are too few samples.
    p: p-value of the test for a change beyond the tolerance, after Holm's correction.
    change: one of CHANGES.
    why: why the times cannot be compared, why there is no interval, or how the kernel changed;
        empty if none of these applies.
    """

    a_us: float
    b_us: float
    ratio: float
    low: float | None
    high: float | None
    p: float
    change: str
    why: str = ""

    @property
    def times(self) -> tuple[tuple[float, Measurement], ...]:
        """Median time in µs and measurement of run a, then of run b."""
        return (self.a_us, _measurement(self.a)), (self.b_us, _measurement(self.b))


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_runs`.

    obstacles: reasons against comparing these runs, which `options.force` has overridden.
    differences: differences between the environments and settings of the runs.
    wander: noise and drift of the reference points.
    tolerance: relative change that is ignored: the margin, or `wander.allowance` if that is larger.
    points: compared points in the order of CHANGES, and within a class by decreasing change.
    lost: points that were measured in a and failed in b. They count as regressions.
    only_a, only_b: number of points that were measured only in run a and only in run b.
    """

    a: Run = field(repr=False)
    b: Run = field(repr=False)
    options: CompareOptions
    obstacles: tuple[str, ...]
    differences: tuple[Difference, ...]
    wander: Wander
    tolerance: float
    points: tuple[Compared, ...]
    lost: tuple[Matched, ...]
    only_a: int
    only_b: int

    @property
    def counts(self) -> dict[str, int]:
        """Number of compared points in each class of CHANGES."""
        found = Counter(point.change for point in self.points)
        return {change: found[change] for change in CHANGES}

    @property
    def regressions(self) -> int:
        """Number of points that are slower in b or failed there."""
        return self.counts["slower"] + len(self.lost)

    @property
    def median_ratio(self) -> float:
        """Median time ratio b / a over all compared points.

        A median far from 1 suggests that the whole device became slower or faster.
        """
        return median([point.ratio for point in self.points])


def compare_runs(a: Run, b: Run, options: CompareOptions | None = None) -> Comparison:
    """Compares run `b` with run `a`, the baseline.

    Raises InputError if the runs have no point in common. Also raises InputError if the runs must
    not be compared (see `obstacles`) and `options.force` is not set.
    """
    options = options or CompareOptions()
    hindrances = obstacles(a, b)
    if hindrances and not options.force:
        raise InputError(
            "compare", "; ".join(hindrances), "runs of one device and one origin, or --force"
        )
    pairs, lost, only_a, only_b = _matched_points(a, b, options)
    if not pairs and not lost:
        expected = "runs of the same workloads"
        if options.by == "key":
            expected += ", provider and timing, or --by workload"
        raise InputError("compare", f"no point in common ({_why_none(a, b, options)})", expected)
    moved = wander(a, b, len(pairs))
    tolerance = max(options.margin, moved.allowance)
    tests = [_test(pair, tolerance) for pair in pairs]
    adjusted = holm([test.p for test in tests])
    points = map(_compared, pairs, tests, adjusted, repeat(options.margin))
    return Comparison(
        a,
        b,
        options,
        hindrances,
        differences(a, b),
        moved,
        tolerance,
        tuple(sorted(points, key=lambda p: (CHANGES.index(p.change), -abs(p.ratio - 1)))),
        lost,
        only_a,
        only_b,
    )


def _measurement(record: Record) -> Measurement:
    """Returns the measurement of a record whose workload was measured."""
    assert isinstance(record.outcome, Measured)
    return record.outcome.measurement


def _test(pair: Matched, tolerance: float) -> RatioTest:
    """Tests whether the times of one point changed by more than the tolerance.

    Nor does a change count that the SM clocks of the two visits may explain (`stated.Stated`). If a
    run has a single time for the point, the result is a ratio without an interval.
    """
    a = _measurement(pair.a)
    b = _measurement(pair.b)
    if min(len(a.samples_us), len(b.samples_us)) > 1:
        by_clock = hypot(a.stated.clock, b.stated.clock)
        return rank_test(a.samples_us, b.samples_us, max(tolerance, by_clock))
    return RatioTest(b.stated.latency_us / a.stated.latency_us, None, None, 1.0)


def _compared(pair: Matched, test: RatioTest, p: float, margin: float) -> Compared:
    """Classifies one point.

    p: p-value of the test, after Holm's correction.
    margin: largest relative change of the time that does not matter.
    """
    a = _measurement(pair.a)
    b = _measurement(pair.b)
    change = "unclear"
    why = _kernel_change(pair)
    if a.mode != b.mode and "unknown" not in (a.mode, b.mode):
        why = _MODES.format(a.mode, b.mode)
    elif test.low is None or test.high is None:
        samples = (len(a.samples_us), len(b.samples_us))
        why = _SINGLE if min(samples) == 1 else _FEW.format(*samples)
    elif p < 1 - CONFIDENCE:
        change = "slower" if test.ratio > 1 else "faster"
    elif 1 / (1 + margin) <= test.low and test.high <= 1 + margin:
        change = "same"
    return Compared(
        **vars(pair),
        a_us=a.stated.latency_us,
        b_us=b.stated.latency_us,
        **vars(replace(test, p=p)),
        change=change,
        why=why,
    )


def _kernel_change(pair: Matched) -> str:
    """Describes how the kernel changed between the runs.

    The text is empty if the kernel is the same, if a kernel is unknown, or if the providers differ.
    """
    old, new = pair.a.launch, pair.b.launch
    if old is None or new is None or pair.a.provider != pair.b.provider or old.kernel == new.kernel:
        return ""
    return kernel_change_words(old, new, longest=_LONGEST_KERNEL)


def _why_none(a: Run, b: Run, options: CompareOptions) -> str:
    """Returns the reason why two runs have no point in common."""
    for name, run, provider in (("A", a, options.provider_a), ("B", b, options.provider_b)):
        records = [r for r in run.records if r.provider == (provider or r.provider)]
        if any(map(_counts, records)):
            continue
        of_provider = f" of {provider}" if provider else ""
        if any(isinstance(record.outcome, Measured) for record in records):
            return f"every point{of_provider} of run {name} was rejected"
        return f"run {name} has no measured point{of_provider}"
    timing = []
    for one in differences(a, b):
        if options.by == "key" and one.name.startswith("timing."):
            timing.append(f"{one.name.removeprefix('timing.')} {one.a} → {one.b}")
    if timing:
        return f"they are timed differently: {', '.join(timing)}"
    works_a = {record.workload for record in a.records if record.role == "point"}
    works_b = {record.workload for record in b.records if record.role == "point"}
    if options.by == "key" and works_a & works_b:
        return "the same workloads by other providers"
    return "no workload is in both"
