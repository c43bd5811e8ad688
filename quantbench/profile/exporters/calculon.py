"""Exports a profile as a Calculon system file (JSON): peaks, links and efficiency curves.

Format: calculon/{processor,memory,network,system}.py of https://github.com/calculon-ai/calculon
(commits f50f3a4, b2fe815, 71f6435, 345f893). A curve lists sizes of work, in GFLOP or 1e6 bytes, in
descending order. Calculon uses the efficiency of the first listed size that is not above the size
of the work.
"""

from __future__ import annotations

import json

from quantbench.errors import InputError, UnsupportedError
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions, require_gpu
from quantbench.profile.exporters.rates import achieved, curve, link_rates
from quantbench.profile.profile import Profile

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8": "float8"}
_GIB = 2**30
#: Pairs (scale, offset in 1/ranks) that give the bytes a rank sends in a ring; see
#: `Collective.bus_bytes`.
_RING = {
    "p2p": [1.0, None],
    "reduce_scatter": [1.0, -1],
    "all_gather": [1.0, -1],
    "all_reduce": [2.0, -1],
}
#: Assumed largest number of GPUs in the network between nodes.
_FABRIC_GPUS = 65536


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<device>.json`.

    The entry `matrix` has the efficiency curve of GEMMs that are not memory-bound, including short
    GEMMs. The entry `vector` has fp32 arithmetic at its peak, because softmax and similar
    operations are memory-bound. The processing mode is roofline, because a GEMM's measured time
    includes its memory traffic.

    Raises InputError for a dtype that Calculon lacks, and UnsupportedError for a device without an
    fp32 peak.
    """
    device = profile.device
    require_gpu(profile, "calculon")
    reached = achieved(profile, options, out)
    if reached.dtype not in _DTYPES:
        raise InputError(WHO, f"products of {reached.dtype}", "--dtype " + ", ".join(_DTYPES))
    links = link_rates(profile, out)
    vector_peak = device.peak("fp32")
    if vector_peak is None:
        raise UnsupportedError(
            WHO, f"{device.name} has no peak for fp32", "one, for calculon's vector arithmetic"
        )
    inside = {
        "bandwidth": links.inside_gb_per_s,
        "efficiency": links.share,
        "size": links.gpus_per_node,
        "latency": links.inside_latency_s,
        "must_be_filled": True,
    }
    between = {
        "bandwidth": links.between_gb_per_s,
        "efficiency": 1.0,
        "size": _FABRIC_GPUS,
        "latency": links.between_latency_s,
        "must_be_filled": False,
    }
    name = _DTYPES[reached.dtype]
    compute = curve(
        reached.compute_by_size.flops / 1e9, reached.compute_by_size.tflops / reached.peak_tflops
    )
    memory = curve(
        reached.memory_by_size.moved_bytes / 1e6,
        reached.memory_by_size.gb_per_s / device.memory_gb_per_s,
    )
    system = {
        "matrix": {name: {"tflops": reached.peak_tflops, "gflops_efficiency": compute}},
        "vector": {name: {"tflops": vector_peak, "gflops_efficiency": [[0.0, 1.0]]}},
        "mem1": {
            "GiB": device.memory_bytes / _GIB,
            "GBps": device.memory_gb_per_s,
            "MB_efficiency": memory,
        },
        "mem2": {"GiB": 0, "GBps": links.host_gb_per_s, "MB_efficiency": [[0.0, 1.0]]},
        "processing_mode": "roofline",
        "networks": [
            {**network, "ops": _RING, "processor_usage": 0.0} for network in (inside, between)
        ],
    }
    out.write(json.dumps(system, indent=1) + "\n", f"{device.name}.json")
    out.rows |= {"matrix efficiencies": len(compute), "memory efficiencies": len(memory)}
    out.notes += [
        "mem2: 0 GiB, for the profile knows nothing of the host's memory",
        "processor_usage: 0, for what communication takes from arithmetic was not measured",
    ]
    out.use.append(f"calculon llm <app> <execution> {device.name}.json <output>")
