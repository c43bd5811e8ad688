"""Measured fp32 products whose kernels are known, and what CUDA cores are expected to do."""

import csv
from functools import cache
from pathlib import Path

import numpy as np

from quantbench.device import lookup
from quantbench.latency.gemm.cost_model import (
    INDEX,
    Machine,
    Menu,
    Shapes,
    Sizes,
    Values,
    hand_prior,
    log_latency,
)
from quantbench.latency.gemm.model import GemmModel
from quantbench.launch import Launch, Tile
from quantbench.providers.identity import split_k_of
from quantbench.providers.kernel_names import parse
from quantbench.quantization import cdiv
from quantbench.workload import Gemm
from quantbench.workload.ops import LAYOUTS
from tools.accuracy.scoring import coverage

A100 = "a100-pcie-40gb"
DATA = Path(__file__).parents[1] / "data" / "named_gemms.csv"
# Below it the table has the launch from Python, not the kernel.
SHORTEST_US = 100.0

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[Launch]]


@cache
def measured() -> Rows:
    with DATA.open(newline="", encoding="utf-8") as stream:
        rows = [
            row for row in csv.DictReader(stream) if float(row["latency_ms"]) * 1e3 > SHORTEST_US
        ]
    launches = []
    for row in rows:
        name = parse(row["kernel"])
        grid = (int(row["grid_x"]), int(row["grid_y"]), int(row["grid_z"]))
        tile = Tile(name.tile.block_m, name.tile.block_n, split_k=grid[2])
        launches.append(Launch(row["kernel"], grid=grid, tile=tile))
    m, n, k = (np.array([int(row[name]) for row in rows]) for name in "mnk")
    return m, n, k, np.array([float(row["latency_ms"]) for row in rows]) * 1e3, launches


def test_fp32_that_nobody_measured_is_predicted_from_other_cuda_cores() -> None:
    m, n, k, latency_us, _ = measured()
    model = GemmModel.prior(A100, dtype="fp32", family_out=True)
    assert f"nobody measured fp32 with torch on {A100}" in model.note
    assert "pooled over p100-pcie-16gb, t4-16gb, v100-pcie-32gb, v100-sxm2-16gb" in model.note
    found = model.predict(m, n, k)
    assert 0.7 < np.median(found.latency_us / latency_us) < 1.43
    assert coverage(latency_us, found.low_us, found.high_us) > 0.85
    # No GPU measured tf32, which runs on tensor cores: fp32's tables say nothing of it.
    tf32 = GemmModel.best(A100, dtype="tf32")
    assert "tensor cores" in tf32.note
    fast_us, slow_us = (of.predict(4096, 4096, 4096).latency_us for of in (tf32, model))
    assert fast_us < 0.5 * slow_us


def test_the_measured_grids_are_what_names_and_shapes_say() -> None:
    m, n, k, _, launches = measured()
    assert len(m) > 140
    for a, b, c, launch in zip(m.tolist(), n.tolist(), k.tolist(), launches, strict=True):
        tiles = (cdiv(b, launch.tile.block_n), cdiv(a, launch.tile.block_m))
        assert launch.grid[:2] == tiles, launch.kernel
        gemm = Gemm(m=a, n=b, k=c, dtype="fp32")
        split_k = split_k_of(launch.grid, parse(launch.kernel), gemm, splitting=False)
        assert split_k == launch.tile.split_k


def test_long_rows_slow_only_the_operands_whose_rows_run_along_k() -> None:
    """V100 (DeepBench), fp16, 8 × 512 × 500000: 658 µs in nn, where the long rows are the 8 of a,
    1,483 µs in nt.
    """
    mean, _ = hand_prior()
    mean[INDEX["tlb_growth"]] = 0.5
    m, n, k = np.full(3, 8.0), np.full(3, 512.0), np.full(3, 5e5)
    machine = Machine.of(lookup("v100-sxm2-16gb"), "fp16")
    layout = np.array([LAYOUTS.index(name) for name in ("nn", "nt", "tn")], dtype=float)
    nn, nt, tn = log_latency(
        Values(mean), Shapes.of(machine, Menu.of(), Sizes.of(m, n, k, layout=layout))
    )[0]
    assert nt > nn + 0.3
    assert tn < nn


def test_a_power_limit_bounds_the_expected_rate() -> None:
    """T4: 8.1 TFLOP/s of fp32 would need more than its 70 W; measured, it reaches some 5."""

    def peak_share(gpu: str) -> float:
        model = GemmModel.prior(gpu, dtype="fp32", family_out=True)
        us = float(model.predict(4096, 4096, 4096).latency_us)
        return 2 * 4096**3 / us / 1e6 / (lookup(gpu).peak("fp32") or 1.0)

    assert 0.4 < peak_share("t4-16gb") < 0.68
    assert peak_share("p100-pcie-16gb") > 1.2 * peak_share("t4-16gb")
