"""Lists the sizes that users can set or sweep (hidden, heads, m, n, k), and the names of model ops.

`SIZES` has the meaning of each size, its usual values, and the values over which it is swept by
default. The ops are listed here too, because the swept size decides which ops are measured by
default.
"""

from dataclasses import dataclass

from quantbench.workload.dtypes import DTYPES

#: names of the linear ops of a layer
LINEAR_OPS = ("qkv", "proj", "mlp_up", "mlp_gate", "mlp_up_gate", "mlp_down")
# GEMMs of latent attention and of shared experts.
_OTHER_LINEAR = (
    "latent_down",
    "q_up",
    "kv_up",
    "shared_up",
    "shared_gate",
    "shared_up_gate",
    "shared_down",
)
_MLP_OPS = ("mlp_up", "mlp_gate", "mlp_up_gate", "mlp_down")
UNFUSED_OPS = ("scores", "softmax", "context")
ATTENTION_OPS = (*UNFUSED_OPS, "attention")
GROUPED_OPS = ("experts_up", "experts_up_gate", "experts_down")
EXPERT_OPS = (*GROUPED_OPS, "permute", "unpermute")
MODEL_OPS = (*LINEAR_OPS, *_OTHER_LINEAR, *ATTENTION_OPS, *EXPERT_OPS, "logits")

#: largest allowed value of a size; the smallest is 1
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Swept:
    """How a size is swept.

    step: step of a range that is typed without a step.
    gpu, cpu: default values on a GPU and on a CPU, as a user would type them.
    ops: ops that are measured by default, namely those that the size changes most.
    length: whether rows in memory have this length (see `grain_of`).
    """

    step: int
    gpu: str
    cpu: str
    ops: tuple[str, ...] = ()
    length: bool = False

    def usual_range(self, kind: str) -> str:
        """Returns the default values as a user would type them.

        kind: device kind, cuda or cpu.
        """
        return self.cpu if kind == "cpu" else self.gpu


@dataclass(frozen=True)
class Size:
    """One size, from 1 to LARGEST.

    words: meaning of the size with its unit, as help text.
    of: owner of the size: `model`, `experts` or `product` (a plain GEMM).
    swept: how the size is swept; None if it cannot be an axis.
    gpu, cpu: usual value on a GPU and on a CPU; 0 if the value follows from other sizes or from the
        model.
    """

    words: str
    of: str
    swept: Swept | None = None
    gpu: int = 0
    cpu: int = 0

    def usual(self, kind: str) -> int:
        """Returns the usual value.

        kind: device kind, cuda or cpu.
        """
        return self.cpu if kind == "cpu" else self.gpu


#: every size by its name. The usual values fit a model with 7 billion parameters on a GPU, and a
#: small model on a CPU.
SIZES = {
    "hidden": Size(
        "Hidden size.", "model",
        Swept(64, "1024:8192:64", "256:1024:16", (*LINEAR_OPS, *_OTHER_LINEAR, *EXPERT_OPS),
        length=True), 4096, 768,
    ),
    "heads": Size("Attention heads.", "model", Swept(1, "8:128:8", "4:24:4", ATTENTION_OPS)),
    "kv-heads": Size("Key/value heads (default: the model's, else as many as heads).", "model"),
    "head-dim": Size(
        "Width of a head (default: the model's, else hidden / heads).", "model",
        Swept(8, "32:256:8", "16:128:8", ATTENTION_OPS, length=True),
    ),
    "ffn": Size(
        "Width of the MLP (default: 4 × hidden).", "model",
        Swept(64, "4096:16384:128", "512:2048:64", _MLP_OPS, length=True),
    ),
    "layers": Size("Layers (default: a usual depth for the hidden size).", "model", None, 1, 1),
    "seq": Size(
        "Sequence length, tokens.", "model",
        Swept(128, "512:8192:256", "64:512:32", MODEL_OPS, length=True), 2048, 256
    ),
    "mbs": Size("Micro-batch size, sequences (default: 1).", "model",
    Swept(1, "1:8:1", "1:4:1", MODEL_OPS)),
    "tp": Size("Tensor-parallel degree (default: 1).", "model",
    Swept(1, "1,2,4,8", "1,2,4", MODEL_OPS)),
    "vocab": Size(
        "Vocabulary size.", "model",
        Swept(64, "49152:51200:64", "960:1536:32", ("logits",), length=True), 50304, 1024
    ),
    "experts": Size(
        "Routed experts of a layer, in place of its MLP (default: the model's).", "experts",
        Swept(1, "8:128:8", "2:32:2", EXPERT_OPS), 64, 8,
    ),
    "top-k": Size("Experts per token.", "experts", Swept(1, "1:8:1", "1:8:1", EXPERT_OPS), 8, 2),
    "moe-ffn": Size(
        "Width of one expert.", "experts",
        Swept(64, "512:4096:64", "64:512:16", GROUPED_OPS, length=True), 2048, 256
    ),
    "tokens": Size(
        "Tokens of each GPU's micro-batch, in place of seq and mbs.", "experts",
        Swept(128, "128:8192:128", "32:512:16", EXPERT_OPS),
    ),
    "ep": Size(
        "Expert-parallel degree; each GPU of it has its own tokens (default: 1).", "experts",
        Swept(1, "1,2,4,8", "1,2,4,8", EXPERT_OPS),
    ),
    "m": Size("Rows of a plain product.", "product", Swept(64, "1024:4096:64", "64:512:16"), 4096,
    512),
    "n": Size(
        "Columns of a plain product.", "product",
        Swept(64, "1024:8192:64", "256:1024:16", length=True), 4096, 512
    ),
    "k": Size(
        "Inner dimension of a plain product.", "product",
        Swept(64, "1024:8192:64", "256:1024:32", length=True), 4096, 512
    ),
    "batch": Size("Number of plain products in one batch (default: 1).", "product",
    Swept(1, "1:64:1", "1:16:1")),
}  # fmt: skip

#: sizes that may be an axis, by name
SWEPT = {name: size.swept for name, size in SIZES.items() if size.swept is not None}
DIMS = tuple(SWEPT)
GEMM_DIMS = tuple(name for name in DIMS if SIZES[name].of == "product")
#: dimensions that only layers with experts have
MOE_DIMS = tuple(name for name in DIMS if SIZES[name].of == "experts")
MODEL_DIMS = tuple(name for name in DIMS if name not in GEMM_DIMS)


def usual_sizes(kind: str, *of: str) -> dict[str, int]:
    """Returns the usual values of sizes, by name as a Python identifier.

    Sizes without a usual value are left out.

    kind: device kind, cuda or cpu.
    of: owners of the sizes to return, as in `Size.of`.
    """
    found = {}
    for name, size in SIZES.items():
        value = size.usual(kind)
        if size.of in of and value:
            found[name.replace("-", "_")] = value
    return found


# Triton compiles another variant of a kernel for integer arguments, such as sizes and strides, that
# are no multiples of 16. 16 elements also fill the 16 bytes of an aligned load, except in 4 bits.
_LENGTH_STEP = 16


def grain_of(dim: str, dtype: str) -> int:
    """Returns the step between sizes in a search for edges along a dimension.

    For the length of a row in memory the step is 16, or 32 in a 4-bit dtype, else 1. Misaligned
    rows and other compiled variants of a kernel could be mistaken for edges.

    >>> grain_of("n", "bf16"), grain_of("n", "nvfp4"), grain_of("m", "bf16")
    (16, 32, 1)
    """
    swept = SWEPT.get(dim)
    return _LENGTH_STEP * DTYPES[dtype].packed if swept and swept.length else 1


def past_edge(dim: str, dtype: str) -> int:
    """Returns how far past an edge `@edges` measures the larger size.

    Rows of a GEMM stay aligned to 128 bytes: on an H200, rows that are aligned to 16 bytes take
    1.4 times as long in our persistent kernel. A head's width moves by `grain_of`.

    >>> past_edge("n", "bf16"), past_edge("n", "fp8"), past_edge("head-dim", "bf16")
    (64, 128, 16)
    """
    grain = grain_of(dim, dtype)
    if grain == 1 or dim == "head-dim":
        return grain
    return 128 * grain // DTYPES[dtype].row_bytes(grain)
