"""Softmax by our own fused Triton kernel, with Megatron-LM's semantics and none of its conditions on shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantbench.kernels.launching import INTERPRETER, unsupported_architecture
from quantbench.kernels.softmax import MAX_COLS, SoftmaxPlan, missing_bf16, plan_backward, plan_forward
from quantbench.providers.base import Task
from quantbench.providers.inputs import Inputs
from quantbench.workload import Softmax

if TYPE_CHECKING:
    import torch

    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch, Tile
    from quantbench.workload import Workload


class TritonSoftmaxTask:
    """One planned softmax, or its gradient. forward: the plan whose result the gradient is of, run once before."""

    def __init__(self, work: SoftmaxPlan, inputs: tuple[torch.Tensor, ...], forward: SoftmaxPlan | None = None) -> None:
        self._work = work
        self._inputs = inputs
        self._forward = forward

    def run(self) -> None:
        """Enqueue the kernel."""
        if self._forward is not None:
            self._forward.run()
            self._forward = None
        self._work.run()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """x, the mask where there is one, for backward the gradient of y."""
        return self._inputs

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """y, or the gradient of the scores: [samples, heads, rows, cols]."""
        return (self._work.out,)

    def launch(self) -> Launch | None:
        """Exactly what runs; None in the interpreter, where nothing is launched."""
        return None if INTERPRETER else self._work.launch


class TritonFusedSoftmax:
    """`triton.fused`: scale, mask and softmax in one pass (`quantbench.kernels.softmax`).

    tile: rows, row length and warps of a program, for every workload; None takes what fits each.
    """

    id = "triton.fused"
    kind = "softmax"

    def __init__(self, tile: Tile | None = None) -> None:
        self._tile = tile

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """From the row's length, the format and the device. V100 and T4 are refused under triton 3.3 and newer, as for
        all our kernels."""
        if not isinstance(workload, Softmax):
            return f"{self.id} runs softmax, not {workload.kind}"
        if workload.cols > MAX_COLS:
            return f"{self.id} takes rows of up to {MAX_COLS} columns, not {workload.cols}"
        if INTERPRETER:
            return "triton's interpreter truncates to bf16" if workload.dtype == "bf16" else None
        if device.compute_capability is None:
            return f"{self.id} needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter"
        capability = device.compute_capability
        reason: str | None = unsupported_architecture(capability) or missing_bf16(workload.dtype, capability)
        return reason

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Inputs: scores, for `full` a boolean mask; for backward the softmax of these scores and a gradient of it."""
        assert isinstance(workload, Softmax)
        work = workload
        inputs = Inputs(device, distribution, seed)
        x = inputs.scores(work)
        causal = work.mask == "causal"
        mask = inputs.padding_mask(work) if work.mask == "full" else None

        scores = (x,) if mask is None else (x, mask)
        if work.direction == "forward":
            return TritonSoftmaxTask(plan_forward(x, work.scale, causal=causal, mask=mask, tile=self._tile), scores)
        forward = plan_forward(x, work.scale, causal=causal, mask=mask)
        gradient = inputs.tensor(*x.shape, dtype=work.dtype)
        backward = plan_backward(gradient, forward.out, work.scale, causal=causal, tile=self._tile)
        return TritonSoftmaxTask(backward, (*scores, gradient), forward)
