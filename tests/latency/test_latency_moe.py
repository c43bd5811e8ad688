"""Predicted time of experts: loads against the drawn routing, recovery of a known truth, files,
references.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantbench.device import DeviceSpec, lookup
from quantbench.errors import InputError, StoreError, UnsupportedError
from quantbench.latency.estimate import IntervalCalibration
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.moe import FEWEST_ROWS, Growth, MoEModel, load_models, shipped_models
from quantbench.latency.moe_features import NUM_FEATURES, TILES, ExpertLoads, Layers, fewer_gpus
from quantbench.workload import Gemm, MoE

H100, H200 = lookup("h100-sxm5-80gb"), lookup("h200-sxm-141gb")
_QUICK = Growth(randomised=4, boosted=40, depth=3)


def layers(count: int, seed: int = 0) -> list[MoE]:
    """Layers of random shapes, half of them skewed."""
    rng = np.random.default_rng(seed)
    shapes = [(4096, 14336, 2, 8), (2048, 768, 8, 128), (7168, 2048, 8, 256), (5120, 8192, 1, 16)]
    made = []
    for _ in range(count):
        hidden, ffn, top_k, experts = shapes[rng.integers(len(shapes))]
        made.append(
            MoE(int(2 ** rng.integers(0, 14)), hidden, ffn, experts, top_k, tp=int(2 ** rng.integers(3)),
                ep=int(2 ** rng.integers(4)), distribution=("balanced", "power_law_1.2")[rng.integers(2)])
        )  # fmt: skip
    return made


def test_loads_are_those_of_the_busiest_rank() -> None:
    histogram = (10, 0, 3, 200, 0, 0, 1, 40)
    works = [
        MoE(33, 64, 64, 8, 2, ep=2),
        MoE(127, 64, 64, 8, 2, ep=4, distribution=histogram),
        MoE(3, 64, 64, 8, 1, ep=8),
    ]
    loads = ExpertLoads.of(works)
    held = [np.array(work.experts_of(work.busiest_rank)) for work in works]
    assert loads.rows.tolist() == [rows.sum() for rows in held]
    assert loads.active.tolist() == [(rows > 0).sum() for rows in held]
    assert loads.most.tolist() == [rows.max() for rows in held]
    tiles = [[np.ceil(rows / tile).sum() for rows in held] for tile in TILES]
    assert loads.tiles.tolist() == tiles


@pytest.mark.parametrize("tokens", [4, 64, 4096])
def test_loads_of_a_power_law_are_near_the_mean_of_its_draws(tokens: int) -> None:
    work = MoE(tokens, 64, 64, 64, 4, ep=8, distribution="power_law_1.2")
    draws = [replace(work, seed=seed) for seed in range(40)]
    rows = [max(draw.rows_per_rank) for draw in draws]
    active = [np.count_nonzero(draw.experts_of(draw.busiest_rank)) for draw in draws]
    found = ExpertLoads.of([work])
    assert found.rows[0] == pytest.approx(np.mean(rows), rel=0.25)
    assert found.active[0] == pytest.approx(np.mean(active), rel=0.25)
    assert float(found.rows[0]) > work.expected_rank_rows


def test_roofline_knows_padding_and_expert_weights() -> None:
    few, many = np.exp(Layers.of([MoE(16, 4096, 2048, of, 1) for of in (2, 16)]).roofline(H100))
    assert many > 3 * few  # sixteen experts' weights are read instead of two's
    edge = Layers.of([MoE(tokens, 4096, 2048, 8, 2) for tokens in (8 * 64 * 16, 8 * 64 * 16 + 8)])
    assert np.diff(edge.loads.tiles[1])[0] == 8  # each expert starts another tile of 64 rows
    assert edge.features(H100).shape == (2, NUM_FEATURES)


def fit(
    works: Sequence[MoE], times: np.ndarray, device: DeviceSpec = H100, library: str = "vllm", **options: Any
) -> MoEModel:  # fmt: skip
    options = {"prior": "none", "growth": _QUICK, **options}
    return MoEModel.fit(device, works, times, library=library, **options)


def errors(model: MoEModel, works: Sequence[MoE], truth: np.ndarray) -> float:
    return float(np.median(np.abs(model.predict(works).latency_us / truth - 1)))


def test_fit_recovers_a_truth_that_the_terms_explain() -> None:
    works = layers(600)
    known = Layers.of(works)
    truth = np.exp(known.roofline(H100) + 0.3 + 0.1 * np.log(known.loads.active))
    model, again = (fit(works[:400], truth[:400]) for _ in range(2))
    assert errors(model, works[400:], truth[400:]) < 0.03
    found = model.predict(works[400:])
    assert (found.low_us < found.latency_us).all()
    assert (found.latency_us < found.high_us).all()
    assert model.rows == 400
    assert "without models" in model.note
    assert np.array_equal(again.predict(works[400:]).latency_us, found.latency_us)


def test_a_reference_teaches_shapes_that_were_not_measured() -> None:
    works = sorted(layers(600, seed=1), key=lambda work: work.hidden)
    known = Layers.of(works)
    # What a width costs is not a matter of the terms, and the same on both GPUs; the widest is not
    # in the fit.
    odd = np.select([known.hidden == width for width in (4096, 5120, 7168)], [0.4, 0.2, 0.8])
    other = fit(works, np.exp(known.roofline(H200) + odd), H200)
    truth = np.exp(known.roofline(H100) + odd + 0.1)
    seen = int((known.hidden != 7168).sum())
    alone, taught = (
        errors(fit(works[:seen], truth[:seen], prior=prior), works[seen:], truth[seen:])
        for prior in ([], [other])
    )
    assert taught < 0.6 * alone


def test_files_keep_models_and_their_references(tmp_path: Path) -> None:
    works, file = layers(200), tmp_path / "model.moe"
    times = np.exp(Layers.of(works).roofline(H100))
    model = fit(works, 0.8 * times, prior=[fit(works, times, H200, "sglang")])
    model.save(file)
    read = MoEModel.load(file)
    assert (read.device, read.library, read.rows, read.note) == (H100, "vllm", 200, model.note)
    assert read.references[0].library == "sglang"
    assert len(load_models(file)) == 2
    assert read.predict(works).latency_us == pytest.approx(
        model.predict(works).latency_us, rel=0.01
    )
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(StoreError, match="a file of quantbench-moe-model"):
        MoEModel.load(file)


def test_a_prior_excludes_the_gpu_itself_and_says_what_it_rests_on() -> None:
    assert "h100-sxm5-80gb" in {one.device.name for one in shipped_models("bf16")}
    prior = MoEModel.prior(H100, library="vllm")
    assert prior.references
    assert H100.name not in {one.device.name for one in prior.references}
    assert "not measured" in prior.note
    far = MoEModel.prior(H100, library="vllm", prior="family-out")
    assert H200.name not in {one.device.name for one in far.references}
    few = MoEModel.fit(H100, layers(FEWEST_ROWS - 1), np.ones(FEWEST_ROWS - 1), library="vllm")
    assert few.rows == 0
    assert "too few" in few.note


def test_op_times_of_experts_and_products() -> None:
    times = ModelTimes(H100, "vllm")
    expert, product = MoE(512, 4096, 14336, 8, 2), Gemm(4096, 4096, 4096)
    found = times.estimates([product, expert])
    assert (
        found[1].latency_us == MoEModel.best(H100, library="vllm").predict([expert]).latency_us[0]
    )
    assert found[1].unmeasured == ""
    assert found[1].bound == "memory"
    unknown = ModelTimes(lookup("a100-sxm4-80gb")).estimates([replace(expert, dtype="mxfp4")])[0]
    assert "none measured" in unknown.unmeasured
    assert unknown.high_us > 2 * unknown.low_us


@pytest.mark.parametrize(
    ("works", "count", "library", "said"),
    [
        (layers(30), 29, "vllm", r"shape \(29,\) for 30 shapes"),
        ([*layers(1), replace(*layers(1), dtype="fp8")], 2, "vllm", "bf16, fp8"),
        (layers(30), 30, "cublas", "library"),
    ],
)
def test_wrong_input_is_named(works: list[MoE], count: int, library: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fit(works, np.ones(count), library=library)


def test_other_kinds_and_formats_are_refused() -> None:
    with pytest.raises(UnsupportedError):
        MoEModel.prior(replace(H100, kind="cpu"), library="vllm")
    model = MoEModel(H100, "bf16", "vllm", (), (), IntervalCalibration(1.0, 0.5))
    with pytest.raises(InputError, match="fp8"):
        model.predict([replace(*layers(1), dtype="fp8")])


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"])
def test_the_default_times_have_no_masked_rows_of_other_gpus(gpu: str) -> None:
    dtype = "bf16" if gpu.startswith("a100") else "fp8_block"
    usual, masked = (MoEModel.best(gpu, dtype=dtype, library=library) for library in ("", "sglang"))
    assert usual.library == "trtllm"
    assert ("masked" in usual.note, "masked" in masked.note) == (False, True)
    # As many rows on each GPU, and an eighth of the experts' weights.
    layers = [MoE(4096 * ep, 7168, 2048, 256, 8, dtype, ep=ep) for ep in (1, 8)]
    ratio, with_masked = (
        float(np.divide(*model.predict(layers[::-1]).latency_us)) for model in (usual, masked)
    )
    assert ratio < 1 < with_masked


@pytest.mark.parametrize(
    ("gpu", "dtype"), [("h100-sxm5-80gb", "bf16"), ("b200-sxm-180gb", "nvfp4")]
)
def test_more_gpus_with_as_many_rows_each_do_not_take_longer(gpu: str, dtype: str) -> None:
    works = [MoE(4096 * ep, 2048, 768, 128, 8, dtype, ep=ep) for ep in (4, 8, 16, 32, 64)]
    times = MoEModel.best(gpu, dtype=dtype).predict(works).latency_us
    assert times.max() < 1.5 * times.min()
    # Beyond the tables: the same layer as on fewer GPUs, whose rows and experts are as many each.
    layers = ((16384, 64), (16385, 64), (65536, 8), (100_000, 6), (10**6, 4))
    assert [fewer_gpus(*layer) for layer in layers] == [1, 2, 4, 6, 4]
