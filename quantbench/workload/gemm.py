"""Matrix products: m×k times k×n; k is always the reduction."""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice, require_int
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES

LAYOUTS = ("nn", "nt", "tn")


@dataclass(frozen=True)
class Gemm:
    """`batch` products c[m, n] = sum over k of a[m, k] · b[k, n].

    layout, in row-major storage: first letter for a (n: stored m×k; t: stored k×m), second for b (n: stored k×n;
    t: stored n×k). A linear layer y = x·Wᵀ with W stored out×in is nt forward, nn for the data gradient and tn for
    the weight gradient. (cuBLAS is column-major and swaps the operands: its kernel names call our nt "tn".)
    accumulate: the format the sum is kept in; fp32, or int32 for int8.

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
        for name in ("m", "n", "k", "batch"):
            require_int("Gemm", name, getattr(self, name))
        require_choice("Gemm", "dtype", self.dtype, GEMM_DTYPES)
        require_choice("Gemm", "layout", self.layout, LAYOUTS)
        natural = "int32" if self.dtype == "int8" else "fp32"
        if self.accumulate not in ("", natural):
            raise InputError("Gemm", f"accumulate = {self.accumulate!r} for {self.dtype}", natural)
        object.__setattr__(self, "accumulate", natural)

    @property
    def output_dtype(self) -> str:
        """Format of c: that of the inputs, bf16 for fp8 and int32 for int8."""
        return DTYPES[self.dtype].output

    @property
    def flops(self) -> int:
        """Multiplications and additions, 2·m·n·k·batch (for int8 they are integer operations)."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def min_bytes(self) -> int:
        """Fewest bytes through device memory: each input read once, each output written once."""
        inputs = (self.m * self.k + self.k * self.n) * DTYPES[self.dtype].element_bytes
        return self.batch * (inputs + self.m * self.n * DTYPES[self.output_dtype].element_bytes)

    def __str__(self) -> str:
        batch = f"{self.batch}×" if self.batch > 1 else ""
        return f"gemm {batch}{self.m}×{self.n}×{self.k} {self.dtype} {self.layout}"
