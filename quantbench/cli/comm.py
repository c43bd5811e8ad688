"""`quantbench comm`: bandwidth and latency of collectives between ranks, under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def comm(
    op: Annotated[
        str, typer.Option(help="all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, broadcast; a list.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Message sizes: 4KiB:1GiB, 4KiB:1GiB:x2 or a list.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or int8.")] = "",
    backend: Annotated[str, typer.Option(help="nccl or gloo (default: nccl where every rank has a GPU).")] = "",
    half_width: Annotated[float, typer.Option(help="Target: relative half-width of the median's interval.")] = 0.02,
    max_time: Annotated[str, typer.Option(help="Longest sampling time per point.")] = "1s",
    results: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Measure collectives over message sizes: torchrun --nproc-per-node=8 -m quantbench comm."""
    from quantbench.cli.comm_run import CommArguments, run

    run(
        CommArguments(op=op, sizes=sizes, dtype=dtype, backend=backend, half_width=half_width, max_time=max_time),
        results,
        as_json=as_json,
    )
