"""The best models at hand for a device: shipped where there are any, else from the spec sheet, saying so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm_menu import Menu
from quantbench.latency.gemm_model import GemmModel, shipped_model
from quantbench.latency.reach import predict_within_reach
from quantbench.latency.softmax import SoftmaxModel
from quantbench.latency.transformer import (
    CORRELATION,
    UNMEASURED_CORRELATION,
    GemmPredictor,
    TransformerModel,
    WorkEstimate,
)
from quantbench.workload import Gemm


def best_models(device: DeviceSpec, dtype: str) -> TransformerModel:
    """Models of products of `dtype`, of softmax and of attention on `device`."""
    gemm, measured = _gemm(device, dtype)
    return TransformerModel(
        device, gemm, SoftmaxModel.prior(device), AttentionModel.best(device),
        CORRELATION if measured else UNMEASURED_CORRELATION,
    )  # fmt: skip


def _gemm(device: DeviceSpec, dtype: str) -> tuple[GemmPredictor, bool]:
    """The predictor of products, and whether anything was measured behind it."""
    if dtype == "fp16" and device.peak("bf16") == device.peak("fp16"):
        shipped = shipped_model(device.name, "bf16")
        if shipped is not None:
            # The same bytes at the same peak, by kernels of the same tiles.
            note = f"; fp16 is taken to run as the bf16 that was measured on {device.name}"
            return _predictor(shipped, note), True
    model = GemmModel.best(device, dtype=dtype)
    return _predictor(model, ""), model.rows > 0


def _predictor(model: GemmModel, addition: str) -> GemmPredictor:
    note = (model.note or _origin(model)) + addition

    def predict(gemms: Sequence[Gemm]) -> list[WorkEstimate]:
        found = predict_within_reach(model, gemms)
        return [replace(_with_residency(one), note=note) for one in found]

    return predict


def _origin(model: GemmModel) -> str:
    """Where a fitted model comes from, for people."""
    said = f"products on {model.device.name}: fitted on {model.rows:,} measured shapes"
    of = model.provenance
    if "held_out" in of:
        median = of["held_out"]["median_pct"]
        said += f" of {of['framework']} {of['framework_version']}, {median:.1f} % off (median) on others"
    return said


def _with_residency(found: WorkEstimate) -> WorkEstimate:
    """With the blocks that the model's menu believes an SM holds of its tile, for whoever counts waves from it."""
    launch = found.launch
    if launch is None or launch.tile is None or launch.blocks_per_sm is not None:
        return found
    held = Menu.of(((launch.tile.block_m, launch.tile.block_n),)).blocks_per_sm
    return replace(found, launch=replace(launch, blocks_per_sm=int(held[0])))
