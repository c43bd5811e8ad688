"""The cost model's arithmetic: gradients against differences, what must rise, and what the menu
means.
"""

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.optimize import approx_fprime

from quantbench.device import lookup
from quantbench.latency.autodiff import Variable, gradient
from quantbench.latency.gemm.cost_model import (
    INDEX,
    PARAMETERS,
    SPLITS,
    TILES,
    Machine,
    Menu,
    Shapes,
    Values,
    hand_prior,
    log_latency,
)
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.member import Member, watched_columns
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.workload import Gemm

MACHINE = Machine.of(lookup("a100-sxm4-80gb"), "bf16")
MENU = Menu.of()


def test_every_kernel_stands_in_its_tile_and_in_its_split() -> None:
    # Splits that were recorded stand at the end.
    uneven = Menu(TILES, (*MENU.kernels[2:20:2], (0, 3), (2, 64)))
    for menu in (MENU, uneven):
        of_tile = menu.each.tile_index[:, 0]
        for groups in (menu.of_tile, menu.of_split):
            seen = np.concatenate([np.arange(len(menu))[kernels] for _, kernels in groups])
            assert sorted(seen) == list(range(len(menu)))
        assert all(set(of_tile[kernels]) == {place} for place, kernels in menu.of_tile)
    splits = {SPLITS[place]: set(uneven.each.split_k[at, 0]) for place, at in uneven.of_split}
    assert (splits[4], splits[32]) == ({3.0, 4.0}, {64.0})


def sizes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    m = np.floor(2 ** rng.uniform(0, 14, count))
    n, k = (32 * np.floor(2 ** rng.uniform(0, 10, count)) for _ in range(2))
    return m, n, k


def times_us(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    parameters: np.ndarray | None = None,
    machine: Machine = MACHINE,
    menu: Menu = MENU,
) -> np.ndarray:
    """Times of shapes that broadcast, by the hand prior if no parameters are given."""
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, dtype=float)) for x in (m, n, k)))
    values = Values(hand_prior()[0] if parameters is None else parameters)
    return np.exp(log_latency(values, Shapes(machine, menu, *arrays))[0])


def index_of(block_m: int, block_n: int) -> int:
    """Position in the menu of a tile's kernel that does not split k."""
    return MENU.kernels.index((TILES.index((block_m, block_n)), 1))


def test_cuda_cores_run_no_larger_tiles_than_registers_hold() -> None:
    sides = {side for tile, _ in Menu.of("CUDA cores").kernels for side in TILES[tile]}
    assert (min(sides), max(sides)) == (32, 128)
    assert len(MENU) == 6 * len(TILES)


def test_narrow_formats_pay_for_rows_beyond_m_and_for_quantizing_a() -> None:
    h100 = lookup("h100-sxm5-80gb")

    def us(dtype: str, m: float, n: float, k: float, **values: float) -> float:
        vector = hand_prior()[0]
        for name in ("padded", "convert", "convert_row"):
            vector[INDEX[name]] = np.log(values.get(name, 1e-9))
        return float(times_us(m, n, k, vector, Machine.of(h100, dtype))[0])

    # The soft minimum over kernels takes a little off what all of them pay.
    rows_us = us("fp8", 4096, 64, 64, convert_row=0.01) - us("fp8", 4096, 64, 64)
    assert rows_us == pytest.approx(40.96, rel=0.2)
    bytes_us = us("fp8", 4096, 64, 8192, convert=1) - us("fp8", 4096, 64, 8192)
    assert bytes_us == pytest.approx(4096 * 8192 * 3 / (h100.memory_gb_per_s * 1e3), rel=0.3)
    assert us("fp8", 257, 8192, 8192, padded=1) > 1.1 * us("fp8", 257, 8192, 8192)
    assert us("fp8", 512, 8192, 8192, padded=1) == pytest.approx(us("fp8", 512, 8192, 8192))
    dear = us("bf16", 257, 64, 8192, padded=1, convert=1, convert_row=0.01)
    assert dear == us("bf16", 257, 64, 8192)


def test_gradient_of_the_whole_form() -> None:
    at = hand_prior()[0] + 0.01
    shapes = Shapes(MACHINE, MENU, *sizes(12))
    source = Variable(at)
    found = gradient(log_latency(Values(source), shapes)[0], source, np.ones(12))
    numeric = approx_fprime(at, lambda z: log_latency(Values(z), shapes)[0].sum(), 1e-6)
    assert found == pytest.approx(numeric, abs=2e-3)
    # m = 1, misalignment and the like need such shapes.
    assert np.count_nonzero(found) > len(PARAMETERS) - 6


@pytest.mark.parametrize("seed", range(3))
def test_every_kernel_and_the_choice_rise_with_k(seed: int) -> None:
    mean, sd = hand_prior()
    values = Values(mean + sd * np.random.default_rng(seed).standard_normal(len(mean)))
    values.vector[[i for i, p in enumerate(PARAMETERS) if p.name == "power"]] = 0.5
    m, n, k = sizes(200, seed)
    k[:50], n[50:70] = np.arange(1, 51), 33  # unaligned, whose alignment doubling mends
    k[70:120] = 2 * np.arange(50) + 33
    low, low_parts = log_latency(values, Shapes(MACHINE, MENU, m, n, k))
    high, high_parts = log_latency(values, Shapes(MACHINE, MENU, m, n, 2 * k))
    assert (high_parts.log_time >= low_parts.log_time - 1e-9).all()
    assert (high >= low - 1e-9).all()


@pytest.mark.parametrize(("m", "n"), [(2304, 3072), (2305, 3072), (128, 256), (8192, 5120)])
def test_waves_agree_with_the_exact_arithmetic(m: int, n: int) -> None:
    tile = Tile(128, 256)
    index = index_of(tile.block_m, tile.block_n)
    shapes = Shapes(MACHINE, MENU, *(np.array([float(x)]) for x in (m, n, 4096)))
    exact = quantize(Gemm(m=m, n=n, k=4096), tile, sm_count=108)
    assert shapes.waves[index, 0] == exact.num_waves
    assert shapes.blocks[index, 0] == exact.num_tiles


def test_wave_quantization_shows_in_the_time() -> None:
    only = MENU.subset(np.array([index_of(128, 256)]))
    # 9 × 12 tiles fill 108 SMs; one row more starts a second wave.
    full, past, later = times_us([1152, 1153, 1280], 3072, 4096, menu=only)
    assert past / full > 1.3
    assert later / past < 1.02


def test_misaligned_rows_cost_more_and_aligned_ones_nothing() -> None:
    odd, eights, aligned = times_us(4096, [4095, 4088, 4096], 4096)
    assert odd > 1.2 * aligned
    assert eights == pytest.approx(aligned, rel=0.02)


def test_features_are_finite_where_a_kernel_is_priced_out_of_all_bounds() -> None:
    vector = hand_prior()[0]
    vector[INDEX["small_tile"]] = 3.0
    m, n, k = sizes(50)
    m[0] = n[0] = LARGEST_SIDE
    shapes = Shapes(MACHINE, MENU, m, n, k)
    member = Member(vector, None)
    log_us, parts = member.physics(shapes)
    assert parts.log_time.max() > np.log(np.finfo(np.float32).max)
    x = member.features(MENU, shapes, log_us, parts, watched_columns(shapes), None)
    assert np.isfinite(x).all()
