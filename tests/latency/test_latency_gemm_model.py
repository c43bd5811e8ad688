"""GemmModel: fitting, priors, intervals, sanity of what it predicts, files and bad input."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantbench.device import DeviceSpec, lookup
from quantbench.errors import InputError, StoreError, UnsupportedError
from quantbench.latency.estimate import Estimates
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


def terms(machine: Machine, menu: Menu, *sizes: np.ndarray, **options: np.ndarray) -> Shapes:
    return Shapes.of(machine, menu, Sizes.of(*sizes, **options))


def invented(count: int, seed: int, gpu: str = A100, quirk: float = 0.15) -> tuple[np.ndarray, ...]:
    """(m, n, k, latency_us) of a made-up GPU: the cost model elsewhere in its prior, with a quirk
    and noise.
    """
    rng = np.random.default_rng(seed)
    m = np.floor(2 ** rng.uniform(0, 13, count))
    n, k = (64 * np.floor(2 ** rng.uniform(0, 8, count)) for _ in range(2))
    mean, sd = hand_prior()
    truth = mean + 0.5 * sd * np.random.default_rng(99).standard_normal(len(mean))
    log_us = log_latency(Values(truth), terms(Machine.of(lookup(gpu), "bf16"), Menu.of(), m, n, k))[
        0
    ]
    log_us = log_us + quirk * ((n > 2048) & (k > 1024)) + 0.02 * rng.standard_normal(count)
    return m, n, k, np.exp(log_us)


@cache
def fitted() -> GemmModel:
    return GemmModel.fit(A100, *invented(200, seed=1), prior="none", effort=QUICK)


def equal(a: Estimates, b: Estimates) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("latency_us", "low_us", "tiles")
    )


@pytest.mark.slow
def test_a_fit_predicts_other_shapes_and_its_interval_covers_them() -> None:
    m, n, k, measured = invented(800, seed=2)
    found = fitted().predict(m, n, k)
    assert summarize(found.latency_us, measured).median_pct < 5.0
    assert 0.80 < coverage(measured, found.low_us, found.high_us) < 0.99
    blind = GemmModel.prior(A100).predict(m, n, k)
    assert (
        summarize(blind.latency_us, measured).median_pct
        > 2 * summarize(found.latency_us, measured).median_pct
    )


@pytest.mark.slow
def test_the_same_rows_and_seed_give_the_same_model() -> None:
    again = GemmModel.fit(A100, *invented(200, seed=1), prior="none", effort=QUICK)
    assert again.to_bytes() == fitted().to_bytes()


@pytest.mark.slow
def test_a_batch_says_of_each_shape_what_it_says_alone() -> None:
    m, n, k = np.array([64, 64, 4096]), np.array([256, 8192, 512]), np.array([4096, 17, 40])
    model = fitted()
    alone = [float(model.predict(*shape).latency_us) for shape in zip(m, n, k, strict=True)]
    assert model.predict(m, n, k).latency_us.tolist() == alone


@pytest.mark.slow
def test_what_is_said_of_a_shape_does_not_depend_on_its_place() -> None:
    m, n, k, _ = invented(2500, seed=5)  # more than are evaluated at a time
    model = fitted()
    whole = model.predict(m, n, k).latency_us
    for part in (slice(1, None), slice(700, 1731), slice(40, 42), slice(2499, 2500)):
        assert np.array_equal(model.predict(m[part], n[part], k[part]).latency_us, whole[part])


@pytest.mark.slow
def test_nothing_is_faster_than_the_peak() -> None:
    """Rows that claim ten times the peak do not make the model believe it."""
    m = n = k = np.full(40, 8192.0) + 64 * np.arange(40)
    model = GemmModel.fit(A100, m, n, k, 2 * m * n * k / 312e6 / 10, prior="none", effort=QUICK)
    found = model.predict(m, n, k)
    assert (found.latency_us >= 2 * m * n * k / 312e6).all()
    assert (found.low_us >= 2 * m * n * k / 312e6).all()


def test_answers_take_the_shape_of_the_question() -> None:
    model = GemmModel.prior(A100)
    one = model.predict(4096, 4096, 4096)
    assert one.latency_us.shape == ()
    assert one.low_us < one.latency_us < one.high_us
    grid = model.predict(np.array([[1], [4096]]), 4096, [64, 128, 4096])
    assert grid.latency_us.shape == grid.bound.shape == (2, 3)
    assert grid.tiles is not None
    assert one.tiles is not None
    assert grid.tiles.shape == (2, 3, 3)
    assert grid.latency_us[1, 2] == one.latency_us
    assert (one.bound, grid.bound[0, 0]) == ("compute", "latency")
    assert model.predict(8, 16384, 16384).bound == "memory"
    block_m, block_n, split_k = one.tiles.tolist()
    tile = Tile(block_m, block_n, split_k=split_k)
    exact = [
        quantize(Gemm(m=4096, n=4096, k=4096), tile, 108, held).num_waves for held in range(1, 7)
    ]
    assert one.waves in exact


@pytest.mark.parametrize("gpu", ["gb200-186gb", A100, "h100-sxm5-80gb", "l40s-48gb"])
@pytest.mark.parametrize(("n", "k"), [(8192, 8192), (28672, 4096)])
def test_the_bound_follows_from_the_rates(gpu: str, n: int, k: int) -> None:
    model, device = GemmModel.best(gpu), lookup(gpu)
    m = 2 ** np.arange(17)
    found = model.predict(m, n, k)
    compute = 2.0 * m * n * k / (device.peak("bf16") or 0.0) / 1e6 / found.latency_us
    memory = 2.0 * (m * k + k * n + m * n) / device.memory_gb_per_s / 1e3 / found.latency_us
    assert np.array_equal(found.bound == "compute", compute > memory)
    assert np.array_equal(
        found.bound == "memory", compute < memory
    )  # the weights alone take longer than a launch


def test_a_small_product_is_bound_by_its_launch() -> None:
    found = GemmModel.best("b200-sxm-180gb", dtype="fp8").predict(
        [64, 65536], [256, 4096], [256, 14336]
    )
    assert found.bound.tolist() == [
        "latency",
        "compute",
    ]  # the large one quantizes its activations for long


def test_a_file_gives_the_same_predictions(tmp_path: Path) -> None:
    fitted().save(tmp_path / "a.gemm")
    back = GemmModel.load(tmp_path / "a.gemm")
    m, n, k, _ = invented(100, seed=4)
    assert equal(back.predict(m, n, k), fitted().predict(m, n, k))
    assert (back.device, back.dtype, back.rows, back.library) == (
        lookup(A100),
        "bf16",
        200,
        "torch",
    )
    back.save(tmp_path / "b.gemm")
    assert (tmp_path / "b.gemm").read_bytes() == (tmp_path / "a.gemm").read_bytes()


def parts_of_a_file() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return unpack("test", fitted().to_bytes(), MODEL_FORMAT, MODEL_VERSION)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    header, arrays = parts_of_a_file()
    with pytest.raises(
        InputError, match=r"format 'other' version 1; expected quantbench-gemm-model version 1"
    ):
        GemmModel.from_bytes(pack({**header, "format": "other"}, arrays))
    with pytest.raises(InputError, match=r"version 99; expected quantbench-gemm-model version 1"):
        GemmModel.from_bytes(pack({**header, "version": 99}, arrays))
    with pytest.raises(StoreError, match=r"interval"):
        GemmModel.from_bytes(
            pack({name: value for name, value in header.items() if name != "interval"}, arrays)
        )
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(StoreError, match=r"a file that save wrote"):
        GemmModel.load(tmp_path / "text.json")


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [
        ("0.feature", 0, 250),
        ("0.right", 0, 0),
        ("0.right", 0, 60000),
        ("0.roots", -1, 1_000_000),
        ("0.number", 0, np.nan),
        ("0.parameters", 0, np.inf),
    ],
)
def test_arrays_that_are_no_trees_or_parameters_are_refused(
    name: str, position: int, value: float
) -> None:
    header, arrays = parts_of_a_file()
    arrays[name] = arrays[name].copy()
    arrays[name][position] = value
    with pytest.raises(StoreError, match=r"trees that do not end|parameters"):
        GemmModel.from_bytes(pack(header, arrays))


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    header, arrays = parts_of_a_file()
    arrays["0.roots"] = np.array([{}], dtype=object)
    with pytest.raises(StoreError, match=r"damaged"):
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
    model = GemmModel.fit(
        A100, [64, 128, 256], [512] * 3, [512] * 3, [5.0, 6.0, 7.0], prior="family-out"
    )
    bare = GemmModel.prior(A100, family_out=True)
    assert equal(model.predict(100, 200, 300), bare.predict(100, 200, 300))
    assert "3 rows are too few" in model.note
    assert model.predict(1, 1, 1).note == model.note
    some = GemmModel.fit(A100, *invented(30, seed=5), prior="none", effort=QUICK)
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
        ({"latency_us": [float("inf")] * 30}, r"latency_us = inf; expected finite times"),
        ({"latency_us": [1.0] * 3}, r"latency_us of shape \(3,\) for 30 shapes"),
        ({"prior": "good"}, r"prior = 'good'; expected one of auto, family-out, none"),
        ({"prior": []}, r"prior = \[\]; expected GemmModels"),
        ({"dtype": "fp4"}, r"dtype = 'fp4'; expected one of"),
    ],
)
def test_bad_input_is_named(changed: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = (
        {name: [64] * 30 for name in "mnk"} | {"latency_us": [5.0] * 30} | changed
    )
    with pytest.raises(InputError, match=message):
        GemmModel.fit(A100, **arguments)  # type: ignore[arg-type]


def test_a_dtype_that_the_gpu_lacks_and_a_processor_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"a100-sxm4-80gb has no peak for fp8; expected one of"
    ):
        GemmModel.prior(A100, dtype="fp8")
    cpu = DeviceSpec("cpu-x", "cpu", 8, 3000, 2**25, 0, 2**34, 40, {"fp32": 1.0})
    with pytest.raises(UnsupportedError, match=r"cpu-x is a cpu"):
        GemmModel.prior(cpu, dtype="fp32")
    with pytest.raises(InputError, match=r"GemmModel.predict: m = 0"):
        GemmModel.prior(A100).predict(0, 1, 1)


@pytest.mark.slow
def test_family_out_knows_nothing_of_the_family() -> None:
    for slug in SHIPPED_GPUS:
        device = lookup(slug)
        own = [k.device for k in shipped_pool() if k.family == family(device)]
        assert slug in own
        prior, _ = choose(device, "bf16", shipped_pool(), family_out=True)
        assert not any(name in prior.source for name in own)
        without, _ = choose(
            device,
            "bf16",
            [k for k in shipped_pool() if k.family != family(device)],
            family_out=False,
        )
        assert np.array_equal(prior.mean, without.mean)
    assert (
        GemmModel.fit(
            A100, *invented(60, seed=6), prior="family-out", effort=QUICK
        ).ensemble.reference
        is None
    )


@pytest.mark.slow
def test_auto_starts_from_the_same_gpu() -> None:
    rows = invented(60, seed=7)
    model = GemmModel.fit(A100, *rows, prior="auto", effort=QUICK)
    assert model.prior_source == A100
    assert model.ensemble.reference is not None
    back = GemmModel.from_bytes(model.to_bytes())
    assert equal(back.predict(*rows[:3]), model.predict(*rows[:3]))


def test_auto_takes_the_residual_of_a_shipped_model_of_the_family() -> None:
    shipped = shipped_model(A100, "bf16")
    assert shipped is not None
    model = GemmModel.fit("a100-pcie-80gb", *invented(60, seed=8), effort=replace(QUICK, members=1))
    assert model.prior_source == A100
    assert model.ensemble.reference is not None
    assert model.ensemble.reference.members[0].parameters == pytest.approx(
        shipped.ensemble.members[0].parameters
    )


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
    assert model is not None
    held_out = model.provenance["held_out"]
    assert 0 < held_out["median_pct"] < 6
    assert len(model.provenance["sha256"]) == 64
    assert model.device == lookup(slug)
    big = model.predict(8192, 8192, 8192)
    tflops = 2 * 8192**3 / big.latency_us / 1e6
    assert 0.4 * model.device.peak_tflops["bf16"] < tflops <= model.device.peak_tflops["bf16"]
    assert len(model.ensemble.members) == 2


def test_times_above_the_peak_are_left_out_of_a_fit() -> None:
    m, n, k, measured = invented(80, seed=5)
    row = int(np.argmax(measured))
    impossible = measured.copy()
    impossible[row] *= 1e-3
    model = GemmModel.fit(A100, m, n, k, impossible, prior="none", effort=QUICK)
    assert (model.rows, model.provenance["above_peak"]) == (79, 1)
    kept = np.arange(80) != row
    other = GemmModel.fit(
        A100, m[kept], n[kept], k[kept], measured[kept], prior="none", effort=QUICK
    )
    assert (other.rows, "above_peak" in other.provenance) == (79, False)
    assert other.predict(4096, 4096, 4096).latency_us == model.predict(4096, 4096, 4096).latency_us


def test_workloads_are_answered_in_order() -> None:
    gemms = [
        Gemm(m=128, n=1024, k=1024),
        Gemm(m=64, n=1024, k=1024, batch=2),
        Gemm(m=4096, n=4096, k=64),
    ]
    works = GemmModel.prior(A100).predict_gemms(gemms)
    for gemm, work in zip(gemms, works, strict=True):
        assert (
            work.latency_us
            == GemmModel.prior(A100).predict(gemm.m, gemm.n, gemm.k, batch=gemm.batch).latency_us
        )
    assert works[2].launch is not None
    assert works[2].launch.tile is not None
    with pytest.raises(InputError, match=r"products of bf16"):
        GemmModel.prior(A100).predict_gemms([Gemm(m=1, n=1, k=1, dtype="fp16")])


def test_predicting_needs_neither_torch_nor_scikit_learn() -> None:
    code = (
        "import sys; from quantbench.latency.gemm.model import GemmModel;"
        "GemmModel.best('a100-sxm4-80gb').predict(1, 64, 64);"
        "print([name for name in ('torch', 'triton', 'sklearn', 'pandas', 'scipy') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
