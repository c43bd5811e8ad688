"""Results in float64 from the definition of each operation, at once: for small workloads. The
oracle of the tests.
"""

from collections.abc import Sequence

import torch

from quantbench.errors import InputError
from quantbench.providers.correctness import causal_mask, softmax, softmax_backward
from quantbench.workload import Attention, Gemm, GroupedGemm, Permute, Softmax, Workload


def results(workload: Workload, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """All results of a workload in float64. inputs: as `Task.inputs` returns them."""
    tensors = [tensor.detach() for tensor in inputs]
    if isinstance(workload, Gemm):
        product = tensors[0].double() @ tensors[1].double()
        return (product + tensors[2].double() if len(tensors) == 3 else product,)
    if isinstance(workload, GroupedGemm):
        return (grouped(workload, tensors[0].double(), tensors[1].double()),)
    if isinstance(workload, Permute):
        slots = tensors[-1]
        if workload.direction == "permute":
            return (torch.stack([tensors[0][slot // workload.top_k].double() for slot in slots]),)
        terms = tensors[0][slots].double() * tensors[1].double().reshape(-1, 1)
        return (terms.reshape(workload.tokens, workload.top_k, -1).sum(1),)
    if isinstance(workload, Softmax):
        x = tensors[0].double()
        dropped = tensors[1] if workload.mask == "full" else None
        if workload.mask == "causal":
            dropped = causal_mask(workload.rows, workload.cols, x.device)
        y = softmax(x, workload.scale, dropped)
        return (
            y
            if workload.direction == "forward"
            else softmax_backward(y, tensors[-1].double(), workload.scale),
        )
    if isinstance(workload, Attention):
        q, k, v = tensors[:3]
        if workload.direction == "forward":
            return (attention(workload, q, k, v),)
        return attention_backward(workload, q, k, v, tensors[3])
    raise InputError(
        "reference", f"a workload of kind {workload.kind}", "gemm, softmax or attention"
    )


def grouped(work: GroupedGemm, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The products of the experts, one after the other."""
    counts = list(work.tokens_per_expert)
    if work.layout == "tn":
        return torch.stack(
            [left @ right for left, right in zip(a.split(counts, 1), b.split(counts), strict=True)]
        )
    return torch.cat([left @ right for left, right in zip(a.split(counts), b, strict=True)])


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """‖output − reference‖ / ‖reference‖ in float64; ‖output‖ where the reference is zero. NaN
    stays NaN.

    >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
    1.3333333333333333
    """
    difference = float(torch.linalg.vector_norm(output.double() - reference.double()))
    size = float(torch.linalg.vector_norm(reference.double()))
    return difference / size if size != 0 else difference


def attention(work: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o = softmax(q·kᵀ/√head_dim)·v; key and value heads serve heads / kv_heads query heads each,
    in order.
    """
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
