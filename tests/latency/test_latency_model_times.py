"""Which products are predicted: sides up to the largest that the models know, batches of any
length.
"""

from dataclasses import replace

import pytest

from quantbench.errors import InputError
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.model_times import predict_within_reach, require_reach
from quantbench.workload import Gemm


@pytest.fixture(scope="module")
def model() -> GemmModel:
    found = shipped_model("a100-sxm4-80gb", "bf16")
    assert found is not None
    return found


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_a_side_beyond_the_models_is_refused(model: GemmModel, side: str) -> None:
    sizes = {"m": 64, "n": 64, "k": 64, side: LARGEST_SIDE}
    require_reach(**sizes)
    assert predict_within_reach(model, [Gemm(**sizes)])[0].latency_us > 0
    sizes[side] += 1
    with pytest.raises(InputError) as caught:
        predict_within_reach(model, [Gemm(64, 64, 64), Gemm(**sizes)])
    assert caught.value.value == f"{side} = {LARGEST_SIDE + 1}"


def test_a_batch_beyond_the_models_grows_in_proportion(model: GemmModel) -> None:
    most = LARGEST_SIDE // 2048
    batches = [Gemm(2048, 2048, 128, batch=batch) for batch in (1, most, 3 * most)]
    one, known, beyond = predict_within_reach(model, batches)
    for found, asked in zip((one, known), model.predict_gemms(batches[:2]), strict=True):
        assert found.latency_us == pytest.approx(asked.latency_us)
    for name in ("latency_us", "low_us", "high_us"):
        assert getattr(beyond, name) == pytest.approx(3 * getattr(known, name))
    assert known.waves is not None
    assert beyond.waves == 3 * known.waves


def test_other_formats_are_asked_for_as_if_they_were_of_the_models_own(model: GemmModel) -> None:
    gemm = Gemm(2048, 4096, 1024)
    found = predict_within_reach(
        model, [replace(gemm, dtype=dtype, accumulate="") for dtype in ("bf16", "int8")]
    )
    assert found[0] == found[1]
