"""Exports a profile as two JSON files for llm-analysis 0.2.2.

One file describes the GPU (a GPUConfig). The other file has the measured rates (arguments of
`LLMAnalysis`).
"""

from __future__ import annotations

import json

from quantbench.errors import InputError
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions, require_gpu
from quantbench.profile.exporters.rates import achieved, link_rates
from quantbench.profile.profile import Profile

_GIB = 2**30
_HALF = ("bf16", "fp16")


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<device>.json` (a GPUConfig) and `<device>-achieved.json` (arguments of LLMAnalysis).

    The GPUConfig has the device's peaks from its spec sheet. The efficiencies that llm-analysis
    computes (achieved over peak) then equal the measured efficiencies. In llm-analysis, GB means
    1024³ bytes for memory sizes and 1e9 bytes for rates.

    Raises InputError unless the GEMMs are of a 16-bit dtype.
    """
    device = profile.device
    require_gpu(profile, "llm-analysis")
    reached = achieved(profile, options, out)
    if reached.dtype not in _HALF:
        raise InputError(
            WHO,
            f"products of {reached.dtype}, where llm-analysis means 16 bits",
            "--dtype bf16 or fp16",
        )
    links = link_rates(profile, out)
    config: dict[str, str | float] = {
        "name": device.name,
        "mem_per_GPU_in_GB": device.memory_bytes / _GIB,
        "hbm_bandwidth_in_GB_per_sec": device.memory_gb_per_s,
        "intra_node_bandwidth_in_GB_per_sec": links.inside_gb_per_s,
        "intra_node_min_message_latency": links.inside_latency_s,
        "peak_fp16_TFLOPS": reached.peak_tflops,
        "inter_node_bandwidth_in_GB_per_sec": links.between_gb_per_s,
    }
    # Without this field, llm-analysis assumes twice the fp16 peak.
    config["peak_i8_TFLOPS"] = device.peak("int8") or reached.peak_tflops
    arguments = {
        "achieved_tflops": reached.tflops,
        "achieved_memory_bandwidth_GBs": reached.gb_per_s,
        "intra_node_memory_efficiency": links.share,
    }
    out.write(json.dumps(config, indent=1) + "\n", f"{device.name}.json")
    out.write(json.dumps(arguments, indent=1) + "\n", f"{device.name}-achieved.json")
    out.rows |= {
        "compute-bound work": len(reached.compute),
        "memory-bound work": len(reached.memory),
    }
    out.use.append(
        f"LLMAnalysis(model, GPUConfig(**json.load(open('{device.name}.json'))), "
        f"**json.load(open('{device.name}-achieved.json')))"
    )
