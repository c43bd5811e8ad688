"""Measures, explains and predicts the tile and wave quantization of GEMMs on GPUs.

The package itself contains only `__version__`, and importing it loads nothing heavy. Only
`quantbench.providers`, `quantbench.timing`, `quantbench.kernels`, and those functions of
`quantbench.device` that concern the device in use, import torch or Triton.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, the folder `kernels` is beside this package. On installation, pyproject's
# package-dir moves it into the package. Searching for submodules one folder up lets
# `python -m quantbench` work in a checkout without installation.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "kernels" / "__init__.py").is_file() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))
