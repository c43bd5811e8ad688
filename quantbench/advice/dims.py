"""What the sides of an op's products are called in the terms of the shape they come from."""

from __future__ import annotations

from quantbench.workload import Op

# Sides (m, n, k) of the forward products, as TransformerShape.ops makes them.
_FORWARD = {
    "qkv": ("tokens", "qkv width / tp", "hidden"),
    "scores": ("seq", "seq", "head_dim"),
    "context": ("seq", "head_dim", "seq"),
    "proj": ("tokens", "hidden", "heads · head_dim / tp"),
    "mlp_up": ("tokens", "ffn / tp", "hidden"),
    "mlp_gate": ("tokens", "ffn / tp", "hidden"),
    "mlp_up_gate": ("tokens", "2 · ffn / tp", "hidden"),
    "mlp_down": ("tokens", "hidden", "ffn / tp"),
    "logits": ("tokens", "vocab / tp", "hidden"),
}


def side_names(op: Op) -> dict[str, str]:
    """`m`, `n` and `k` of the op's product by name; empty for softmax and attention.

    >>> from quantbench.workload import TransformerShape
    >>> ops = TransformerShape(hidden=1024, heads=16, seq=512).ops()
    >>> side_names(next(op for op in ops if op.label == "mlp_up.wgrad"))
    {'m': 'ffn / tp', 'n': 'hidden', 'k': 'tokens'}
    """
    if op.name not in _FORWARD or op.workload.kind != "gemm":
        return {}
    m, n, k = _FORWARD[op.name]
    if op.phase == "dgrad":
        n, k = k, n
    elif op.phase == "wgrad":
        # The gradient of a weight stored n×k is n×k; that of context's values, stored k×n, is k×n.
        m, n, k = (k, n, m) if op.name == "context" else (n, k, m)
    return {"m": m, "n": n, "k": k}
