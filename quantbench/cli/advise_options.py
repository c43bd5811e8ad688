"""The options of `quantbench advise` as a shape, a source of times and a space of neighbours."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from quantbench.advice import Repair, Space, repaired
from quantbench.advice.advise import TOP
from quantbench.advice.space import DIMENSIONS
from quantbench.cli.model_options import ModelOptions, chosen_model
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpTimes
from quantbench.workload import TransformerShape

_WHO = "advise"
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class AdviseArguments:
    """What was typed, not yet understood; "" and None leave a thing open. sizes: by the option's name."""

    sizes: dict[str, str]
    gpu: str = ""
    profile: Path | None = None
    model: str = ""
    config: Path | None = None
    gated: bool = False
    dtype: str = ""
    attention: str = ""
    dropout: bool | None = None
    softmax: str = ""
    tolerance: str = "5%"
    top: str = ""
    head_dims: str = "64,128,256"
    replicate_kv: bool = False
    keep: str = ""
    keep_layers: bool = False
    shapes_out: Path | None = None
    fail_over: str = ""

    def device(self) -> DeviceSpec:
        """The GPU that is asked about by name."""
        if not self.gpu:
            raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them) or --profile")
        spec = lookup(self.gpu)
        if spec.kind != "cuda":
            raise InputError(_WHO, f"--gpu {self.gpu}", "a GPU: on processors waves are not modelled")
        return spec

    def times(self) -> tuple[OpTimes, OpTimes]:
        """Where times come from, the profile or the models of the GPU; and where launches do, always the models."""
        if self.profile is None:
            models = ModelTimes(self.device())
            return models, models
        from quantbench.profile import Profile

        if self.gpu:
            raise InputError(_WHO, f"--gpu {self.gpu} and --profile {self.profile}", "one of them")
        profile = Profile.load(self.profile)
        if profile.device.kind != "cuda":
            raise InputError(_WHO, f"--profile {self.profile} of {profile.device.name}", "the profile of a GPU")
        return profile, ModelTimes(profile.device)

    def shape(self, device: DeviceSpec, space: Space) -> tuple[TransformerShape, Repair | None, tuple[str, ...]]:
        """The shape, from a preset or a config or from sizes alone; the shapes that stand in for it where tp cannot
        split it (its own tp is 1 then); and what had to be assumed, in words."""
        typed = {name.replace("-", "_"): _size(name, text) for name, text in self.sizes.items() if text}
        options = ModelOptions(
            self.model, self.config, typed, self.gated, self.dtype, self.attention, self.dropout, self.softmax
        )
        try:
            shape, assumed = chosen_model(_WHO, options, device)
            repair = None
        except InputError:
            tp = typed.get("tp", 1)
            if tp == 1:
                raise
            shape, assumed = chosen_model(_WHO, replace(options, sizes={**typed, "tp": 1}), device)
            repair = repaired(shape, tp, space)
            if repair is None:
                raise
        of_one = (f"{name} = 1" for name in ("mbs", "tp") if name not in typed)
        untimed = ["dropout is not timed"] if shape.dropout else []
        return shape, repair, (*assumed, *of_one, *untimed)

    def space(self) -> Space:
        """What neighbours are tried."""
        kept = [word.strip().replace("-", "_") for word in self.keep.split(",")] if self.keep else []
        for name in kept:
            require_choice(_WHO, "--keep", name, DIMENSIONS)
        if self.keep_layers:
            kept.append("layers")
        words = self.head_dims.split(",") if self.head_dims else []
        return Space(
            tolerance=percentage("--tolerance", self.tolerance, most=50),
            head_dims=tuple(sorted({_size("head-dims", word.strip()) for word in words})),
            replicate_kv=self.replicate_kv,
            keep=tuple(dict.fromkeys(kept)),
        )

    def count(self) -> int:
        """How many neighbours are looked for."""
        if not self.top:
            return TOP
        if not re.fullmatch("[0-9]{1,10}", self.top) or int(self.top) > _LARGEST:
            raise InputError("--top", repr(self.top), "an integer of at least 0")
        return int(self.top)

    def most_waste(self) -> float | None:
        """The share of the time that may be wasted; None where there is no gate."""
        return percentage("--fail-over", self.fail_over) if self.fail_over else None


def percentage(option: str, text: str, most: int = 100) -> float:
    """`3%` or `0.5 %` as a share. A number without the sign is refused: 3 may mean 3 % and 0.03 as well.

    most: the largest percentage.

    >>> percentage("--fail-over", "3%")
    0.03
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = float("nan")
    if not text.strip().endswith("%") or not isfinite(value) or not 0 <= value <= most:
        raise InputError(option, repr(text), f"a percentage from 0% to {most}%, such as 3%")
    return value / 100


def _size(name: str, text: str) -> int:
    if not (re.fullmatch("[0-9]{1,10}", text) and 1 <= int(text) <= _LARGEST):
        raise InputError(f"--{name}", repr(text), "an integer of at least 1")
    return int(text)
