"""The cost model's arithmetic: gradients against differences, what must rise, and what the menu
means.
"""

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from quantbench.device import lookup
from quantbench.latency import autodiff as tape
from quantbench.latency.autodiff import Variable, gradient
from quantbench.latency.gemm.cost_model import (
    INDEX,
    PARAMETERS,
    SPLITS,
    TILES,
    Machine,
    Menu,
    Shapes,
    Sizes,
    Values,
    hand_prior,
    log_latency,
)
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.member import Member, TrainingRows
from quantbench.latency.gemm.training import Prior, fit_parameters
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.workload import Gemm

MACHINE = Machine.of(lookup("a100-sxm4-80gb"), "bf16")
MENU = Menu.of()


def terms(machine: Machine, menu: Menu, *sizes: np.ndarray, **options: np.ndarray) -> Shapes:
    return Shapes.of(machine, menu, Sizes.of(*sizes, **options))


def test_every_kernel_stands_in_its_tile_and_in_its_split() -> None:
    uneven = Menu(
        TILES, (*Menu.of().kernels[2:20:2], (0, 3), (2, 64))
    )  # splits that were recorded stand at the end
    for menu in (MENU, uneven):
        for groups, of in ((menu.of_tile, menu.each.tile_index[:, 0]), (menu.of_split, None)):
            seen = np.concatenate([np.arange(len(menu))[kernels] for _, kernels in groups])
            assert sorted(seen) == list(range(len(menu)))
            if of is not None:
                assert all(set(of[kernels]) == {place} for place, kernels in groups)
    assert {
        SPLITS[place]: set(uneven.each.split_k[kernels, 0]) for place, kernels in uneven.of_split
    }[4] == {3.0, 4.0}
    assert {
        SPLITS[place]: set(uneven.each.split_k[kernels, 0]) for place, kernels in uneven.of_split
    }[32] == {64.0}


def sizes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    m = np.floor(2 ** rng.uniform(0, 14, count))
    n, k = (32 * np.floor(2 ** rng.uniform(0, 10, count)) for _ in range(2))
    return m, n, k


def index_of(block_m: int, block_n: int) -> int:
    """Position in the menu of a tile's kernel that does not split k."""
    return MENU.kernels.index((TILES.index((block_m, block_n)), 1))


def test_cuda_cores_run_no_larger_tiles_than_registers_hold() -> None:
    sides = {side for tile, _ in Menu.of("CUDA cores").kernels for side in TILES[tile]}
    assert (min(sides), max(sides)) == (32, 128)
    assert len(MENU) == 6 * len(TILES)


def test_narrow_formats_pay_for_rows_beyond_m_and_for_quantizing_a() -> None:
    def us(dtype: str, m: float, n: float, k: float, **values: float) -> float:
        vector = hand_prior()[0]
        for name in ("padded", "convert", "convert_row"):
            vector[INDEX[name]] = np.log(values.get(name, 1e-9))
        shapes = terms(
            Machine.of(lookup("h100-sxm5-80gb"), dtype),
            MENU,
            *(np.array([float(x)]) for x in (m, n, k)),
        )
        return float(np.exp(log_latency(Values(vector), shapes)[0][0]))

    # The soft minimum over kernels takes a little off what all of them pay.
    assert us("fp8", 4096, 64, 64, convert_row=0.01) == pytest.approx(
        us("fp8", 4096, 64, 64) + 40.96, rel=0.15
    )
    bytes_moved_us = 4096 * 8192 * 3 / (lookup("h100-sxm5-80gb").memory_gb_per_s * 1e3)
    assert us("fp8", 4096, 64, 8192, convert=1) == pytest.approx(
        us("fp8", 4096, 64, 8192) + bytes_moved_us, rel=0.15
    )
    assert us("fp8", 257, 8192, 8192, padded=1) > 1.1 * us("fp8", 257, 8192, 8192)
    assert us("fp8", 512, 8192, 8192, padded=1) == pytest.approx(us("fp8", 512, 8192, 8192))
    assert us("bf16", 257, 64, 8192, padded=1, convert=1, convert_row=0.01) == us(
        "bf16", 257, 64, 8192
    )


@pytest.mark.parametrize("operation", ["exp", "log", "sigmoid", "soft_plus"])
def test_tape_gradients_of_functions(operation: str) -> None:
    function = getattr(tape, operation, None) or getattr(np, operation)
    x = np.array([0.3, 1.7, 2.0])
    source = Variable(x)
    found = gradient(function(source * 2.0), source, np.ones(3))
    assert found == pytest.approx(approx_fprime(x, lambda v: function(v * 2.0).sum()), rel=1e-5)


def test_tape_gradients_of_soft_minimum_and_broadcasting() -> None:
    x = np.array([0.3, 1.1])
    offsets = np.array([[0.0, 0.2], [0.5, 0.1], [0.3, 0.0]])

    def function(v):  # type: ignore[no-untyped-def]
        return tape.soft_minimum(
            v * offsets + offsets,
            np.exp(v[:1]),
        )

    source = Variable(x)
    found = gradient(function(source), source, np.ones(2))
    assert found == pytest.approx(approx_fprime(x, lambda v: function(v).sum()), rel=1e-5)


def test_gradient_of_the_whole_form() -> None:
    mean, _ = hand_prior()
    shapes = terms(MACHINE, MENU, *sizes(12))
    source = Variable(mean + 0.01)
    found = gradient(log_latency(Values(source), shapes)[0], source, np.ones(12))
    numeric = approx_fprime(mean + 0.01, lambda z: log_latency(Values(z), shapes)[0].sum(), 1e-6)
    assert found == pytest.approx(numeric, abs=2e-3)
    assert (
        np.count_nonzero(found) > len(PARAMETERS) - 6
    )  # m = 1, misalignment and the like need such shapes


@pytest.mark.parametrize("seed", range(3))
def test_every_kernel_and_the_choice_rise_with_k(seed: int) -> None:
    mean, sd = hand_prior()
    values = Values(mean + sd * np.random.default_rng(seed).standard_normal(len(mean)))
    values.vector[[i for i, p in enumerate(PARAMETERS) if p.name == "power"]] = 0.5
    m, n, k = sizes(200, seed)
    k[:50], n[50:70] = np.arange(1, 51), 33  # unaligned, whose alignment doubling mends
    k[70:120] = 2 * np.arange(50) + 33
    low, low_parts = log_latency(values, terms(MACHINE, MENU, m, n, k))
    high, high_parts = log_latency(values, terms(MACHINE, MENU, m, n, 2 * k))
    assert (high_parts.log_time >= low_parts.log_time - 1e-9).all()
    assert (high >= low - 1e-9).all()


def test_waves_agree_with_the_exact_arithmetic() -> None:
    tile = Tile(128, 256)
    index = index_of(tile.block_m, tile.block_n)
    for m, n in ((2304, 3072), (2305, 3072), (128, 256), (8192, 5120)):
        shapes = terms(MACHINE, MENU, *(np.array([float(x)]) for x in (m, n, 4096)))
        exact = quantize(Gemm(m=m, n=n, k=4096), tile, sm_count=108)
        assert shapes.waves.count[index, 0] == exact.num_waves
        assert shapes.waves.blocks[index, 0] == exact.num_tiles


def test_wave_quantization_shows_in_the_time() -> None:
    mean, _ = hand_prior()
    only = MENU.subset(np.array([index_of(128, 256)]))
    m = np.array(
        [1152.0, 1153.0, 1280.0]
    )  # 9 × 12 tiles fill 108 SMs; one row more starts a second wave
    t = np.exp(
        log_latency(Values(mean), terms(MACHINE, only, m, np.full(3, 3072.0), np.full(3, 4096.0)))[
            0
        ]
    )
    assert t[1] / t[0] > 1.3
    assert t[2] / t[1] < 1.02


def test_misaligned_rows_cost_more_and_aligned_ones_nothing() -> None:
    mean, _ = hand_prior()
    one = np.array([4096.0])

    def time_us(n: float) -> float:
        return float(
            np.exp(log_latency(Values(mean), terms(MACHINE, MENU, one, np.array([n]), one))[0])[0]
        )

    assert time_us(4095.0) > 1.2 * time_us(4096.0)
    assert time_us(4088.0) == pytest.approx(time_us(4096.0), rel=0.02)


@pytest.mark.slow
def test_a_fit_recovers_what_made_the_data() -> None:
    prior = Prior(*hand_prior(), "the hand prior")
    rng = np.random.default_rng(5)
    truth = prior.mean + 0.5 * prior.sd * rng.standard_normal(len(prior.mean))
    m, n, k = sizes(150, seed=6)
    log_us = log_latency(Values(truth), terms(MACHINE, MENU, m, n, k))[0]
    rows = TrainingRows(Sizes.of(m, n, k), log_us)
    found = fit_parameters(MACHINE, MENU, rows, prior)
    held = terms(MACHINE, MENU, *sizes(300, seed=7))
    error = np.abs(log_latency(Values(found), held)[0] - log_latency(Values(truth), held)[0])
    blind = np.abs(log_latency(Values(prior.mean), held)[0] - log_latency(Values(truth), held)[0])
    assert np.median(error) < 0.03
    assert np.median(error) < 0.3 * np.median(blind)


def test_features_are_finite_where_a_kernel_is_priced_out_of_all_bounds() -> None:
    vector = hand_prior()[0]
    vector[INDEX["small_tile"]] = 3.0
    m, n, k = sizes(50)
    m[0] = n[0] = LARGEST_SIDE
    shapes = terms(MACHINE, MENU, m, n, k)
    member = Member(vector, None)
    log_us, parts = member.physics(shapes)
    assert parts.log_time.max() > np.log(np.finfo(np.float32).max)
    x = member.features(shapes, log_us, parts, None)
    assert np.isfinite(x).all()
