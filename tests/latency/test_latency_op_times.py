"""A whole shape's time is the sum of its ops, with an interval between 'all errors cancel' and 'all
errors add up'.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from quantbench import latency
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpEstimate, OpTimes, RememberedTimes, ShapeEstimate, total
from quantbench.launch import Launch, Tile
from quantbench.workload import Gemm, Op, TransformerShape

A100 = lookup("a100-sxm4-80gb")
SHAPE = TransformerShape(hidden=4096, heads=32, seq=2048, layers=4, vocab=50304)


@dataclass
class Gemms:
    """A model of products that predicts 200 TFLOP/s ± 10 % for everything. asked: what it was
    asked.
    """

    device: DeviceSpec = A100
    dtype: str = "bf16"
    rows: int = 100
    in_waves: bool = True
    batched: bool = False
    asked: list[Gemm] = field(default_factory=list)

    def predict_gemms(self, gemms: Sequence[Gemm]) -> list[Estimate]:
        self.asked += gemms
        times = [work.flops / 200e6 for work in gemms]
        launch = Launch("guess", tile=Tile(128, 256), blocks_per_sm=1)
        return [Estimate(t, 0.9 * t, 1.1 * t, launch=launch, waves=1) for t in times]


def models(gemms: Gemms) -> ModelTimes:
    return ModelTimes(A100, gemm=lambda dtype: (cast(GemmModel, gemms), "guessed"))


def whole(times: OpTimes, shape: TransformerShape, *, backward: bool = True) -> ShapeEstimate:
    """All layers of a shape."""
    ops = shape.ops(backward=backward)
    found = zip(ops, times.estimates([op.workload for op in ops]), strict=True)
    return total([OpEstimate(op, one) for op, one in found])


def op(latency_us: float, half: float, count: int = 1) -> OpEstimate:
    estimate = Estimate(latency_us, latency_us - half, latency_us + half)
    return OpEstimate(Op("qkv", "forward", Gemm(128, 128, 128), count), estimate)


def test_sum_of_ops_with_counts() -> None:
    found = whole(models(Gemms()), SHAPE)
    assert found.latency_us == pytest.approx(
        sum(o.estimate.latency_us * o.op.count for o in found.ops)
    )
    assert len(found.ops) == len(SHAPE.ops())
    gemm_us = sum(o.total_us for o in found.ops if isinstance(o.op.workload, Gemm))
    assert gemm_us == pytest.approx(
        sum(o.workload.flops * o.count for o in SHAPE.ops() if o.workload.kind == "gemm") / 200e6
    )
    assert found.low_us < found.latency_us < found.high_us
    notes = {o.estimate.note for o in found.ops}
    assert "guessed" in notes
    assert any("attention on a100-sxm4-80gb" in note for note in notes)
    assert 100 < found.tflops < 312


def test_forward_alone_is_about_a_third() -> None:
    model = models(Gemms())
    ratio = whole(model, SHAPE, backward=False).latency_us / whole(model, SHAPE).latency_us
    assert 0.25 < ratio < 0.4


def test_unfused_shapes_ask_the_softmax_model() -> None:
    shape = TransformerShape(hidden=1024, heads=16, seq=512, attention="unfused")
    found = whole(models(Gemms()), shape)
    assert {o.op.name for o in found.ops} >= {"scores", "softmax", "context"}
    assert any(
        "softmax on a100-sxm4-80gb: from the spec sheet" in o.estimate.note for o in found.ops
    )


def test_equal_work_is_asked_for_once() -> None:
    gemms = Gemms()
    remembered = RememberedTimes(models(gemms))
    whole(remembered, SHAPE)
    whole(remembered, SHAPE)
    assert len(gemms.asked) == len(set(gemms.asked))


def test_interval_of_a_sum() -> None:
    # Two equal parts of ±10: ±14.1 if their errors cancel, ±20 if they add up, √((200 + 400) / 2)
    # when half of each.
    found = total([op(100, 10), op(100, 10)])
    assert (found.latency_us, found.high_us) == pytest.approx((200, 200 + 300**0.5))
    assert total([op(100, 10), op(100, 10)], correlation=1.0).low_us == pytest.approx(180)
    assert total([op(100, 10, count=3)]).low_us == pytest.approx(270)
    with pytest.raises(InputError, match=r"no ops; expected at least one"):
        total([])


def test_the_models_are_offered_by_name_and_loaded_when_asked_for() -> None:
    code = (
        "import sys, quantbench.latency as latency; assert 'numpy' not in sys.modules;"
        "assert latency.SoftmaxModel.__module__ == 'quantbench.latency.softmax'; assert 'scipy' not in sys.modules;"
        "assert [n for n in latency.__all__ if not getattr(latency, n)] == []"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(
        AttributeError, match=r"module 'quantbench.latency' has no attribute 'Oracle'"
    ):
        getattr(latency, "Oracle")  # noqa: B009
