"""Predicted times: what a product, a softmax, an attention or a whole transformer shape takes, and how surely.

The models are imported when they are first asked for, so that light parts of this package stay light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.latency.attention import AttentionModel
    from quantbench.latency.estimate import Estimate, Estimates
    from quantbench.latency.gemm.cliffs import cliff_probability, forecast_cliffs
    from quantbench.latency.gemm.model import GemmModel
    from quantbench.latency.model_times import ModelTimes
    from quantbench.latency.op_times import OpTimes
    from quantbench.latency.softmax import SoftmaxModel

_MODULES = {
    "AttentionModel": "attention",
    "Estimate": "estimate",
    "Estimates": "estimate",
    "GemmModel": "gemm.model",
    "ModelTimes": "model_times",
    "OpTimes": "op_times",
    "SoftmaxModel": "softmax",
    "cliff_probability": "gemm.cliffs",
    "forecast_cliffs": "gemm.cliffs",
}

__all__ = [
    "AttentionModel",
    "Estimate",
    "Estimates",
    "GemmModel",
    "ModelTimes",
    "OpTimes",
    "SoftmaxModel",
    "cliff_probability",
    "forecast_cliffs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
