"""Fused attention by torch: `scaled_dot_product_attention` with one backend pinned.

Left to itself torch prefers FlashAttention-2 where cuDNN's kernel is up to twice as fast; pinning tells them apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quantbench.providers.base import Task
from quantbench.providers.inputs import TORCH_DTYPES, Inputs, torch_device
from quantbench.providers.torch_tasks import BackwardTask, ForwardTask
from quantbench.workload import Attention

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.workload import Workload


class TorchAttention:
    """One backend. Forward keeps nothing for a backward pass; backward computes the gradients of q, k and v through
    a kept graph, its forward not timed.

    Grouped heads go to the kernel as they are where the backend takes them. Where it does not, keys and values are
    repeated for each query head in every run, which is timed: that is what using this backend costs.
    """

    id: str
    kind = "attention"
    backend: SDPBackend
    cpu = False

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """What torch itself says of a workload like this one, asked without launching anything."""
        if not isinstance(workload, Attention):
            return f"{self.id} runs attention, not {workload.kind}"
        if device.kind != "cuda":
            return None if self.cpu else f"{self.id} needs a CUDA device"
        return self._heads(workload, device).refusal

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """q, k and v, and for backward a gradient of the result."""
        assert isinstance(workload, Attention)
        work = workload
        inputs = Inputs(device, distribution, seed)
        q, k, v = inputs.attention_operands(work)
        repeats = work.heads // work.kv_heads if self._heads(work, device).repeated else 1
        grouped = work.kv_heads < work.heads and repeats == 1
        backend = self.backend

        def forward() -> torch.Tensor:
            keys, values = k, v
            if repeats > 1:
                keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
            with sdpa_kernel(backend):  # 8 µs on the host, behind which a GPU's queue does not run dry
                return scaled_dot_product_attention(q, keys, values, is_causal=work.causal, enable_gqa=grouped)

        if work.direction == "forward":
            return ForwardTask(forward, (q, k, v))
        return BackwardTask(forward, (q, k, v), inputs.tensor(*q.shape, dtype=work.dtype))

    def _heads(self, work: Attention, device: DeviceSpec) -> _Heads:
        if device.kind != "cuda":
            return _Heads(repeated=False)
        with sdpa_kernel(self.backend):  # torch also refuses what is switched off
            return choose_heads(self.id, CAN_USE[self.backend], work, torch_device(device))


class TorchFlash(TorchAttention):
    """`torch.flash`: FlashAttention-2 on CUDA, torch's own flash kernel on a CPU."""

    id = "torch.flash"
    backend = SDPBackend.FLASH_ATTENTION
    cpu = True


class TorchCudnn(TorchAttention):
    """`torch.cudnn`: cuDNN's graph-generated attention."""

    id = "torch.cudnn"
    backend = SDPBackend.CUDNN_ATTENTION


class TorchEfficient(TorchAttention):
    """`torch.efficient`: the memory-efficient kernel from xFormers, built on CUTLASS."""

    id = "torch.efficient"
    backend = SDPBackend.EFFICIENT_ATTENTION


class TorchMath(TorchAttention):
    """`torch.math`: two batched products and a softmax, the whole score matrix in memory."""

    id = "torch.math"
    backend = SDPBackend.MATH
    cpu = True


@dataclass(frozen=True)
class _Heads:
    """How grouped heads are run: `repeated` for each query head or as they are; or why nothing runs."""

    repeated: bool
    refusal: str | None = None


#: torch's own test of a backend; None for the one that takes everything
CAN_USE: dict[SDPBackend, Callable[..., bool] | None] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.can_use_efficient_attention,
    SDPBackend.MATH: None,
}


def choose_heads(
    provider_id: str, can_use: Callable[..., bool] | None, work: Attention, device: torch.device
) -> _Heads:
    """Ask torch about the workload as it is, then, for grouped heads, with them repeated."""
    if can_use is None:
        return _Heads(repeated=False)
    refusal = _refusal(provider_id, can_use, work, device)
    if refusal is None or work.kv_heads == work.heads:
        return _Heads(repeated=False, refusal=refusal)
    refusal = _refusal(provider_id, can_use, replace(work, kv_heads=work.heads), device)
    return _Heads(repeated=True, refusal=refusal)


def _refusal(provider_id: str, can_use: Callable[..., bool], work: Attention, device: torch.device) -> str | None:
    """Why the backend does not take `work`, in torch's words, or None. Asked with one sample and one group of heads:
    neither count is among torch's conditions, and memory is spared."""
    group = work.heads // work.kv_heads
    dtype, training = TORCH_DTYPES[work.dtype], work.direction == "backward"
    q, k, v = (
        torch.empty(1, heads, seq, work.head_dim, dtype=dtype, device=device, requires_grad=training)
        for heads, seq in ((group, work.seq_q), (1, work.seq_k), (1, work.seq_k))
    )
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, work.causal, group > 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_use(params, True):  # True: say why not, as warnings
            return None
    said = [" ".join(str(warning.message).split("(Triggered")[0].split()).rstrip(" .") for warning in caught]
    return f"{provider_id} does not take {work}: {'; '.join(said) or 'torch does not say why'}"
