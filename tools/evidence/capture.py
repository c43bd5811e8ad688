"""Records what a machine offers: device, versions, and the kernels that each provider runs for a few workloads.

Entry point: `python -m tools.evidence.capture FILE.json`. Run by `run`. Tests of kernel names read such files.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantbench import device
from quantbench.device.spec import DeviceSpec
from quantbench.providers import catalog, identity
from quantbench.sweep.child import context_lost
from quantbench.workload import Attention, Gemm, Softmax, Workload
from tools.evidence.side_by_side import write_json

#: Square and skinny products, a long reduction (split-k), a batch; every format and layout that a provider may take.
WORKLOADS: tuple[Workload, ...] = (
    *(Gemm(4096, 4096, 4096, layout=layout) for layout in ("nt", "nn", "tn")),
    Gemm(64, 4160, 512, layout="nt"),
    *(Gemm(2048, 2048, 2048, dtype=dtype, layout="nt") for dtype in ("fp16", "fp32", "tf32", "fp8", "int8")),
    Gemm(128, 128, 16384, layout="nt"),
    Gemm(4096, 4104, 4104, layout="nt"),
    Gemm(1024, 1024, 128, batch=32, layout="nt"),
    *(Softmax(32, 2048, 2048, direction=direction) for direction in ("forward", "backward")),
    *(Attention(1, 32, 2048, 2048, 128, direction=direction) for direction in ("forward", "backward")),
)  # fmt: skip

_PROVIDERS = ("torch", "torch.addmm", "triton", "triton.persistent", "triton.stream_k", "triton.split_k")


def main() -> None:
    """Runs every provider on the workloads that it takes; writes the file after each, and runs none of it again."""
    out = Path(sys.argv[1])
    spec = device.current()
    known = json.loads(out.read_text(encoding="utf-8"))["kernels"] if out.exists() else []
    done = {(row["provider"], row["workload"]) for row in known}
    state = device.monitor(spec)()
    found = {"device": asdict(spec), "state": asdict(state), "software": identity.versions(), "kernels": known}
    for provider in catalog.expand(_PROVIDERS):
        for work in WORKLOADS:
            if catalog.runs_kind(provider, work.kind) and (provider, str(work)) not in done:
                known.append(_kernels(provider, work, spec))
                write_json(out, found)
                if known[-1].get("lost"):
                    sys.exit("the CUDA context is lost; run again for the rest")
    print(f"{len(known)} workloads captured")


def _kernels(provider_id: str, work: Workload, spec: DeviceSpec) -> dict[str, Any]:
    """Returns the kernels of one run and the launch that they are read as, or why there are none."""
    row: dict[str, Any] = {"provider": provider_id, "workload": str(work)}
    try:
        provider = catalog.make(provider_id)
        reason = provider.unsupported(work, spec)
        if reason is not None:
            return row | {"skipped": reason}
        task = provider.prepare(work, spec)
        for _ in range(2):  # loads and compiles
            task.run()
        kernels = identity.kernel_events(identity.trace_events(task.run))
    except Exception as error:  # noqa: BLE001 - also triton's errors, which are no RuntimeErrors; the rest goes on
        return row | {"error": str(error)[:1000], "lost": context_lost(error)}
    launch = task.launch() or identity.launch_of(kernels, work, spec)
    return row | {"kernels": [asdict(kernel) for kernel in kernels], "launch": asdict(launch) if launch else None}


if __name__ == "__main__":
    main()
