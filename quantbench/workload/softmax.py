"""The softmax between the two batched products of attention, as Megatron fuses it: scale, mask, normalise."""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice, require_int
from quantbench.workload.dtypes import DTYPES, VECTOR_DTYPES

MASKS = ("causal", "full", "none")
DIRECTIONS = ("forward", "backward")

# Per unmasked element. Forward: scale, compare for the maximum, subtract, exponential, sum, divide. Backward
# (y and its gradient g are given): g·y, sum, subtract the sum, times y, times scale.
_FLOPS_PER_ELEMENT = {"forward": 6, "backward": 5}


def causal_pairs(size: int) -> int:
    """Elements on and below the diagonal of a size×size matrix.

    >>> causal_pairs(3)
    6
    """
    return size * (size + 1) // 2


@dataclass(frozen=True)
class Softmax:
    """y = softmax(scale · x + mask) over the last dimension of x[batch, rows, cols].

    batch: heads / TP × MBS; rows: sq; cols: sk. mask: causal (columns past the row are dropped; needs rows == cols,
    as Megatron's kernel does), full (a boolean tensor mask_batch×1×rows×cols, shared by the heads) or none.
    mask_batch: MBS, the samples that the mask tells apart; divides batch.

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
        for name in ("batch", "rows", "cols", "mask_batch"):
            require_int("Softmax", name, getattr(self, name))
        require_choice("Softmax", "dtype", self.dtype, VECTOR_DTYPES)
        require_choice("Softmax", "mask", self.mask, MASKS)
        require_choice("Softmax", "direction", self.direction, DIRECTIONS)
        if isinstance(self.scale, bool) or not 0 < self.scale < float("inf"):
            raise InputError("Softmax", f"scale = {self.scale!r}", "a finite number above 0")
        if self.mask == "causal" and self.rows != self.cols:
            raise InputError("Softmax", f"causal with rows = {self.rows}, cols = {self.cols}", "rows equal to cols")
        if self.batch % self.mask_batch:
            raise InputError("Softmax", f"mask_batch = {self.mask_batch}", f"a divisor of batch = {self.batch}")

    @property
    def live_elements(self) -> int:
        """Elements that are read: all, or those on and below the diagonal."""
        if self.mask == "causal":
            return self.batch * causal_pairs(self.rows)
        return self.batch * self.rows * self.cols

    @property
    def flops(self) -> int:
        """Arithmetic on unmasked elements: 6 each forward, 5 each backward; an exponential counts as one."""
        return _FLOPS_PER_ELEMENT[self.direction] * self.live_elements

    @property
    def min_bytes(self) -> int:
        """Fewest bytes through device memory: live inputs (backward: y and its gradient) and the mask are read
        once, every output element is written once, the zeros above the diagonal included."""
        width = DTYPES[self.dtype].element_bytes
        reads = 1 if self.direction == "forward" else 2
        has_mask = self.mask == "full" and self.direction == "forward"
        mask_bytes = self.mask_batch * self.rows * self.cols if has_mask else 0
        return width * (reads * self.live_elements + self.batch * self.rows * self.cols) + mask_bytes

    def __str__(self) -> str:
        return f"softmax {self.batch}×{self.rows}×{self.cols} {self.dtype} {self.mask} {self.direction}"
