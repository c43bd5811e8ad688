"""The constants of the GEMM cost model: their names, what is expected of them before any measurement, and how surely.

Every parameter is kept as a number z without unit, mostly the logarithm of the quantity that its meaning names; mean
and sd are those of z for a GPU of which only the spec sheet is known. They are the project's own estimates, made wide;
pooled knowledge of measured GPUs replaces them (`gemm_prior`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm_menu import LARGEST_TILE, TILES
from quantbench.latency.tape import Variable

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """One constant. z is its logarithm where `meaning` starts with "log"."""

    name: str
    meaning: str
    mean: float
    sd: float


PARAMETERS = (
    Parameter("efficiency", "log share of the peak that the best tile reaches", np.log(0.75), 0.25),
    Parameter("fill", "log elements of k worth the filling of a block's pipeline", np.log(200.0), 0.7),
    Parameter("saturation", "log blocks on an SM that saturate it", np.log(1.5), 0.4),
    Parameter("fluid", "logit of the share of waves that is softened by overlap", -0.5, 1.0),
    Parameter("dram", "log share of the memory's bandwidth that is reached", np.log(0.85), 0.2),
    Parameter("block_flow", "log bytes per µs that one resident block of 128 + 128 draws", np.log(50e3), 0.7),
    Parameter("block_flow_growth", "exponent of block_m + block_n in it", 0.7, 0.3),
    Parameter("flow_norm", "log(p - 1) of the norm that joins block flow and bandwidth", np.log(2.0), 0.5),
    Parameter("l2_speed", "log bandwidth of L2 over that of memory", np.log(2.5), 0.4),
    Parameter("hot_a", "log share of L2 that holds a between runs", np.log(0.7), 0.5),
    Parameter("hot_b", "log share of L2 that holds b between runs, six copies of it", np.log(0.7), 0.7),
    Parameter("hot_c", "log share of L2 that holds c between runs, six copies of it", np.log(0.7), 0.7),
    Parameter("hot_width", "log width of that step, in log bytes", np.log(0.4), 0.5),
    Parameter("write", "log cost of a written byte over a read one", 0.0, 0.15),
    Parameter("l2_to_sm", "log bandwidth between L2 and the SMs over that of memory", np.log(3.0), 0.5),
    Parameter("overlap", "log(p - 1) of the norm that joins arithmetic and traffic", np.log(2.0), 0.5),
    Parameter("write_overlap", "log(p - 1) of the norm that joins the main loop and writing c", np.log(0.7), 1.0),
    Parameter("launch", "log µs of an empty kernel", np.log(2.2), 0.4),
    Parameter("prologue", "log µs that a block of 128 × 128 adds to it", np.log(0.3), 0.8),
    Parameter("wave", "log µs between waves", np.log(0.4), 0.8),
    Parameter("epilogue", "log µs of writing 128 × 128 results of a wave", np.log(0.15), 0.8),
    Parameter("step", "log µs latency of 32 elements of k", np.log(0.015), 0.8),
    Parameter("step_growth", "exponent of block_m + block_n in it", 0.0, 0.5),
    Parameter("split", "log µs of a split-k reduction", 0.0, 0.7),
    Parameter("split_steps", "log µs per doubling of split_k", np.log(0.1), 0.7),
    Parameter("split_speed", "log bandwidth of partial sums over that of L2", 0.0, 0.7),
    # Parts that add to one output tile take turns where there is no reduction of its own (CUTLASS: "serial split-K").
    Parameter("split_serial", "log µs that each further part of k waits for the one before it", np.log(0.01), 2.0),
    Parameter("small_tile", "log penalty of small tiles in many waves", np.log(0.03), 1.0),
    Parameter("choice", "log width of the choice among kernels, in log time", np.log(0.05), 0.5),
    Parameter("power", "tenths of log time that a long kernel loses to its clock", 0.0, 0.5),
    Parameter("power_after", "log of compute time over 1 ms where that sets in", 0.0, 1.0),
    Parameter("vector_launch", "log launch of the matrix-vector kernel over that of a product", 0.0, 0.3),
    Parameter("vector_flow", "log bandwidth of the matrix-vector kernel over that of a product", np.log(0.7), 0.3),
    Parameter("misaligned", "log factor of arithmetic per halving of alignment below 16 bytes", 0.25, 0.15),
)  # fmt: skip
INDEX = {p.name: i for i, p in enumerate(PARAMETERS)}
#: the tiles' efficiencies stand behind the named parameters in a vector
FIRST_TILE = len(PARAMETERS)
_TILE_SD = 0.3


def hand_prior(tiles: tuple[tuple[int, int], ...] = TILES) -> tuple[FloatArray, FloatArray]:
    """(mean, sd), each (parameters + tiles,): what is expected of a GPU of which only the spec sheet is known."""
    small = [-0.16 * float(np.log2(LARGEST_TILE / (m * n))) for m, n in tiles]  # small tiles reuse each byte less
    mean = np.array([p.mean for p in PARAMETERS] + small)
    sd = np.array([p.sd for p in PARAMETERS] + [_TILE_SD] * len(tiles))
    return mean, sd


# On the GPUs of the public tables this share is 0.1 where the waves of one tile explain the steps (A100), and from 0.4
# to 0.9 where they do not (docs/choosing-shapes.md); 0.38 is what is assumed before any measurement.
_LARGEST_FLUID_SHARE = 1 / 3


def runs_in_waves(vectors: Sequence[FloatArray]) -> bool:
    """Whether these parameters say that products run in waves: the mean share of a wave that overlap softens is small.

    vectors: (parameters,) of each member of a model.
    """
    fluid = [1.0 / (1.0 + np.exp(-vector[INDEX["fluid"]])) for vector in vectors]
    return bool(np.mean(fluid) < _LARGEST_FLUID_SHARE)


@dataclass(frozen=True)
class Values:
    """A parameter vector under its names: a plain array, or a `tape.Variable` of which a gradient is wanted."""

    vector: Any

    def __getitem__(self, name: str) -> Any:
        i = INDEX[name]
        part = slice(i, i + 1)
        return self.vector.take(part) if isinstance(self.vector, Variable) else self.vector[part]

    def tiles(self, index: npt.NDArray[np.intp]) -> Any:
        """Log efficiency of each kernel's tile, (kernels,)."""
        at = FIRST_TILE + index
        return self.vector.take(at) if isinstance(self.vector, Variable) else self.vector[at]
