"""Writes links.json, the times of all-reduce within a node, from public NCCL tables.

The tables are part of the package aiconfigurator-core (extra `tables`; Apache-2.0). Run it as
`python -m tools.make_links`.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantbench.errors import UnsupportedError
from quantbench.importers.aiconfigurator import systems_folder
from quantbench.importers.runs import digest
from quantbench.latency.libraries import SYSTEMS

_HALF_BYTES = 2


def links_of(file: Path) -> dict[str, Any]:
    """Returns the times of all-reduce in fp16 by number of GPUs.

    The times are in microseconds, beside message sizes in bytes, ascending. A size measured
    repeatedly has its median time.

    file: an nccl_perf.parquet with the columns op_name, nccl_dtype, num_gpus, message_size
        (elements) and latency (ms).
    """
    import pyarrow.parquet as pq

    table = pq.read_table(file).to_pandas()
    rows = table[(table.op_name == "all_reduce") & (table.nccl_dtype == "half")]
    links = {}
    for num_gpus, group in rows.groupby("num_gpus"):
        times = group.groupby("message_size").latency.median()
        links[str(int(num_gpus))] = {
            "message_bytes": [int(size) * _HALF_BYTES for size in times.index],
            "latency_us": [round(float(ms) * 1e3, 3) for ms in times],
        }
    return links


def main() -> None:
    """Writes quantbench/latency/links.json.

    Raises UnsupportedError if aiconfigurator-core is not installed.
    """
    systems = systems_folder()
    if systems is None:
        raise UnsupportedError(
            "make_links", "aiconfigurator-core is not installed", "pip install -e '.[tables]'"
        )
    root = systems / "data"
    devices = {}
    for slug, system in SYSTEMS.items():
        files = sorted(root.glob(f"{system}/comm/nccl/*/nccl_perf.parquet"))
        if files:
            devices[slug] = {
                "file": str(files[-1].relative_to(root)),
                "sha256": digest(files[-1]),
                "all_reduce": links_of(files[-1]),
            }
    data = {
        "format": "quantbench-links",
        "version": 1,
        "provenance": {
            "script": "python -m tools.make_links",
            "package": f"aiconfigurator-core {version('aiconfigurator-core')}",
            "rows": "op_name all_reduce, nccl_dtype half",
        },
        "devices": devices,
    }
    target = Path(__file__).parent.parent / "quantbench" / "latency" / "links.json"
    target.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
