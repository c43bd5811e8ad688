"""GemmModel: fitting, priors, intervals, sanity of what it predicts, files and bad input."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, QuantbenchError, StoreError, UnsupportedError
from quantbench.latency.families import family
from quantbench.latency.gemm.cost_model import (
    Machine,
    Menu,
    Shapes,
    Sizes,
    Values,
    hand_prior,
    log_latency,
)
from quantbench.latency.gemm.member import Growth
from quantbench.latency.gemm.model import MODEL_FORMAT, MODEL_VERSION, GemmModel, shipped_model
from quantbench.latency.gemm.training import Effort, choose, shipped_pool
from quantbench.latency.model_file import pack, unpack
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.workload import Gemm
from tools.accuracy.scoring import coverage, summarize
from tools.accuracy.tables import SHIPPED_GPUS

A100 = "a100-sxm4-80gb"
QUICK = Effort(members=2, rows_first=150, rows_other=100, growth=Growth(trees=10))


def invented(count: int, seed: int, gpu: str = A100, quirk: float = 0.15) -> tuple[np.ndarray, ...]:
    """(m, n, k, latency_us) of a made-up GPU: the cost model elsewhere in its prior, with a quirk
    and noise.
    """
    rng = np.random.default_rng(seed)
    m = np.floor(2 ** rng.uniform(0, 13, count))
    n, k = (64 * np.floor(2 ** rng.uniform(0, 8, count)) for _ in range(2))
    mean, sd = hand_prior()
    truth = mean + 0.5 * sd * np.random.default_rng(99).standard_normal(len(mean))
    shapes = Shapes.of(Machine.of(lookup(gpu), "bf16"), Menu.of(), Sizes.of(m, n, k))
    log_us = log_latency(Values(truth), shapes)[0]
    log_us = log_us + quirk * ((n > 2048) & (k > 1024)) + 0.02 * rng.standard_normal(count)
    return m, n, k, np.exp(log_us)


@cache
def fitted() -> GemmModel:
    return GemmModel.fit(A100, *invented(200, seed=1), prior="none", effort=QUICK)


def equal(a: GemmModel, b: GemmModel, *shapes: object) -> None:
    found, other = a.predict(*shapes), b.predict(*shapes)
    for name in ("latency_us", "low_us", "tiles"):
        np.testing.assert_array_equal(getattr(found, name), getattr(other, name))


def fit(*rows: object, prior: str = "none", gpu: str = A100, effort: Effort = QUICK) -> GemmModel:
    return GemmModel.fit(gpu, *rows, prior=prior, effort=effort)


@pytest.mark.slow
def test_a_fit_predicts_other_shapes_and_its_interval_covers_them() -> None:
    m, n, k, measured = invented(800, seed=2)
    found, blind = (model.predict(m, n, k) for model in (fitted(), GemmModel.prior(A100)))
    error = summarize(found.latency_us, measured).median_pct
    assert error < 5.0
    assert 0.80 < coverage(measured, found.low_us, found.high_us) < 0.99
    assert summarize(blind.latency_us, measured).median_pct > 2 * error


@pytest.mark.slow
def test_what_is_said_of_a_shape_does_not_depend_on_its_place() -> None:
    m, n, k, _ = invented(2500, seed=5)  # more than are evaluated at a time
    model = fitted()
    whole = model.predict(m, n, k).latency_us
    for part in (slice(700, 1731), slice(40, 42), slice(2499, 2500)):
        assert np.array_equal(model.predict(m[part], n[part], k[part]).latency_us, whole[part])


@pytest.mark.slow
def test_times_above_the_peak_are_left_out_of_a_fit_and_nothing_is_predicted_faster() -> None:
    m, n, k, measured = invented(80, seed=5)
    row = int(np.argmax(measured))
    measured[row] *= 1e-3
    model = fit(m, n, k, measured)
    assert (model.rows, model.provenance["above_peak"]) == (79, 1)
    assert "above_peak" not in fitted().provenance
    found = model.predict(m, n, k)
    assert (found.low_us >= 2 * m * n * k / 312e6).all()
    assert found.latency_us[row] > 100 * measured[row]


def test_padded_scales_are_learnt_where_a_has_a_scale_for_each_row(tmp_path: Path) -> None:
    m, n, k, latency_us = invented(200, seed=1, gpu="h100-sxm5-80gb")
    small = np.minimum(m, 200)
    rows = small, n, k, latency_us[0] + 50.0 * (small % 4 != 0)
    shapes = np.array([95, 96, 97, 100, 101]), 4096, 4096
    padded = np.array([True, False, True, False, True])
    found = {}
    for dtype in ("fp8_block", "fp8"):
        model = GemmModel.fit("h100-sxm5-80gb", *rows, dtype=dtype, prior="none", effort=QUICK)
        model.save(tmp_path / dtype)
        found[dtype] = GemmModel.load(tmp_path / dtype).predict(*shapes).latency_us
    assert found["fp8_block"][padded].min() > 1.5 * found["fp8_block"][~padded].max()
    assert found["fp8"].max() < 1.5 * found["fp8"].min()


def test_answers_take_the_shape_of_the_question() -> None:
    model = GemmModel.prior(A100)
    one = model.predict(4096, 4096, 4096)
    assert one.latency_us.shape == ()
    assert one.low_us < one.latency_us < one.high_us
    grid = model.predict(np.array([[1], [4096]]), 4096, [64, 128, 4096])
    assert grid.latency_us.shape == grid.bound.shape == (2, 3)
    assert grid.tiles.shape == (2, 3, 3)
    assert grid.latency_us[1, 2] == one.latency_us
    assert (one.bound, grid.bound[0, 0]) == ("compute", "latency")
    assert model.predict(8, 16384, 16384).bound == "memory"
    block_m, block_n, split_k = one.tiles.tolist()
    tile, gemm = Tile(block_m, block_n, split_k=split_k), Gemm(4096, 4096, 4096)
    assert one.waves in [quantize(gemm, tile, 108, held).num_waves for held in range(1, 7)]


@pytest.mark.parametrize("gpu", ["gb200-186gb", A100, "l40s-48gb"])
def test_the_bound_follows_from_the_rates(gpu: str) -> None:
    model, device = GemmModel.best(gpu), lookup(gpu)
    m, n, k = 2 ** np.arange(17), 28672, 4096
    found = model.predict(m, n, k)
    compute_us = 2.0 * m * n * k / (device.peak("bf16") or 0.0) / 1e6
    memory_us = 2.0 * (m * k + k * n + m * n) / device.memory_gb_per_s / 1e3
    assert np.array_equal(found.bound == "compute", compute_us > memory_us)
    # The weights alone take longer than a launch.
    assert np.array_equal(found.bound == "memory", compute_us < memory_us)


def test_a_file_gives_the_same_predictions(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gemm", tmp_path / "b.gemm"
    fitted().save(first)
    back = GemmModel.load(first)
    equal(back, fitted(), *invented(100, seed=4)[:3])
    assert (back.device, back.dtype) == (lookup(A100), "bf16")
    assert (back.rows, back.library) == (200, "torch")
    back.save(second)
    assert second.read_bytes() == first.read_bytes()


def parts_of_a_file() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return unpack("test", fitted().to_bytes(), MODEL_FORMAT, MODEL_VERSION)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "other"}, "format 'other' version 1; expected quantbench-gemm-model version 1"),
        ({"version": 99}, "version 99; expected quantbench-gemm-model version 1"),
        ({"interval": None}, "interval"),
    ],
)
def test_files_that_are_no_models_are_refused(changes: dict[str, Any], said: str) -> None:
    header, arrays = parts_of_a_file()
    changed = {name: value for name, value in {**header, **changes}.items() if value is not None}
    with pytest.raises(QuantbenchError, match=said):
        GemmModel.from_bytes(pack(changed, arrays))


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        ("0.feature", 0, 250),
        ("0.right", 0, 0),
        ("0.right", 0, 60000),
        ("0.roots", -1, 1_000_000),
        ("0.number", 0, np.nan),
        ("0.parameters", 0, np.inf),
        ("0.roots", 0, {}),  # pickled objects are not read
    ],
)
def test_arrays_that_are_no_trees_or_parameters_are_refused(
    name: str, position: int, value: Any
) -> None:
    header, arrays = parts_of_a_file()
    arrays[name] = arrays[name].astype(object if value == {} else arrays[name].dtype)
    arrays[name][position] = value
    with pytest.raises(StoreError, match=r"trees that do not end|parameters|damaged"):
        GemmModel.from_bytes(pack(header, arrays))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_a_changed_file_is_refused(tmp_path: Path, share: float) -> None:
    raw = bytearray(fitted().to_bytes())
    raw[int(share * len(raw))] ^= 1
    (tmp_path / "a.gemm").write_bytes(raw)
    with pytest.raises((StoreError, InputError), match=r"damaged|format|version|broken|trees"):
        GemmModel.load(tmp_path / "a.gemm")


@pytest.mark.slow
def test_few_rows_fall_back_to_the_prior_and_say_so() -> None:
    model = fit([64, 128, 256], [512] * 3, [512] * 3, [5.0, 6.0, 7.0], prior="family-out")
    equal(model, GemmModel.prior(A100, family_out=True), 100, 200, 300)
    assert "3 rows are too few" in model.note
    assert model.predict(1, 1, 1).note == model.note
    some = fit(*invented(30, seed=5))
    assert "no trees were grown" in some.note
    assert some.ensemble.members[0].forest is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"m": [-1] * 30}, r"m = -1; expected a whole number from 1 to 2097151"),
        ({"k": [float("nan")] * 30}, r"k = nan; expected a whole number"),
        ({"n": [1.5] * 30}, r"n = 1.5; expected a whole number"),
        ({"n": ["8"] * 30}, r"n of shape \(30,\) and type <U1; expected whole numbers"),
        ({"m": [1] * 29}, r"29, 30, 30, 29 values of m, n, k, batch"),
        ({"latency_us": [0.0] * 30}, r"latency_us = 0.0; expected finite times above 0"),
        ({"latency_us": [1.0] * 3}, r"latency_us of shape \(3,\) for 30 shapes"),
        ({"prior": "good"}, r"prior = 'good'; expected one of auto, family-out, none"),
        ({"dtype": "fp4"}, r"dtype = 'fp4'; expected one of"),
    ],
)
def test_bad_input_is_named(changed: dict[str, Any], message: str) -> None:
    sizes = dict.fromkeys("mnk", [64] * 30)
    with pytest.raises(InputError, match=message):
        GemmModel.fit(A100, **(sizes | {"latency_us": [5.0] * 30} | changed))


def test_a_dtype_that_the_gpu_lacks_and_a_processor_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a100-sxm4-80gb has no peak for fp8"):
        GemmModel.prior(A100, dtype="fp8")
    with pytest.raises(UnsupportedError, match="cpu-x is a cpu"):
        GemmModel.prior(replace(lookup(A100), name="cpu-x", kind="cpu"))
    with pytest.raises(InputError, match=r"GemmModel.predict: m = 0"):
        GemmModel.prior(A100).predict(0, 1, 1)
    with pytest.raises(InputError, match="products of bf16"):
        GemmModel.prior(A100).predict_gemms([Gemm(m=1, n=1, k=1, dtype="fp16")])


@pytest.mark.parametrize("slug", SHIPPED_GPUS)
def test_family_out_knows_nothing_of_the_family(slug: str) -> None:
    device, pool = lookup(slug), shipped_pool()
    others = [k for k in pool if k.family != family(device)]
    assert slug not in {k.device for k in others}
    prior, _ = choose(device, "bf16", pool, family_out=True)
    without, _ = choose(device, "bf16", others, family_out=False)
    assert prior.source == without.source
    assert np.array_equal(prior.mean, without.mean)


@pytest.mark.slow
def test_auto_takes_the_prior_and_the_residual_of_the_family() -> None:
    shipped = shipped_model(A100, "bf16")
    rows = invented(60, seed=8)
    model = fit(*rows, prior="auto", gpu="a100-pcie-80gb", effort=replace(QUICK, members=1))
    assert model.prior_source == A100
    assert model.ensemble.reference is not None
    shared, own = (of.members[0] for of in (model.ensemble.reference, shipped.ensemble))
    assert shared.parameters == pytest.approx(own.parameters)
    equal(GemmModel.from_bytes(model.to_bytes()), model, *rows[:3])


def test_an_unknown_gpu_gets_a_wide_interval_that_says_so() -> None:
    found = GemmModel.best("t4-16gb", dtype="fp16").predict(4096, 4096, 4096)
    assert "nobody measured fp16 on t4-16gb" in found.note
    assert found.high_us / found.low_us > 1.5
    known = GemmModel.best(A100).predict(4096, 4096, 4096)
    assert known.note == ""
    assert known.high_us / known.low_us < 1.4


@pytest.mark.parametrize("slug", SHIPPED_GPUS)
def test_shipped_models_state_where_they_come_from_and_are_sane(slug: str) -> None:
    model = shipped_model(slug, "bf16")
    held_out = model.provenance["held_out"]
    assert 0 < held_out["median_pct"] < 6
    assert len(model.provenance["sha256"]) == 64
    assert model.device == lookup(slug)
    big = model.predict(8192, 8192, 8192)
    tflops = 2 * 8192**3 / big.latency_us / 1e6
    assert 0.4 * model.device.peak_tflops["bf16"] < tflops <= model.device.peak_tflops["bf16"]
    assert len(model.ensemble.members) == 2


def test_workloads_are_answered_in_order() -> None:
    model = GemmModel.prior(A100)
    gemms = [Gemm(128, 1024, 1024), Gemm(64, 1024, 1024, batch=2), Gemm(4096, 4096, 64)]
    found = model.predict_gemms(gemms)
    alone = [model.predict(g.m, g.n, g.k, batch=g.batch).latency_us for g in gemms]
    assert [one.latency_us for one in found] == alone
    assert found[2].launch.tile is not None
