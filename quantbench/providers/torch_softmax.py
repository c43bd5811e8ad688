"""Softmax as Megatron-LM computes it where its fused kernel refuses: one torch operation after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantbench.providers import references
from quantbench.providers.base import Task
from quantbench.providers.inputs import TORCH_DTYPES, Inputs
from quantbench.providers.torch_tasks import BackwardTask, ForwardTask
from quantbench.workload import Softmax

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.workload import Workload

# What Megatron-LM fills in for masked scores (attention_mask_func).
_MASKED = -10_000.0


class TorchEagerSoftmax:
    """`torch.eager`: to fp32 (fp16 and bf16 inputs), times scale, masked scores to −10000, softmax, cast back.

    Source: Megatron-LM, megatron/core/fusions/fused_softmax.py, `forward_torch_softmax` with softmax_in_fp32. The
    causal mask is made once and kept, as there. Backward is autograd's through the same operations.
    """

    id = "torch.eager"
    kind = "softmax"

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """Runs every softmax everywhere."""
        if not isinstance(workload, Softmax):
            return f"{self.id} runs softmax, not {workload.kind}"
        return None

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Inputs: scores, for `full` a boolean mask, for backward a gradient of the result."""
        assert isinstance(workload, Softmax)
        work = workload
        inputs = Inputs(device, distribution, seed)
        x = inputs.scores(work)
        dropped: torch.Tensor | None = None
        if work.mask == "causal":
            dropped = references.causal_mask(work.rows, work.cols, x.device)
        elif work.mask == "full":
            dropped = inputs.padding_mask(work)

        def forward() -> torch.Tensor:
            return megatron_fallback(x, work.scale, dropped)

        mask = dropped if work.mask == "full" else None
        if work.direction == "forward":
            return ForwardTask(forward, (x,) if mask is None else (x, mask))
        return BackwardTask(forward, (x,), inputs.tensor(*x.shape, dtype=work.dtype), mask)


def megatron_fallback(x: torch.Tensor, scale: float, dropped: torch.Tensor | None) -> torch.Tensor:
    """softmax(scale · x) in fp32 over the last dimension, scores that `dropped` marks set to −10000; x's dtype.

    >>> megatron_fallback(torch.zeros(1, 2), 1.0, torch.tensor([[False, True]]))
    tensor([[1., 0.]])
    """
    half = x.dtype in (TORCH_DTYPES["fp16"], TORCH_DTYPES["bf16"])
    scores = (x.float() if half else x) * scale
    if dropped is not None:
        scores.masked_fill_(dropped, _MASKED)
    probabilities = torch.softmax(scores, dim=-1)
    return probabilities.to(x.dtype) if half else probabilities
