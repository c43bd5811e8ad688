"""`quantbench sweep`: time real work over hidden sizes, heads, sequence lengths, … on the device at hand."""

import time
from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o

_TIMING = "Timing"
_RUN = "The run"


def sweep(
    dim: o.Dims = None,
    hidden: o.Hidden = "",
    heads: o.Heads = "",
    kv_heads: o.KvHeads = 0,
    head_dim: o.HeadDim = "",
    ffn: o.Ffn = "",
    gated: o.Gated = False,
    seq: o.Seq = "",
    mbs: o.Mbs = "",
    tp: o.Tp = "",
    vocab: o.Vocab = "",
    m: o.M = "",
    n: o.N = "",
    k: o.K = "",
    batch: o.Batch = "",
    layout: o.Layout = "nn",
    model: o.Model = "",
    config: o.Config = None,
    dtype: o.Dtype = "",
    ops: o.Ops = "",
    direction: o.Direction = "forward",
    causal: o.Causal = True,
    attention: o.Attention = "",
    dropout: o.Dropout = None,
    softmax: o.SoftmaxOption = "",
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --dim: a CSV file with the columns m, n, k of single products, or the JSON file of "
            "transformer shapes that advise --shapes-out writes."
        ),
    ] = None,
    points: Annotated[int, typer.Option(min=0, help="Measure only so many of the points (0: all).")] = 0,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Choose --points by what a fitted model is least sure of.")
    ] = False,
    refine: Annotated[
        bool, typer.Option("--refine", help="Then bisect to the exact size of every edge the points show.")
    ] = False,
    provider: Annotated[
        str, typer.Option(help="Who computes: torch, triton, torch.flash, my.module:Class, comma separated.")
    ] = "torch",
    cache: Annotated[str, typer.Option(help="cold or hot last-level cache.", rich_help_panel=_TIMING)] = "cold",
    mode: Annotated[str, typer.Option(help="auto, events or graph.", rich_help_panel=_TIMING)] = "auto",
    half_width: Annotated[
        float | None,
        typer.Option(
            help="Target: relative half-width of the median's interval (default 0.005; CPU 0.01).",
            rich_help_panel=_TIMING,
        ),
    ] = None,
    min_samples: Annotated[int, typer.Option(help="Samples at least.", rich_help_panel=_TIMING)] = 10,
    max_time: Annotated[
        str, typer.Option(help="Sampling time per point at most (default 2s; CPU 500ms).", rich_help_panel=_TIMING)
    ] = "",
    distribution: Annotated[
        str, typer.Option(help="Inputs: normal, uniform, integers, zeros.", rich_help_panel=_TIMING)
    ] = "normal",
    seed: Annotated[int, typer.Option(help="Of the order of the points.", rich_help_panel=_TIMING)] = 0,
    budget: Annotated[
        str,
        typer.Option(help="Time for all: 8m, 90s, none (default: 4m; CPU 75s; --resume none).", rich_help_panel=_RUN),
    ] = "",
    point_limit: Annotated[
        str, typer.Option(help="A point that takes longer counts as hanging.", rich_help_panel=_RUN)
    ] = "",
    skip_impossible: Annotated[
        bool, typer.Option(help="Leave out sizes that cannot be, instead of refusing them.", rich_help_panel=_RUN)
    ] = False,
    on: Annotated[
        str, typer.Option(help="ray: on every GPU of a Ray cluster, one run per kind.", rich_help_panel=_RUN)
    ] = "",
    shard: Annotated[
        str, typer.Option(help="Part I/N of the plan, for N tasks whose runs are merged.", rich_help_panel=_RUN)
    ] = "",
    results: Annotated[Path, typer.Option(help="Where runs are kept.", rich_help_panel=_RUN)] = Path("results"),
    resume: Annotated[
        Path | None, typer.Option(help="Finish this run (or --budget of it).", rich_help_panel=_RUN)
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the plan and its time; run nothing.", rich_help_panel=_RUN)] = (
        False
    ),
    gpu: Annotated[str, typer.Option(help="Plan for this GPU (with --dry-run).", rich_help_panel=_RUN)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.", rich_help_panel=_RUN)] = False,
) -> None:
    """Time real matmuls, softmax and attention on the device at hand, and keep every sample."""
    start_s = time.monotonic()  # the budget covers the imports too
    from quantbench.cli import sweep_run
    from quantbench.cli.sweep_options import SweepArguments

    arguments = SweepArguments(
        dims=tuple(dim or ()), sizes={
            "hidden": hidden, "heads": heads, "head-dim": head_dim, "ffn": ffn, "seq": seq, "mbs": mbs, "tp": tp,
            "vocab": vocab, "m": m, "n": n, "k": k, "batch": batch,
        },
        kv_heads=kv_heads, gated=gated, layout=layout, model=model, config=config, dtype=dtype, ops=ops,
        direction=direction, causal=causal, attention=attention, dropout=dropout, softmax=softmax,
        provider=provider, cache=cache, mode=mode, half_width=half_width,
        min_samples=min_samples, max_time=max_time, distribution=distribution, seed=seed, budget=budget,
        point_limit=point_limit, skip_impossible=skip_impossible, shapes=shapes, points=points, adaptive=adaptive,
        refine=refine, shard=shard,
    )  # fmt: skip
    if dry_run:
        sweep_run.dry_run(arguments, gpu, as_json=as_json)
    elif on:
        from quantbench.cli import sweep_on

        sweep_on.run(arguments, on, results, resume, gpu, as_json=as_json)
    else:
        sweep_run.run(arguments, results, resume, gpu, as_json=as_json, start_s=start_s)
