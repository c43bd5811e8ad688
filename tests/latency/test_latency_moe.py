"""Predicted time of experts: loads against the drawn routing, recovery of a known truth, files,
references.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, StoreError, UnsupportedError
from quantbench.latency.estimate import IntervalCalibration
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.moe import (
    FEWEST_ROWS,
    Growth,
    MoEModel,
    load_models,
    save_models,
    shipped_models,
)
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
    for i, work in enumerate(works):
        held = np.array(work.experts_of(work.busiest_rank))
        assert loads.rows[i] == held.sum()
        assert loads.active[i] == (held > 0).sum()
        assert loads.fullest[i] == held.max()
        for tile, tiles in zip(TILES, loads.tiles[:, i], strict=True):
            assert tiles == np.ceil(held / tile).sum()


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
    few, many = (MoE(16, 4096, 2048, experts, 1) for experts in (2, 16))
    times = np.exp(Layers.of([few, many]).roofline(H100))
    assert times[1] > 3 * times[0]  # sixteen experts' weights are read instead of two's
    edge = Layers.of([MoE(tokens, 4096, 2048, 8, 2) for tokens in (8 * 64 * 16, 8 * 64 * 16 + 8)])
    assert np.diff(edge.loads.tiles[1])[0] == 8  # each expert starts another tile of 64 rows
    assert edge.features(H100).shape == (2, NUM_FEATURES)


def test_fit_recovers_a_truth_that_the_terms_explain() -> None:
    works = layers(600)
    known = Layers.of(works)
    truth = np.exp(known.roofline(H100) + 0.3 + 0.1 * np.log(known.loads.active))
    train, test = np.arange(400), np.arange(400, 600)
    model = MoEModel.fit(
        H100, works[:400], truth[train], library="vllm", prior="none", growth=_QUICK
    )
    found = model.predict([works[i] for i in test])
    assert np.median(np.abs(found.latency_us / truth[test] - 1)) < 0.03
    assert (found.low_us < found.latency_us).all()
    assert (found.latency_us < found.high_us).all()
    assert model.rows == 400
    assert "without models" in model.note
    again = MoEModel.fit(
        H100, works[:400], truth[train], library="vllm", prior="none", growth=_QUICK
    )
    np.testing.assert_array_equal(
        again.predict(works[:9]).latency_us, model.predict(works[:9]).latency_us
    )


def test_a_reference_teaches_shapes_that_were_not_measured() -> None:
    works = layers(600, seed=1)
    known = Layers.of(works)
    # What a width costs is not a matter of the terms, and the same on both GPUs; the widest is not
    # in the fit.
    odd = np.select([known.hidden == width for width in (4096, 5120, 7168)], [0.4, 0.2, 0.8])
    other = MoEModel.fit(
        H200, works, np.exp(known.roofline(H200) + odd), library="vllm", prior="none", growth=_QUICK
    )
    truth = np.exp(known.roofline(H100) + odd + 0.1)
    seen, unseen = np.flatnonzero(known.hidden != 7168), np.flatnonzero(known.hidden == 7168)
    errors = []
    for prior in ([], [other]):
        model = MoEModel.fit(
            H100, [works[i] for i in seen], truth[seen], library="vllm", prior=prior, growth=_QUICK
        )  # fmt: skip
        found = model.predict([works[i] for i in unseen])
        errors.append(float(np.median(np.abs(found.latency_us / truth[unseen] - 1))))
    assert errors[1] < 0.6 * errors[0]


def test_files_keep_models_and_their_references(tmp_path: Path) -> None:
    works = layers(200)
    times = np.exp(Layers.of(works).roofline(H100))
    other = MoEModel.fit(H200, works, times, library="sglang", prior="none", growth=_QUICK)
    model = MoEModel.fit(H100, works, 0.8 * times, library="vllm", prior=[other], growth=_QUICK)
    save_models(tmp_path / "model.moe", [model])
    read = load_models(tmp_path / "model.moe")[-1]
    assert (read.device, read.library, read.rows, read.note) == (H100, "vllm", 200, model.note)
    assert read.references[0].library == "sglang"
    assert len(load_models(tmp_path / "model.moe")) == 2
    np.testing.assert_allclose(
        read.predict(works).latency_us, model.predict(works).latency_us, rtol=0.01
    )
    (tmp_path / "broken.moe").write_bytes((tmp_path / "model.moe").read_bytes()[:-200])
    with pytest.raises(StoreError, match="broken"):
        load_models(tmp_path / "broken.moe")


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


def test_wrong_input_is_named() -> None:
    works = layers(30)
    with pytest.raises(InputError, match=r"shape \(29,\) for 30 shapes"):
        MoEModel.fit(H100, works, np.ones(29), library="vllm")
    with pytest.raises(InputError, match="bf16, fp8"):
        MoEModel.fit(H100, [*works, replace(works[0], dtype="fp8")], np.ones(31), library="vllm")
    with pytest.raises(InputError, match="library"):
        MoEModel.fit(H100, works, np.ones(30), library="cublas")
    with pytest.raises(UnsupportedError):
        MoEModel.prior(replace(H100, kind="cpu"), library="vllm")
    model = MoEModel(H100, "bf16", "vllm", (), (), IntervalCalibration(1.0, 0.5))
    with pytest.raises(InputError, match="fp8"):
        model.predict([replace(works[0], dtype="fp8")])


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
    model = MoEModel.best(gpu, dtype=dtype)
    times = model.predict(
        [MoE(4096 * ep, 2048, 768, 128, 8, dtype, ep=ep) for ep in (4, 8, 16, 32, 64)]
    ).latency_us
    assert times.max() < 1.5 * times.min()
    # Beyond the tables: the same layer as on fewer GPUs, whose rows and experts are as many each.
    assert [fewer_gpus(*layer) for layer in ((16384, 64), (16385, 64), (65536, 8), (100_000, 6), (10**6, 4))] == [
        1, 2, 4, 6, 4,
    ]  # fmt: skip
