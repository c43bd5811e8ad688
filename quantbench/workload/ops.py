"""Defines the workloads of a dense layer: GEMM, softmax, attention, casts and collectives.

Every workload has flops, min_bytes and dtype, and validates its fields. Its string is the label in
tables and messages.
"""

from dataclasses import dataclass

from quantbench.errors import (
    InputError,
    require_bools,
    require_choices,
    require_divisor,
    require_int,
    require_ints,
)
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES, VECTOR_DTYPES, element_bytes

LAYOUTS = ("nn", "nt", "tn")
MASKS = ("causal", "full", "none")
DIRECTIONS = ("forward", "backward")

# Number of a softmax's operations per unmasked element. Forward counts scale, compare (for the
# maximum), subtract, exponential, sum and divide. Backward starts from y and its gradient g, and
# counts g·y, sum, subtract, times y and times scale.
_FLOPS_PER_ELEMENT = {"forward": 6, "backward": 5}

COLLECTIVE_OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
#: Dtypes of collectives. The dtype affects the reduction, but not the number of bytes moved.
COLLECTIVE_DTYPES = ("fp16", "bf16", "fp32", "int8", "fp8")
LARGEST_MESSAGE_BYTES = 2**46


def _unmasked(rows: int, cols: int, *, causal: bool) -> int:
    """Returns the number of unmasked scores in a matrix, which is square if the mask is causal."""
    return rows * (rows + 1) // 2 if causal else rows * cols


def multiples_around(size: int, step: int) -> str:
    """Formats the multiples of `step` just below and above a size.

    >>> multiples_around(192, 128), multiples_around(70, 128)
    ('128 or 256', '128')
    """
    below = size // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def require_multiple(value: object, name: str, by: str) -> None:
    """Raises InputError unless the field `by` of a dataclass divides the field `name`."""
    size = getattr(value, name)
    step = getattr(value, by)
    if size % step:
        what = f"{name} = {size} with {by} = {step}"
        expected = f"{name} divisible by {by}: {multiples_around(size, step)}"
        raise InputError(type(value).__name__, what, expected)


@dataclass(frozen=True)
class Gemm:
    """Batched GEMM: `batch` matrix products c[m, n] = a[m, k] · b[k, n].

    layout: row-major storage of a (first letter: n for m×k, t for k×m) and of b (second letter: n
        for k×n, t for n×k). A linear layer y = x·Wᵀ with W stored as out×in has layout nt forward,
        nn for the data gradient and tn for the weight gradient. cuBLAS is column-major and swaps
        the operands, so its kernel names contain "tn" for nt.
    accumulate: dtype of the sum over k: int32 for int8, and fp32 otherwise; "" sets this dtype.

    >>> Gemm(m=2048, n=4096, k=1024).flops
    17179869184
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    layout: str = "nn"
    accumulate: str = ""

    kind = "gemm"

    def __post_init__(self) -> None:
        require_ints(self, "m", "n", "k", "batch")
        require_choices(self, dtype=GEMM_DTYPES, layout=LAYOUTS)
        natural = "int32" if self.dtype == "int8" else "fp32"
        if self.accumulate not in ("", natural):
            raise InputError("Gemm", f"accumulate = {self.accumulate!r} for {self.dtype}", natural)
        object.__setattr__(self, "accumulate", natural)

    @property
    def output_dtype(self) -> str:
        """Dtype of c.

        It is bf16 for 8- and 4-bit floating-point inputs, int32 for int8, fp32 for tf32, and
        otherwise the dtype of the inputs.
        """
        return DTYPES[self.dtype].output

    @property
    def contiguous_dims(self) -> tuple[str, str]:
        """Names of the dimensions (m, n or k) along which the kernel reads a and b contiguously.

        The layout determines the two dimensions. If the inputs have fewer bytes per element than c,
        however, both dimensions are k in every layout (cuBLASLt's "TN format").
        """
        kind = DTYPES[self.dtype]
        narrow = kind.element_bytes / kind.packed < element_bytes(self.output_dtype)
        layout = "nt" if narrow else self.layout
        return {"nn": ("k", "n"), "nt": ("k", "k"), "tn": ("m", "n")}[layout]

    @property
    def flops(self) -> int:
        """Number of multiplications and additions, 2·m·n·k·batch (integer operations for int8)."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic in bytes.

        Each input and scale is read once, and each output is written once.
        """
        kind = DTYPES[self.dtype]
        inputs = round(self.m * self.k * kind.a_bytes + self.k * self.n * kind.b_bytes)
        return self.batch * (inputs + self.m * self.n * element_bytes(self.output_dtype))

    def __str__(self) -> str:
        batch = f"{self.batch}×" if self.batch > 1 else ""
        return f"gemm {batch}{self.m}×{self.n}×{self.k} {self.dtype} {self.layout}"


@dataclass(frozen=True)
class Softmax:
    """Masked softmax y = softmax(scale · x) over the last dimension of x[batch, rows, cols].

    batch: number of score matrices, MBS · heads / TP.
    rows: number of queries.
    cols: number of keys.
    mask: causal, full or none. A causal mask masks the columns past the row, and needs rows equal
        to cols, as in Megatron's kernel. A full mask is a boolean tensor mask_batch×1×rows×cols
        that the heads share.
    scale: factor of the scores.
    mask_batch: number of samples (MBS) with separate masks, which divides batch.
    direction: forward or backward.

    >>> Softmax(batch=2, rows=4, cols=4, mask="none").min_bytes
    128
    """

    batch: int
    rows: int
    cols: int
    dtype: str = "bf16"
    mask: str = "causal"
    scale: float = 1.0
    mask_batch: int = 1
    direction: str = "forward"

    kind = "softmax"

    def __post_init__(self) -> None:
        require_ints(self, "batch", "rows", "cols", "mask_batch")
        require_choices(self, dtype=VECTOR_DTYPES, mask=MASKS, direction=DIRECTIONS)
        if isinstance(self.scale, bool) or not 0 < self.scale < float("inf"):
            raise InputError("Softmax", f"scale = {self.scale!r}", "a finite number above 0")
        if self.mask == "causal" and self.rows != self.cols:
            sizes = f"rows = {self.rows}, cols = {self.cols}"
            raise InputError("Softmax", f"causal with {sizes}", "rows equal to cols")
        require_divisor(self, "mask_batch", "batch")

    @property
    def unmasked_elements(self) -> int:
        """Number of elements of x that are read.

        With a causal mask, this is the lower triangle with the diagonal. Otherwise, it is all of x.
        """
        return self.batch * _unmasked(self.rows, self.cols, causal=self.mask == "causal")

    @property
    def flops(self) -> int:
        """Number of operations: per element that is read, 6 forward and 5 backward.

        An exponential counts as one operation.
        """
        return _FLOPS_PER_ELEMENT[self.direction] * self.unmasked_elements

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic in bytes.

        Forward reads the unmasked elements of x, and a full mask, once. Backward reads the unmasked
        elements of y and of its gradient once. Every output element is written once, including the
        zeros above a causal mask's diagonal.
        """
        width = element_bytes(self.dtype)
        written_bytes = width * self.batch * self.rows * self.cols
        live_bytes = width * self.unmasked_elements
        if self.direction == "backward":
            return written_bytes + 2 * live_bytes
        mask_bytes = 0
        if self.mask == "full":
            mask_bytes = self.mask_batch * self.rows * self.cols
        return written_bytes + live_bytes + mask_bytes

    def __str__(self) -> str:
        shape = f"{self.batch}×{self.rows}×{self.cols}"
        return f"softmax {shape} {self.dtype} {self.mask} {self.direction}"


@dataclass(frozen=True)
class Attention:
    """Fused attention o = softmax(q·kᵀ / √head_dim)·v.

    q is [batch, heads, seq_q, head_dim], and k and v are [batch, kv_heads, seq_k, head_dim].

    kv_heads: number of key/value heads, which divides heads; 0 means `heads`. Grouped-query
        attention has fewer key/value heads than heads.
    causal: whether a query sees only the keys up to its position. This needs seq_q == seq_k,
        because libraries otherwise align the diagonal differently.
    direction: forward or backward.

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
        require_ints(self, "batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")
        require_choices(self, dtype=VECTOR_DTYPES, direction=DIRECTIONS)
        require_divisor(self, "kv_heads", "heads")
        require_bools(self, "causal")
        if self.causal and self.seq_q != self.seq_k:
            sizes = f"seq_q = {self.seq_q}, seq_k = {self.seq_k}"
            raise InputError("Attention", f"causal with {sizes}", "seq_q equal to seq_k")

    @property
    def unmasked_pairs(self) -> int:
        """Number of unmasked query-key pairs in all heads and samples."""
        return self.batch * self.heads * _unmasked(self.seq_q, self.seq_k, causal=self.causal)

    @property
    def flops(self) -> int:
        """Number of the GEMMs' operations on unmasked pairs.

        Forward has two GEMMs. Backward has five, one of which recomputes q·kᵀ. The softmax is not
        counted, as in the FlashAttention papers (Dao 2022, 2023).
        """
        products = 2 if self.direction == "forward" else 5
        return 2 * products * self.unmasked_pairs * self.head_dim

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic in bytes.

        Forward reads q, k and v, and writes o and one fp32 statistic per row. Backward reads all
        five tensors and the gradient of o, and writes the gradients of q, k and v.
        """
        width = element_bytes(self.dtype)
        q = self.batch * self.heads * self.seq_q * self.head_dim * width
        kv = 2 * self.batch * self.kv_heads * self.seq_k * self.head_dim * width
        row_stats = 4 * self.batch * self.heads * self.seq_q
        if self.direction == "forward":
            return 2 * q + kv + row_stats
        return 4 * q + 2 * kv + row_stats

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        shape = f"{self.batch}×{heads}×{self.seq_q}×{self.seq_k}×{self.head_dim}"
        mask = "causal" if self.causal else "full"
        return f"attention {shape} {self.dtype} {mask} {self.direction}"


@dataclass(frozen=True)
class Collective:
    """Collective operation `op` over num_gpus GPUs, spread evenly over num_nodes machines.

    message_bytes: size of a rank's send or receive buffer, whichever is larger, as `size` in
        nccl-tests (doc/PERFORMANCE.md). It is the whole vector in all_reduce and broadcast, the
        output in all_gather, the input in reduce_scatter, one rank's send buffer in all_to_all, and
        the message in send_recv.

    >>> Collective("all_reduce", message_bytes=1024, num_gpus=4).bus_bytes
    1536
    """

    op: str
    message_bytes: int
    num_gpus: int
    dtype: str = "bf16"
    num_nodes: int = 1

    kind = "collective"
    flops = 0  # no matrix arithmetic

    def __post_init__(self) -> None:
        require_choices(self, op=COLLECTIVE_OPS)
        require_int("Collective", "message_bytes", self.message_bytes, high=LARGEST_MESSAGE_BYTES)
        require_int("Collective", "num_gpus", self.num_gpus, low=2, high=2**20)
        require_int("Collective", "num_nodes", self.num_nodes, high=2**20)
        require_choices(self, dtype=COLLECTIVE_DTYPES)
        require_divisor(self, "num_nodes", "num_gpus")
        width = element_bytes(self.dtype)
        if self.message_bytes % width:
            what = f"message_bytes = {self.message_bytes}"
            raise InputError("Collective", what, f"a multiple of {width}")

    @property
    def bus_bytes(self) -> int:
        """Minimum number of bytes that each GPU sends over its links, rounded up.

        bus_bytes divided by the time is nccl-tests' bus bandwidth, which can be compared with the
        links' bandwidth.
        """
        if self.op in ("broadcast", "send_recv"):
            return self.message_bytes
        total = self.message_bytes * (self.num_gpus - 1)
        if self.op == "all_reduce":
            total *= 2
        return -(-total // self.num_gpus)

    @property
    def min_bytes(self) -> int:
        """Minimum number of bytes over one GPU's links, as in `bus_bytes`."""
        return self.bus_bytes

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.op} {self.message_bytes} B over {self.num_gpus} GPUs{nodes} {self.dtype}"


@dataclass(frozen=True)
class Cast:
    """Conversion of a rows×cols tensor from `dtype` to `to`, with its scales.

    reads: number of times that the tensor is read.
    copies: number of times that the tensor is written: 2 if a transposed copy is written too.

    >>> Cast(rows=128, cols=128, to="fp8", copies=2).min_bytes
    65536
    """

    rows: int
    cols: int
    to: str
    dtype: str = "bf16"
    reads: int = 1
    copies: int = 1

    kind = "cast"
    flops = 0  # no matrix arithmetic

    def __post_init__(self) -> None:
        require_ints(self, "rows", "cols", "reads", "copies")
        require_choices(self, dtype=VECTOR_DTYPES, to=GEMM_DTYPES)

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic in bytes."""
        each = self.reads * element_bytes(self.dtype) + self.copies * DTYPES[self.to].a_bytes
        return round(self.rows * self.cols * each)

    def __str__(self) -> str:
        return f"cast {self.rows}×{self.cols} {self.dtype} to {self.copies}× {self.to}"
