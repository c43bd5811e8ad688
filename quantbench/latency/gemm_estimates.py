"""What the GEMM model answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GemmEstimates:
    """Predicted products. Every array has the shape of the sizes that were asked for, () for plain numbers.

    latency_us; low_us, high_us: its 90 % interval. block_m, block_n, split_k and num_waves: of the
    kernel that the model believes the library takes. bound: compute, memory or latency. note: what to know of all of
    them, "" when there is nothing.
    """

    latency_us: npt.NDArray[np.float64]
    low_us: npt.NDArray[np.float64]
    high_us: npt.NDArray[np.float64]
    block_m: npt.NDArray[np.int64]
    block_n: npt.NDArray[np.int64]
    split_k: npt.NDArray[np.int64]
    num_waves: npt.NDArray[np.int64]
    bound: npt.NDArray[np.str_]
    source: str = "modelled"
    note: str = ""

    @property
    def tile(self) -> npt.NDArray[np.int64]:
        """(…, 2): block_m, block_n."""
        return np.stack([self.block_m, self.block_n], axis=-1)

    def __len__(self) -> int:
        return len(self.latency_us)

    def reshape(self, shape: tuple[int, ...]) -> GemmEstimates:
        """The same in another shape."""
        arrays: dict[str, Any] = {k: v.reshape(shape) for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return GemmEstimates(**{**vars(self), **arrays})
