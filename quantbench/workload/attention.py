"""Fused scaled-dot-product attention."""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice, require_int
from quantbench.workload.dtypes import DTYPES, VECTOR_DTYPES
from quantbench.workload.softmax import DIRECTIONS, causal_pairs


@dataclass(frozen=True)
class Attention:
    """o = softmax(q·kᵀ / √head_dim)·v for q[batch, heads, seq_q, head_dim], k and v[batch, kv_heads, seq_k, head_dim].

    kv_heads below heads is grouped-query attention; 0 (the default) stands for heads. causal needs
    seq_q == seq_k: libraries disagree about which corner the diagonal ends in otherwise.

    >>> Attention(batch=1, heads=2, seq_q=4, seq_k=4, head_dim=8, causal=False).flops
    1024
    """

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    kv_heads: int = 0
    dtype: str = "bf16"
    causal: bool = True
    direction: str = "forward"

    kind = "attention"

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"):
            require_int("Attention", name, getattr(self, name))
        require_choice("Attention", "dtype", self.dtype, VECTOR_DTYPES)
        require_choice("Attention", "direction", self.direction, DIRECTIONS)
        if self.heads % self.kv_heads:
            raise InputError("Attention", f"kv_heads = {self.kv_heads}", f"a divisor of heads = {self.heads}")
        if not isinstance(self.causal, bool):
            raise InputError("Attention", f"causal = {self.causal!r}"[:80], "True or False")
        if self.causal and self.seq_q != self.seq_k:
            raise InputError(
                "Attention", f"causal with seq_q = {self.seq_q}, seq_k = {self.seq_k}", "seq_q equal to seq_k"
            )

    @property
    def live_pairs(self) -> int:
        """Query-key pairs that count, over all heads and samples."""
        per_head = causal_pairs(self.seq_q) if self.causal else self.seq_q * self.seq_k
        return self.batch * self.heads * per_head

    @property
    def flops(self) -> int:
        """Matrix arithmetic on live pairs: two products forward, five backward (one of them recomputes q·kᵀ).

        The softmax between them is left out, as in the FlashAttention papers (Dao 2022, 2023), so that figures
        compare with published ones.
        """
        products = 2 if self.direction == "forward" else 5
        return 2 * products * self.live_pairs * self.head_dim

    @property
    def min_bytes(self) -> int:
        """Fewest bytes through device memory: forward reads q, k, v and writes o and the fp32 row statistics;
        backward reads those and do, and writes dq, dk, dv."""
        width = DTYPES[self.dtype].element_bytes
        q = self.batch * self.heads * self.seq_q * self.head_dim * width
        kv = 2 * self.batch * self.kv_heads * self.seq_k * self.head_dim * width
        row_stats = 4 * self.batch * self.heads * self.seq_q
        if self.direction == "forward":
            return 2 * q + kv + row_stats
        return 4 * q + 2 * kv + row_stats

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.kv_heads == self.heads else f"{self.heads}/{self.kv_heads}"
        shape = f"{self.batch}×{heads}×{self.seq_q}×{self.seq_k}×{self.head_dim}"
        return f"attention {shape} {self.dtype} {'causal' if self.causal else 'full'} {self.direction}"
