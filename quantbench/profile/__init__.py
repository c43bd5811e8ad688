"""Stores and queries the profile of one GPU.

A profile has measured tables, fitted models, cliffs (jumps of the time between neighbouring sizes)
and findings (verdicts on rules of thumb). `Profile` is the entry point. Names are imported on first
use, so that importing a light module of the package stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.latency.estimate import Estimate
    from quantbench.profile.answers import ProfileEstimates
    from quantbench.profile.models import Models
    from quantbench.profile.profile import Profile
    from quantbench.profile.table import Table

__all__ = ["Estimate", "Models", "Profile", "ProfileEstimates", "Table"]

_MODULES = {
    "Estimate": "latency.estimate",
    "Models": "profile.models",
    "Profile": "profile.profile",
    "ProfileEstimates": "profile.answers",
    "Table": "profile.table",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"quantbench.{_MODULES[name]}"), name)
