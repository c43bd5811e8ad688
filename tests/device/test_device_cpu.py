"""Processors as Linux describes them, and the bounds that follow."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from quantbench.device import cpu
from quantbench.device.cpu import CpuInfo, cpu_slug, cpu_spec, cpu_state, parse_cpuinfo
from quantbench.device.here import default_dtype

GIB = 2**30

TURIN_VM = """processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 26
model		: 2
model name	: AMD EPYC
cpu MHz		: 2596.122
flags		: fpu sse2 avx fma hypervisor avx2 avx512f avx512bw avx_vnni avx512_bf16

processor	: 1
vendor_id	: AuthenticAMD
"""
SAPPHIRE_RAPIDS = """processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 143
model name	: Intel(R) Xeon(R) Platinum 8488C
cpu MHz		: 2400.000
flags		: sse2 avx fma avx2 avx512f avx512bw avx512_bf16 avx512_fp16 amx_bf16 amx_int8
"""
HASWELL = """processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 63
model name	: Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz
cpu MHz		: 2500.000
flags		: sse2 avx fma avx2
"""
GRAVITON_3 = """processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd asimdhp sve bf16 i8mm
CPU implementer	: 0x41
CPU part	: 0xd40
"""


def parsed(text: str, *, max_mhz: float | None = None, exact: bool = False) -> CpuInfo:
    return parse_cpuinfo(
        text, last_cache_bytes=32 * 2**20, memory_bytes=16 * GIB, max_mhz=max_mhz, exact_clock=exact
    )


def test_a_virtual_machine_that_hides_its_turbo_gets_the_highest_clock_of_its_model() -> None:
    spec = cpu_spec(parsed(TURIN_VM))
    assert spec.name == "cpu-amd-epyc"
    assert (spec.kind, spec.sm_count, spec.compute_capability) == ("cpu", 1, None)
    assert spec.sm_clock_mhz == 5000
    assert spec.l2_bytes == 32 * 2**20
    assert spec.peak("fp32") == pytest.approx(64 * 5.0 / 1000)
    assert spec.peak("bf16") == pytest.approx(128 * 5.0 / 1000)
    assert spec.peak("tf32") is None
    assert spec.source["peak_tflops"] == "estimated upper bound for one core at 5000 MHz"
    assert spec.source["peak_tflops.bf16"].endswith(
        "128 operations per cycle, VDPBF16PS: 2 × 32 multiply-adds"
    )
    assert not spec.registered


def test_amx() -> None:
    spec = cpu_spec(parsed(SAPPHIRE_RAPIDS))
    assert spec.name == "cpu-intel-xeon-platinum-8488c"
    assert spec.peak("bf16") == pytest.approx(1024 * 4.8 / 1000)
    assert spec.peak("fp16") == pytest.approx(128 * 4.8 / 1000)
    assert spec.peak("int8") == pytest.approx(2048 * 4.8 / 1000)


def test_bf16_without_instructions_is_bounded_by_fp32() -> None:
    spec = cpu_spec(parsed(HASWELL))
    assert spec.peak("bf16") == spec.peak("fp32") == pytest.approx(32 * 6.2 / 1000)
    assert "computed as fp32" in spec.source["peak_tflops.bf16"]
    assert default_dtype(spec) == "fp32"


@pytest.mark.parametrize("text", [TURIN_VM, SAPPHIRE_RAPIDS, GRAVITON_3])
def test_native_bf16_is_the_default(text: str) -> None:
    assert default_dtype(cpu_spec(parsed(text))) == "bf16"


def test_arm() -> None:
    spec = cpu_spec(parsed(GRAVITON_3))
    assert spec.name == "cpu-neoverse-v1"
    assert spec.peak("fp32") == pytest.approx(64 * 4.7 / 1000)
    assert spec.peak("bf16") == pytest.approx(128 * 4.7 / 1000)


def test_a_clock_that_counts_turbo_in_is_believed() -> None:
    spec = cpu_spec(parsed(HASWELL, max_mhz=3300, exact=True))
    assert spec.sm_clock_mhz == 3300
    assert spec.source["sm_clock_mhz"] == "cpufreq's maximum, turbo included"


def test_a_clock_without_turbo_is_not_believed() -> None:
    assert cpu_spec(parsed(HASWELL, max_mhz=2501)).sm_clock_mhz == 6200


def test_a_clock_above_the_models_highest_is_believed() -> None:
    assert cpu_spec(parsed(TURIN_VM, max_mhz=5700)).sm_clock_mhz == 5700


def test_a_processor_that_tells_nothing_still_has_a_bound() -> None:
    spec = cpu_spec(replace(parsed("processor : 0\n"), name="", last_cache_bytes=None))
    assert spec.name == "cpu-unknown"
    assert spec.peak("fp32") == pytest.approx(2 * 6.2 / 1000)
    assert spec.source["l2_bytes"] == "assumed, not reported"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC 7R13 Processor", "cpu-amd-epyc-7r13"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "cpu-amd-ryzen-9-7950x"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", "cpu-amd-ryzen-7-7840u"),
        ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", "cpu-intel-core-i7-8700k"),
        ("Apple M2 Max", "cpu-apple-m2-max"),
        ("", "cpu-unknown"),
    ],
)
def test_slugs(name: str, slug: str) -> None:
    assert cpu_slug(name) == slug


def test_the_outermost_cache_counts(tmp_path: Path) -> None:
    for index, (level, size) in enumerate(
        [("1", "48K"), ("1", "32K"), ("2", "1024K"), ("3", "32768K")]
    ):
        folder = tmp_path / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(level)
        (folder / "size").write_text(size)
    assert cpu._last_cache(tmp_path) == 32 * 2**20
    assert cpu._last_cache(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("driver", "exact"), [("amd-pstate-epp", True), ("intel_pstate", True), ("acpi-cpufreq", False)]
)
def test_cpufreq_is_exact_only_with_drivers_that_count_turbo_in(
    tmp_path: Path, driver: str, exact: bool
) -> None:
    folder = tmp_path / "cpufreq"
    folder.mkdir()
    (folder / "cpuinfo_max_freq").write_text("4400000\n")
    (folder / "scaling_driver").write_text(driver + "\n")
    assert cpu._cpufreq(tmp_path) == (4400.0, exact)
    assert cpu._cpufreq(tmp_path / "none") == (None, False)


def test_state_of_this_machine() -> None:
    state = cpu_state()
    assert state.load_per_core >= 0
    assert f"over {os.cpu_count()} logical cores" in state.note
    if "hypervisor" in cpu.cpu_info().flags:
        assert state.sm_clock_mhz is None
