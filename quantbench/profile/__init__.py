"""The profile of one GPU: measured tables, fitted models, cliffs and findings, for planners and for people.

The parts are imported when they are first asked for, so that light parts of this package stay light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.latency.estimate import Estimate
    from quantbench.profile.estimate import Estimates, LayerEstimate
    from quantbench.profile.models import Models
    from quantbench.profile.parts import Finding, KnownCliff, Provenance, RunSource
    from quantbench.profile.profile import Profile
    from quantbench.profile.table import Table

_MODULES = {
    "Estimate": "estimate",
    "Estimates": "estimate",
    "Finding": "parts",
    "KnownCliff": "parts",
    "LayerEstimate": "estimate",
    "Models": "models",
    "Profile": "profile",
    "Provenance": "parts",
    "RunSource": "parts",
    "Table": "table",
}

__all__ = [
    "Estimate",
    "Estimates",
    "Finding",
    "KnownCliff",
    "LayerEstimate",
    "Models",
    "Profile",
    "Provenance",
    "RunSource",
    "Table",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
