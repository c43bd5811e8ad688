"""Provides attention and unfused softmax with torch.

Attention is `scaled_dot_product_attention` with one backend selected, so that each backend is
measured separately. By default, torch prefers FlashAttention-2 even where cuDNN's kernel is up to
twice as fast. Softmax runs the same operations as Megatron-LM without its fused kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quantbench.providers.base import Task
from quantbench.providers.correctness import causal_mask
from quantbench.providers.inputs import TORCH_DTYPES, Inputs, torch_device
from quantbench.providers.tasks import BackwardTask, BuiltInProvider, ForwardTask
from quantbench.workload import Attention, Softmax

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec

# Value that Megatron-LM gives to masked scores (attention_mask_func).
_MASKED = -10_000.0


# `flash` is FlashAttention-2 on CUDA and torch's own flash kernel on a CPU. `cudnn` is cuDNN's
# graph-generated attention. `efficient` is the memory-efficient kernel from xFormers, built on
# CUTLASS. `math` is two batched GEMMs and a softmax, with the whole score matrix in memory.
#: backends of attention, by variant: (backend, torch's check whether the backend supports some
#: inputs); a check of None means that the backend supports all inputs
BACKENDS: dict[str, tuple[SDPBackend, Callable[..., bool] | None]] = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.can_use_flash_attention),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.can_use_cudnn_attention),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.can_use_efficient_attention),
    "math": (SDPBackend.MATH, None),
}
# Variants that run on a CPU.
_ON_CPU = ("flash", "math")


class TorchAttention(BuiltInProvider[Attention]):
    """Attention with one selected backend of torch.

    A forward pass saves nothing for a backward pass. A backward pass computes the gradients of q, k
    and v through a retained autograd graph, and its forward pass is not timed.

    With grouped heads, several query heads share one key head. The kernel gets them unchanged if
    the backend supports them. Otherwise each run first repeats keys and values for each query head,
    which is timed as part of this backend's cost.
    """

    kind = "attention"

    def refusal(self, work: Attention, device: DeviceSpec) -> str | None:
        """Returns torch's reason for refusing the workload; None if torch accepts it.

        No kernel is launched.
        """
        if device.kind == "cpu":
            if self.variant in _ON_CPU:
                return None
            return f"{self.id} needs a CUDA device"
        return self._heads(work, device)[1]

    def task(self, work: Attention, device: DeviceSpec, inputs: Inputs) -> Task:
        q, k, v, *gradient = inputs.operands(work)
        repeats = work.heads // work.kv_heads if self._heads(work, device)[0] else 1
        grouped = work.kv_heads < work.heads and repeats == 1
        backend = BACKENDS[self.variant][0]

        def forward() -> torch.Tensor:
            keys = k
            values = v
            if repeats > 1:
                keys = k.repeat_interleave(repeats, dim=1)
                values = v.repeat_interleave(repeats, dim=1)
            # The context manager takes 8 µs on the host, which is short enough to keep the queue of
            # a GPU filled.
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, keys, values, is_causal=work.causal, enable_gqa=grouped
                )

        if work.direction == "forward":
            return ForwardTask(forward, (q, k, v))
        return BackwardTask(forward, (q, k, v), gradient[0])

    def _heads(self, work: Attention, device: DeviceSpec) -> tuple[bool, str | None]:
        """Returns whether keys and values must be repeated, and torch's reason for refusing.

        On a GPU, this is the result of `choose_heads`. On a CPU nothing is refused, but only some
        versions of torch's flash kernel support grouped heads.
        """
        if device.kind == "cpu":
            grouped = work.kv_heads < work.heads
            return grouped and self.variant == "flash" and not _cpu_flash_takes_groups(), None
        backend, can_use = BACKENDS[self.variant]
        with sdpa_kernel(backend):  # torch also refuses a backend that is switched off
            return choose_heads(self.id, can_use, work, torch_device(device))


@cache
def _cpu_flash_takes_groups() -> bool:
    """Returns whether torch's flash kernel for CPUs supports grouped heads.

    The kernel in torch 2.6 does not support them.
    """
    q = torch.zeros(1, 2, 1, 8)
    k = torch.zeros(1, 1, 1, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives its reasons for refusing as warnings
        try:
            scaled_dot_product_attention(q, k, k, enable_gqa=True)
        except RuntimeError:
            return False
    return True


def choose_heads(
    provider_id: str, can_use: Callable[..., bool] | None, work: Attention, device: torch.device
) -> tuple[bool, str | None]:
    """Returns whether keys and values must be repeated, and torch's reason for refusing.

    They are repeated, once for each query head, if the backend refuses grouped heads. The reason is
    None if torch accepts the workload, either unchanged or with repeated keys and values.

    can_use: torch's check of the backend; None if the backend supports all inputs.
    """
    if can_use is None:
        return False, None
    refusal = _refusal(provider_id, can_use, work, device)
    if refusal is None or work.kv_heads == work.heads:
        return False, refusal
    return True, _refusal(provider_id, can_use, replace(work, kv_heads=work.heads), device)


def _refusal(
    provider_id: str, can_use: Callable[..., bool], work: Attention, device: torch.device
) -> str | None:
    """Returns torch's reason for refusing `work`; None if torch accepts it.

    To save memory, only one sample and one group of heads are allocated for the check. torch's
    conditions do not depend on the number of samples or groups.
    """

    def empty(heads: int, seq: int) -> torch.Tensor:
        made = torch.empty(
            1, heads, seq, work.head_dim, dtype=TORCH_DTYPES[work.dtype], device=device
        )
        return made.requires_grad_(work.direction == "backward")

    group = work.heads // work.kv_heads
    q = empty(group, work.seq_q)
    k = empty(1, work.seq_k)
    v = empty(1, work.seq_k)
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, work.causal, group > 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_use(params, True):  # with True, torch states its reasons as warnings
            return None
    reasons = []
    for warning in caught:
        text = str(warning.message).split("(Triggered")[0]
        reasons.append(" ".join(text.split()).rstrip(" ."))
    return f"{provider_id} does not take {work}: {'; '.join(reasons) or 'torch does not say why'}"


class TorchEagerSoftmax(BuiltInProvider[Softmax]):
    """Softmax as a sequence of torch operations (`torch.eager`).

    Megatron-LM runs the same operations if its fused kernel does not support a shape. fp16 and bf16
    are cast to fp32, scaled, masked with −10000, and cast back after the softmax. Source:
    Megatron-LM, megatron/core/fusions/fused_softmax.py, `forward_torch_softmax` with
    softmax_in_fp32. As in Megatron-LM, the causal mask is made once and kept. autograd runs the
    backward pass through these operations.
    """

    kind = "softmax"

    def refusal(self, work: Softmax, device: DeviceSpec) -> str | None:
        return None

    def task(self, work: Softmax, device: DeviceSpec, inputs: Inputs) -> Task:
        given = inputs.operands(work)
        x = given[0]
        mask = given[1] if work.mask == "full" else None
        dropped = mask
        if work.mask == "causal":
            dropped = causal_mask(work.rows, work.cols, x.device)

        def forward() -> torch.Tensor:
            return megatron_fallback(x, work.scale, dropped)

        if work.direction == "forward":
            return ForwardTask(forward, given)
        return BackwardTask(forward, (x,), given[-1], mask)


def megatron_fallback(x: torch.Tensor, scale: float, dropped: torch.Tensor | None) -> torch.Tensor:
    """Computes softmax(scale · x) in fp32 over the last dimension; the result has the dtype of x.

    dropped: boolean mask, True for masked scores, which are set to −10000; None for no mask.

    >>> megatron_fallback(torch.zeros(1, 2), 1.0, torch.tensor([[False, True]]))
    tensor([[1., 0.]])
    """
    scores = x.float() * scale
    if dropped is not None:
        scores.masked_fill_(dropped, _MASKED)
    return torch.softmax(scores, dim=-1).to(x.dtype)
