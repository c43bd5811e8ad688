"""The fitted models of a profile."""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.device.spec import DeviceSpec
from quantbench.profile.fields import Json


@dataclass(frozen=True)
class Models:
    """What predicts where nothing was measured."""


def models_to_json(models: Models) -> Json:
    """As a JSON object of lists by kind."""
    return {}


def models_from_json(data: object, device: DeviceSpec) -> Models:
    """What `models_to_json` wrote."""
    return Models()
