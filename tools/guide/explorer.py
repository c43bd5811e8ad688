"""Takes the explorer's screenshots for the docs, or writes the documentation site's explorer page.

Screenshots need Chromium. Without Chromium, the old screenshots are kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlencode

import numpy as np
from PIL import Image

from quantbench.device import default_dtype, known, lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.explore.page import write_explorer
from quantbench.latency.gemm.model import shipped_model
from quantbench.workload import TransformerShape
from quantbench.workload.presets import preset

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ATTEMPTS = 5
#: --curve-0 in quantbench/explore/templates/explore.css
_CURVE_RGB = (0x00, 0x72, 0xB2)
_GPUS = ("a100-sxm4-80gb", "h100-sxm5-80gb")
#: file of a screenshot → (settings of the page, width and height in pixels)
SHOTS: dict[str, tuple[dict[str, object], tuple[int, int]]] = {
    "docs/figures/explore.png": (
        {"hidden": 5000, "heads": 40, "kv_heads": 40, "head_dim": 125, "ffn": 20000, "seq": 2048,
         "tp": 8, "vocab": 50304, "gated": 0, "detail": "a100-sxm4-80gb/bf16/sglang"},
        (1280, 820),
    ),
    "docs/figures/explore-tiles.png": (
        {"hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn": 16384, "seq": 257,
         "vocab": 50304, "gated": 0, "axis": "seq", "detail": "a100-sxm4-80gb/bf16/sglang"},
        (1280, 1860),
    ),
}  # fmt: skip


def shelf_devices() -> tuple[DeviceSpec, ...]:
    """Returns the NVIDIA GPUs that have a shipped GEMM model for their default dtype."""
    return tuple(
        spec
        for spec in known()
        if spec.kind == "cuda" and shipped_model(spec.name, default_dtype(spec))
    )


def screenshots() -> None:
    """Writes the files of SHOTS with the first Chromium found, or prints that there is none.

    Raises StoreError if a screenshot still shows no curve after several attempts.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print("no Chromium here: the explorer's screenshots stay as they are", file=sys.stderr)
        return
    with TemporaryDirectory() as folder:
        page = Path(folder) / "explore.html"
        write_explorer(
            page, [lookup(gpu) for gpu in _GPUS], TransformerShape(hidden=4096, heads=32)
        )
        for name, (setting, (width, height)) in SHOTS.items():
            words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            # Virtual time lets the page finish before it is drawn. This does not always succeed,
            # because the page unpacks models in threads.
            words += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=60000"]
            words += [f"--window-size={width},{height}", f"--screenshot={Path(name).resolve()}"]
            for _ in range(_ATTEMPTS):
                subprocess.run(
                    [*words, f"{page.as_uri()}#{urlencode(setting)}"],
                    check=True,
                    capture_output=True,
                )
                with Image.open(name) as file:
                    shot = file.convert("RGB")
                if shows_curve(shot):
                    break
            else:
                raise StoreError(
                    "screenshot",
                    f"{name}: no curve after {_ATTEMPTS} attempts",
                    "a page that is drawn",
                )
            shot.quantize(256, Image.Quantize.FASTOCTREE).save(name, optimize=True)


def shows_curve(shot: Image.Image) -> bool:
    """Returns whether a picture of the page shows the first curve.

    It does if at least a hundred pixels are close to the curve's colour.

    shot: RGB picture.
    """
    near = np.abs(np.asarray(shot, dtype=int) - _CURVE_RGB).max(axis=-1) <= 24
    return bool(near.sum() >= 100)


def site_page(path: Path) -> None:
    """Writes the explorer's page for all GPUs with a shipped model."""
    write_explorer(
        path,
        shelf_devices(),
        preset("llama-3-8b"),
        title="Transformer layers on the GPUs of the shelf",
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        site_page(Path(sys.argv[1]))
    else:
        screenshots()
