"""Runs put together: every point once, the better measurement of it, nothing mixed that must not
be.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import refused, run_json
from commands import run as run_command
from made_runs import SPEC, measurement, record, reference, run, samples, write

from quantbench.cli.sweep_options import SweepArguments, sweep_options
from quantbench.cluster.merge import merge_runs
from quantbench.errors import InputError
from quantbench.launch import Launch
from quantbench.measurement import Grade
from quantbench.store.folder import Run, read_run
from quantbench.store.record import Failed, Measured, Record, Skipped
from quantbench.sweep.axes import Held
from quantbench.sweep.options import SweepOptions, options_from_json, options_to_json, plan_sweep
from quantbench.workload import Gemm

OPTIONS = SweepOptions(
    dims=("n=1024:2048:64",), held=Held(m=1024, k=1024), providers=("torch.mm",), budget_s=60.0
)


def point(n: int, us: float = 100.0, grade: str = "A", **changes: object) -> Record:
    reasons = () if grade == "A" else ("made",)
    timed = measurement(samples(us, noise=0.002, count=12, seed=n))
    outcome = Measured(timed, Grade(grade, reasons))
    return record(Gemm(1024, n, 1024), outcome, {"n": n}, **changes)


def run_of(number: int, records: list[Record], **changes: object) -> Run:
    started = f"2026-11-20T13:{40 + number}:00+00:00"
    ended = f"2026-11-20T13:{50 + number}:00+00:00"
    return run(records, f"part-{number}", started=started, ended=ended, **changes)


def two_runs(**changes: object) -> list[Run]:
    """Two runs of one point each. changes: what is different in the second."""
    return [run_of(1, [point(64)]), run_of(2, [point(128)], **changes)]


def test_every_point_of_all_runs_is_there_once() -> None:
    merged = merge_runs(
        [run_of(1, [point(64), point(128)]), run_of(2, [point(192), reference(50.0, 3.0)])]
    )
    assert [(r.role, r.workload.n) for r in merged.records] == [  # type: ignore[union-attr]
        ("point", 64), ("point", 128), ("point", 192), ("reference", 2048),
    ]  # fmt: skip
    assert merged.info.run_id == "part-1-merged"
    assert {r.run_id for r in merged.records} == {"part-1-merged"}
    assert [r.source for r in merged.records] == ["run part-1"] * 2 + ["run part-2"] * 2
    assert merged.info.axes == {"n": [64, 128, 192]}
    assert (merged.info.started, merged.info.ended) == (
        "2026-11-20T13:41:00+00:00",
        "2026-11-20T13:52:00+00:00",
    )
    assert merged.repeated == 0
    assert merged.notes == ()


def test_time_goes_on_from_run_to_run() -> None:
    late = run_of(3, [replace(point(64), elapsed_s=5.0)])
    merged = merge_runs([late, run_of(1, [replace(point(128), elapsed_s=7.0)])])
    assert [r.elapsed_s for r in merged.records] == [7.0, 125.0]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (point(64, grade="C"), point(64, 200.0, grade="A"), "A"),
        (point(64, grade="B"), point(64, 200.0, grade="D"), "B"),
        (point(64, grade="D"), replace(point(64), outcome=Failed("crash", "x")), "D"),
        (replace(point(64), outcome=Skipped("x")), point(64, grade="rejected"), "rejected"),
    ],
)
def test_of_a_point_measured_twice_the_better_trusted_one_stands(
    first: Record, second: Record, kept: str
) -> None:
    for order in ([first, second], [second, first]):
        merged = merge_runs([run_of(number, [one]) for number, one in enumerate(order)])
        (only,) = merged.records
        assert only.outcome.grade.letter == kept
        assert merged.repeated == 1


def test_of_two_as_good_the_earlier_stands_and_both_places_are_kept() -> None:
    one, two = point(64, 100.0), replace(point(64, 200.0), places=point(128).places)
    (only,) = merge_runs([run_of(2, [two]), run_of(1, [one])]).records
    assert only.outcome.measurement.samples_us[0] == pytest.approx(100.0, rel=0.02)
    assert [place.axes for place in only.places] == [{"n": 64}, {"n": 128}]


def test_kernels_of_a_foreign_table_stay_apart() -> None:
    one, two = (
        point(64, launch=Launch(name), origin="imported", source="a table")
        for name in ("cublas", "flashinfer")
    )
    merged = merge_runs([run_of(1, [one, two]), run_of(2, [two])])
    assert len(merged.records) == 2
    assert merged.repeated == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"device": replace(SPEC, name="h100-test")},
            "part-2 against part-1: device: device a100-test → h100-test",
        ),
        (
            {"device": replace(SPEC, sm_count=104)},
            "part-2 against part-1: device: sm_count 108 → 104",
        ),
        (
            {"software": {"torch": "2.12.0"}},
            "part-2 against part-1: software: torch 2.11.0 → 2.12.0",
        ),
        (
            {"software": {"torch": "2.11.0", "triton": "3.6"}},
            "part-2 against part-1: software: triton absent → 3.6",
        ),
        (
            {"origin": "measured"},
            "part-2 against part-1: origin: origin simulated → measured and simulated",
        ),
    ],
)
def test_what_must_not_be_mixed_is_refused_unless_told(
    changes: dict[str, object], message: str
) -> None:
    runs = two_runs(**changes)
    with pytest.raises(InputError) as caught:
        merge_runs(runs)
    assert (
        str(caught.value)
        == f"merge: {message}; expected runs of one device with one software, or --force"
    )
    assert message in merge_runs(runs, force=True).notes


def test_machines_that_differ_in_their_kernel_alone_are_merged() -> None:
    runs = [
        run_of(n, [point(64 * n)], software={"torch": "2.11.0", "os": f"Linux-6.{n}"})
        for n in (1, 2)
    ]
    assert merge_runs(runs).notes == ()


def test_one_run_alone_and_one_run_twice_are_refused() -> None:
    one = run_of(1, [point(64)])
    with pytest.raises(InputError, match=r"^merge: 1 run; expected two or more"):
        merge_runs([one])
    with pytest.raises(
        InputError, match=r"^merge: records of part-1 twice; expected each run once"
    ):
        merge_runs([one, one])


def shard(part: int, parts: int, **changes: object) -> Run:
    options = replace(OPTIONS, shard=(part, parts))
    _, plan = plan_sweep(options, SPEC)
    records = [
        replace(point(p.workload.n), key=p.key, workload=p.workload, places=p.places)  # type: ignore[union-attr]
        for p in plan.points
    ]
    return run_of(part, records, options=options_to_json(options), **changes)


def test_the_parts_of_a_plan_are_disjoint_and_make_the_whole() -> None:
    whole = {p.key for p in plan_sweep(OPTIONS, SPEC)[1].points}
    parts = [{r.key for r in shard(part, 4).records} for part in (1, 2, 3, 4)]
    assert sum(map(len, parts)) == len(whole)
    assert set().union(*parts) == whole
    assert (
        max(map(len, parts)) - min(map(len, parts)) <= 2
    )  # both sides of an edge stay in one part


def test_parts_share_their_reference_point() -> None:
    plans = [plan_sweep(replace(OPTIONS, shard=(part, 4)), SPEC)[1] for part in (1, 2, 3, 4)]
    assert len({plan.reference.key for plan in plans if plan.reference is not None}) == 1


def test_tasks_that_began_in_the_same_second_are_told_apart() -> None:
    merged = merge_runs(
        [replace(shard(part, 4), folder=Path(f"parts/{part}/run")) for part in (1, 2, 3, 4)]
    )
    assert {r.source for r in merged.records} == {f"part {part} of 4" for part in (1, 2, 3, 4)}
    again = [replace(run_of(1, [point(64 * n)]), folder=Path(f"parts/{n}/run")) for n in (1, 2)]
    assert {r.source for r in merge_runs(again).records} == {"parts/1/run", "parts/2/run"}


def test_a_merged_run_can_be_resumed_with_the_whole_plan() -> None:
    merged = merge_runs([shard(part, 4) for part in (1, 3, 4)])
    assert merged.notes == ("part 2 of 4 is missing",)
    assert merged.info.how_ended == "interrupted"
    options = options_from_json(merged.info.options)
    plan = plan_sweep(options, SPEC)[1]
    assert {p.key for p in plan.points} - {r.key for r in merged.records} == {
        r.key for r in shard(2, 4).records
    }
    whole = merge_runs([shard(part, 4) for part in (1, 2, 3, 4)])
    assert whole.info.how_ended == "complete"


@pytest.mark.parametrize(
    ("endings", "merged"),
    [
        (("complete", "complete"), "complete"),
        (("complete", "budget"), "budget"),
        (("budget", "interrupted"), "interrupted"),
        (("running", "complete"), "interrupted"),
    ],
)
def test_how_a_merged_run_ended(endings: tuple[str, str], merged: str) -> None:
    runs = [run_of(n, [point(64 * (n + 1))], how_ended=how) for n, how in enumerate(endings)]
    found = merge_runs(runs)
    assert found.info.how_ended == merged
    assert len(found.notes) == sum(how != "complete" for how in endings)


def test_other_variables_are_told() -> None:
    assert merge_runs(two_runs(environment={"CUDA_LAUNCH_BLOCKING": "1"})).notes == (
        "part-2 against part-1: environment: CUDA_LAUNCH_BLOCKING absent → 1",
    )


@pytest.mark.slow
def test_the_command_writes_one_run_and_names_slow_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for number, us in enumerate((50.0, 50.1, 56.0)):
        records = [point(64 * (number + 1)), *(reference(us, 10.0 * i) for i in range(6))]
        folders.append(write(tmp_path / "parts", run_of(number, records)))
    monkeypatch.chdir(tmp_path)
    words = f"merge {' '.join(map(str, folders))} -o results"
    assert run_command(words).splitlines() == [
        "3 runs of a100-test, 3 points",
        "run part-2 is 12 % slower, clock 1410 of 1410 MHz",
        "kept in results/a100-test/part-0-merged/",
        "Next: quantbench check results/a100-test/part-0-merged",
    ]
    assert len(read_run(tmp_path / "results" / "a100-test" / "part-0-merged").records) == 21
    assert refused(words).expected.startswith("a new run id")
    assert run_json(f"{words} --run-id all")["points"] == 3


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "/4", "2/", "-1/4", "1/0", "²/4"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--shard: .*; expected PART/PARTS"):
        sweep_options(SweepArguments(dim=["n"], shard=text), "cpu")


def test_a_part_of_a_plan_is_asked_for_by_its_number() -> None:
    assert sweep_options(SweepArguments(dim=["n"], shard="2/8"), "cpu").shard == (2, 8)
    with pytest.raises(InputError, match=r"^sweep: --shard with --refine"):
        sweep_options(SweepArguments(dim=["n"], shard="2/8", refine=True), "cpu")


def test_more_parts_than_points_are_refused() -> None:
    with pytest.raises(InputError, match=r"^--shard: 99/99; expected at most 10 parts"):
        plan_sweep(replace(OPTIONS, shard=(99, 99)), SPEC)


def reference_at(elapsed_s: float) -> Record:
    return replace(point(64), role="reference", places=(), elapsed_s=elapsed_s)


def test_a_run_and_its_copy_are_refused() -> None:
    one = run_of(1, [point(64), reference_at(1.0), point(128)])
    copy = replace(one, folder=Path("copy"), records=(*one.records[:2], point(192)))
    with pytest.raises(InputError, match=r"^merge: records of copy twice; expected each run once"):
        merge_runs([one, run_of(2, [point(256)]), copy])
