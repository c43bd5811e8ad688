"""Two runs point by point: faster, slower, same or unclear.

A change is claimed where a rank test on the raw samples says that it exceeds the tolerance, after Holm's correction
over all compared points: whatever the number of points, a run held against an unchanged one gives a false claim at most
once in twenty. (Holm and not a false discovery rate, because one false regression already fails a build.) The
tolerance is the margin that does not matter in practice, or what the reference point wanders by itself if that is more.
"Same" is claimed point by point, where the 95 % interval of the ratio lies within the tolerance.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from quantbench.analysis.compare_differences import Difference, differences, obstacles
from quantbench.analysis.compare_match import Matched, match_runs
from quantbench.analysis.compare_ranks import RatioTest, figure_test, holm, rank_test
from quantbench.analysis.compare_wander import Wander, wander
from quantbench.errors import InputError
from quantbench.quantization import kernel_change_words
from quantbench.stats import CONFIDENCE, median
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Place, Record

VERDICTS = ("slower", "faster", "same", "unclear")
METHOD = (
    "Mann-Whitney rank test on the raw samples, Holm's correction over all points at 5 %; intervals are the same "
    "test's, each at 95 %"
)
FIGURES_METHOD = "single figures: log-normal test with the noise given, Holm's correction over all points at 5 %"

# Characters of a kernel's name: --json has them all.
_LONGEST_KERNEL = 10_000
# Below these numbers of samples the rank test has no 95 % interval.
_FEW = "{} against {} samples: too few for an interval"
_SINGLE = "single figures without a spread (--noise says how well one repeats)"


@dataclass(frozen=True)
class CompareOptions:
    """margin: a relative change that does not matter. by, provider_a, provider_b: see `match_runs`. noise: relative
    standard deviation of figures that come without a spread; None where it is not known. force: compare also what
    should not be compared."""

    margin: float = 0.01
    by: str = "key"
    provider_a: str = ""
    provider_b: str = ""
    noise: float | None = None
    force: bool = False

    def __post_init__(self) -> None:
        for name, value, low in (("margin", self.margin, 0.0), ("noise", self.noise, 1e-6)):
            if value is not None and not low <= value < 1:
                raise InputError("compare", f"--{name} {value!r}", "a share below 1, such as 0.01 or 1%")


@dataclass(frozen=True)
class Compared:
    """One point. ratio: b over a, above 1 is slower; low, high: its 95 % interval, None where there is none. p: after
    Holm's correction. verdict: one of VERDICTS. why: for unclear points and changed kernels, in words."""

    place: Place
    a: Record
    b: Record
    a_us: float
    b_us: float
    ratio: float
    low: float | None
    high: float | None
    p: float
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Lost:
    """A point that was measured before and fails now: a regression."""

    place: Place
    record: Record
    kind: str
    message: str


@dataclass(frozen=True)
class Comparison:
    """The result. obstacles: why these runs should not have been compared (force was given). only_a, only_b: points
    without a partner."""

    a: Run
    b: Run
    options: CompareOptions
    obstacles: tuple[str, ...]
    differences: tuple[Difference, ...]
    wander: Wander
    tolerance: float
    points: tuple[Compared, ...]
    lost: tuple[Lost, ...]
    only_a: int
    only_b: int

    @property
    def counts(self) -> dict[str, int]:
        """Points by verdict."""
        found = Counter(point.verdict for point in self.points)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def regressions(self) -> int:
        """Points that became slower or fail now."""
        return self.counts["slower"] + len(self.lost)

    @property
    def median_ratio(self) -> float:
        """The middle of all ratios: far from 1, everything moved together."""
        return median([point.ratio for point in self.points])


def compare_runs(a: Run, b: Run, options: CompareOptions | None = None) -> Comparison:
    """Hold run `b` against run `a`.

    Raises InputError for runs that must not be compared (unless forced), and for runs without a common point.
    """
    options = options or CompareOptions()
    hindrances = obstacles(a, b)
    if hindrances and not options.force:
        raise InputError("compare", "; ".join(hindrances), "runs of one device and one origin, or --force")
    matching = match_runs(a, b, options.by, options.provider_a, options.provider_b)
    if not matching.pairs and not matching.lost:
        raise InputError("compare", f"no point in common ({_why_none(a, b, options)})", _what_would_match(options))
    moved = wander(a, b, len(matching.pairs))
    tolerance = max(options.margin, moved.allowance)
    tests = [_test(pair, tolerance, options.noise) for pair in matching.pairs]
    adjusted = holm([test.p for test in tests])
    points = [_compared(*one, tolerance) for one in zip(matching.pairs, tests, adjusted, strict=True)]
    return Comparison(
        a, b, options, hindrances, differences(a, b), moved, tolerance,
        tuple(sorted(points, key=lambda p: (VERDICTS.index(p.verdict), -abs(p.ratio - 1)))),
        tuple(_lost(pair) for pair in matching.lost), len(matching.only_a), len(matching.only_b),
    )  # fmt: skip


def _samples(record: Record) -> tuple[float, ...]:
    assert isinstance(record.outcome, Measured)
    return record.outcome.measurement.samples_us


def _single(pair: Matched) -> bool:
    return len(_samples(pair.a)) == 1 or len(_samples(pair.b)) == 1


def _test(pair: Matched, tolerance: float, noise: float | None) -> RatioTest:
    a, b = _samples(pair.a), _samples(pair.b)
    if _single(pair):
        if noise is None:
            return RatioTest(median(b) / median(a), None, None, 1.0)
        return figure_test(a, b, tolerance, noise)
    return rank_test(a, b, tolerance)


def _compared(pair: Matched, test: RatioTest, p: float, tolerance: float) -> Compared:
    a, b = _samples(pair.a), _samples(pair.b)
    why = _kernel_change(pair)
    if test.low is None or test.high is None:
        verdict, why = "unclear", _SINGLE if _single(pair) else _FEW.format(len(a), len(b))
    elif p < 1 - CONFIDENCE:
        verdict = "slower" if test.ratio > 1 else "faster"
    elif 1 / (1 + tolerance) <= test.low and test.high <= 1 + tolerance:
        verdict = "same"
    else:
        verdict = "unclear"
    return Compared(
        pair.place, pair.a, pair.b, median(a), median(b), test.ratio, test.low, test.high, p, verdict, why
    )  # fmt: skip


def _kernel_change(pair: Matched) -> str:
    old, new = pair.a.launch, pair.b.launch
    if old is None or new is None or pair.a.provider != pair.b.provider or old.kernel == new.kernel:
        return ""
    return kernel_change_words(old, new, longest=_LONGEST_KERNEL)


def _lost(pair: Matched) -> Lost:
    assert isinstance(pair.b.outcome, Failed)
    return Lost(pair.place, pair.b, pair.b.outcome.kind, pair.b.outcome.message)


def _why_none(a: Run, b: Run, options: CompareOptions) -> str:
    for name, run in (("A", a), ("B", b)):
        if not any(isinstance(r.outcome, Measured) for r in run.records):
            return f"run {name} has no measured point"
        if not any(isinstance(r.outcome, Measured) and r.outcome.grade.letter != "rejected" for r in run.records):
            return f"every point of run {name} was rejected"
    timing = [d for d in differences(a, b) if d.name.startswith("timing.")]
    if options.by == "key" and timing:
        return "they are timed differently: " + ", ".join(f"{d.name[7:]} {d.a} → {d.b}" for d in timing)
    return "no workload is in both"


def _what_would_match(options: CompareOptions) -> str:
    return "runs of the same workloads" + (", provider and timing, or --by workload" if options.by == "key" else "")
