"""`quantbench advise`: what a shape costs on a GPU, what it wastes past edges, and better shapes near it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o

_SEARCH, _GATE = "Neighbours", "A gate for continuous integration"


def advise(
    gpu: Annotated[str, typer.Option(help="Device slug of the card (quantbench devices lists them).")] = "",
    profile: Annotated[Path | None, typer.Option(help="A measured profile instead of the models of --gpu.")] = None,
    model: o.Model = "",
    config: o.Config = None,
    hidden: o.Hidden = "",
    heads: o.Heads = "",
    kv_heads: Annotated[str, typer.Option(help="Key/value heads (default: as heads).")] = "",
    head_dim: o.HeadDim = "",
    ffn: o.Ffn = "",
    gated: o.Gated = False,
    vocab: o.Vocab = "",
    layers: Annotated[str, typer.Option(help="Layers (default: a usual depth for the hidden size).")] = "",
    seq: o.Seq = "",
    mbs: o.Mbs = "",
    tp: o.Tp = "",
    dtype: o.Dtype = "",
    attention: o.Attention = "",
    dropout: o.Dropout = None,
    softmax: o.SoftmaxOption = "",
    tolerance: Annotated[
        str, typer.Option(help="How far parameters may be from the shape's.", rich_help_panel=_SEARCH)
    ] = "5%",
    top: Annotated[
        str,
        typer.Option(
            help="How many to show, those included that are not surely faster; 0 looks for none (default: at most 8 "
            "that surely are).",
            rich_help_panel=_SEARCH,
        ),
    ] = "",
    head_dims: Annotated[
        str, typer.Option(help="Head widths to try beside the shape's own.", rich_help_panel=_SEARCH)
    ] = "64,128,256",
    replicate_kv: Annotated[
        bool,
        typer.Option("--replicate-kv", help="Try fewer key/value heads than tp, copied.", rich_help_panel=_SEARCH),
    ] = False,
    keep: Annotated[
        str,
        typer.Option(
            help="What must not change: hidden, heads, kv_heads, head_dim, ffn, vocab, layers, mbs; comma separated.",
            rich_help_panel=_SEARCH,
        ),
    ] = "",
    keep_layers: Annotated[
        bool, typer.Option("--keep-layers", help="The same as --keep layers.", rich_help_panel=_SEARCH)
    ] = False,
    shapes_out: Annotated[
        Path | None,
        typer.Option(
            "--shapes-out",
            "-o",
            help="Write every shape that is named to this .json file, for sweep --shapes.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    fail_over: Annotated[
        str, typer.Option(help="Exit code 1 when more than this is wasted past edges: 3%.", rich_help_panel=_GATE)
    ] = "",
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML here.", rich_help_panel=_GATE)] = None,
    as_json: o.AsJson = False,
) -> None:
    """Say what each product, softmax and attention of a shape costs, what is wasted past edges, and what is better."""
    from quantbench.cli.advise_options import AdviseArguments
    from quantbench.cli.advise_run import run

    arguments = AdviseArguments(
        sizes={
            "hidden": hidden, "heads": heads, "kv-heads": kv_heads, "head-dim": head_dim, "ffn": ffn, "vocab": vocab,
            "layers": layers, "seq": seq, "mbs": mbs, "tp": tp,
        },
        gpu=gpu, profile=profile, model=model, config=config, gated=gated, dtype=dtype, attention=attention,
        dropout=dropout, softmax=softmax, tolerance=tolerance, top=top, head_dims=head_dims, replicate_kv=replicate_kv,
        keep=keep, keep_layers=keep_layers, shapes_out=shapes_out, fail_over=fail_over,
    )  # fmt: skip
    if run(arguments, junit, as_json=as_json):
        raise typer.Exit(1)
