"""Merges several runs of one device into one run, with `merge_runs`.

The merged run has one record per point, and all repetitions of the reference points.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, StoreError, first_repeated
from quantbench.measurement import GRADES
from quantbench.store.differences import differences
from quantbench.store.folder import Run, RunWriter
from quantbench.store.record import Failed, Measured, Record, Skipped
from quantbench.store.run import RunInfo
from quantbench.units import counted


@dataclass(frozen=True)
class Merged:
    """A merged run.

    repeated: number of records that were dropped because another record of the same point was kept.
    notes: messages on tolerated differences between the runs, and on parts of a sharded plan that
        no run measured.
    """

    info: RunInfo
    records: tuple[Record, ...]
    repeated: int
    notes: tuple[str, ...]


def merge_runs(runs: Sequence[Run], run_id: str = "", *, force: bool = False) -> Merged:
    """Merges two or more runs.

    If several runs have a point, the measurement with the best grade is kept. If grades are equal,
    the measurement of the run that started first is kept. A measurement is preferred to a failure,
    and a failure to a skipped point. The merged run counts elapsed times from the start of the
    first run.

    run_id: id of the merged run; "" for `<first run's id>-merged`.
    force: whether to merge runs that differ in device, software or origin. The notes name the
        differences.

    Raises InputError if there are fewer than two runs, or if two runs share a record. Without
    `force`, raises InputError if the runs differ in device, software or origin.
    """
    if len(runs) < 2:
        raise InputError("merge", counted(len(runs), "run"), "two or more")
    runs = sorted(runs, key=lambda run: run.info.started)
    measured: set[tuple[object, ...]] = set()
    for run in runs:
        started = (run.info.run_id, run.info.started)
        own = {(*started, record.key, record.elapsed_s) for record in run.records}
        if own & measured:
            raise InputError("merge", f"records of {run.folder} twice", "each run once")
        measured |= own
    first = runs[0].info
    serious: list[str] = []
    for run in runs[1:]:
        serious += _differences(runs[0], run, "device", "origin", "software")
    if serious and not force:
        what = serious[0]
        if len(serious) > 1:
            what += f" (and {len(serious) - 1} more differences)"
        raise InputError("merge", what, "runs of one device with one software, or --force")
    run_id = run_id or f"{first.run_id}-merged"
    points: dict[tuple[str, str], Record] = {}
    others: list[Record] = []
    repeated = 0
    for run, label in zip(runs, _labels(runs), strict=True):
        later_s = _seconds_between(first.started, run.info.started)
        for record in run.records:
            record = replace(
                record,
                run_id=run_id,
                source=record.source or label,
                elapsed_s=record.elapsed_s + later_s,
            )
            # An imported table may contain several kernels for one workload. Each kernel is a
            # separate point.
            kernel = ""
            if record.launch is not None and record.origin == "imported":
                kernel = record.launch.kernel
            name = (record.key, kernel)
            if record.role != "point":
                others.append(record)
            elif name in points:
                repeated += 1
                points[name] = _better(points[name], record)
            else:
                points[name] = record
    infos = [run.info for run in runs]
    options, missing = _options(infos)
    how_ended = "complete"
    endings = {info.how_ended for info in infos} - {"complete"}
    if endings or missing:
        how_ended = "budget" if endings == {"budget"} else "interrupted"
    phases_s: Counter[str] = Counter()
    axes: dict[str, list[int]] = {}
    for info in infos:
        phases_s.update(info.phases_s)
        for dim, values in info.axes.items():
            axes[dim] = sorted({*axes.get(dim, ()), *values})
    info = replace(
        first,
        run_id=run_id,
        axes=axes,
        options=options,
        ended=max((info.ended for info in infos if info.ended), default=None),
        how_ended=how_ended,
        phases_s=dict(sorted(phases_s.items())),
    )
    records = sorted([*points.values(), *others], key=lambda record: record.elapsed_s)
    notes = (*serious, *missing, *_tolerated(runs))
    return Merged(info, tuple(records), repeated, notes)


def _better(one: Record, other: Record) -> Record:
    """Returns the better of two records of a point.

    The result has the `places` (positions in a sweep) of both records.
    """
    places = {}
    for place in (*one.places, *other.places):
        places[place.op, *sorted(place.axes.items())] = place
    return replace(min(one, other, key=_rank), places=tuple(places.values()))


def write_merged(results: Path, merged: Merged) -> Path:
    """Writes a merged run to `results/<device>/<run-id>/`, and returns this folder.

    Raises StoreError if the folder exists.
    """
    with RunWriter.create(results, merged.info) as writer:
        writer.extend(merged.records)
    return writer.folder


def _differences(first: Run, other: Run, *kinds: str) -> list[str]:
    """Returns the differences between two runs' metadata as messages.

    kinds: kinds of differences to return, as in `Difference.kind`.
    """
    found = []
    for one in differences(first, other):
        # The operating system does not affect times, and tables from different sources may be
        # merged.
        if one.kind in kinds and one.name not in ("os", "source"):
            found.append(f"{other.info.run_id} against {first.info.run_id}: {one}")
    return found


def _labels(runs: Sequence[Run]) -> list[str]:
    """Returns a label for each run, to be the source of its records in the merged run.

    A label is the run's id or, for a run with --shard, the number of its part of the plan. If two
    labels are equal, because the runs started in the same second, all labels are the runs' folders.
    """
    labels = []
    for run in runs:
        label = f"run {run.info.run_id}"
        if shard := _shard(run.info):
            label = "part {} of {}".format(*shard)
        labels.append(label)
    if first_repeated(labels) is not None:
        return [str(run.folder) for run in runs]
    return labels


def _shard(info: RunInfo) -> tuple[int, int] | None:
    """Returns (part, number of parts) of a run that measured a part of a plan, otherwise None."""
    match info.options.get("shard"):
        case [int(part), int(parts)] if 1 <= part <= parts:
            return part, parts
    return None


def _rank(record: Record) -> tuple[int, int]:
    """Returns a sort key: measurements by grade, best first; then failures; then skipped points."""
    match record.outcome:
        case Measured(_, grade):
            return 0, GRADES.index(grade.letter)
        case Failed():
            return 1, 0
        case Skipped():
            return 2, 0


def _options(infos: Sequence[RunInfo]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options of the merged run, and messages on missing parts of the plan.

    If the runs measured parts of one plan, the options are those of the whole plan, with the sum of
    all parts' budgets. If the runs have different options, the result contains only the runs' ids,
    because there is no single plan to resume.
    """
    bare = [dict(info.options) for info in infos]
    for options in bare:
        options.pop("shard", None)
    if any(options != bare[0] for options in bare):
        return {"merged": [info.run_id for info in infos]}, []
    shards = [shard for shard in map(_shard, infos) if shard is not None]
    if len(shards) < len(infos) or len({parts for _, parts in shards}) != 1:
        return dict(infos[0].options), []
    parts = shards[0][1]
    missing = sorted(set(range(1, parts + 1)) - {part for part, _ in shards})
    notes = [f"part {part} of {parts} is missing" for part in missing]
    budget_s = bare[0].get("budget_s")
    if isinstance(budget_s, int | float):
        budget_s *= parts
    return bare[0] | {"shard": [], "budget_s": budget_s}, notes


def _tolerated(runs: Sequence[Run]) -> list[str]:
    """Returns messages on problems that do not prevent a merge without `force`.

    They are defects in the runs' records, different environment variables, and incomplete runs.
    """
    notes: list[str] = []
    for run in runs:
        notes += run.warnings
    for run in runs[1:]:
        notes += _differences(runs[0], run, "environment")
    for run in runs:
        if run.info.how_ended != "complete":
            notes.append(f"{run.info.run_id} is {run.info.how_ended}")
    return notes


def _seconds_between(start: str, later: str) -> float:
    """Returns the seconds between two start times from run.json.

    Raises StoreError if one of them is not a time in ISO 8601.
    """
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        raise StoreError(
            "merge", f"started = {later!r} and {start!r}", "times in ISO 8601"
        ) from None
