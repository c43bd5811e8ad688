"""A profile as the planner's source of times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError

if TYPE_CHECKING:
    from quantbench.planner.op_times import OpTimes
    from quantbench.profile.profile import Profile


@dataclass(frozen=True)
class ProfileTimes:
    """Times of the profile's own GPU, remembered; a `planner.op_times.TimesOf`. path: its file, for messages."""

    profile: Profile
    path: Path

    def __call__(self, device: DeviceSpec) -> OpTimes:
        """The times. Raises InputError for another GPU than the profile's."""
        from quantbench.planner.op_times import RememberedTimes

        if device.name != self.profile.device.name:
            raise InputError("--profile", f"{self.path} is of {self.profile.device.name}", f"one of {device.name}")
        return RememberedTimes(self.profile)
