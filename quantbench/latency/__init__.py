"""Predicts how long GEMMs, softmax, attention and expert layers take on a GPU.

Each prediction is a latency in µs with a 90 % interval. `ModelTimes` predicts any of these ops; a
class such as `GemmModel` fits and predicts one kind of op. The package imports its names on first
use, so that importing it is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.latency.attention import AttentionModel as AttentionModel
    from quantbench.latency.estimate import Estimate as Estimate
    from quantbench.latency.estimate import Estimates as Estimates
    from quantbench.latency.gemm.model import GemmModel as GemmModel
    from quantbench.latency.model_times import ModelTimes as ModelTimes
    from quantbench.latency.op_times import OpTimes as OpTimes
    from quantbench.latency.softmax import SoftmaxModel as SoftmaxModel

_MODULES = {
    "AttentionModel": "attention",
    "Estimate": "estimate",
    "Estimates": "estimate",
    "GemmModel": "gemm.model",
    "ModelTimes": "model_times",
    "OpTimes": "op_times",
    "SoftmaxModel": "softmax",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
