"""What the results should be: float64, from the operation's definition, on the device that the inputs are on.

Written out by hand and sharing nothing with what is measured; memory and time are no concern here, since results are
checked on small stand-ins (`quantbench.providers.correctness`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from quantbench.workload import Attention


def matmul(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """scale · a·b for a[…, m, k] and b[…, k, n]."""
    return (a.double() @ b.double()) * scale


def causal_mask(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """A boolean mask[rows, cols], True above the diagonal: what a causal softmax drops."""
    return torch.ones(rows, cols, dtype=torch.bool, device=device).triu(diagonal=1)


def softmax(x: torch.Tensor, scale: float, dropped: torch.Tensor | None) -> torch.Tensor:
    """softmax(scale · x) over the last dimension, without what `dropped` marks; a row dropped whole has no result."""
    scores = x.double() * scale
    if dropped is not None:
        scores = scores.masked_fill(dropped, -torch.inf)
    scores = (scores - scores.amax(-1, keepdim=True)).exp()
    return scores / scores.sum(-1, keepdim=True)


def softmax_backward(y: torch.Tensor, gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of x for y = softmax(scale · x) and the gradient of y."""
    y, gradient = y.double(), gradient.double()
    return scale * y * (gradient - (gradient * y).sum(-1, keepdim=True))


def attention(work: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o = softmax(q·kᵀ/√head_dim)·v; key and value heads serve heads / kv_heads query heads each, in order."""
    return _probabilities(work, q, k) @ _per_query_head(work, v)


def attention_backward(
    work: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v for the gradient of o."""
    scale = work.head_dim**-0.5
    p = _probabilities(work, q, k)
    do = gradient.double()
    dv = p.transpose(-1, -2) @ do
    ds = softmax_backward(p, do @ _per_query_head(work, v).transpose(-1, -2), scale)
    dq = ds @ _per_query_head(work, k)
    dk = ds.transpose(-1, -2) @ q.double()
    return dq, _per_kv_head(work, dk), _per_kv_head(work, dv)


def _probabilities(work: Attention, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = q.double() @ _per_query_head(work, k).transpose(-1, -2)
    dropped = causal_mask(work.seq_q, work.seq_k, q.device) if work.causal else None
    return softmax(scores, work.head_dim**-0.5, dropped)


def _per_query_head(work: Attention, x: torch.Tensor) -> torch.Tensor:
    return x.double().repeat_interleave(work.heads // work.kv_heads, dim=1)


def _per_kv_head(work: Attention, x: torch.Tensor) -> torch.Tensor:
    return x.reshape(work.batch, work.kv_heads, -1, *x.shape[2:]).sum(2)
