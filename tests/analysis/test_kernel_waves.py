"""Tile and wave edges of named kernels in scattered tables: found where a device pays whole waves, only there."""

from collections.abc import Callable
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from quantbench.analysis.check import check_run
from quantbench.analysis.kernel_waves import KernelWaves, kernel_waves
from quantbench.analysis.summary import points_of
from quantbench.cli.check import check_to_json
from quantbench.device import lookup
from quantbench.importers import neusight
from quantbench.importers.runs import Origin, Row, Rows, records_of, write_run
from quantbench.launch import Launch, Tile
from quantbench.quantization import cdiv
from quantbench.report.page import write_report
from quantbench.report.sections import kernels_section
from quantbench.store.folder import Run, read_run
from quantbench.store.record import Place
from quantbench.workload import Gemm

V100 = lookup("v100-pcie-32gb")
ORIGIN = Origin("t", "made", {}, {"importer": "test", "sha256": "0"})
WHOLE = Path(__file__).parents[3] / "shared" / "data" / "neusight_fp32.parquet"
TILE = Tile(64, 64)
NAME = "volta_sgemm_64x64_nn"
#: time of a product in times of one block, from its number of blocks and the filled share of their tiles
Blocks = Callable[[float, float], float]


def scattered(tmp_path: Path, waves_of: Blocks, *, off_16_bytes: float = 1.0) -> Run:
    """Writes 1,500 batched products of random sizes on a V100 whose blocks take 98 µs per 1,000 of the reduction."""
    random = np.random.default_rng(0)
    found = Rows()
    for _ in range(1500):
        batch, k = int(random.integers(1, 120)), int(np.exp(random.uniform(np.log(64), np.log(4096))))
        m, n = (int(size) for size in random.integers(16, 180, size=2))
        work = Gemm(m, n, k, batch=batch, dtype="fp32")
        grid = (cdiv(n, 64), cdiv(m, 64), batch)
        blocks = grid[0] * grid[1] * grid[2]
        waves = waves_of(blocks / V100.sm_count, m * n * batch / (blocks * TILE.elements))
        aligned = n % 4 == 0 and k % 4 == 0
        time_us = (40.0 + waves * 0.098 * k * (1 if aligned else off_16_bytes)) * float(np.exp(random.normal(0, 0.02)))
        place = Place({"m": m, "n": n, "k": k, "batch": batch}, "bmm")
        found.rows.append(Row(work, time_us, "torch", place, launch=Launch(NAME, grid, (64, 1, 1), tile=TILE)))
    return read_run(write_run(tmp_path, V100, ORIGIN, found).folder)


def of(run: Run) -> KernelWaves:
    (found,) = kernel_waves(points_of(run.records, V100), V100)
    assert (found.kernel, found.provider, found.tile) == (NAME, "torch", TILE)
    return found


def test_whole_waves_of_one_block_per_sm(tmp_path: Path) -> None:
    found = of(scattered(tmp_path, lambda per_sm, filled: ceil(per_sm)))
    assert [edge.blocks for edge in found.edges[:4]] == [80, 160, 240, 320]
    assert found.edges[0].low < 2.0 < found.edges[0].high
    assert found.constant_us == pytest.approx(40, abs=5)
    assert found.us_per_1000 == pytest.approx(98, rel=0.05)
    assert found.whole_tiles


def test_waves_of_two_blocks_per_sm_rise_after_every_second(tmp_path: Path) -> None:
    # A block alone on its SM is as slow as two that share it.
    found = of(scattered(tmp_path, lambda per_sm, filled: ceil(per_sm / 2)))
    assert [edge.blocks for edge in found.edges[:3]] == [160, 320, 480]


def test_blocks_that_share_the_sms_evenly_have_no_edges(tmp_path: Path) -> None:
    found = of(scattered(tmp_path, lambda per_sm, filled: max(1.0, per_sm)))
    assert found.edges == ()
    assert found.whole_tiles


def test_tiles_of_which_only_the_filled_part_is_paid(tmp_path: Path) -> None:
    found = of(scattered(tmp_path, lambda per_sm, filled: ceil(per_sm) * (filled / 0.6) ** 0.5))
    assert found.fill_exponent == pytest.approx(0.5, abs=0.1)
    assert not found.whole_tiles


@pytest.mark.parametrize("cost", [1.0, 1.3])
def test_rows_off_16_bytes(cost: float, tmp_path: Path) -> None:
    found = of(scattered(tmp_path, lambda per_sm, filled: ceil(per_sm), off_16_bytes=cost))
    assert found.unaligned is not None
    assert found.unaligned_error is not None
    assert found.unaligned == pytest.approx(np.log(cost), abs=max(0.03, 4 * found.unaligned_error))
    assert found.unaligned_error < 0.05


def test_points_without_a_launch_say_nothing(tmp_path: Path) -> None:
    run = scattered(tmp_path, lambda per_sm, filled: ceil(per_sm))
    points = [p for p in points_of(run.records, V100) if p.launch is None]
    assert kernel_waves(points, V100) == ()


def test_check_has_the_kernels(tmp_path: Path) -> None:
    found = check_run(scattered(tmp_path, lambda per_sm, filled: ceil(per_sm)))
    (kernel,) = check_to_json(found)["kernels"]
    assert kernel["kernel"] == NAME
    assert kernel["whole_tiles"]
    assert kernel["edges"][0]["blocks"] == 80
    section = kernels_section(found)
    assert section is not None
    assert section.table is not None
    (cells,) = section.table.rows
    assert cells[0].startswith(NAME)
    assert cells[4].startswith("80 ")
    assert "80 SMs" in section.note
    assert "Edges of named kernels" in write_report(found.run, tmp_path / "report.html").page.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not WHOLE.exists(), reason="no ../shared beside the checkout")
def test_batched_products_of_real_gpus_step_at_whole_waves() -> None:
    edges = {}
    for gpu in ("v100-pcie-32gb", "a100-pcie-40gb"):
        spec = lookup(gpu)
        found = neusight.read_rows(WHOLE, spec)
        records = records_of(found.rows, neusight.origin_of(WHOLE, found, spec), spec)
        kernels = {one.kernel: one for one in kernel_waves(points_of(records, spec), spec)}
        assert all(one.whole_tiles for one in kernels.values() if one.kernel.endswith("_nn"))
        edges[gpu] = [edge.blocks for edge in max(kernels.values(), key=lambda one: one.num_points).edges]
    assert {80, 320, 640} <= set(edges["v100-pcie-32gb"])  # up to four 64x64 blocks share an SM
    assert edges["a100-pcie-40gb"][:4] == [108, 216, 324, 432]  # one 128x128 block fills one
