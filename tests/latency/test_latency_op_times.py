"""A whole shape's time is the sum of its ops, with an interval between 'all errors cancel' and 'all
errors add up'.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import CachedTimes, OpEstimate, OpTimes, ShapeEstimate, total
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
    unaligned: bool = False
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
    times = models(Gemms())
    found, forward = (whole(times, SHAPE, backward=backward) for backward in (True, False))
    summed_us = sum(o.estimate.latency_us * o.op.count for o in found.ops)
    assert found.latency_us == pytest.approx(summed_us)
    assert len(found.ops) == len(SHAPE.ops())
    gemms = [o for o in found.ops if isinstance(o.op.workload, Gemm)]
    flops = sum(o.op.workload.flops * o.op.count for o in gemms)
    assert sum(o.total_us for o in gemms) == pytest.approx(flops / 200e6)
    assert found.low_us < found.latency_us < found.high_us
    assert 100 < found.tflops < 312
    assert 0.25 < forward.latency_us / found.latency_us < 0.4


def test_unfused_shapes_ask_the_softmax_model() -> None:
    shape = TransformerShape(hidden=1024, heads=16, seq=512, attention="unfused")
    notes = {o.op.name: o.estimate.note for o in whole(models(Gemms()), shape).ops}
    assert notes.keys() >= {"scores", "softmax", "context"}
    assert "softmax on a100-sxm4-80gb: from the spec sheet" in notes["softmax"]


def test_equal_work_is_asked_for_once() -> None:
    gemms = Gemms()
    remembered = CachedTimes(models(gemms))
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
