"""Provides GEMMs with torch (`TorchMm`).

torch calls cuBLAS or cuBLASLt on a GPU, and oneDNN or MKL on a CPU. `torch_moe` uses the functions
of this module for the GEMMs of single experts. torch's process-wide switch for tf32 is set only
while a GEMM is launched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from quantbench.providers.inputs import Inputs, output_templates
from quantbench.providers.tasks import BuiltInProvider, LaunchTask
from quantbench.workload import Gemm
from quantbench.workload.dtypes import MEASURED_DTYPES, missing_format

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec


# For each 8-bit dtype: torch's function, and the number that must divide n and k on CUDA.
_NARROW = {"fp8": ("torch._scaled_mm", 16), "int8": ("torch._int_mm", 8)}


class TorchMm(BuiltInProvider[Gemm]):
    """GEMMs with torch's functions (`torch.mm`), which write into a given output.

    fp16, bf16, fp32 and tf32 use `mm`, or `bmm` for a batch. fp8 uses `_scaled_mm`, and int8 uses
    `_int_mm`. Except for tf32, torch's switches keep their defaults. GEMMs in fp16 and bf16 may
    therefore add the partial sums of split-k in their own dtype instead of fp32. fp8 accumulates in
    fp32 (`use_fast_accum` is off). Its scales are 1, so the stored values are the operands.
    """

    kind = "gemm"

    def refusal(self, work: Gemm, device: DeviceSpec) -> str | None:
        return unsupported_gemm(work, device)

    def task(self, work: Gemm, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        a, b = inputs.operands(work)
        c = torch.empty_like(output_templates(work)[0], device=a.device)
        return LaunchTask(gemm_call(work, a, b, c), (a, b), (c,))


def gemm_call(
    work: Gemm, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> Callable[[], object]:
    """Returns a function that computes a·b with torch and writes the result into c."""
    call: Callable[[], object]
    if work.dtype == "fp8":
        one = torch.ones((), dtype=torch.float32, device=a.device)
        call = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=c.dtype, out=c)
    else:
        multiply: Callable[..., object] = torch.bmm if work.batch > 1 else torch.mm
        if work.dtype == "int8":
            multiply = torch._int_mm
        call = partial(multiply, a, b, out=c)
    return with_tf32(call, _tf32(work, c))


def unsupported_gemm(work: Gemm, device: DeviceSpec) -> str | None:
    """Returns the reason why torch cannot compute a GEMM on the device; None if it can."""
    return _no_format(work, device) or _no_narrow(work, device)


def with_tf32(call: Callable[[], object], allowed: bool | None) -> Callable[[], object]:
    """Wraps `call` so that tf32 is allowed or forbidden while `call` runs.

    torch's switch applies to the whole process. torch reads the switch when it enqueues a GEMM, or
    captures it into a CUDA graph. The switch is therefore set only during the call, and then reset.

    allowed: whether tf32 is allowed; None returns `call` unchanged.
    """
    if allowed is None:
        return call
    matmul = torch.backends.cuda.matmul

    def switched() -> None:
        before = matmul.allow_tf32
        matmul.allow_tf32 = allowed
        try:
            call()
        finally:
            matmul.allow_tf32 = before

    return switched


def _tf32(gemm: Gemm, c: torch.Tensor) -> bool | None:
    """Returns whether the GEMM allows tf32; None if torch's switch has no effect on it."""
    if gemm.dtype not in ("fp32", "tf32") or not c.is_cuda:
        return None
    # The old switch `allow_tf32` is used instead of `fp32_precision`, for two reasons: torch 2.6
    # has only the old switch, and torch 2.9 and later keep the two switches equal only if the old
    # switch is set. Some versions of torch warn once about the old switch. The assignment below
    # changes nothing, but makes torch give this warning here, where it is ignored.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    return gemm.dtype == "tf32"


def _no_format(gemm: Gemm, device: DeviceSpec) -> str | None:
    """Returns the reason why torch or the device has no GEMMs in a dtype; None if it has."""
    if gemm.dtype not in MEASURED_DTYPES:
        return f"{gemm.dtype} products are imported, not measured"
    capability = device.compute_capability
    if device.kind == "cuda" and capability is not None:
        return missing_format(gemm.dtype, capability)
    if gemm.dtype in ("tf32", "fp8"):
        return f"{gemm.dtype} products need a CUDA device"
    return None


def _no_narrow(gemm: Gemm, device: DeviceSpec) -> str | None:
    """Returns the reason why torch's function for an 8-bit dtype does not support the GEMM.

    Returns None if the function supports the GEMM, and for other dtypes.
    """
    if gemm.dtype not in _NARROW:
        return None
    function, step = _NARROW[gemm.dtype]
    if gemm.batch > 1:
        return f"{function} takes single products, and this is a batch of {gemm.batch}"
    if device.kind != "cuda":
        return None
    if gemm.dtype == "fp8" and gemm.layout != "nt":
        return f"{function} needs a row-major and b column-major, layout nt, not {gemm.layout}"
    if gemm.dtype == "int8" and gemm.m <= 16:
        return f"{function} needs more than 16 rows on CUDA, not m = {gemm.m}"
    if gemm.n % step or gemm.k % step:
        needs = f"n and k divisible by {step} on CUDA"
        return f"{function} needs {needs}, not n = {gemm.n}, k = {gemm.k}"
    return None
