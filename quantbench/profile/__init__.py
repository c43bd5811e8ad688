"""Stores and queries the profile of one GPU: measured tables, fitted models, cliffs and rule findings.

Entry point: `Profile`. Used by users' Python code and by the commands `profile`, `plan` and `advise`. Names are
imported on first use, so that importing a light module of this package stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.latency.estimate import Estimate
    from quantbench.profile.answers import Estimates
    from quantbench.profile.models import Models
    from quantbench.profile.profile import Profile
    from quantbench.profile.table import Table

__all__ = ["Estimate", "Estimates", "Models", "Profile", "Table"]

_MODULES = {
    "Estimate": "latency.estimate", "Estimates": "profile.answers", "Models": "profile.models",
    "Profile": "profile.profile", "Table": "profile.table",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"quantbench.{_MODULES[name]}"), name)
