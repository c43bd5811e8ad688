"""Number formats: how wide they are, what a product of them is written as, and where each is computed.

Sources: IEEE 754 (fp16, fp32), NVIDIA A100 whitepaper 2020 (bf16; tf32: fp32 storage, 10-bit mantissa in the
tensor core), OCP FP8 specification 1.0 2023 (fp8 is e4m3 here, as in torch.float8_e4m3fn).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A number format. element_bytes: storage per element; output: the format a product is written in by default."""

    name: str
    element_bytes: int
    output: str


_ALL = (
    Dtype("fp16", 2, "fp16"),
    Dtype("bf16", 2, "bf16"),
    Dtype("fp32", 4, "fp32"),
    Dtype("tf32", 4, "fp32"),
    Dtype("fp8", 1, "bf16"),
    Dtype("int8", 1, "int32"),
    Dtype("int32", 4, "int32"),
)

DTYPES: dict[str, Dtype] = {d.name: d for d in _ALL}

#: what matrix products may be asked for (int32 is only ever written)
GEMM_DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp8", "int8")
#: what softmax and attention may be asked for
VECTOR_DTYPES = ("fp16", "bf16", "fp32")


def element_bytes(dtype: str) -> int:
    """Bytes per stored element of `dtype`."""
    return DTYPES[dtype].element_bytes
