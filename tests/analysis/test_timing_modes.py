"""Points of different timing modes are never compared, and the floor of short times is published
with them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run as run_command
from simulator import RUN_ID, SimulatedGpu, along, records_of, run_of, write_simulated

from quantbench.analysis.check import check_run, fit_all
from quantbench.analysis.compare import compare_runs
from quantbench.analysis.curves import repeatability
from quantbench.analysis.jumps import find_gaps, jumps_of
from quantbench.analysis.neighbours import bad_sizes_on, curves_of_rows
from quantbench.analysis.rules import RULES
from quantbench.analysis.summary import floor_lines, points_of, rows_of
from quantbench.cli.sweep_print import result
from quantbench.launch import Tile
from quantbench.report.page import write_report
from quantbench.store.folder import read_run
from quantbench.store.record import Record
from quantbench.sweep.options import SweepOptions, options_to_json
from quantbench.sweep.runner import Finished
from quantbench.workload import Gemm

# Blocks share the SMs without waves, and all sizes are whole tiles: the time is smooth, 12 to 40
# µs.
GPU = SimulatedGpu(100, Tile(128, 128), tile_ns_per_k=4.0, overhead_us=8.0, fluid_share=1.0)
SIZES = range(1024, 9216, 128)
GEMMS = along("n", SIZES, Gemm(1024, 1, 1024))
OFFSET_US = 2.0


def timed_as(
    record: Record, mode: str, *, offset_us: float = 0.0, floor_us: float | None = None
) -> Record:
    measurement = record.outcome.measurement
    samples_us = tuple(us + offset_us for us in measurement.samples_us)
    changed = replace(measurement, samples_us=samples_us, mode=mode, floor_us=floor_us)
    return replace(record, outcome=replace(record.outcome, measurement=changed))


def mixed(records: Sequence[Record], below_us: float = 20.0) -> list[Record]:
    """Points below as means of a graph, the others by events, which take 2 µs more."""
    long = [np.median(r.outcome.measurement.samples_us) >= below_us for r in records]  # type: ignore[union-attr]
    return [
        timed_as(record, "events", offset_us=OFFSET_US) if by_events else timed_as(record, "graph")
        for record, by_events in zip(records, long, strict=True)
    ]


@pytest.mark.parametrize("origin", ["simulated", "imported"])
def test_no_cliff_is_reported_between_points_of_different_modes(origin: str) -> None:
    records = [
        replace(r, origin=origin, source="x")
        for r in mixed(records_of(GPU, GEMMS, noise=0.003, seed=1))
    ]
    modes = [r.outcome.measurement.mode for r in records]  # type: ignore[union-attr]
    assert 5 < modes.index("events") < len(modes) - 5
    found = check_run(run_of(GPU, records), rules=RULES)
    assert (found.cliffs, found.falls, found.common) == ((), (), ())
    assert [len({p.mode for p in curve.points}) for curve in found.curves["n"]] == [1, 1]
    assert (
        find_gaps(jumps_of(fit_all(points_of(records, GPU.spec()), repeatability(records)))) == ()
    )
    # Were the modes not known, the step would be there.
    unknown = [timed_as(record, "unknown") for record in records]
    (step,) = check_run(run_of(GPU, unknown), rules=()).cliffs
    assert step.before.latency_us < 20 < step.after.latency_us


def test_a_cliff_within_a_mode_is_found_beside_another_mode() -> None:
    records = mixed(records_of(GPU, GEMMS, noise=0.003, seed=2))
    slow = [
        record if record.workload.n <= 6144 else timed_as(record, "events", offset_us=4.0)  # type: ignore[union-attr]
        for record in records
    ]
    (cliff,) = check_run(run_of(GPU, slow), rules=()).cliffs
    assert (cliff.at, cliff.next) == (6144, 6272)


def test_a_size_is_not_called_bad_because_of_its_mode() -> None:
    # One size in the middle of a sweep by graphs was timed by events, twice as long.
    records = records_of(GPU, GEMMS, noise=0.003, seed=3)
    records = [timed_as(r, "graph") for r in records[:20]] + [
        timed_as(records[20], "events", offset_us=20.0)
    ]
    points = points_of(records, GPU.spec())
    alike = [replace(point, mode="graph") for point in points]
    mixed, same = (
        bad_sizes_on(curves_of_rows(rows_of(each), "n"), "n") for each in (points, alike)
    )
    assert mixed == ()
    assert same != ()


# ---- the floor


def point_of(us: float, mode: str = "events", floor_us: float | None = 1.8) -> tuple[float, object]:
    (record,) = records_of(GPU, GEMMS[:1], noise=0.0, seed=0)
    (point,) = points_of([timed_as(record, mode, floor_us=floor_us)], GPU.spec())
    return us, point


def test_the_floor_is_given_by_mode_and_only_for_short_times() -> None:
    assert floor_lines([point_of(60.0), point_of(900.0)]) == []  # type: ignore[list-item]
    assert floor_lines([point_of(6.0, floor_us=None)]) == []  # type: ignore[list-item]
    several = [
        point_of(6.0),
        point_of(49.0, floor_us=2.1),
        point_of(8.0, "graph", 1.2),
        point_of(70.0, floor_us=9.0),
    ]
    (line,) = floor_lines(several)  # type: ignore[arg-type]
    events, graph = "1.80 µs to 2.10 µs (empty kernel, events)", "1.20 µs (empty kernel, graph)"
    assert line == f"times under 50 µs include a floor of {events} or {graph}"


def test_the_floor_stands_in_the_outputs_of_all_commands_that_show_times(tmp_path: Path) -> None:
    records = [
        timed_as(r, "events", floor_us=1.8) for r in records_of(GPU, GEMMS, noise=0.003, seed=4)
    ]
    folder = write_simulated(tmp_path, GPU, records)
    other = write_simulated(tmp_path, GPU, records, f"{RUN_ID}-b")
    line = "times under 50 µs include a floor of 1.80 µs (empty kernel, events)"
    for words in (f"check {folder}", f"compare {folder} {other}"):
        assert line in " ".join(run_command(words).split())
    run = read_run(folder)
    info = replace(run.info, options=options_to_json(SweepOptions(("n=1024:9216:128",))))
    lines, answer = result(replace(run, info=info), Finished("complete"), 1.0)
    assert line in lines
    assert {row["floor_us"] for row in answer["rows"]} == {1.8}
    page = write_report(run, tmp_path / "page").page.read_text()
    assert page.count(line) == 1  # below the first picture


def test_times_of_different_modes_are_not_called_slower() -> None:
    records = records_of(GPU, GEMMS[:20], noise=0.003, seed=6)
    modes = {"graph": 0.0, "events": OFFSET_US, "unknown": OFFSET_US}
    made = {mode: [timed_as(r, mode, offset_us=us) for r in records] for mode, us in modes.items()}
    runs = {mode: run_of(GPU, own, mode) for mode, own in made.items()}
    mixed_up = compare_runs(runs["graph"], runs["events"])
    assert mixed_up.counts == {"slower": 0, "faster": 0, "same": 0, "unclear": 20}
    assert "mode graph in A and events in B" in mixed_up.points[0].why
    assert compare_runs(runs["graph"], runs["unknown"]).counts["slower"] == 20
