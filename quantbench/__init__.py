"""Measures, explains and predicts the tile and wave quantization of matrix products on GPUs.

The package itself holds only `__version__`, and importing it loads nothing heavy. Only
`quantbench.providers`, `quantbench.timing`, `quantbench.kernels`, and functions of
`quantbench.device` for the device in use, import torch or Triton.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, the kernels are beside this package and not in it; pyproject's package-dir moves
# them inside on installation. Searching for submodules one folder up makes `python -m quantbench`
# work in a checkout without installation.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "kernels" / "__init__.py").is_file() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))
