"""Defines the dtypes: their widths, the output dtype of GEMMs, and the dtypes each op supports.

`dtype_name` translates torch's dtype names, and `missing_format` checks a GPU's support.
"""

from dataclasses import dataclass

from quantbench.errors import InputError

#: Number of two-byte elements in a thread's widest load (16 bytes). Fast attention kernels require
#: a head_dim that is a multiple of this number.
ALIGNED_ELEMENTS = 8


@dataclass(frozen=True)
class Dtype:
    """Number format.

    element_bytes: bytes per stored unit, which contains `packed` elements.
    output: output dtype of a GEMM with inputs of this dtype.
    packed: number of elements in a stored unit: 2 for 4-bit formats, otherwise 1.
    scale_a_bytes, scale_b_bytes: bytes of scales per element of a GEMM's operands a and b.
    """

    name: str
    element_bytes: int
    output: str
    packed: int = 1
    scale_a_bytes: float = 0.0
    scale_b_bytes: float = 0.0

    @property
    def a_bytes(self) -> float:
        """Bytes per element of a GEMM's operand a, including scales."""
        return self.element_bytes / self.packed + self.scale_a_bytes

    @property
    def b_bytes(self) -> float:
        """Bytes per element of a GEMM's operand b, including scales."""
        return self.element_bytes / self.packed + self.scale_b_bytes

    def row_bytes(self, length: int) -> int:
        """Returns the size in bytes of a row of `length` elements, without scales."""
        return length * self.element_bytes // self.packed


# fp16, fp32: IEEE 754.
# bf16, tf32 (fp32 storage, 10-bit mantissa in the tensor core): NVIDIA A100 whitepaper, 2020.
# fp8 (e4m3, as in torch.float8_e4m3fn, with one scale per tensor): OCP FP8 specification 1.0, 2023.
# fp8_block (one fp32 scale per 1×128 elements of a and 128×128 elements of b): DeepSeek-V3
# (arXiv:2412.19437, section 3.3).
# mxfp8, mxfp4 (one scale byte per 32 elements along k): OCP MX specification 1.0, 2023.
# nvfp4 (one e4m3 scale per 16 elements along k, and one fp32 scale per tensor): NVIDIA, cuTile
# documentation, 2026, NVFP4 and MXFP8.
_ALL = (
    Dtype("fp16", 2, "fp16"),
    Dtype("bf16", 2, "bf16"),
    Dtype("fp32", 4, "fp32"),
    Dtype("tf32", 4, "fp32"),
    Dtype("fp8", 1, "bf16"),
    Dtype("fp8_block", 1, "bf16", scale_a_bytes=4 / 128, scale_b_bytes=4 / 128**2),
    Dtype("mxfp8", 1, "bf16", scale_a_bytes=1 / 32, scale_b_bytes=1 / 32),
    Dtype("nvfp4", 1, "bf16", packed=2, scale_a_bytes=1 / 16, scale_b_bytes=1 / 16),
    Dtype("mxfp4", 1, "bf16", packed=2, scale_a_bytes=1 / 32, scale_b_bytes=1 / 32),
    Dtype("int8", 1, "int32"),
    Dtype("int32", 4, "int32"),
)

DTYPES = {d.name: d for d in _ALL}

#: Dtypes of GEMM inputs. int32 is only an output.
GEMM_DTYPES = tuple(name for name in DTYPES if name != "int32")
#: GEMM dtypes that quantbench can measure. Times in other dtypes come from imported tables.
MEASURED_DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp8", "int8")
#: Dtypes of softmax and attention.
VECTOR_DTYPES = ("fp16", "bf16", "fp32")
# First compute capability whose tensor cores support a dtype. Older GPUs would emulate bf16 in
# another format.
# Sources: NVIDIA A100 whitepaper 2020 (bf16, tf32), Turing whitepaper 2018 (int8), Ada whitepaper
# 2022 (fp8).
_FIRST_CAPABILITY = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "int8": (7, 5)}
#: Our name for each of torch's dtype names.
_ALIASES = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "tfloat32": "tf32",
    "float8_e4m3fn": "fp8",
}  # fmt: skip


def dtype_name(dtype: object, operation: str = "dtype") -> str:
    """Returns the canonical name of a dtype.

    dtype: a quantbench name, a torch name or a torch.dtype.
    operation: the caller's name for error messages.

    Raises InputError for an unknown dtype.

    >>> dtype_name("torch.float32"), dtype_name("bf16")
    ('fp32', 'bf16')
    """
    text = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(text, text)
    if name not in GEMM_DTYPES:
        known = ", ".join((*GEMM_DTYPES, *_ALIASES))
        raise InputError(operation, f"dtype = {dtype!r}", f"one of {known}")
    return name


def missing_format(dtype: str, capability: tuple[int, int]) -> str | None:
    """Returns why a GPU of this compute capability does not support a dtype, or None if it does.

    Only dtypes that the providers measure are known; other dtypes, such as nvfp4, give None.

    >>> missing_format("fp8", (8, 0))
    'fp8 needs compute capability 8.9, not 8.0'
    """
    first = _FIRST_CAPABILITY.get(dtype, capability)
    if capability >= first:
        return None
    have = "{}.{}".format(*capability)
    need = "{}.{}".format(*first)
    return f"{dtype} needs compute capability {need}, not {have}"


def element_bytes(dtype: str) -> int:
    """Returns the bytes per stored unit of a dtype (see `Dtype`)."""
    return DTYPES[dtype].element_bytes
