"""What the installed triton can do: asked once, here, so that no kernel compares versions by itself.

triton 3.2 (torch 2.6) to 3.7 (torch 2.13) are meant. This module imports triton and nothing heavier.
"""

import importlib.util
import os

import triton

from quantbench.errors import UnsupportedError


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number of a version.

    >>> parse_version("3.7.1+git1234")
    (3, 7)
    """
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


TRITON = parse_version(triton.__version__)

#: descriptors made on the host and passed as arguments; `tl` descriptor loads and stores of them (TMA)
HAS_TENSOR_DESCRIPTOR = importlib.util.find_spec("triton.tools.tensor_descriptor") is not None

#: kernels run in Python on CPU tensors. Fixed when triton is imported; changing it later breaks triton.
INTERPRETER = os.environ.get("TRITON_INTERPRET", "0") == "1"

_VOLTA_NAMES = {(7, 0): "V100 (sm_70)", (7, 5): "T4 (sm_75)"}


def _missing(capability: tuple[int, int], version: tuple[int, int]) -> tuple[str, str] | None:
    """(what is wrong, what it needs) where triton makes no tensor-core code for a compute capability.

    Found by compiling: triton 3.3.1 fails on sm_70 and sm_75, 3.4 and later compile `tl.dot` there to scalar
    multiplications with thousands of spills; 3.1 and 3.2 give HMMA. 3.2 does not know sm_100.
    """
    architecture = f"sm_{capability[0]}{capability[1]}"
    triton_version = f"triton {version[0]}.{version[1]}"
    if capability < (7, 0):
        return f"{architecture} has no tensor cores", "a GPU of compute capability 7.0 or newer"
    if capability < (8, 0) and version >= (3, 3):
        name = _VOLTA_NAMES.get(capability, architecture)
        return f"{triton_version} makes no tensor-core code for {name}", "torch 2.6 with triton 3.2 installed"
    if capability >= (10, 0) and version < (3, 3):
        return f"{triton_version} does not know {architecture}", "torch 2.7 with triton 3.3 installed, or newer"
    return None


def unsupported_architecture(capability: tuple[int, int], version: tuple[int, int] = TRITON) -> str | None:
    """None when triton `version` makes tensor-core code for a compute capability, otherwise why not, in one sentence.

    >>> print(unsupported_architecture((7, 0), (3, 6)))
    triton 3.6 makes no tensor-core code for V100 (sm_70); it needs torch 2.6 with triton 3.2 installed
    """
    missing = _missing(capability, version)
    return None if missing is None else f"{missing[0]}; it needs {missing[1]}"


def require_architecture(operation: str, capability: tuple[int, int], version: tuple[int, int] = TRITON) -> None:
    """Raise UnsupportedError where `unsupported_architecture` has a reason."""
    missing = _missing(capability, version)
    if missing is not None:
        raise UnsupportedError(operation, *missing)
