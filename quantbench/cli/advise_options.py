"""The options of `quantbench advise` as a shape, a source of times and a space of neighbours."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from quantbench.advice import ModelledTimes, ProfileTimes, Space
from quantbench.cli.plan_options import with_what_follows
from quantbench.device import default_dtype, lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.planner.layout import padded_vocab
from quantbench.planner.op_times import OpTimes
from quantbench.planner.shape_search import ShapeSpace
from quantbench.workload import TransformerShape

_WHO = "advise"
ATTENTIONS = ("eager", "flash")
_LARGEST = 2**31 - 1
# hidden / layers of a usual model: the middle of what the planner's search allows.
_USUAL_ASPECT = round(sqrt(ShapeSpace.aspect[0] * ShapeSpace.aspect[1]))


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
    attention: str = "eager"
    tolerance: str = "5%"
    top: str = "8"
    fail_over: str = ""

    def device(self) -> DeviceSpec:
        """The GPU that is asked about by name."""
        if not self.gpu:
            raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them) or --profile")
        spec = lookup(self.gpu)
        if spec.kind != "cuda":
            raise InputError(_WHO, f"--gpu {self.gpu}", "a GPU: on processors waves are not modelled")
        return spec

    def times(self) -> OpTimes:
        """Where times come from: the profile, or the models of the GPU."""
        if self.profile is None:
            return ModelledTimes(self.device())
        from quantbench.profile import Profile

        if self.gpu:
            raise InputError(_WHO, f"--gpu {self.gpu} and --profile {self.profile}", "one of them")
        profile = Profile.load(self.profile)
        if profile.device.kind != "cuda":
            raise InputError(_WHO, f"--profile {self.profile} of {profile.device.name}", "the profile of a GPU")
        return ProfileTimes(profile, ModelledTimes(profile.device))

    def number_format(self, device: DeviceSpec) -> str:
        """What was typed, or what is usual on the device."""
        if self.dtype and device.peak(self.dtype) is None:
            have = ", ".join(sorted(device.peak_tflops))
            raise InputError(_WHO, f"--dtype {self.dtype} on {device.name}", f"one of {have}")
        return self.dtype or default_dtype(device)

    def shape(self, device: DeviceSpec) -> tuple[TransformerShape, tuple[str, ...]]:
        """The shape, from a preset or a config or from sizes alone, and what had to be assumed, in words."""
        require_choice(_WHO, "--attention", self.attention, ATTENTIONS)
        typed = {name.replace("-", "_"): _size(name, text) for name, text in self.sizes.items() if text}
        base = self._base(typed)
        assumed = []
        named = bool(self.model) or self.config is not None
        changes = with_what_follows(base, typed)
        if not named and "layers" not in typed:
            changes["layers"] = max(1, round(typed["hidden"] / _USUAL_ASPECT))
            assumed.append(f"layers = {changes['layers']} (hidden / {_USUAL_ASPECT})")
        tp, vocab = typed.get("tp", 1), typed.get("vocab", base.vocab)
        if not named and "vocab" not in typed:
            changes["vocab"] = padded_vocab(vocab, tp)
            assumed.append(f"vocab = {changes['vocab']}")
        if not named and "seq" not in typed:
            assumed.append(f"seq = {base.seq}")
        if "mbs" not in typed:
            assumed.append("mbs = 1")
        if changes.get("vocab", vocab) % tp:
            changes["vocab"] = padded_vocab(vocab, tp)
            assumed.append(f"vocab padded from {vocab} to {changes['vocab']}, as tp = {tp} must divide it")
        if self.gated:
            changes["gated"] = True
        changes.update(dtype=self.number_format(device), fused_attention=self.attention == "flash")
        try:
            return replace(base, **changes), tuple(assumed)
        except InputError as error:
            raise InputError(_WHO, error.value, error.expected) from None

    def _base(self, typed: dict[str, Any]) -> TransformerShape:
        from quantbench.workload.huggingface import from_config
        from quantbench.workload.presets import preset

        if self.model and self.config is not None:
            raise InputError(_WHO, f"--model {self.model} and --config {self.config}", "one of them")
        if self.model:
            return preset(self.model)
        if self.config is not None:
            return from_config(self.config)
        missing = [f"--{name}" for name in ("hidden", "heads") if name not in typed]
        if missing:
            raise InputError(_WHO, f"no {' and no '.join(missing)}", "--hidden and --heads, --model or --config")
        # One head always divides; the typed heads come with everything else.
        return TransformerShape(hidden=typed["hidden"], heads=1)

    def space(self) -> Space:
        """What neighbours are tried."""
        return Space(tolerance=percentage("--tolerance", self.tolerance, most=50))

    def count(self) -> int:
        """How many neighbours are shown."""
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
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _LARGEST):
        raise InputError(f"--{name}", repr(text), "an integer of at least 1")
    return int(text)
