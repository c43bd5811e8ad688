"""Active sampling: measure a few shapes at random, then those that the fitted model is least sure of, in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.stats import median
from quantbench.store.record import Measured, Record
from quantbench.sweep.plan import Group, Plan, PlanPoint
from quantbench.workload import Gemm

# A fifth at random tells the model the range; what remains comes in so many rounds, each with a fit of a few seconds.
_FIRST_SHARE = 0.2
_ROUNDS = 4
_FEWEST_FIRST = 10


def first_points(plan: Plan, total: int) -> Plan:
    """The part of a plan that an adaptive sweep of `total` points begins with (the plan is in random order already)."""
    return replace(plan, groups=tuple(Group((point,)) for point in plan.points[: _first_count(total)]))


def _first_count(total: int) -> int:
    return min(total, max(_FEWEST_FIRST, round(total * _FIRST_SHARE)))


@dataclass(frozen=True)
class LeastSure:
    """The `more` of an adaptive sweep: picks from the candidates until `total` points have been tried.

    candidates: products of one provider, dtype and layout, without batches, as the model knows them.
    """

    candidates: tuple[PlanPoint, ...]
    spec: DeviceSpec
    total: int
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = {(p.provider, p.workload.dtype, isinstance(p.workload, Gemm)) for p in self.candidates}
        if len(kinds) != 1 or not next(iter(kinds))[2]:
            raise InputError("--adaptive", f"{len(kinds)} kinds of points", "products of one provider and dtype")
        if any(isinstance(p.workload, Gemm) and p.workload.batch > 1 for p in self.candidates):
            raise InputError("--adaptive", "batched products", "products without batches")

    def __call__(self, records: Sequence[Record]) -> Sequence[PlanPoint]:
        """The next round, in the order to measure it; nothing once enough points were tried."""
        import numpy as np

        from quantbench.latency.gemm.cliffs import next_points
        from quantbench.latency.gemm.model import GemmModel

        tried = {r.key for r in records if r.role == "point"}
        left = [p for p in self.candidates if p.key not in tried]
        count = min(self.total - len(tried), len(left), self._round_size())
        if count <= 0:
            return ()
        known = [(_sizes(r.workload), us, r.launch) for r in records if (us := _time_us(r)) is not None]
        sizes = np.array([shape for shape, _, _ in known], dtype=np.int64).reshape(-1, 3)
        model = GemmModel.fit(
            self.spec,
            sizes[:, 0],
            sizes[:, 1],
            sizes[:, 2],
            np.array([us for _, us, _ in known]),
            dtype=self.candidates[0].workload.dtype,
            launches=[launch for _, _, launch in known],
            seed=self.seed,
        )
        shapes = np.array([_sizes(p.workload) for p in left], dtype=np.int64)
        chosen = next_points(model, (shapes[:, 0], shapes[:, 1], shapes[:, 2]), count)
        return [left[i] for i in chosen]

    def _round_size(self) -> int:
        return max(1, -(-(self.total - _first_count(self.total)) // _ROUNDS))


def _time_us(record: Record) -> float | None:
    """Median of a measured point; None for what a model must not learn from."""
    outcome = record.outcome
    if record.role != "point" or not isinstance(outcome, Measured) or outcome.grade.letter == "rejected":
        return None
    return median(outcome.measurement.samples_us)


def _sizes(workload: object) -> tuple[int, int, int]:
    assert isinstance(workload, Gemm)
    return (workload.m, workload.n, workload.k)
