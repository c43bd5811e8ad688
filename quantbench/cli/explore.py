"""Command `explore`: writes an HTML page that predicts a transformer's times on chosen GPUs.

Sliders on the page set the transformer's sizes. The page needs no other file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.cli.model_options import named_model
from quantbench.cli.options import command, option
from quantbench.cli.output import Result, check_file
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.units import size

if TYPE_CHECKING:
    from quantbench.explore.page import FittedModel

_MODEL = "llama-3-8b"
_GPUS = "a100-sxm4-80gb,h100-sxm5-80gb"


@command
def explore(
    gpu: str = option(
        "", f"GPUs, comma separated (quantbench devices lists them; default: {_GPUS})."
    ),
    model: str | None = option(
        None, f"Preset to start from (list: quantbench models; default: {_MODEL})."
    ),
    config: Path | None = option(None, "A Hugging Face config.json to start from."),
    profile: Path | None = option(
        None,
        "Measured profile (JSON file), instead of --gpu: its products are looked up, others "
        "come from a fit to them.",
    ),
    output: Path = option(Path("explore.html"), "HTML file to write.", "--output", "-o"),
) -> Result:
    """Write an HTML page with sliders: a shape's times, waste, tiles and better shapes on some
    GPUs.
    """
    from quantbench.explore.page import fitted_models, left_out, write_explorer

    check_file("explore", output, suffix=".html")
    if model == "":
        raise InputError("explore", "--model ''", "the name of a preset (quantbench models)")
    if profile is not None and gpu:
        raise InputError("explore", f"--gpu {gpu} and --profile {profile}", "one of them")
    named = named_model("explore", model or ("" if config else _MODEL), config)
    fitted: dict[str, FittedModel] = {}
    if profile is None:
        devices = [lookup(name.strip()) for name in (gpu or _GPUS).split(",") if name.strip()]
        if not devices:
            raise InputError("explore", f"--gpu {gpu!r}", "names of GPUs, comma separated")
    else:
        device, fitted = fitted_models(profile)
        devices = [device]
    title = (
        f"{named.name if model or config else 'A transformer layer'} on "
        f"{', '.join(device.name for device in devices)}"
    )
    written = write_explorer(output, devices, named.shape, title=title, fitted=fitted)
    lines = [f"{output}: {size(written)}, open it in a browser or send it; it needs no network"]
    if missing := left_out(named.shape):
        lines.append(f"{named.name}: the page leaves out {', '.join(missing)}")
    return Result({"page": output, "bytes": written}, lines)
