"""Which GPUs teach what about each other."""

import pytest

from quantbench.device import lookup
from quantbench.latency.attention import attention_prior
from quantbench.latency.attention_cost_model import assumed_family
from quantbench.latency.families import family, family_of, generation, unit
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import choose, known_in_waves, shipped_pool


def test_families_by_compute_capability() -> None:
    families = {
        (7, 0): "volta", (7, 5): "turing", (8, 0): "ampere", (8, 6): "ampere", (8, 9): "ada", (9, 0): "hopper",
        (10, 0): "blackwell", (10, 3): "blackwell", (12, 1): "blackwell-rtx", (13, 0): "sm_130", None: "cpu",
    }  # fmt: skip
    assert {capability: family_of(capability) for capability in families} == families
    assert generation("sm_130") == "sm_130"


def test_a_card_of_the_generation_with_other_kernels_is_no_kin() -> None:
    data_centre, rtx = lookup("gb200-186gb"), lookup("rtx-pro-6000-96gb")
    assert (family(data_centre), family(rtx)) == ("blackwell", "blackwell-rtx")
    near, far, blind = (
        choose(device, "bf16", shipped_pool(), family_out=out)[0]
        for device, out in ((data_centre, False), (rtx, False), (data_centre, True))
    )
    assert near.source == "b200-sxm-180gb"
    measured = sorted(k.device for k in shipped_pool() if k.dtype == "bf16")
    assert far.source == "pooled over " + ", ".join(measured)
    assert "b200" not in blind.source + attention_prior(data_centre, family_out=True).words
    assert attention_prior(data_centre, family_out=False).family.name == "fmha_sm100"
    assert (
        attention_prior(rtx, family_out=False).family.name
        == assumed_family(rtx).name
        == "fa2_dense"
    )


def test_products_run_in_waves_where_measurements_say_so() -> None:
    # docs/choosing-shapes.md has the correlations of the same tables: confirmed on the A100,
    # refuted on the others.
    measured = [k.device for k in shipped_pool() if k.dtype == "bf16"]
    assert [slug for slug in measured if known_in_waves(lookup(slug), "bf16")] == ["a100-sxm4-80gb"]
    assert [slug for slug in measured if GemmModel.best(slug).in_waves] == ["a100-sxm4-80gb"]
    assert known_in_waves(lookup("a30-24gb"), "fp16")  # of the A100's family
    assert not known_in_waves(lookup("a100-sxm4-80gb"), "fp32")
    assert not known_in_waves(lookup("v100-sxm2-32gb"), "fp16")
    assert not GemmModel.best("a100-sxm4-80gb", dtype="fp32").in_waves


@pytest.mark.parametrize(
    ("slug", "dtype", "expected"),
    [
        ("p100-pcie-16gb", "fp16", "CUDA cores"),
        ("v100-sxm2-16gb", "fp16", "tensor cores"),
        ("v100-sxm2-16gb", "int8", "CUDA cores"),
        ("a100-sxm4-80gb", "tf32", "tensor cores"),
        ("mi300x-192gb", "fp32", "matrix cores"),
    ],
)
def test_the_unit_is_that_which_multiplies_the_dtype(slug: str, dtype: str, expected: str) -> None:
    assert unit(lookup(slug), dtype) == expected
