"""Versions of everything that a figure may depend on."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from quantbench import __version__


def versions() -> dict[str, str]:
    """Versions by name; what is not installed is left out."""
    found = {
        "quantbench": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "torch": torch.__version__,
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    # triton compiles our kernels; cuBLAS stands behind mm, and its choice of kernels moves cliffs.
    for name, package in (("triton", "triton"), ("cublas", "nvidia-cublas"), ("cublas", "nvidia-cublas-cu12")):
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found
