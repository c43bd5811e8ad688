"""What of the surroundings changes timings and must be known to run something again: variables and versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from quantbench import __version__

#: variables that change what is measured
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "GLOO_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "QUANTBENCH_DEVICE", "QUANTBENCH_KERNEL_NAMES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TRITON_INTERPRET",
)  # fmt: skip
#: families of variables: all that begin so, whatever a library's release calls them
PREFIXES = ("NCCL_", "TORCH_NCCL_", "UCX_", "FI_", "PSM2_")
#: packages whose release moves timings
_PACKAGES = ("torch", "triton", "numpy", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl", "nvidia-nccl-cu12")


def relevant_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are set and matter, by name, in order.

    >>> relevant_environment({"NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_LAUNCH_BLOCKING": "1"})
    {'CUDA_LAUNCH_BLOCKING': '1', 'NCCL_DEBUG': 'INFO'}
    """
    given = os.environ if environ is None else environ
    return {name: given[name] for name in sorted(given) if name in VARIABLES or name.startswith(PREFIXES)}


def installed_versions() -> dict[str, str]:
    """Versions of what is installed, by name, without importing any of it."""
    found = {"quantbench": __version__, "python": platform.python_version(), "os": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
