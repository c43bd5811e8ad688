"""The registry: every constant has a source, and every figure agrees with the others it is made
of.
"""

import tomllib
from importlib.resources import files

import pytest

from quantbench.device import registry
from quantbench.device.registry import SOURCED, Entry, architectures, entries
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError

ENTRIES = [pytest.param(entry, id=entry.spec.name) for entry in entries()]
DATA = tomllib.loads((files("quantbench.device") / "registry.toml").read_text(encoding="utf-8"))
DOCUMENTS = DATA["documents"]

# Data sheets round to two or three digits (8.1, 60, 112 for 113.05).
ROUNDING = 0.01
# GB200 NVL72 prints 576 TB/s for 72 GPUs whose pins make 589.
BANDWIDTH_ROUNDING = 0.025


@pytest.mark.parametrize("entry", ENTRIES)
def test_peaks_are_sms_times_rate_times_clock(entry: Entry) -> None:
    spec = entry.spec
    rate = architectures()[spec.architecture].rate
    for dtype, peak in spec.peak_tflops.items():
        clock_mhz = spec.peak_clock_mhz.get(dtype, spec.sm_clock_mhz)
        share = 0.5 if dtype in DATA["device"][spec.name].get("half_rate", ()) else 1.0
        made = spec.sm_count * rate[dtype] * share * clock_mhz * 1e-6
        assert peak == pytest.approx(made, rel=ROUNDING), (
            f"{spec.name} {dtype}: {peak} is stated, {made:.1f} computed"
        )


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_dtype_of_the_architecture_has_a_peak(entry: Entry) -> None:
    spec = entry.spec
    assert spec.peak_tflops.keys() == architectures()[spec.architecture].rate.keys()
    assert spec.peak_clock_mhz.keys() <= spec.peak_tflops.keys()
    highest_mhz = max(spec.sm_clock_mhz, *spec.peak_clock_mhz.values(), 0)
    assert spec.max_sm_clock_mhz >= highest_mhz
    # The table of `quantbench devices` leaves tf32 out, which is half of fp16.
    tf32 = spec.peak("tf32")
    assert tf32 is None or tf32 == pytest.approx(spec.peak_tflops["fp16"] / 2, rel=ROUNDING)
    assert set(DATA["device"][spec.name].get("half_rate", ())) <= spec.peak_tflops.keys()


@pytest.mark.parametrize("entry", ENTRIES)
def test_bandwidth_is_two_transfers_a_clock_on_every_pin(entry: Entry) -> None:
    stated = DATA["device"][entry.spec.name]
    made = 2e6 * stated["memory_clock_mhz"] * stated["memory_bus_bits"] / 8 / 1e9
    assert entry.spec.memory_gb_per_s == pytest.approx(made, rel=BANDWIDTH_ROUNDING)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_constant_names_a_document_with_its_year(entry: Entry) -> None:
    assert entry.spec.source.keys() == set(SOURCED)
    for field, source in entry.spec.source.items():
        titles = [title for title in DOCUMENTS.values() if source.startswith(title)]
        assert titles, f"{entry.spec.name} {field}: {source!r} is no known document"


def test_published_documents_carry_a_year() -> None:
    for key, title in DOCUMENTS.items():
        if key not in ("cuda", "nvml"):
            assert any(f"20{year}" in title for year in range(17, 27)), title


def test_slugs_and_names_are_unique() -> None:
    names = [name.casefold() for entry in entries() for name in entry.names]
    assert len(names) == len(set(names))
    slugs = [entry.spec.name for entry in entries()]
    assert len(slugs) == len(set(slugs))


# By hand, from the documents named in the registry; a second pair of eyes on the figures most used.
@pytest.mark.parametrize(
    ("slug", "sm_count", "l2_mib", "smem_per_block", "bf16", "bandwidth"),
    [
        ("v100-sxm2-32gb", 80, 6, 98304, None, 900),
        ("a100-sxm4-80gb", 108, 40, 166912, 312, 2039),
        ("h100-sxm5-80gb", 132, 50, 232448, 989.4, 3352),
        ("h100-pcie-80gb", 114, 50, 232448, 756, 2039),
        ("h200-sxm-141gb", 132, 60, 232448, 989.4, 4800),
        ("b200-sxm-180gb", 148, 126.5, 232448, 2250, 7700),
        ("gb200-186gb", 152, 126.5, 232448, 2500, 8000),
        ("b300-sxm-270gb", 148, 126.5, 232448, 2250, 7700),
        ("l40s-48gb", 142, 96, 101376, 366, 864),
        ("rtx-4090-24gb", 128, 72, 101376, 165.2, 1008),
        ("t4-16gb", 40, 4, 65536, None, 320),
        ("p100-pcie-16gb", 56, 4, 49152, None, 732),
        ("mi250x-64gb", 110, 8, 65536, 191.5, 1600),
        ("mi300x-192gb", 304, 256, 65536, 1307.4, 5300),
        ("mi325x-256gb", 304, 256, 65536, 1307.4, 6000),
        ("mi355x-288gb", 256, 256, 163840, 2516.6, 8000),
    ],
)
def test_known_figures(
    slug: str,
    sm_count: int,
    l2_mib: float,
    smem_per_block: int,
    bf16: float | None,
    bandwidth: float,
) -> None:
    spec = registry.lookup(slug)
    assert spec.sm_count == sm_count
    assert spec.l2_bytes == l2_mib * 2**20
    assert spec.smem_per_block_bytes == smem_per_block
    assert spec.peak("bf16") == bf16
    assert spec.memory_gb_per_s == bandwidth
    assert spec.registered


def test_slugs_that_others_rely_on() -> None:
    slugs = {spec.name for spec in registry.known()}
    assert slugs >= {
        "v100-sxm2-16gb", "v100-sxm2-32gb", "v100-pcie-16gb", "v100-pcie-32gb", "a100-sxm4-40gb", "a100-sxm4-80gb",
        "a100-pcie-40gb", "a100-pcie-80gb", "h100-sxm5-80gb", "h100-pcie-80gb", "h100-nvl-94gb", "h200-sxm-141gb",
        "h200-nvl-141gb", "b200-sxm-180gb", "l40s-48gb", "mi300x-192gb",
    }  # fmt: skip


@pytest.mark.parametrize(
    "slug", [spec.name for spec in registry.known() if spec.compute_capability == (7, 0)]
)
def test_volta_has_neither_bf16_nor_tf32_nor_fp8(slug: str) -> None:
    spec = registry.lookup(slug)
    assert [spec.peak(dtype) for dtype in ("bf16", "tf32", "fp8", "int8")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("a100-pcie-40gb", "a100-pcie-40gb"),
        ("h100", "h100-sxm5-80gb"), ("H100", "h100-sxm5-80gb"), ("NVIDIA H200", "h200-sxm-141gb"),
        ("l40", "l40-48gb"), ("v100s", "v100s-pcie-32gb"), ("4090", "rtx-4090-24gb"), ("a10", "a10-24gb"),
        # Of several cards of one model: SXM before slots, then the larger memory.
        ("a100", "a100-sxm4-80gb"), ("v100", "v100-sxm2-16gb"), ("a100-40gb", "a100-sxm4-40gb"),
        ("a100-pcie", "a100-pcie-80gb"), ("A100-80GB", "a100-sxm4-80gb"), ("A100-80G", "a100-sxm4-80gb"),
        ("a100-sxm-80gb", "a100-sxm4-80gb"), ("V100-32GB", "v100-sxm2-32gb"), ("v100_16GiB", "v100-sxm2-16gb"),
        # One model's name begins another's.
        ("rtx pro 6000", "rtx-pro-6000-96gb"), ("rtx-pro-6000-server", "rtx-pro-6000-server-96gb"),
        ("mi300x", "mi300x-192gb"), ("AMD Instinct MI355X", "mi355x-288gb"), ("AMD MI325X", "mi325x-256gb"),
        # As CUDA reports them.
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
    ],
)  # fmt: skip
def test_lookup_by_short_names(name: str, slug: str) -> None:
    assert registry.lookup(name).name == slug


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("rtx-6000", "rtx-6000-ada-48gb, rtx-pro-6000-96gb, rtx-pro-6000-server-96gb"),
        ("a100-60gb", "a100-sxm4-80gb, a100-sxm4-40gb, a100-pcie-80gb, a100-pcie-40gb"),
        ("h100-sxm5-80", "h100-sxm5-80gb, h100-pcie-80gb, h100-nvl-94gb"),
        ("a1000", "a100-sxm4-80gb, a100-sxm4-40gb, a100-pcie-80gb, a100-pcie-40gb"),
    ],
)
def test_lookup_lists_the_candidates(name: str, candidates: str) -> None:
    with pytest.raises(InputError) as caught:
        registry.lookup(name)
    listed = f"(`quantbench devices` lists all {len(entries())})"
    assert str(caught.value) == f"device: {name!r}; expected one of {candidates} {listed}"


@pytest.mark.parametrize(
    "name", ["80gb", "sxm", "", " ", "NVIDIA", "rtx", "mi400x", "a100-a100-v100", "-", "6000"]
)
def test_a_name_that_leaves_no_model_or_several_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"expected .* lists all"):
        registry.lookup(name)


def test_amd_gpus_are_rocm_devices_of_wavefronts() -> None:
    amd = [spec for spec in registry.known() if spec.name.startswith("mi")]
    assert {(spec.kind, spec.warp_threads) for spec in amd} == {("rocm", 64)}
    assert [spec.architecture for spec in amd] == ["gfx90a", "gfx942", "gfx942", "gfx950"]
    assert registry.lookup("p100").warp_threads == 32
    with pytest.raises(
        InputError, match=r"compute_capability = \(9, 1\); expected that of gfx90a, gfx942, gfx950"
    ):
        DeviceSpec("x", "rocm", 304, 2100, 2**28, 65536, 2**37, 5300, {"bf16": 1307}, (9, 1))


def test_formats_that_differ_in_their_scales_have_one_peak() -> None:
    mi355x = registry.lookup("mi355x")
    assert mi355x.peak("fp8_block") == mi355x.peak("fp8")
    assert mi355x.ceiling("fp8_block") == mi355x.ceiling("fp8")
    assert registry.lookup("mi300x").peak("mxfp4") is None
    b200, h100 = registry.lookup("b200"), registry.lookup("h100")
    assert b200.peak("mxfp8") == b200.peak("fp8")
    assert b200.peak("mxfp4") == b200.peak("nvfp4") == 2 * b200.peak_tflops["fp8"]
    assert [h100.peak(dtype) for dtype in ("mxfp8", "nvfp4", "mxfp4")] == [None] * 3
    assert mi355x.peak("mxfp8") == mi355x.peak("fp8")


def test_ceiling_scales_the_peak_to_the_clock() -> None:
    h100 = registry.lookup("h100-sxm5-80gb")
    assert h100.ceiling("bf16") == pytest.approx(132 * 4096 * 1980e-6, rel=1e-3)
    assert h100.ceiling("bf16", 1575) == pytest.approx(132 * 4096 * 1575e-6, rel=1e-3)
    assert h100.ceiling("fp32") == pytest.approx(66.9)  # stated at 1980 MHz already
    assert registry.lookup("v100-sxm2-16gb").ceiling("bf16") is None


def test_a_slipped_decimal_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"DeviceSpec x: memory_gb_per_s = 2039000; expected a number from 1 to 20000",
    ):
        DeviceSpec(
            "x", "cuda", 108, 1410, 40 * 2**20, 167936, 2**36, 2_039_000, {"bf16": 312}, (8, 0)
        )
