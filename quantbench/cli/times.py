"""Declares the options that choose the source of op times: a GPU's models or a measured profile.

The commands that predict times share these options (`TimesOptions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from quantbench.cli.options import gpu_option, option, typed_words
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.libraries import LIBRARIES

if TYPE_CHECKING:
    from quantbench.latency.model_times import ModelTimes
    from quantbench.latency.op_times import OpTimes


MACHINES = "Machines"


@dataclass(frozen=True, kw_only=True)
class TimesOptions:
    """Options that choose the source of op times; "" and None mean the default.

    who: name of the command, for error messages.
    """

    who: ClassVar[str]

    gpu: str = gpu_option("", MACHINES)
    library: str = option(
        "",
        f"Whose kernels run: {', '.join(LIBRARIES)} (default: the one with the largest public "
        "table).",
        panel=MACHINES,
    )
    profile: Path | None = option(
        None, "Measured profile (JSON file), instead of the models of --gpu.", panel=MACHINES
    )

    def times(self) -> tuple[OpTimes, ModelTimes]:
        """Returns the source of op times, and the latency models of its device.

        Without --profile, both are the same object.

        Raises InputError unless exactly one of --gpu and --profile is typed, for --library with
        --profile, and for a profile of a CPU.
        """
        from quantbench.latency.model_times import ModelTimes
        from quantbench.profile import Profile

        if self.profile is None:
            if not self.gpu:
                known = "--gpu (quantbench devices lists them) or --profile"
                raise InputError(self.who, "no GPU", known)
            models = ModelTimes(lookup(self.gpu), self.library)
            return models, models
        for typed in typed_words(self, ("gpu", "library")):
            raise InputError(self.who, f"{typed} and --profile {self.profile}", "one of them")
        measured = Profile.load(self.profile)
        if measured.device.kind == "cpu":
            typed = f"--profile {self.profile} of {measured.device.name}"
            raise InputError(self.who, typed, "the profile of a GPU")
        return measured, ModelTimes(measured.device)

    def words(self, device: DeviceSpec, dtype: str, *, experts: bool) -> str:
        """Describes the source of op times: the profile, or the libraries whose kernels are
        predicted.

        experts: whether the workload has experts, whose kernels may be from another library.
        """
        from quantbench.latency.model_times import chosen_libraries

        if self.profile is not None:
            return f"times of {self.profile}"
        return chosen_libraries(device, dtype, self.library, self.who, experts=experts)
