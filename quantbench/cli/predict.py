"""`quantbench predict`: what a sweep would show on a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli import options as o


def predict(
    gpu: Annotated[str, typer.Option("--gpu", help="The card: h100, a100-40gb or a slug of `quantbench devices`.")],
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
    skip_impossible: Annotated[bool, typer.Option(help="Leave out sizes that cannot be, instead of refusing.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the predicted sawtooth as a PNG here.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Predict a sweep on any known GPU: no hardware, no extra needed."""
    from quantbench.cli.predict_run import run
    from quantbench.cli.sweep_options import SweepArguments

    arguments = SweepArguments(
        dims=tuple(dim or ()), sizes={
            "hidden": hidden, "heads": heads, "head-dim": head_dim, "ffn": ffn, "seq": seq, "mbs": mbs, "tp": tp,
            "vocab": vocab, "m": m, "n": n, "k": k, "batch": batch,
        },
        kv_heads=kv_heads, gated=gated, layout=layout, model=model, config=config, dtype=dtype, ops=ops,
        direction=direction, causal=causal, attention=attention, dropout=dropout, softmax=softmax,
        skip_impossible=skip_impossible,
    )  # fmt: skip
    run(arguments, gpu, plot, as_json=as_json)
