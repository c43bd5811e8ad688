"""Runs flash attention in Triton, forward and backward.

Entry points: `attention`, `plan_forward`, `plan_backward`, `AttentionPlan`, `heads_side_by_side`.
Used by `providers.triton_kernels`.
"""

from quantbench.kernels.attention.host import (
    AttentionPlan,
    attention,
    heads_side_by_side,
    plan_backward,
    plan_forward,
)

__all__ = ["AttentionPlan", "attention", "heads_side_by_side", "plan_backward", "plan_forward"]
