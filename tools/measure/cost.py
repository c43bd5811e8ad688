"""Compares the times, and what one point costs, of several timing methods on random GEMMs.

The methods are quantbench's timer, do_bench, mamf-finder's loop, and a short CUDA graph. Run it as
`python -m tools.measure.cost FILE.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quantbench import device
from quantbench.timing import make_timer
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm
from tools.measure.other_methods import METHODS
from tools.measure.random_shapes import random_shapes
from tools.measure.side_by_side import by_timer, measure_rows

#: number of shapes to compare
COST_SHAPES = 50
_METHODS = ("do_bench", "mamf", "graph6")


def main() -> None:
    """Measures the missing rows of the table, and writes the table."""
    out = Path(sys.argv[1])
    spec = device.current()
    methods = {"quantbench": by_timer(make_timer(spec, TimingOptions()))}
    methods |= {name: METHODS[name] for name in _METHODS}
    dtype = device.default_dtype(spec)
    # The seed differs from that of the shapes on which the model is tested.
    shapes = random_shapes(seed=1)[:COST_SHAPES]
    gemms = [Gemm(m, n, k, dtype=dtype, layout="nt") for m, n, k in shapes]
    measure_rows(out, spec, gemms, methods)


if __name__ == "__main__":
    main()
