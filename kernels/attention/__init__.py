"""Computes flash attention in Triton, forward and backward."""

from quantbench.kernels.attention.host import (
    AttentionPlan,
    attention,
    heads_side_by_side,
    plan_backward,
    plan_forward,
)

__all__ = ["AttentionPlan", "attention", "heads_side_by_side", "plan_backward", "plan_forward"]
