"""Batched products, layouts and the models fitted to published tables: NeuSight, DeepBench,
aiter.
"""

from dataclasses import replace

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.gemm.cost_model import (
    Machine,
    Menu,
    Shapes,
    Values,
    hand_prior,
    log_latency,
)
from quantbench.latency.gemm.member import Growth
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.gemm.training import Effort
from quantbench.latency.model_times import ModelTimes
from quantbench.workload import Gemm
from tools.accuracy.scoring import coverage
from tools.published_tables import PUBLISHED

V100 = "v100-pcie-32gb"
QUICK = Effort(members=1, rows_first=100, rows_other=60, growth=Growth(trees=12))


def invented(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    m, n, k = (np.floor(2 ** rng.uniform(4, 10, rows)) for _ in range(3))
    return {"m": m, "n": n, "k": k, "batch": np.floor(2 ** rng.uniform(0, 8, rows))}


def made(sizes: dict[str, np.ndarray], slower: np.ndarray | float = 0.0) -> np.ndarray:
    """Times in µs by the hand prior's cost model, `slower` in log time."""
    shapes = Shapes(Machine.of(lookup(V100), "fp32"), Menu.of(), *sizes.values())
    return np.exp(log_latency(Values(hand_prior()[0]), shapes)[0] + slower)


def test_a_batch_of_one_is_a_single_product_and_a_batch_is_no_taller_one() -> None:
    model, prior = GemmModel.best(V100, dtype="fp32"), GemmModel.prior(V100, dtype="fp32")
    assert model.batched
    m = np.array([100, 129, 512])
    single, one = model.predict(m, 80, 256), model.predict(m, 80, 256, batch=1)
    assert single.latency_us.tolist() == one.latency_us.tolist()
    # 16 products of one row fill 16 tiles; one product of 16 rows fills one.
    assert prior.predict(16, 4096, 64, batch=64).waves > prior.predict(16 * 64, 4096, 64).waves
    us, double_us = prior.predict(128, 128, 4096, batch=[80, 160]).latency_us
    assert double_us > 1.5 * us
    with pytest.raises(InputError, match=r"batch = 0; expected a whole number from 1"):
        model.predict(m, 80, 256, batch=0)
    with pytest.raises(InputError, match=r"2 layouts for 3 shapes"):
        model.predict(m, 80, 256, layout=["nn", "nt"])


@pytest.mark.slow
def test_batches_and_a_slower_layout_are_learned_and_stored() -> None:
    train, test = invented(160), invented(400)
    layout = np.array(["nn", "nt"])[np.arange(160) % 2]
    times = made(train, np.where(layout == "nt", 0.4, 0.0))
    model = GemmModel.fit(
        V100, **train, latency_us=times, layout=layout.tolist(), dtype="fp32", prior="none", effort=QUICK
    )  # fmt: skip
    found, times = model.predict(**test, layout="nn"), made(test)
    assert np.median(np.abs(found.latency_us / times - 1)) < 0.06
    assert coverage(times, found.low_us, found.high_us) > 0.8
    slower = model.predict(**test, layout="nt").latency_us
    assert 1.25 < np.median(slower / found.latency_us) < 1.75
    again = GemmModel.from_bytes(model.to_bytes())
    assert again.predict(**test, layout="nt").latency_us.tolist() == slower.tolist()


def test_a_weight_gradient_over_an_odd_number_of_tokens_has_aligned_rows() -> None:
    model = GemmModel.best("h100-sxm5-80gb")
    assert not model.layouts
    k, layouts = [4096, 4097, 4104, 4097], ["tn", "tn", "tn", "nn"]
    aligned, odd, above, odd_rows = model.predict(4096, 4096, k, layout=layouts).latency_us
    assert aligned <= odd == above
    assert odd < 0.6 * odd_rows
    # Rows of the activations are m long there: an odd m costs what an odd k costs elsewhere.
    assert model.predict(4099, 4096, 4096, layout="tn").latency_us > 1.5 * aligned
    # FP8 tensor cores read rows along k, so another layout is transposed first.
    fp8 = GemmModel.best("h100-sxm5-80gb", dtype="fp8")
    transposed, plain = fp8.predict(4096, 4096, [4097, 4096], layout=["tn", "nt"]).latency_us
    assert transposed > 1.5 * plain


@pytest.mark.parametrize(("slug", "dtype"), PUBLISHED)
def test_models_of_published_tables_are_shipped_and_state_their_table(
    slug: str, dtype: str
) -> None:
    model = shipped_model(slug, dtype)
    assert GemmModel.best(slug, dtype=dtype) is model
    assert (model.device, model.dtype, model.note) == (lookup(slug), dtype, "")
    assert model.provenance["table"] == PUBLISHED[slug, dtype].file
    assert 0 < model.provenance["held_out"]["median_pct"] < 12
    big = model.predict(4096, 4096, 4096)
    peak = model.device.peak(dtype)
    assert peak is not None
    assert 0.2 * peak < 2 * 4096**3 / big.latency_us / 1e6 <= peak


@pytest.mark.parametrize(
    ("slug", "dtype", "batched"),
    [("v100-sxm2-16gb", "fp16", False), ("v100-pcie-32gb", "fp32", True)],
)
def test_op_times_take_these_models_and_say_what_was_measured(
    slug: str, dtype: str, batched: bool
) -> None:
    times, gemm = ModelTimes(lookup(slug)), Gemm(512, 512, 512, dtype=dtype)
    single, batch = times.estimates([gemm, replace(gemm, batch=8)])
    assert single.unmeasured == ""
    assert (batch.unmeasured == "") is batched
    assert "measured shapes of" in times.note
