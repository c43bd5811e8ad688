"""Collects the environment variables and software versions that affect times, for run.json."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from quantbench import __version__

#: environment variables that affect times
VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE",
    "GLOO_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "QUANTBENCH_DEVICE", "QUANTBENCH_KERNEL_NAMES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TRITON_INTERPRET",
)  # fmt: skip
#: prefixes of further variables that affect times; the exact names change between library releases
PREFIXES = ("NCCL_", "TORCH_NCCL_", "UCX_", "FI_", "PSM2_")
#: packages whose version affects times
_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-nccl",
    "nvidia-nccl-cu12",
)


def relevant_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables that affect times, sorted by name.

    environ: variables to select from; None for os.environ.

    >>> relevant_environment({"NCCL_DEBUG": "INFO", "HOME": "/root", "CUDA_LAUNCH_BLOCKING": "1"})
    {'CUDA_LAUNCH_BLOCKING': '1', 'NCCL_DEBUG': 'INFO'}
    """
    found = {}
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name in VARIABLES or name.startswith(PREFIXES):
            found[name] = value
    return found


def installed_versions() -> dict[str, str]:
    """Returns the versions of quantbench, Python, the OS and the installed packages in _PACKAGES.

    No package is imported for this.
    """
    found = {
        "quantbench": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
