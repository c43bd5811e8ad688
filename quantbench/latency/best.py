"""The best models at hand for a device: shipped where there are any, else from the spec sheet, saying so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.menu import Menu
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.reach import predict_within_reach
from quantbench.latency.roofline import peak_share
from quantbench.latency.softmax import SoftmaxModel
from quantbench.latency.transformer import (
    CORRELATION,
    UNMEASURED_CORRELATION,
    TransformerModel,
    WorkEstimate,
)
from quantbench.quantization import credible_waves
from quantbench.workload import Gemm


def best_models(device: DeviceSpec, dtype: str) -> TransformerModel:
    """Models of products, of softmax and of attention on `device`. dtype: that of the linear layers, by whose products
    the errors of a sum are judged; products of another (attention's beside fp8 and int8) are predicted in their own."""
    products = _Products(device)
    measured = products.of(dtype)[0].rows > 0
    return TransformerModel(
        device, products, SoftmaxModel.prior(device), AttentionModel.best(device),
        CORRELATION if measured else UNMEASURED_CORRELATION,
    )  # fmt: skip


def best_gemm_model(device: DeviceSpec, dtype: str) -> GemmModel:
    """The model that `best_models` predicts products of a number format by."""
    return _Products(device).of(dtype)[0]


class _Products:
    """Products of a device by the model of each one's number format, found when it is first asked for."""

    def __init__(self, device: DeviceSpec) -> None:
        self._device = device
        self._known: dict[str, tuple[GemmModel, str]] = {}

    def __call__(self, gemms: Sequence[Gemm]) -> list[WorkEstimate]:
        by_dtype: dict[str, dict[Gemm, None]] = defaultdict(dict)
        for gemm in gemms:
            by_dtype[gemm.dtype][gemm] = None
        found: dict[Gemm, WorkEstimate] = {}
        for dtype, same in by_dtype.items():
            model, note = self.of(dtype)
            answers = predict_within_reach(model, list(same))
            for gemm, one in zip(same, answers, strict=True):
                found[gemm] = replace(_with_waves(one, gemm, model), note=note)
        return [found[gemm] for gemm in gemms]

    def of(self, dtype: str) -> tuple[GemmModel, str]:
        """The model of a number format, and what to know of it."""
        if dtype not in self._known:
            self._known[dtype] = self._found(dtype)
        return self._known[dtype]

    def _found(self, dtype: str) -> tuple[GemmModel, str]:
        device = self._device
        addition = ""
        model = None
        if dtype == "fp16" and device.peak("bf16") == device.peak("fp16"):
            # The same bytes at the same peak, by kernels of the same tiles.
            model = shipped_model(device.name, "bf16")
            addition = f"; fp16 is taken to run as the bf16 that was measured on {device.name}"
        if model is None:
            model, addition = GemmModel.best(device, dtype=dtype), ""
        return model, (model.note or _origin(model)) + addition


def _origin(model: GemmModel) -> str:
    """Where a fitted model comes from, for people."""
    said = f"products on {model.device.name}: fitted on {model.rows:,} measured shapes"
    of = model.provenance
    if "held_out" in of:
        median = of["held_out"]["median_pct"]
        said += f" of {of['framework']} {of['framework_version']}, {median:.1f} % off (median) on others"
    return said


def _with_waves(found: WorkEstimate, gemm: Gemm, model: GemmModel) -> WorkEstimate:
    """With blocks per SM where the model finds that the device runs in waves, and with waves where they can be stated.

    See `quantization.credible_waves`.
    """
    launch = found.launch
    if launch is None or launch.tile is None:
        return replace(found, waves=None)
    held = int(Menu.of(((launch.tile.block_m, launch.tile.block_n),)).blocks_per_sm[0]) if model.in_waves else None
    share = peak_share(gemm, found.estimate.latency_us, model.device)
    waves = credible_waves(gemm, launch.tile, model.device.sm_count, held, share)
    return replace(
        found, launch=replace(launch, blocks_per_sm=held), waves=None if waves is None else waves.num_waves
    )  # fmt: skip
