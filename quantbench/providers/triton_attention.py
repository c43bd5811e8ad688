"""Attention by our own Triton kernels: tile and grid are known, head_dim is free, gradients are the same each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantbench.kernels.attention import AttentionPlan, plan_backward, plan_forward
from quantbench.kernels.attention.menu import MAX_HEAD_DIM, MIN_HEAD_DIM
from quantbench.kernels.attention.operands import too_old
from quantbench.kernels.launching import INTERPRETER, unsupported_architecture, wrong_in_interpreter
from quantbench.providers.base import Task
from quantbench.providers.inputs import Inputs
from quantbench.workload import Attention

if TYPE_CHECKING:
    import torch

    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch, Tile
    from quantbench.workload import Workload


class TritonAttentionTask:
    """One planned attention, or its gradients. forward: the plan whose result the gradients are of, run once before."""

    def __init__(
        self,
        work: AttentionPlan,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        forward: AttentionPlan | None = None,
    ) -> None:
        self._work = work
        self._inputs = inputs
        self._outputs = outputs
        self._forward = forward

    def run(self) -> None:
        """Enqueue the kernel (backward: its three kernels)."""
        if self._forward is not None:
            self._forward.run()
            self._forward = None
        self._work.run()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k and v, for backward the gradient of o."""
        return self._inputs

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """o, or the gradients of q, k and v."""
        return self._outputs

    def launch(self) -> Launch | None:
        """Exactly what runs, of backward the kernel that keeps k and v; None in the interpreter."""
        return None if INTERPRETER else self._work.launch


class TritonFlash:
    """`triton.flash`: flash attention (`quantbench.kernels.attention`).

    tile, schedule: of forward, for every workload; None takes the menu's. autotune: the fastest entry of the menu is
    taken instead of the first.
    """

    id = "triton.flash"
    kind = "attention"

    def __init__(self, tile: Tile | None = None, *, schedule: str | None = None, autotune: bool = False) -> None:
        self._tile = tile
        self._schedule = schedule
        self._autotune = autotune

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """From head_dim, the format and the device."""
        if not isinstance(workload, Attention):
            return f"{self.id} runs attention, not {workload.kind}"
        if not MIN_HEAD_DIM <= workload.head_dim <= MAX_HEAD_DIM:
            return f"{self.id} takes head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {workload.head_dim}"
        reason: str | None
        if INTERPRETER:
            reason = wrong_in_interpreter(workload.dtype)
        elif device.compute_capability is None:
            reason = f"{self.id} needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter"
        else:
            reason = too_old(device.compute_capability) or unsupported_architecture(device.compute_capability)
        return reason

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Inputs: q, k and v; for backward what forward made of them and a gradient of o."""
        assert isinstance(workload, Attention)
        work = workload
        inputs = Inputs(device, distribution, seed)
        q, k, v = inputs.attention_operands(work)
        forward = plan_forward(
            q, k, v, causal=work.causal, tile=self._tile, schedule=self._schedule, autotune=self._autotune
        )
        o, lse = forward.outputs
        if work.direction == "forward":
            return TritonAttentionTask(forward, (q, k, v), (o,))
        gradient = inputs.tensor(*q.shape, dtype=work.dtype)
        backward = plan_backward(q, k, v, o, lse, gradient, causal=work.causal)
        return TritonAttentionTask(backward, (q, k, v, gradient), backward.outputs, forward)
