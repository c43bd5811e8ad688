"""`quantbench import megatron-log`: import training logs: tokens per second, TFLOPs and loss of each iteration."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quantbench.errors import InputError


def import_megatron_log(
    files: Annotated[list[Path], typer.Argument(help="Logs of Megatron-LM or Megatron-DeepSpeed (.gz and .xz too).")],
    gpu: Annotated[str, typer.Option("--gpu", help="The GPUs: h100, a100-40gb or a slug of `quantbench devices`.")],
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs, if not in the log.")] = 0,
    tp: Annotated[int, typer.Option(min=0, help="Tensor-parallel degree, if not in the log.")] = 0,
    pp: Annotated[int, typer.Option(min=0, help="Pipeline stages, if not in the log.")] = 0,
    mbs: Annotated[int, typer.Option(min=0, help="Micro-batch size, if not in the log.")] = 0,
    seq: Annotated[int, typer.Option(min=0, help="Sequence length, if not in the log.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens per second by layout over GPUs here (PNG).")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder that holds the runs.")] = Path("results"),
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the run, for one file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Import training logs, also with line prefixes, restarts, several ranks and truncated lines."""
    from dataclasses import replace

    from quantbench.cli.console import output, say
    from quantbench.cli.writable import check_file
    from quantbench.device import lookup
    from quantbench.importers.megatron_log import read_log
    from quantbench.importers.training_run import default_run_id, summarize, write_training
    from quantbench.report.training import draw_throughput, training_table

    spec = lookup(gpu)
    if run_id is not None and len(files) > 1:
        raise InputError("import megatron-log", f"--run-id {run_id} for {len(files)} files", "one file with it")
    if plot is not None and plot.suffix != ".png":
        raise InputError("import megatron-log", f"--plot {plot}", "a name that ends in .png")
    if plot is not None:
        check_file("import megatron-log --plot", plot)
    given = {name: value for name, value in {"gpus": gpus, "tp": tp, "pp": pp, "mbs": mbs}.items() if value}
    summaries, folders = [], []
    for path in files:
        found = read_log(path)
        if seq:
            found = replace(found, arguments={**found.arguments, "seq": seq})
        name = run_id or default_run_id(path)
        summary = summarize(name, found, given)
        summaries.append(summary)
        folders.append(write_training(results, spec.name, name, path, found, summary))
    if plot is not None:
        draw_throughput(summaries, plot)
    if as_json:
        found_json = [{**asdict(s), "folder": str(f)} for s, f in zip(summaries, folders, strict=True)]
        print(json.dumps(found_json, indent=1))
        return
    console = output()
    console.print(training_table(summaries))
    for summary, folder in zip(summaries, folders, strict=True):
        for reason, count in summary.left_out.items():
            say(console, f"{summary.name}: {count} lines left out: {reason}")
        say(console, f"{folder}")
    if plot is not None:
        say(console, f"picture: {plot}")
    say(console, f"Next: quantbench report {' '.join(str(folder) for folder in folders)}")
