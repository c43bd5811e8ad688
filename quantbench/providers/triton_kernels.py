"""Provides quantbench's own Triton kernels as providers.

The kernels themselves are in `quantbench.kernels`. They state their grid and tile, so no profiler
is needed. With Triton's interpreter nothing is launched, and a task states no launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from quantbench.kernels import attention, gemm, softmax
from quantbench.kernels.attention.menu import MAX_HEAD_DIM, MIN_HEAD_DIM
from quantbench.kernels.attention.operands import too_old
from quantbench.kernels.gemm import grouped
from quantbench.kernels.launching import (
    INTERPRETER,
    TORCH_DTYPES,
    Plan,
    Reason,
    first_reason,
    wrong_in_interpreter,
)
from quantbench.providers.inputs import Inputs
from quantbench.providers.tasks import BuiltInProvider, LaunchTask
from quantbench.workload import Attention, Gemm, GroupedGemm, Softmax
from quantbench.workload.dtypes import missing_format

if TYPE_CHECKING:
    import torch

    from quantbench.device.spec import DeviceSpec

_W = TypeVar("_W", Attention, Gemm, GroupedGemm, Softmax)


class _TritonProvider(BuiltInProvider[_W]):
    """Base class of the Triton providers, with checks that they share."""

    def _no_gpu(self, device: DeviceSpec, interpreter: str | None, *reasons: Reason) -> str | None:
        """Returns the reason why the kernel cannot run here; None if it can.

        If Triton's interpreter is on, the device is not checked, and `interpreter` is returned.

        interpreter: reason why the interpreter cannot run the workload; None if it can.
        reasons: functions that map a GPU's compute capability to a reason or None.
        """
        if INTERPRETER:
            return interpreter
        capability = device.compute_capability
        if device.kind != "cuda" or capability is None:
            needs = "a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter"
            return f"{self.id} needs {needs}"
        refusal: str | None = first_reason(capability, *reasons)
        return refusal

    def _no_product(self, dtype: str, device: DeviceSpec) -> str | None:
        """Returns the reason why GEMMs in a dtype cannot run on the device; None if they can."""
        if dtype not in TORCH_DTYPES:
            return f"{self.id} does not take {dtype}"
        interpreter = wrong_in_interpreter(dtype)
        return self._no_gpu(device, interpreter, lambda c: missing_format(dtype, c))


def _task(
    work: Plan, inputs: tuple[torch.Tensor, ...], forward: Plan | None = None, outputs: int = 3
) -> LaunchTask:
    """Builds a task from a plan, which is a compiled kernel (or several) with its tensors.

    work: plan whose runs are timed.
    forward: forward plan that runs once, before the first run of a backward plan; default none.
    outputs: number of output tensors of the plan to use as the task's outputs; default up to 3. The
        forward plan of attention also writes row statistics, which are not an output of the task.
    """
    return LaunchTask(
        work.run,
        inputs,
        work.outputs[:outputs],
        launch=None if INTERPRETER else work.launch,
        before=forward and forward.run,
    )


class TritonGemm(_TritonProvider[Gemm]):
    """GEMMs with Triton. Each of four schedules is a variant:

    - `data_parallel` runs one block per tile, with the full effect of wave quantization.
    - `split_k` runs several blocks per tile along the reduction, and then a second kernel that adds
      up their partial sums.
    - `stream_k` runs one wave of blocks. They share the reduction steps of the last tiles evenly.
    - `persistent` runs one wave of blocks. Each block computes one tile after the other.

    fp8 operands have no scale. On Hopper, their sums keep 14 bits over the whole reduction, as with
    torch's use_fast_accum.
    """

    kind = "gemm"

    def refusal(self, work: Gemm, device: DeviceSpec) -> str | None:
        return self._no_product(work.dtype, device)

    def task(self, work: Gemm, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        operands = inputs.operands(work)
        tf32 = work.dtype == "tf32"
        plan = gemm.plan(*operands, tile=self.tile, schedule=self.variant, tf32=tf32)
        return _task(plan, operands)


class TritonGrouped(_TritonProvider[GroupedGemm]):
    """Grouped GEMMs with Triton, which pad the rows of each expert to whole tiles.

    `triton.grouped` runs one block per tile of any expert. `triton.grouped_persistent` runs one
    wave of blocks, and each block computes one tile after the other. The table of tiles is made
    when the task is created and is not timed, because the routing is part of the workload.
    """

    kind = "grouped_gemm"

    def refusal(self, work: GroupedGemm, device: DeviceSpec) -> str | None:
        return self._no_product(work.dtype, device)

    def task(self, work: GroupedGemm, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        operands = inputs.operands(work)
        plan = grouped.plan(
            *operands,
            work.tokens_per_expert,
            tile=self.tile,
            schedule="persistent" if self.variant == "grouped_persistent" else "data_parallel",
            tf32=work.dtype == "tf32",
        )
        return _task(plan, operands)


class TritonFusedSoftmax(_TritonProvider[Softmax]):
    """Scale, mask and softmax in one kernel (`triton.fused`).

    The kernel computes the same as Megatron-LM's fused softmax, but without its conditions on the
    shape.
    """

    kind = "softmax"

    def refusal(self, work: Softmax, device: DeviceSpec) -> str | None:
        if work.cols > softmax.MAX_COLS:
            return f"{self.id} takes rows of up to {softmax.MAX_COLS} columns, not {work.cols}"
        interpreter = "triton's interpreter truncates to bf16" if work.dtype == "bf16" else None
        return self._no_gpu(device, interpreter, lambda c: missing_format(work.dtype, c))

    def task(self, work: Softmax, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        given = inputs.operands(work)
        causal = work.mask == "causal"
        backward = work.direction == "backward"
        forward = softmax.plan_forward(
            given[0],
            work.scale,
            causal=causal,
            mask=given[1] if work.mask == "full" else None,
            tile=None if backward else self.tile,
        )
        if not backward:
            return _task(forward, given)
        plan = softmax.plan_backward(
            given[-1], forward.out, work.scale, causal=causal, tile=self.tile
        )
        return _task(plan, given, forward)


class TritonFlash(_TritonProvider[Attention]):
    """Flash attention (`triton.flash`) with any head_dim from 8 to 256 and deterministic gradients.

    tile: tile of the forward kernel. The backward kernels choose their own tiles.

    A backward task runs several kernels, and states the launch of the kernel for dk and dv.
    """

    kind = "attention"

    def refusal(self, work: Attention, device: DeviceSpec) -> str | None:
        if not MIN_HEAD_DIM <= work.head_dim <= MAX_HEAD_DIM:
            taken = f"head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            return f"{self.id} takes {taken}, not {work.head_dim}"
        return self._no_gpu(device, wrong_in_interpreter(work.dtype), too_old)

    def task(self, work: Attention, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        given = inputs.operands(work)
        q, k, v = given[:3]
        forward = attention.plan_forward(q, k, v, causal=work.causal, tile=self.tile)
        if work.direction == "forward":
            return _task(forward, given, outputs=1)
        plan = attention.plan_backward(q, k, v, *forward.outputs, given[3], causal=work.causal)
        return _task(plan, given, forward)
