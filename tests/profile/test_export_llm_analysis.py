"""The llm-analysis export, loaded by its own package."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest
from known_profile import GEMMS, SOFTMAXES, known_profile

from quantbench.profile.exporters import export_profile
from quantbench.workload import Collective, Gemm, Softmax

# In a process of its own: the package logs and warns as it is imported.
_LOAD = """
import json, sys
from llm_analysis.analysis import LLMAnalysis
from llm_analysis.config import GPUConfig, get_model_config_by_name
config, arguments = (json.load(open(path)) for path in sys.argv[1:])
gpu = GPUConfig(**config)
found = LLMAnalysis(get_model_config_by_name("decapoda-research_llama-7b-hf"), gpu, **arguments)
print(json.dumps({
    "peak": gpu.peak_fp16_TFLOPS, "memory": gpu.mem_per_GPU_in_GB,
    "tflops": found.get_TFLOPS_per_gpu(), "gb_per_s": found.get_gpu_hbm_bandwidth(),
    "intra_gb_per_s": found.get_intra_node_bandwidth(), "inter_gb_per_s": found.get_inter_node_bandwidth(),
}))
"""


def files(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    export_profile(known_profile(), "llm-analysis", folder)
    return tuple(
        json.loads((folder / f"a100-sxm4-80gb{part}.json").read_text())
        for part in ("", "-achieved")
    )  # type: ignore[return-value]


def test_figures_are_medians_of_what_was_measured(tmp_path: Path) -> None:
    config, arguments = files(tmp_path)
    work = {Gemm(*shape, layout="nt"): us for shape, us in GEMMS.items()}
    bound = [
        g.flops / us / 1e6 for g, us in work.items() if g.m >= 256
    ]  # far above the ridge of 153 FLOPs per byte
    assert arguments["achieved_tflops"] == pytest.approx(median(bound), rel=1e-12)
    # Work that is four times as large as the cache: one row of 14336 × 14336, eight of 16384 ×
    # 16384, two softmaxes.
    memory = [
        g.min_bytes / us / 1e3
        for g, us in work.items()
        if g.m <= 8 and g.min_bytes > 4 * 40 * 2**20
    ]
    memory += [Softmax(*shape).min_bytes / us / 1e3 for shape, us in SOFTMAXES.items()]
    assert arguments["achieved_memory_bandwidth_GBs"] == pytest.approx(median(memory), rel=1e-12)
    bus = Collective("all_reduce", 2**28, 8).bus_bytes / 2100.0 / 1e3
    assert arguments["intra_node_memory_efficiency"] == pytest.approx(bus / 300.0, rel=1e-12)
    assert config["intra_node_min_message_latency"] == 9.5e-6
    assert config["mem_per_GPU_in_GB"] == 80.0


@pytest.mark.skipif(
    find_spec("llm_analysis") is None, reason="needs the package llm-analysis 0.2.2"
)
def test_the_package_computes_with_them(tmp_path: Path) -> None:
    _, arguments = files(tmp_path)
    paths = [str(tmp_path / f"a100-sxm4-80gb{part}.json") for part in ("", "-achieved")]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["peak"] == 312
    assert found["memory"] == 80.0
    assert found["tflops"] == pytest.approx(arguments["achieved_tflops"], rel=1e-12)
    assert found["gb_per_s"] == pytest.approx(arguments["achieved_memory_bandwidth_GBs"], rel=1e-12)
    assert found["intra_gb_per_s"] == pytest.approx(
        300 * arguments["intra_node_memory_efficiency"], rel=1e-12
    )


def test_without_measurements_the_model_answers_and_says_so(tmp_path: Path) -> None:
    made = export_profile(known_profile({}), "llm-analysis", tmp_path)
    arguments = json.loads((tmp_path / "a100-sxm4-80gb-achieved.json").read_text())
    assert 150 < arguments["achieved_tflops"] < 312
    assert 1000 < arguments["achieved_memory_bandwidth_GBs"] < 2039
    said = "achieved TFLOP/s from products of bf16 as modelled; achieved GB/s from memory-bound work as modelled"
    assert said in made.notes
