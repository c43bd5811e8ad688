"""Matrix products by torch, which hands them to cuBLAS or cuBLASLt (oneDNN or MKL on a CPU)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from quantbench.providers.base import Task
from quantbench.providers.inputs import TORCH_DTYPES, Inputs
from quantbench.workload import Gemm

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch
    from quantbench.workload import Workload

# Compute capability from which on the tensor cores have a format. bf16 would run on older devices, converted.
# Sources: NVIDIA A100 whitepaper 2020 (bf16, tf32), Turing whitepaper 2018 (int8), Ada whitepaper 2022 (fp8).
_FIRST_CAPABILITY = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "int8": (7, 5)}


class GemmTask:
    """One product into an output that is allocated once."""

    def __init__(
        self,
        call: Callable[[], object],
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
        tf32: bool | None = None,
    ) -> None:
        self._call = call
        self._inputs = inputs
        self._output = output
        self._tf32 = tf32

    def run(self) -> None:
        """Enqueue the product. tf32 is a switch of the whole process, read while the product is enqueued (or captured
        into a graph): it is set for the call alone."""
        if self._tf32 is None:
            self._call()
            return
        matmul = torch.backends.cuda.matmul
        before = matmul.allow_tf32
        matmul.allow_tf32 = self._tf32
        try:
            self._call()
        finally:
            matmul.allow_tf32 = before

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """a, b and where there is one the bias."""
        return self._inputs

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """c[m, n], or c[batch, m, n]."""
        return (self._output,)

    def launch(self) -> Launch | None:
        """Not known; the profiler tells."""
        return None


class TorchMm:
    """`torch.mm`: mm and bmm in fp16, bf16, fp32 and tf32, `_scaled_mm` in fp8, `_int_mm` in int8, with `out=`.

    torch's switches are left as they are by default: products in fp16 and bf16 may add up split-k parts in that
    format; fp8 accumulates without `use_fast_accum`, that is in fp32, with one scale per tensor, which is 1: operands
    count as they are stored.
    """

    id = "torch.mm"
    kind = "gemm"

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """From the format, the device and the limits that torch states for its narrow products."""
        if not isinstance(workload, Gemm):
            return f"{self.id} runs matrix products, not {workload.kind}"
        return _no_format(workload, device) or _no_narrow(workload, device)

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Operands as the layout stores them, and a contiguous c."""
        assert isinstance(workload, Gemm)
        gemm = workload
        a, b = Inputs(device, distribution, seed).gemm_operands(gemm)
        c = _output(gemm, a)
        call: Callable[[], object]
        if gemm.dtype == "fp8":
            one = torch.ones((), dtype=torch.float32, device=a.device)

            def call() -> object:
                return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=c.dtype, out=c)

        elif gemm.dtype == "int8":

            def call() -> object:
                return torch._int_mm(a, b, out=c)

        elif gemm.batch > 1:

            def call() -> object:
                return torch.bmm(a, b, out=c)

        else:

            def call() -> object:
                return torch.mm(a, b, out=c)

        return GemmTask(call, (a, b), c, _tf32(gemm, a))


class TorchAddmm:
    """`torch.addmm`: one product plus a bias of n numbers, as a linear layer with bias runs it; the bias is not
    counted in FLOPs and bytes."""

    id = "torch.addmm"
    kind = "gemm"

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """As `torch.mm`, and single products in floating point alone."""
        if not isinstance(workload, Gemm):
            return f"{self.id} runs matrix products, not {workload.kind}"
        if workload.batch > 1:
            return f"torch.addmm takes single products, and this is a batch of {workload.batch}"
        if workload.dtype in ("fp8", "int8"):
            return f"torch.addmm does not take {workload.dtype}"
        return _no_format(workload, device)

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Operands as the layout stores them, a bias, and a contiguous c."""
        assert isinstance(workload, Gemm)
        inputs = Inputs(device, distribution, seed)
        a, b = inputs.gemm_operands(workload)
        bias = inputs.tensor(workload.n, dtype=workload.dtype)
        c = _output(workload, a)

        def call() -> object:
            return torch.addmm(bias, a, b, out=c)

        return GemmTask(call, (a, b, bias), c, _tf32(workload, a))


def _output(gemm: Gemm, a: torch.Tensor) -> torch.Tensor:
    shape = (gemm.batch, gemm.m, gemm.n) if gemm.batch > 1 else (gemm.m, gemm.n)
    return torch.empty(shape, dtype=TORCH_DTYPES[gemm.output_dtype], device=a.device)


def _tf32(gemm: Gemm, a: torch.Tensor) -> bool | None:
    """Whether the product allows tf32; None where the switch has no say."""
    if gemm.dtype not in ("fp32", "tf32") or not a.is_cuda:
        return None
    # The old switch rather than `fp32_precision`: torch 2.6 has no other, and 2.9 and later keep both in step only
    # when the old one is set. Some of those warn once about it; that one warning is spent here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    return gemm.dtype == "tf32"


def _no_format(gemm: Gemm, device: DeviceSpec) -> str | None:
    """Why the device cannot multiply in this format, or None."""
    capability = device.compute_capability
    if capability is None:
        return f"{gemm.dtype} products need a CUDA device" if gemm.dtype in ("tf32", "fp8") else None
    first = _FIRST_CAPABILITY.get(gemm.dtype)
    if first is None or capability >= first:
        return None
    have, need = (".".join(map(str, pair)) for pair in (capability, first))
    return f"{gemm.dtype} products need compute capability {need}, and {device.name} has {have}"


def _no_narrow(gemm: Gemm, device: DeviceSpec) -> str | None:
    """Why torch's fp8 or int8 product does not take this one, or None."""
    if gemm.dtype not in ("fp8", "int8"):
        return None
    function = "torch._scaled_mm" if gemm.dtype == "fp8" else "torch._int_mm"
    if gemm.batch > 1:
        return f"{function} takes single products, and this is a batch of {gemm.batch}"
    if device.kind != "cuda":
        return None
    if gemm.dtype == "fp8":
        if gemm.layout != "nt":
            return f"torch._scaled_mm needs a row-major and b column-major, layout nt, not {gemm.layout}"
        if gemm.n % 16 or gemm.k % 16:
            return f"torch._scaled_mm needs n and k divisible by 16, not n = {gemm.n}, k = {gemm.k}"
        return None
    if gemm.m <= 16:
        return f"torch._int_mm needs more than 16 rows on CUDA, not m = {gemm.m}"
    if gemm.n % 8 or gemm.k % 8:
        return f"torch._int_mm needs n and k divisible by 8 on CUDA, not n = {gemm.n}, k = {gemm.k}"
    return None
