"""Processors as Linux describes them, and the bounds that no core exceeds."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from quantbench.device import cpu
from quantbench.device.cpu import CpuInfo, cpu_info, cpu_slug, cpu_spec, cpu_state, parse_cpuinfo
from quantbench.device.here import default_dtype
from quantbench.latency.op_times import peak_share
from quantbench.workload import Gemm, Softmax

TURIN_VM = """processor	: 0
vendor_id	: AuthenticAMD
model name	: AMD EPYC
cpu MHz		: 2596.122
flags		: fpu sse2 avx fma hypervisor avx2 avx512f avx512bw avx_vnni avx512_bf16

processor	: 1
vendor_id	: AuthenticAMD
"""
SAPPHIRE_RAPIDS = """processor	: 0
model name	: Intel(R) Xeon(R) Platinum 8488C
flags		: sse2 avx fma avx2 avx512f avx512bw avx512_bf16 avx512_fp16 amx_bf16 amx_int8
"""
HASWELL = """processor	: 0
model name	: Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz
flags		: sse2 avx fma avx2
"""
GRAVITON_3 = """processor	: 0
BogoMIPS	: 2100.00
Features	: fp asimd asimdhp sve bf16 i8mm
CPU implementer	: 0x41
CPU part	: 0xd40
"""


def parsed(text: str) -> CpuInfo:
    return parse_cpuinfo(text, last_cache_bytes=32 * 2**20, memory_bytes=16 * 2**30)


def test_the_spec_of_a_virtual_machine() -> None:
    spec = cpu_spec(parsed(TURIN_VM))
    assert spec.name == "cpu-amd-epyc"
    assert (spec.kind, spec.sm_count, spec.compute_capability) == ("cpu", 1, None)
    assert spec.l2_bytes == 32 * 2**20
    assert spec.peak("tf32") is None
    assert not spec.registered
    assert spec.source["peak_tflops"].startswith("upper bound of any core")


@pytest.mark.parametrize(
    ("dtype", "operations", "mhz"),
    [
        ("fp32", 64, 6200),  # AVX-512: 2 × 16 multiply-adds
        ("bf16", 1024, 6200),  # AMX TDPBF16PS: 16·16·32 multiply-adds in 16 cycles
        ("int8", 2048, 6200),  # AMX TDPBSSD: 16·16·64 multiply-adds in 16 cycles
        ("fp32", 1024, 4700),  # Apple M4: two outer products of 16 × 16 a cycle
    ],
)
def test_no_core_exceeds_the_peaks(dtype: str, operations: int, mhz: float) -> None:
    peak_tflops = cpu_spec(parsed(SAPPHIRE_RAPIDS)).peak(dtype)
    assert peak_tflops is not None
    assert peak_tflops >= operations * mhz * 1e-6


def test_no_share_of_the_bound_is_told() -> None:
    spec = cpu_spec(cpu_info())
    assert peak_share(Gemm(64, 64, 64, dtype="fp32"), 1.0, spec) is None
    assert peak_share(Softmax(8, 64, 64), 1.0, spec) is None


def test_bf16_without_instructions_is_bounded_by_fp32() -> None:
    spec = cpu_spec(parsed(HASWELL))
    assert spec.peak("bf16") == spec.peak("fp32")
    assert default_dtype(spec) == "fp32"


@pytest.mark.parametrize("text", [TURIN_VM, SAPPHIRE_RAPIDS, GRAVITON_3])
def test_native_bf16_is_the_default(text: str) -> None:
    assert default_dtype(cpu_spec(parsed(text))) == "bf16"


def test_an_arm_core_is_named_by_its_number() -> None:
    assert cpu_spec(parsed(GRAVITON_3)).name == f"cpu-{os.uname().machine.replace('_', '-')}-0xd40"


def test_a_processor_that_tells_nothing_still_has_a_spec() -> None:
    spec = cpu_spec(replace(parsed("processor : 0\n"), name="", last_cache_bytes=None))
    assert spec.name == "cpu-unknown"
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
    for index, size in enumerate(("48K", "32K", "1024K", "32768K")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(f"{size}\n")
    assert cpu._last_cache(tmp_path) == 32 * 2**20
    assert cpu._last_cache(tmp_path / "none") is None


def test_state_of_this_machine() -> None:
    state = cpu_state()
    assert state.load_per_core >= 0
    assert f"over {os.cpu_count()} logical cores" in state.note
    if "hypervisor" in cpu.cpu_info().flags:
        assert state.sm_clock_mhz is None
