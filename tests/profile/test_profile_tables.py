"""From runs to tables: one row per workload and provider, runs that do not belong together
refused.
"""

from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import made_profiles as made
import made_runs
import numpy as np
import pytest

from quantbench.device.spec import PEAK_MARGIN
from quantbench.errors import InputError
from quantbench.measurement import Grade
from quantbench.profile import Profile, Table
from quantbench.profile.build import tables_of
from quantbench.profile.sources import SIZES, roofline_parts
from quantbench.profile.table import LAYOUTS
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Record, Skipped
from quantbench.timing.grade import grade
from quantbench.workload import Attention, Collective, Gemm, Softmax, Workload

WORKS: tuple[Workload, ...] = (
    Gemm(100, 200, 300, batch=4, dtype="fp8", layout="tn"), Gemm(1, 1, 1, dtype="int8"), Gemm(64, 64, 64),
    Softmax(8, 128, 128), Softmax(8, 128, 64, mask="none", direction="backward", dtype="fp32"),
    Attention(2, 8, 64, 64, 32, 2), Attention(2, 8, 1, 64, 32, causal=False, direction="backward"),
    Collective("all_reduce", 1 << 20, 8, num_nodes=2),
)  # fmt: skip


def table(kind: str, works: tuple[Workload, ...], us: float = 1e4) -> Table:
    records = [
        made_runs.record(work, (us,), {"n": i}) for i, work in enumerate(works) if work.kind == kind
    ]
    return tables_of([made.run(records)])[0][kind]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_tables_rows_are_the_workloads_again(kind: str) -> None:
    works = [work for work in WORKS if work.kind == kind]
    found = table(kind, WORKS)
    assert set(found.workloads()) == set(works)
    assert list(found.columns) == list(LAYOUTS[kind].names)


@pytest.mark.parametrize(
    "work", [work for work in WORKS if not isinstance(work, Collective)], ids=str
)
def test_the_roofline_s_arithmetic_and_bytes_are_those_of_the_workload(
    work: Gemm | Softmax | Attention,
) -> None:
    device = made.A100
    sizes = tuple(np.array([getattr(work, name)]) for name in SIZES[work.kind])
    keys = set(LAYOUTS[work.kind].keys) - {*SIZES[work.kind], "provider"}
    fixed = {name: getattr(work, name) for name in keys}
    memory_us, compute_us = roofline_parts(device, work.kind, sizes, fixed)
    assert memory_us == pytest.approx([work.min_bytes / (device.memory_gb_per_s * 1e3)], rel=1e-12)
    peak = None if isinstance(work, Softmax) else device.peak(work.dtype)
    assert compute_us == pytest.approx(
        [0.0 if peak is None else work.flops / (peak * 1e6)], rel=1e-12
    )


def test_launches_grades_and_origins_are_kept() -> None:
    row = next(made.profile().tables["gemm"].rows())
    launch = {"kernel": "made_128x256", "block_m": 128, "block_n": 256, "split_k": 1}
    assert row.items() >= {**launch, "grade": "A", "origin": "simulated"}.items()
    assert row["low_us"] < row["latency_us"] < row["high_us"]
    single = next(made.profile().tables["collective"].rows())
    assert single["low_us"] == single["latency_us"] == single["high_us"]


def graded(work: Workload, us: float, letter: str, **changes: Any) -> Record:
    grade = Grade(letter, () if letter == "A" else ("made so",))
    return made_runs.record(
        work,
        Measured(made_runs.measurement((us, us * 1.02, us * 0.98)), grade),
        {"m": 1},
        **changes,
    )


def test_of_several_figures_the_best_graded_count_and_the_middle_one_of_these() -> None:
    work = Gemm(4096, 4096, 4096)
    letters = (("C", 500.0), ("A", 600.0), ("A", 640.0), ("A", 610.0), ("rejected", 500.0))
    runs = [
        made.run([graded(work, us, letter)], f"run-{i}") for i, (letter, us) in enumerate(letters)
    ]
    tables, given = tables_of(runs)
    row = next(tables["gemm"].rows())
    assert (row["latency_us"], row["grade"]) == (610.0, "A")
    assert row["low_us"] <= 0.98 * 610
    assert row["high_us"] >= 1.02 * 640
    assert given == {"run-0": 0, "run-1": 0, "run-2": 0, "run-3": 1, "run-4": 0}


def test_own_measurements_come_before_imported_ones() -> None:
    work = Gemm(4096, 4096, 4096)
    mine = graded(work, 600.0, "C", origin="measured")
    other = graded(work, 500.0, "A", origin="imported", source="a table")
    runs = [
        made.run([mine], "mine", origin="measured"),
        made.run([other], "other", origin="imported"),
    ]
    row = next(tables_of(runs)[0]["gemm"].rows())
    assert (row["latency_us"], row["origin"]) == (600.0, "measured")


def test_what_was_not_timed_is_in_no_table() -> None:
    records = [
        made_runs.record(Gemm(64, 64, 64), Skipped("no such thing"), {"m": 64}),
        made_runs.record(Gemm(65, 64, 64), Failed("crash", "it crashed"), {"m": 65}),
        made_runs.reference(500.0, 1.0),
        graded(Gemm(66, 64, 64), 5.0, "rejected"),
    ]
    tables, _ = tables_of([made.run(records)])
    assert all(len(found) == 0 for found in tables.values())


def cold(run_id: str, cache: str = "cold", **changes: Any) -> Run:
    outcome = Measured(made_runs.measurement((600.0, 601.0, 602.0), cache=cache), Grade("A"))
    return made.run(
        [made_runs.record(Gemm(4096, 4096, 4096), outcome, {"m": 4096})], run_id, **changes
    )


@pytest.mark.parametrize(
    ("runs", "value"),
    [
        ([], "no runs"),
        ([cold("a"), cold("a")], "run a is given twice"),
        ([cold("a"), cold("b", device=replace(made.A100, name="h100"))],
         "run a is of name a100-sxm4-80gb, run b of h100"),
        ([cold("a"), cold("b", device=replace(made.A100, sm_count=98))], "run a is of sm_count 108, run b of 98"),
        ([cold("a"), cold("b", origin="measured")], "simulated runs beside measured ones"),
        ([cold("a"), cold("b", "hot")], "runs timed with cold and with hot caches"),
    ],
)  # fmt: skip
def test_runs_that_do_not_belong_together_are_refused(runs: list[Run], value: str) -> None:
    with pytest.raises(InputError) as error:
        Profile.from_runs(runs)
    assert error.value.value == value


@pytest.mark.parametrize(
    ("work", "us", "message"),
    [
        (Gemm(4096, 4096, 4096), 0.55, "0.55; expected a time at the peak of a100-sxm4-80gb at the least (are they"),
        (Gemm(64, 64, 64), 0.004, "latency_us 0.004; expected at least 0.05 µs (is it in milliseconds?)"),
        (Attention(8, 32, 4096, 4096, 128), 5.0, "expected a time at the peak of a100-sxm4-80gb at the least"),
        (Softmax(64, 2048, 2048), 0.5, "expected no more than 100 times the memory's 2039 GB/s"),
    ],
)  # fmt: skip
def test_times_in_another_unit_are_noticed(work: Workload, us: float, message: str) -> None:
    with pytest.raises(InputError) as error:
        Profile.from_runs([made.run([made_runs.record(work, (us,), {"m": 1})])], fit=False)
    assert message in str(error.value)


@pytest.mark.parametrize("share", [1.04, 1.06])
def test_a_profile_takes_every_rate_that_grading_takes(share: float) -> None:
    work = Gemm(8192, 8192, 8192, dtype="bf16")
    device = made.run([]).info.device
    us = work.flops / (device.ceiling("bf16") or 0.0) / 1e6 / share
    run = made.run([made_runs.record(work, (us,) * 20, {"m": 1})])
    found = made_runs.measurement([us] * 20)
    judged = grade(found, flops=work.flops, min_bytes=work.min_bytes, spec=device, dtype="bf16")
    rejected = share > PEAK_MARGIN
    assert (judged.letter == "rejected") == rejected
    with pytest.raises(InputError, match="a time at the peak") if rejected else nullcontext():
        assert len(Profile.from_runs([run], fit=False).tables["gemm"]) == 1


def test_tables_are_sorted_and_have_each_key_once() -> None:
    found = made.profile().tables["gemm"]
    columns = dict(found.columns)
    with pytest.raises(InputError, match="out of order, or there twice"):
        Table("gemm", {name: values[::-1] for name, values in columns.items()})
    with pytest.raises(InputError, match="out of order, or there twice"):
        Table("gemm", {name: np.repeat(values, 2) for name, values in columns.items()})
    shuffled = Table.of("gemm", {name: values[::-1] for name, values in columns.items()})
    assert all(np.array_equal(shuffled[name], found[name]) for name in columns)
    with pytest.raises(InputError, match="columns of different lengths"):
        Table("gemm", {**columns, "m": columns["m"][1:]})
    with pytest.raises(InputError, match="expected m, n, k, batch"):
        Table("gemm", {"m": columns["m"]})
    with pytest.raises(ValueError, match="read-only"):
        found["m"][0] = 1


def test_cliffs_and_verdicts_come_with_their_evidence() -> None:
    """A sweep of a made staircase, with one step of 30 %."""
    records = []
    for n in range(1024, 2049, 32):
        middle = 100 * (n / 1024) ** 0.2 * (1.3 if n > 1536 else 1.0)
        times = made_runs.samples(middle, noise=0.002, count=15, seed=n)
        records.append(made_runs.record(Gemm(2048, n, 4096), times, {"n": n}))
    profile = Profile.from_runs([made.run(records)], fit=False)
    worst = profile.cliffs[0]
    assert (worst.axis, worst.at, worst.next) == ("n", 1536, 1568)
    assert worst.low < 1.3 < worst.high
    assert (worst.before, worst.after) == (Gemm(2048, 1536, 4096), Gemm(2048, 1568, 4096))
    assert set(worst.keys) <= {record.key for record in records}
    assert profile.provenance.num_cliffs == len(profile.cliffs)
    assert len({finding.rule for finding in profile.findings}) == len(profile.findings) > 10


def test_provenance_names_runs_and_digests_their_records() -> None:
    records = made.gemm_records()
    one, other = (
        Profile.from_runs([made.run(part, "run", source="made")], fit=False).provenance.runs[0]
        for part in (records, records[:-1])
    )
    assert (one.run_id, one.origin, one.source, one.cache) == ("run", "simulated", "made", "cold")
    assert (one.records, one.rows, other.records) == (22, 22, 21)
    assert one.keys_sha256 != other.keys_sha256
    assert len(asdict(one)["keys_sha256"]) == 64


@pytest.mark.slow
def test_models_are_fitted_to_the_rows() -> None:
    """A device twice as slow as any A100: only a fit can know."""
    rng = np.random.default_rng(3)
    gemms = [Gemm(*(64 * rng.integers(4, 64, 3)).tolist(), layout="nt") for _ in range(80)]
    run = made.run([made_runs.record(g, (2 * made.true_us(g),), {"m": g.m}) for g in gemms])
    fitted, bare = (Profile.from_runs([run], fit=fit) for fit in (True, False))
    assert (fitted.models.gemm[0].rows, fitted.models.gemm[0].dtype) == (80, "bf16")
    true = 2 * made.true_us(Gemm(3000, 3000, 3000))
    known, blind = (of.models.gemm[0].predict(3000, 3000, 3000).latency_us for of in (fitted, bare))
    assert known == pytest.approx(true, rel=0.15)
    assert blind < 0.7 * true
    # What the rows say of the model's level corrects even one that was not fitted.
    assert bare.gemm(3000, 3000, 3000).latency_us == pytest.approx(true, rel=0.1)
