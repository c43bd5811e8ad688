"""A provider that looks faster than it is never gets a grade above D: it fails with the reason, or
is graded D.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace

import cheating_providers
import pytest
import torch

from quantbench.device.cpu import cpu_info, cpu_spec
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.providers import correctness
from quantbench.store.record import Failed, Measured, Record, record_from_json, record_to_json
from quantbench.store.typed import encode
from quantbench.sweep.messages import Hello, Reply, Request, reply_from_json
from quantbench.sweep.plan import Group, Plan, PlanPoint
from quantbench.sweep.runner import Sweep, SweepJob
from quantbench.sweep.worker import Worker
from quantbench.timing.cpu import CpuTimer
from quantbench.timing.options import TimingOptions
from quantbench.workload import Attention, Gemm, GroupedGemm, Permute, Softmax, Workload

TIMING = TimingOptions(max_time_s=0.05, min_samples=10, half_width=0.2, cache="hot")
SMALL = Gemm(144, 160, 512, dtype="fp32")
LONG_SUM = Gemm(96, 96, 4096, dtype="fp16")
EXPERTS = GroupedGemm((90, 0, 40, 3), 60, 70, dtype="fp32", layout="nt")
SCORES = Softmax(6, 70, 70, dtype="fp32", mask_batch=2, scale=0.3)
HEADS = Attention(2, 4, 130, 130, 32, kv_heads=2, dtype="fp32")


class InThisProcess:
    """A worker without a process."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.hello = Hello(spec, DeviceState(), {})
        self._worker = Worker(
            spec, CpuTimer(TIMING, spec, DeviceState), TIMING, lambda request: None
        )

    def begin(self, timing: TimingOptions) -> None:
        pass

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        return reply_from_json(json.loads(json.dumps(encode(self._worker.run(request)))))

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def spec() -> DeviceSpec:
    return cpu_spec(cpu_info())


def record_of(spec: DeviceSpec, cheat: str, work: Workload) -> Record:
    """What a sweep writes of one point."""
    kept: list[Record] = []
    point = PlanPoint("0" * 16, work, f"cheating_providers:{cheat}", (), 1.0)
    job = SweepJob(Plan((Group((point,)),), None), "r", spec, TIMING)
    Sweep(job, lambda: InThisProcess(spec), kept.append, time.monotonic).run()
    (record,) = kept
    return record


CHEATS = [
    ("HalfAboveK320", SMALL, "before timing: relative error 0."),
    ("WrongAfterTwoCalls", SMALL, "after timing"),
    ("WrongAfterFiveCalls", SMALL, "after timing"),
    ("HalfTheReduction", SMALL, "before timing: relative error 0."),
    ("CachesByPointer", SMALL, "after timing: relative error"),
    ("CachesByCorners", SMALL, "relative error"),
    ("FollowsSigns", SMALL, "relative error"),
    ("FollowsAFewRows", SMALL, "relative error"),
    ("ReturnsThePrevious", SMALL, "relative error"),
    ("PreparedAhead", SMALL, "before timing: relative error"),
    ("WritesNothing", SMALL, "23040 of 23040 elements not written"),
    ("InAThread", SMALL, "not written"),
    ("WhenItIsRead", SMALL, "LazyTensor; expected a plain torch.Tensor"),
    ("WhenItIsPoisoned", SMALL, "after timing: relative error"),
    ("WhenItIsChecked", SMALL, "after timing: relative error"),
    ("ZeroesItsInputs", SMALL, "before timing: input 0 was changed"),
    ("SpoilsItsInputs", SMALL, "before timing: "),
    ("SparseInputs", SMALL, "before timing: relative error"),
    ("ViewOfAnInput", SMALL, "output 0 has strides"),
    ("SmallerOutput", SMALL, "output 0 is 72×160 float32; expected 144×160 float32"),
    ("HalfPrecisionOutput", SMALL, "output 0 is 144×160 float16; expected 144×160 float32"),
    ("ColumnMajorOutput", SMALL, "output 0 has strides (1, 144); expected strides (160, 1)"),
    ("OneRowRepeated", SMALL, "output 0 has strides (0, 1)"),
    ("OtherLayout", SMALL, "input 0 has strides (1, 144); expected strides (512, 1)"),
    ("WritesHalf", SMALL, "11520 of 23040 elements not written"),
    ("Bf16Arithmetic", SMALL, "relative error 0.00"),
    ("Tf32Arithmetic", SMALL, "relative error 0.000"),
    ("Fp16Sums", LONG_SUM, "relative error 0.0"),
    ("SmallestExpertMissing", EXPERTS, "relative error"),
    ("KeepsTheFirstResult", EXPERTS, "elements not written"),
    ("KeepsTheFirstResult", Permute(70, 60, 2, direction="unpermute"), "elements not written"),
    ("OneHeadMissing", SCORES, "relative error"),
    ("KeepsTheFirstResult", SCORES, "elements not written"),
    ("KeepsTheFirstResult", replace(SCORES, direction="backward"), "elements not written"),
    ("OneHeadMissing", HEADS, "relative error"),
    ("KeysMissing", replace(HEADS, kv_heads=4, causal=False), "relative error"),
    ("KeepsTheFirstResult", HEADS, "elements not written"),
    ("KeepsTheFirstResult", replace(HEADS, direction="backward"), "elements not written"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cheat", "work", "reason"), CHEATS, ids=[f"{c}-{w.kind}" for c, w, _ in CHEATS]
)
def test_a_cheat_is_refused_with_the_reason(
    cheat: str, work: Workload, reason: str, spec: DeviceSpec
) -> None:
    # Of the corners, one point in 18 passes: the last change before the check reaches one.
    points = 4 if cheat == "CachesByCorners" else 1
    outcomes = (record_of(spec, cheat, work).outcome for _ in range(points))
    outcome = next((found for found in outcomes if isinstance(found, Failed)), None)
    assert outcome.error == "wrong_result"
    assert outcome.message.startswith("check ")
    assert reason in outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cheat", ["FollowsSigns", "FollowsAFewRows"])
@pytest.mark.parametrize("work", [SMALL, LONG_SUM, Gemm(1536, 32, 64, dtype="fp32")], ids=str)
def test_following_a_few_rows_and_columns_fails_each_time(
    cheat: str, work: Workload, seed: int, spec: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit's seeds come from the operating system; here from a generator."""
    monkeypatch.setattr("secrets.randbits", random.Random(seed).getrandbits)
    outcome = record_of(spec, cheat, work).outcome
    assert isinstance(outcome, Failed), outcome
    assert outcome.error == "wrong_result"


def test_a_task_without_inputs_is_graded_d(spec: DeviceSpec) -> None:
    record = record_of(spec, "HidesItsInputs", SMALL)
    assert record.outcome.grade.letter == "D"
    assert "its results were not checked: its task has no inputs()" in record.outcome.grade.reasons
    assert record.check is None


@pytest.mark.slow
def test_work_on_other_cores_is_graded_d(spec: DeviceSpec) -> None:
    outcome = record_of(spec, "OnAllCores", Gemm(512, 512, 512, dtype="fp32")).outcome
    assert outcome.grade.letter == "D"
    assert any("helped by other threads" in reason for reason in outcome.grade.reasons)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("honest", "work"),
    [
        ("Honest", SMALL),
        ("Honest", Gemm(1, 1, 1, dtype="fp32")),
        ("Honest", replace(SMALL, layout="tn")),
        ("Honest", replace(LONG_SUM, dtype="bf16", layout="nt")),
        ("HonestReference", SCORES),
        ("HonestReference", replace(SCORES, direction="backward", mask="full", dtype="bf16")),
        ("HonestReference", HEADS),
        ("HonestReference", replace(HEADS, direction="backward", dtype="fp16", causal=False)),
    ],
)
def test_the_honest_are_measured_and_their_error_is_recorded(
    honest: str, work: Workload, spec: DeviceSpec
) -> None:
    record = record_of(spec, honest, work)
    assert isinstance(record.outcome, Measured), record.outcome
    assert (
        record.check.relative_error
        <= record.check.tolerance
        == correctness.tolerance(work).relative_norm
    )
    assert not any("not checked" in reason for reason in record.outcome.grade.reasons)
    again = record_from_json(json.loads(json.dumps(record_to_json(record))))
    assert again.check == record.check


def test_every_cheat_is_tried() -> None:
    tried = {cheat for cheat, _, _ in CHEATS} | {"HidesItsInputs", "OnAllCores"}
    written = {
        name
        for name, value in vars(cheating_providers).items()
        if isinstance(value, type)
        and issubclass(value, cheating_providers.Honest)
        and "Honest" not in name
    }
    assert tried == written
    assert len(tried) >= 15


def test_inputs_are_new_each_time(spec: DeviceSpec) -> None:
    """Nothing that a provider may know decides about the numbers."""
    from quantbench.providers.audit import Audit

    seen = []
    for _ in range(2):
        provider = cheating_providers.Honest()
        audit = Audit(provider, SMALL, spec, "normal")
        task = provider.prepare(SMALL, spec, seed=3)
        audit.add(task)
        audit.before_timing()
        seen.append(task.a.clone())
    assert not torch.equal(*seen)
