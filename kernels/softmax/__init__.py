"""Megatron-LM's fused scale, mask and softmax in Triton, with gradients: `scaled_causal_softmax`, `plan_forward`."""

from quantbench.kernels.softmax.host import (
    SoftmaxPlan,
    megatron_fused_available,
    plan_backward,
    plan_forward,
    scaled_causal_softmax,
    scaled_causal_softmax_backward,
    scaled_masked_softmax,
    scaled_masked_softmax_backward,
    scaled_softmax,
)

__all__ = [
    "SoftmaxPlan",
    "megatron_fused_available",
    "plan_backward",
    "plan_forward",
    "scaled_causal_softmax",
    "scaled_causal_softmax_backward",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "scaled_softmax",
]
