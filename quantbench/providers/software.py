"""Versions of everything that a figure may depend on."""

import platform
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
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        pass
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("nvidia-cublas", "nvidia-cublas-cu12"):  # the library behind mm; its choice of kernels moves cliffs
        try:
            found["cublas"] = version(package)
        except PackageNotFoundError:
            continue
    return found
