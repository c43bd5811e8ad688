"""Chooses the source of predicted times for a command: the models of a GPU, or a measured
profile.
"""

from __future__ import annotations

from pathlib import Path

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpTimes
from quantbench.profile import Profile


def chosen_times(
    who: str, gpu: str, library: str, profile: Path | None
) -> tuple[OpTimes, ModelTimes]:
    """Returns the source of times, and the models of its device, which name launches.

    gpu, library: as typed, "" if not.

    Raises InputError for neither a GPU nor a profile, for both, and for a CPU's profile.
    """
    if profile is None:
        if not gpu:
            raise InputError(who, "no GPU", "--gpu (quantbench devices lists them) or --profile")
        models = ModelTimes(lookup(gpu), library)
        return models, models
    for name, value in (("gpu", gpu), ("library", library)):
        if value:
            raise InputError(who, f"--{name} {value} and --profile {profile}", "one of them")
    measured = Profile.load(profile)
    if measured.device.kind == "cpu":
        raise InputError(
            who, f"--profile {profile} of {measured.device.name}", "the profile of a GPU"
        )
    return measured, ModelTimes(measured.device)
