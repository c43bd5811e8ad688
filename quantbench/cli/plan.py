"""`quantbench plan`: the fastest layout of a training job over GPUs, or what a table of layouts should have taken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o

_MODEL, _MACHINES, _LAYOUT, _SHAPES = "The model", "The machines", "The layout (comma separated lists)", "Shape search"


def plan(
    model: Annotated[str, typer.Option(help="A preset such as bloom-176b.", rich_help_panel=_MODEL)] = "",
    config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json.", rich_help_panel=_MODEL)] = None,
    hidden: Annotated[int, typer.Option(min=0, help="Hidden size.", rich_help_panel=_MODEL)] = 0,
    heads: Annotated[int, typer.Option(min=0, help="Attention heads.", rich_help_panel=_MODEL)] = 0,
    kv_heads: Annotated[int, typer.Option(min=0, help="Key/value heads (0: as heads).", rich_help_panel=_MODEL)] = 0,
    ffn: Annotated[int, typer.Option(min=0, help="Width of the MLP (0: 4 × hidden).", rich_help_panel=_MODEL)] = 0,
    gated: Annotated[bool, typer.Option("--gated", help="The MLP has a gate.", rich_help_panel=_MODEL)] = False,
    layers: Annotated[int, typer.Option(min=0, help="Layers.", rich_help_panel=_MODEL)] = 0,
    seq: Annotated[int, typer.Option(min=0, help="Sequence length.", rich_help_panel=_MODEL)] = 0,
    vocab: Annotated[int, typer.Option(min=0, help="Vocabulary size.", rich_help_panel=_MODEL)] = 0,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.", rich_help_panel=_MODEL)] = "",
    attention: o.Attention = "",
    dropout: o.Dropout = None,
    softmax: o.SoftmaxOption = "",
    optimizer: Annotated[str, typer.Option(help="fused_adam, adam or adam_8bit.", rich_help_panel=_MODEL)] = "",
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs.", rich_help_panel=_MACHINES)] = None,
    gpu: Annotated[str, typer.Option(help="Device slug (quantbench devices).", rich_help_panel=_MACHINES)] = "",
    profile: Annotated[
        Path | None,
        typer.Option(help="Times from this profile of the GPU.", rich_help_panel=_MACHINES),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(help="jean-zay-a100, dgx-a100, … (default: the GPU's own system).", rich_help_panel=_MACHINES),
    ] = "",
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs in a node.", rich_help_panel=_MACHINES)] = 0,
    node_gbit_per_s: Annotated[
        float, typer.Option(min=0, help="All network adapters of a node.", rich_help_panel=_MACHINES)
    ] = 0,
    link_gb_per_s: Annotated[
        float, typer.Option(min=0, help="Bus bandwidth of all-reduces inside a node.", rich_help_panel=_MACHINES)
    ] = 0,
    gbs: Annotated[
        int | None, typer.Option(min=1, help="Global batch size, samples.", rich_help_panel=_MACHINES)
    ] = None,
    rampup_step: Annotated[
        int, typer.Option(min=0, help="Samples by which the batch grows at first.", rich_help_panel=_MACHINES)
    ] = 0,
    dp_overlap: Annotated[
        float, typer.Option(min=0, max=1, help="Share of DP traffic that is hidden.", rich_help_panel=_MACHINES)
    ] = 0.0,
    dp: Annotated[str, typer.Option(help="Data-parallel degrees.", rich_help_panel=_LAYOUT)] = "",
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees.", rich_help_panel=_LAYOUT)] = "",
    pp: Annotated[str, typer.Option(help="Pipeline stages.", rich_help_panel=_LAYOUT)] = "",
    mbs: Annotated[str, typer.Option(help="Micro-batch sizes.", rich_help_panel=_LAYOUT)] = "",
    interleave: Annotated[str, typer.Option(help="Chunks per stage.", rich_help_panel=_LAYOUT)] = "",
    zero: Annotated[str, typer.Option(help="ZeRO stages.", rich_help_panel=_LAYOUT)] = "",
    recompute: Annotated[str, typer.Option(help="full, selective, none.", rich_help_panel=_LAYOUT)] = "",
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="Only with it, or only without.", rich_help_panel=_LAYOUT)
    ] = None,
    allow_uneven: Annotated[
        bool, typer.Option("--allow-uneven", help="Stages of different length too.", rich_help_panel=_LAYOUT)
    ] = False,
    shape_search: Annotated[
        bool, typer.Option("--shape-search", help="Let hidden, heads and layers vary.", rich_help_panel=_SHAPES)
    ] = False,
    params: Annotated[
        float, typer.Option(min=0, help="Parameters to stay near (default: the model's).", rich_help_panel=_SHAPES)
    ] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0, max=0.5, help="How far from it, as a share.", rich_help_panel=_SHAPES)
    ] = 0.03,
    aspect: Annotated[str, typer.Option(help="hidden / layers, from:to.", rich_help_panel=_SHAPES)] = "125:205",
    head_dim: Annotated[str, typer.Option(help="head_dim, from:to.", rich_help_panel=_SHAPES)] = "64:256",
    rows: Annotated[
        Path | None, typer.Option(help="Predict every row of this CSV instead (columns of bloom_tables.csv).")
    ] = None,
    as_typed: Annotated[
        bool, typer.Option("--as-typed", help="With --rows: leave known typing mistakes uncorrected.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check: one layout, or with --rows a table. 1 if anything is wrong.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Lines to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Rank all layouts (DP, TP, PP, MBS, interleaving, ZeRO, recomputation) of a job by predicted time."""
    from quantbench.cli import plan_run
    from quantbench.cli.plan_options import PlanArguments

    arguments = PlanArguments(
        model=model, config=config, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, gated=gated,
        layers=layers, seq=seq, vocab=vocab, dtype=dtype, attention=attention, dropout=dropout, softmax=softmax,
        optimizer=optimizer, gpus=gpus or 0, gpu=gpu, profile=profile, cluster=cluster, gpus_per_node=gpus_per_node,
        node_gbit_per_s=node_gbit_per_s, link_gb_per_s=link_gb_per_s, gbs=gbs or 0, rampup_step=rampup_step,
        dp_overlap=dp_overlap, dp=dp, tp=tp, pp=pp, mbs=mbs, interleave=interleave,
        zero=zero, recompute=recompute, sequence_parallel=sequence_parallel, allow_uneven=allow_uneven,
        params=params, tolerance=tolerance, aspect=aspect, head_dim=head_dim, as_typed=as_typed,
    )  # fmt: skip
    if rows is not None:
        found = plan_run.check_table(rows, arguments, as_json) if check else plan_run.rows(rows, arguments, as_json)
    elif check:
        found = plan_run.check_layout(arguments, as_json)
    elif shape_search:
        found = plan_run.shapes(arguments, top, as_json)
    else:
        found = plan_run.search_layouts(arguments, top, as_json)
    if found:
        raise typer.Exit(1)
