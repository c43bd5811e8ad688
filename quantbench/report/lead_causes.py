"""Why a size is bad: the cause of the cliff that lies between it and the better one, else the arithmetic of the tile.

Nothing is said from a tile that is merely assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.analysis.blocks import tile_in_use
from quantbench.analysis.cliffs import Cliff
from quantbench.analysis.curves import variant_of
from quantbench.analysis.explain import idle_reasons
from quantbench.analysis.neighbours import BadSize
from quantbench.analysis.periods import Period
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch
from quantbench.report.words import printable

_Curve = tuple[str, str, str, tuple[tuple[str, int], ...]]


class Causes:
    """Looks causes up among the cliffs of a run."""

    def __init__(self, spec: DeviceSpec, cliffs: Sequence[Cliff], periods: Sequence[Period]) -> None:
        self._spec = spec
        self._tiles = {period.family: _launch(period) for period in periods}
        self._cliffs: dict[_Curve, list[Cliff]] = {}
        for cliff in cliffs:
            held = tuple(sorted(cliff.held.items()))
            self._cliffs.setdefault((cliff.axis, cliff.op, cliff.provider, held), []).append(cliff)

    def words(self, bad: BadSize) -> str:
        """The cause in words, with the op where there are several."""
        cliff = self._told_by(bad)
        cause = cliff.cause.words if cliff is not None else self._arithmetic(bad)
        return f"{bad.culprit.op}: {cause}" if len(bad.row.points) > 1 else cause

    def kind(self, bad: BadSize) -> str:
        """The cause without its figures, so that shapes can be counted together."""
        cliff = self._told_by(bad)
        return cliff.cause.kind if cliff is not None else _kind(self._arithmetic(bad))

    def _told_by(self, bad: BadSize) -> Cliff | None:
        """The cliff in between whose cause is known; None where it was worked out from a tile that is only assumed."""
        cliff = self._between(bad)
        if cliff is None or cliff.cause.kind not in ("tile edge", "wave edge"):
            return cliff
        return None if cliff.cause.evidence == "arithmetic" and self._known(cliff.after) is None else cliff

    def _between(self, bad: BadSize) -> Cliff | None:
        """The largest cliff of the op that loses most, between the two sizes."""
        culprit = bad.culprit
        held = tuple(sorted((name, value) for name, value in culprit.axes.items() if name != bad.axis))
        there = self._cliffs.get((bad.axis, culprit.op, culprit.provider, held), ())
        low, high = sorted((bad.better.axes[bad.axis], bad.size))
        between = [c for c in there if low <= c.at < high and c.after.workload.dtype == culprit.workload.dtype]
        return max(between, key=lambda c: c.ratio, default=None)

    def _arithmetic(self, bad: BadSize) -> str:
        old, new = bad.culprit_at_better.launch, bad.culprit.launch
        if old is not None and new is not None and old.kernel != new.kernel:
            if old.tile is not None and new.tile is not None and old.tile != new.tile:
                return f"the library changed from {old.tile} to {new.tile}"
            return f"the library changed kernel ({printable(old.kernel, 40)} to {printable(new.kernel, 40)})"
        old, new = self._known(bad.culprit_at_better), self._known(bad.culprit)
        if old is None or new is None:
            return "unexplained"
        before = self._idle(bad.culprit_at_better, old)
        fresh = [reason for reason in self._idle(bad.culprit, new) if reason not in before]
        return fresh[0] if fresh else "unexplained"

    def _idle(self, point: Point, launch: Launch) -> tuple[str, ...]:
        used = tile_in_use(self._spec, point.workload.dtype, launch)
        return idle_reasons(point.workload, self._spec, used, point.peak_share)

    def _known(self, point: Point) -> Launch | None:
        """The launch with its tile: as it ran, or as the steps of the whole run tell it."""
        if point.launch is not None and point.launch.tile is not None:
            return point.launch
        return self._tiles.get((point.op, point.provider, variant_of(point.workload)))


def _launch(period: Period) -> Launch | None:
    """The tile that surely explains the steps of a family; None where none does."""
    if not period.clear or period.chosen is None:
        return None
    return Launch(period.tile_words, tile=period.chosen.tile, blocks_per_sm=period.chosen.per_sm(period.sm_count))


def _kind(cause: str) -> str:
    if cause.startswith("wave "):
        return "wave edge"
    if "pads to" in cause:
        return "tile edge"
    if " blocks for " in cause:
        return "fewer blocks than SMs"
    if cause.startswith("rows are aligned"):
        return "alignment"
    return "kernel change" if cause.startswith("the library") else cause
