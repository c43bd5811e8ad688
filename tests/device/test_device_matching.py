"""Names and figures as CUDA reports them, and the spec that each becomes."""

import pytest

from quantbench.device.matching import Properties, match
from quantbench.device.registry import lookup
from quantbench.errors import UnsupportedError

MIB = 2**20

# name, compute capability, SMs, bytes: as deviceQuery and torch print them on such cards.
REPORTED = [
    ("Tesla V100-SXM2-16GB", (7, 0), 80, 16928342016, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", (7, 0), 80, 34089730048, "v100-sxm2-32gb"),
    ("Tesla V100-PCIE-16GB", (7, 0), 80, 16936927232, "v100-pcie-16gb"),
    ("Tesla V100-PCIE-32GB", (7, 0), 80, 34072559616, "v100-pcie-32gb"),
    ("Tesla P100-PCIE-16GB", (6, 0), 56, 17071734784, "p100-pcie-16gb"),
    ("Tesla T4", (7, 5), 40, 15642329088, "t4-16gb"),
    ("A100-SXM4-40GB", (8, 0), 108, 40536 * MIB, "a100-sxm4-40gb"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 84987740160, "a100-sxm4-80gb"),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 42297786368, "a100-pcie-40gb"),
    ("NVIDIA A100 80GB PCIe", (8, 0), 108, 84974239744, "a100-pcie-80gb"),
    ("NVIDIA A10", (8, 6), 72, 23609475072, "a10-24gb"),
    ("NVIDIA A10G", (8, 6), 80, 22723 * MIB, "a10g-24gb"),
    ("NVIDIA A40", (8, 6), 84, 47608692736, "a40-48gb"),
    ("NVIDIA RTX A6000", (8, 6), 84, 51160023040, "rtx-a6000-48gb"),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 25443893248, "rtx-3090-24gb"),
    ("NVIDIA L4", (8, 9), 58, 23612293120, "l4-24gb"),
    ("NVIDIA L40S", (8, 9), 142, 47576711168, "l40s-48gb"),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 24146083840, "rtx-4090-24gb"),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 85017755648, "h100-sxm5-80gb"),
    ("NVIDIA H100 PCIe", (9, 0), 114, 81008 * MIB, "h100-pcie-80gb"),
    ("NVIDIA H100 NVL", (9, 0), 132, 99456909312, "h100-nvl-94gb"),
    ("NVIDIA H200", (9, 0), 132, 143156 * MIB, "h200-sxm-141gb"),
    ("NVIDIA GH200 480GB", (9, 0), 132, 102005473280, "gh200-96gb"),
    ("NVIDIA GH200 120GB", (9, 0), 132, 101468602368, "gh200-96gb"),
    ("NVIDIA B200", (10, 0), 148, 182631 * MIB, "b200-sxm-180gb"),
    ("NVIDIA GB200", (10, 0), 152, 189471 * MIB, "gb200-186gb"),
    ("NVIDIA B300 SXM6 AC", (10, 3), 148, 275040 * MIB, "b300-sxm-270gb"),
    ("NVIDIA GB300", (10, 3), 152, 284208 * MIB, "gb300-279gb"),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 33660534784, "rtx-5090-32gb"),
    (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        (12, 0),
        188,
        97887 * MIB,
        "rtx-pro-6000-96gb",
    ),
    (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        (12, 0),
        188,
        97887 * MIB,
        "rtx-pro-6000-server-96gb",
    ),
]


@pytest.mark.parametrize(("name", "capability", "sms", "memory_bytes", "slug"), REPORTED)
def test_known_cards(
    name: str, capability: tuple[int, int], sms: int, memory_bytes: int, slug: str
) -> None:
    assert match(Properties(name, capability, sms, memory_bytes)) == lookup(slug)


def test_a_card_that_may_run_faster_keeps_its_peaks_and_gets_a_higher_bound() -> None:
    spec = match(
        Properties("NVIDIA GeForce RTX 3090", (8, 6), 82, 25443893248, max_sm_clock_mhz=2100)
    )
    assert spec.registered
    assert (spec.sm_clock_mhz, spec.max_sm_clock_mhz) == (1695, 2100)
    assert spec.source["max_sm_clock_mhz"] == "reported by the card"
    assert spec.ceiling("bf16") == pytest.approx(71 * 2100 / 1695)


def test_a_mig_slice_is_not_the_card() -> None:
    spec = match(Properties("NVIDIA A100 80GB PCIe MIG 1g.10gb", (8, 0), 14, 10200547328))
    card = lookup("a100-pcie-80gb")
    assert spec.name == "a100-pcie-80gb-14sm-10gb"
    assert not spec.registered
    assert spec.sm_count == 14
    assert spec.peak("bf16") == pytest.approx(312 * 14 / 108)
    assert spec.memory_gb_per_s == pytest.approx(card.memory_gb_per_s / 8)
    assert spec.l2_bytes == card.l2_bytes // 8
    assert spec.smem_per_block_bytes == card.smem_per_block_bytes
    assert spec.source["peak_tflops"] == (
        "estimated: 14 of 108 SMs and 10 of 80 GiB of a100-pcie-80gb"
    )


def test_fewer_sms_are_not_the_card() -> None:
    spec = match(Properties("NVIDIA H200", (9, 0), 66, 143156 * MIB))
    assert spec.name == "h200-sxm-141gb-66sm-140gb"
    assert not spec.registered
    assert spec.peak("bf16") == pytest.approx(989.4 / 2)
    assert spec.memory_gb_per_s == 4800
    assert spec.source["peak_tflops"] == (
        "estimated: 66 of 132 SMs and 140 of 141 GiB of h200-sxm-141gb"
    )


def test_a_vgpu_with_part_of_the_memory_is_not_the_card() -> None:
    spec = match(Properties("NVIDIA A40", (8, 6), 84, 24 * 2**30))
    assert spec.name == "a40-48gb-84sm-24gb"
    assert not spec.registered
    assert spec.memory_bytes == 24 * 2**30
    assert spec.peak("bf16") == lookup("a40-48gb").peak("bf16")


def test_a_known_name_with_another_architecture_is_unknown() -> None:
    spec = match(Properties("NVIDIA B200", (9, 0), 132, 80 * 2**30, max_sm_clock_mhz=1000))
    assert spec.name == "b200-80gb"
    assert spec.peak("bf16") == pytest.approx(132 * 4096 * 1000e-6)


def test_an_unknown_card_gets_estimates_from_what_it_reports() -> None:
    spec = match(
        Properties(
            "NVIDIA H20", (9, 0), 78, 97285 * MIB, l2_bytes=60 * MIB, max_sm_clock_mhz=1980,
             max_memory_clock_mhz=2619, memory_bus_bits=6144,
        )
    )  # fmt: skip
    assert spec.name == "h20-95gb"
    assert not spec.registered
    assert spec.peak("bf16") == pytest.approx(78 * 4096 * 1980e-6)
    assert spec.memory_gb_per_s == pytest.approx(4022.8, abs=0.1)
    assert spec.source["peak_tflops"] == "estimated: SMs × the rate of sm_90 × clock"
    assert spec.source["memory_gb_per_s"] == "estimated: 2 × the reported memory clock × bus width"


def test_an_unknown_card_that_reports_nothing_gets_bounds_never_none() -> None:
    spec = match(Properties("NVIDIA A16", (8, 6), 10, 15 * 2**30))
    assert spec.sm_clock_mhz == 1800  # the highest of sm_86 in the registry
    assert spec.memory_gb_per_s == 936
    assert (
        spec.source["sm_clock_mhz"] == "estimated: the highest of sm_86, not reported by the card"
    )
    assert spec.smem_per_block_bytes == 101376
    assert spec.peak("bf16") == pytest.approx(10 * 1024 * 1800e-6)


def test_an_unknown_minor_version_is_bounded_by_its_major_one() -> None:
    spec = match(Properties("NVIDIA GB10", (12, 1), 48, 119 * 2**30, max_sm_clock_mhz=2418))
    assert spec.peak("bf16") == pytest.approx(48 * 1024 * 2418e-6)
    assert "(nothing is known of sm_121)" in spec.source["peak_tflops"]


def test_an_unknown_major_version_is_bounded_by_the_fastest() -> None:
    spec = match(Properties("NVIDIA Rubin", (13, 0), 200, 288 * 2**30, max_sm_clock_mhz=2000))
    assert spec.peak("bf16") == pytest.approx(200 * 8192 * 2000e-6)
    assert "(nothing is known of sm_130)" in spec.source["peak_tflops"]


def test_unknown_cards_before_volta_are_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        match(Properties("Tesla P100-SXM2-16GB", (6, 0), 56, 16 * 2**30))
    assert caught.value.value == "Tesla P100-SXM2-16GB of compute capability 6.0"
