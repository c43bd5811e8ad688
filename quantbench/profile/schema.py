"""The published JSON Schema of profiles, as shipped in the package."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from quantbench.profile.migrations import PROFILE_VERSION


def schema() -> dict[str, Any]:
    """The schema of the version that is written: `schemas/profile-1.json`."""
    text = files("quantbench.profile").joinpath(f"schemas/profile-{PROFILE_VERSION}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
