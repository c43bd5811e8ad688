"""Measures, explains and predicts the tile and wave quantization of matrix products on GPUs.

The package itself holds only `__version__`. Importing it loads nothing heavy: only
`quantbench.providers`, `quantbench.timing`, `quantbench.kernels` and `quantbench.device` functions
for the device in use import torch or triton.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout the kernels are beside this package, not in it (pyproject's package-dir moves them
# inside on installation). Searching submodules one folder up makes `python -m quantbench` work
# there without installation.
_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "kernels" / "__init__.py").is_file() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))
