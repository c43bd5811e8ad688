"""Options that several commands share: what is held still, and what a point is."""

from pathlib import Path
from typing import Annotated

import typer

_MODEL = "The model"

Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        help="What to vary: hidden, heads, head-dim, ffn, seq, mbs, tp, vocab, m, n, k or batch, with values after '=' "
        "if wanted: hidden=1024:4096:64, tp=1,2,4, n=3072:8192@edges. Several make a grid.",
    ),
]
Hidden = Annotated[str, typer.Option(help="Hidden size.", rich_help_panel=_MODEL)]
Heads = Annotated[str, typer.Option(help="Attention heads.", rich_help_panel=_MODEL)]
KvHeads = Annotated[int, typer.Option(min=0, help="Key/value heads (0: as heads).", rich_help_panel=_MODEL)]
HeadDim = Annotated[str, typer.Option(help="Width of a head.", rich_help_panel=_MODEL)]
Ffn = Annotated[str, typer.Option(help="Width of the MLP (default: 4 × hidden).", rich_help_panel=_MODEL)]
Gated = Annotated[bool, typer.Option("--gated", help="The MLP has a gate beside `up`.", rich_help_panel=_MODEL)]
Seq = Annotated[str, typer.Option(help="Sequence length.", rich_help_panel=_MODEL)]
Mbs = Annotated[str, typer.Option(help="Micro-batch size.", rich_help_panel=_MODEL)]
Tp = Annotated[str, typer.Option(help="Tensor-parallel degree.", rich_help_panel=_MODEL)]
Vocab = Annotated[str, typer.Option(help="Vocabulary size.", rich_help_panel=_MODEL)]
M = Annotated[str, typer.Option("--m", "-m", help="Rows of a plain product.", rich_help_panel=_MODEL)]
N = Annotated[str, typer.Option("--n", "-n", help="Columns of a plain product.", rich_help_panel=_MODEL)]
K = Annotated[str, typer.Option("--k", "-k", help="Reduction of a plain product.", rich_help_panel=_MODEL)]
Batch = Annotated[str, typer.Option(help="Plain products in one batch.", rich_help_panel=_MODEL)]
Layout = Annotated[str, typer.Option(help="nn, nt or tn: storage of plain products.", rich_help_panel=_MODEL)]
Model = Annotated[str, typer.Option(help="A preset such as llama-3-8b to hold.", rich_help_panel=_MODEL)]
Config = Annotated[Path | None, typer.Option(help="A Hugging Face config.json to hold.", rich_help_panel=_MODEL)]
Dtype = Annotated[str, typer.Option(help="fp16, bf16, fp32, tf32, fp8, int8.", rich_help_panel=_MODEL)]
Attention = Annotated[
    str,
    typer.Option(
        help="flash (one kernel) or unfused (scores, softmax, context); default: the model's, else flash.",
        rich_help_panel=_MODEL,
    ),
]
Dropout = Annotated[
    bool | None,
    typer.Option(
        "--dropout/--no-dropout",
        help="Hidden states and attention are dropped out; default: the model's, else not.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
SoftmaxOption = Annotated[
    str,
    typer.Option(
        "--softmax",
        help="Of unfused attention: megatron (its fused kernel where it runs) or torch (separate kernels).",
        rich_help_panel=_MODEL,
    ),
]
Ops = Annotated[str, typer.Option(help="Ops by name, comma separated: qkv,attention,…", rich_help_panel=_MODEL)]
Direction = Annotated[str, typer.Option(help="forward, backward or both.", rich_help_panel=_MODEL)]
Causal = Annotated[bool, typer.Option(help="Causal attention.", rich_help_panel=_MODEL)]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON.")]
