"""Writes a file of random GEMM shapes for `quantbench sweep --shapes`.

Run it as `python -m tools.measure.random_shapes FILE.csv`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

COUNT = 700
_LARGEST = 16384


def random_shapes(seed: int = 0) -> list[tuple[int, int, int]]:
    """Draws COUNT shapes (m, n, k) at random, uniform on a log scale.

    n and k are multiples of 8, and three in four of them are multiples of 64.
    """
    random = np.random.default_rng(seed)

    def draw(least: int, step: int) -> int:
        value = np.exp(random.uniform(np.log(least), np.log(_LARGEST)))
        return max(step, round(float(value) / step) * step)

    def width() -> int:
        return draw(64, 64 if random.random() < 0.75 else 8)

    return [(draw(1, 1), width(), width()) for _ in range(COUNT)]


def main() -> None:
    """Writes the shapes as CSV with the columns m, n and k."""
    with Path(sys.argv[1]).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("m", "n", "k"), *random_shapes()])


if __name__ == "__main__":
    main()
