"""The options that describe a grid of points, as `sweep` and `predict` take them, and the sizes that they hold or vary.

`held_and_dims` turns them into what is held and the axes; `assumed_words` says what was not typed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from shlex import quote
from typing import Annotated, Any

import typer

from quantbench.cli.model_options import ModelOptions, attention_of, named_model, window_ignored
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.sweep.axes import DIMS, GEMM_DIMS, MODEL_DIMS, UNFUSED_OPS, Held
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

# What a point takes of a model. Layers are not among it: a point is one layer.
_OF_A_MODEL = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "gate_fused", "seq", "vocab", "softmax",
)  # fmt: skip
# What `sweep_words` repeats, beside the axes and the sizes.
_SAID_AGAIN = (
    "model", "config", "kv_heads", "gated", "layout", "dtype", "ops", "direction", "attention", "softmax",
    "skip_impossible",
)  # fmt: skip
_PANEL, _SIZES = "Model", "Sizes: a number, or with --dim of the same name a range"


def _size_option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=_SIZES, show_default=False)


@dataclass(frozen=True, kw_only=True)
class GridOptions(ModelOptions):
    """What varies and what is held still, as typed. A size is a range where it is an axis."""

    dim: Annotated[
        list[str] | None,
        typer.Option(
            help="Dimension to vary: hidden, heads, head-dim, ffn, seq, mbs, tp, vocab, m, n, k or batch; with values: "
            "hidden=1024:4096:64, tp=1,2,4, n=3072:8192@edges. Several make a grid.",
        ),
    ] = None
    hidden: Annotated[str, _size_option("Hidden size.")] = ""
    heads: Annotated[str, _size_option("Attention heads.")] = ""
    head_dim: Annotated[str, _size_option("Width of a head.")] = ""
    ffn: Annotated[str, _size_option("Width of the MLP (default: 4 × hidden).")] = ""
    seq: Annotated[str, _size_option("Sequence length, tokens.")] = ""
    mbs: Annotated[str, _size_option("Micro-batch size, sequences.")] = ""
    tp: Annotated[str, _size_option("Tensor-parallel degree.")] = ""
    vocab: Annotated[str, _size_option("Vocabulary size.")] = ""
    m: Annotated[str, _size_option("Rows of a plain product.", "--m", "-m")] = ""
    n: Annotated[str, _size_option("Columns of a plain product.", "--n", "-n")] = ""
    k: Annotated[str, _size_option("Inner dimension of a plain product.", "--k", "-k")] = ""
    batch: Annotated[str, _size_option("Number of plain products in one batch.")] = ""
    layout: Annotated[str, typer.Option(help="Layout of plain products: nn, nt or tn.", rich_help_panel=_PANEL)] = "nn"
    ops: Annotated[
        str, typer.Option(help="Ops of a layer, comma separated: qkv,attention (default: all).", rich_help_panel=_PANEL)
    ] = ""
    direction: Annotated[str, typer.Option(help="forward, backward or both.", rich_help_panel=_PANEL)] = "forward"
    causal: Annotated[bool, typer.Option(help="Causal attention.", rich_help_panel=_PANEL)] = True
    skip_impossible: Annotated[
        bool, typer.Option(help="Leave out impossible sizes instead of refusing them.", rich_help_panel=_PANEL)
    ] = False

    @property
    def dims(self) -> tuple[str, ...]:
        """The axes, as typed."""
        return tuple(self.dim or ())

    @property
    def sizes(self) -> dict[str, str]:
        """All sizes by dimension, as typed; "" where none was."""
        return {dim: getattr(self, dim.replace("-", "_")) for dim in DIMS}


def held_and_dims(arguments: GridOptions, who: str = "sweep", *, listed: bool = False) -> tuple[Held, tuple[str, ...]]:
    """What is held, and the axes as texts. A size given for a dimension that `--dim` names alone is its range.

    Raises InputError, in the name of the command `who`, for a size that is no integer, for a size given twice, and for
    no `--dim` at all. listed: whether a file lists the shapes, so that no axis is needed.
    """
    if not arguments.dims and not listed:
        raise _no_dim(arguments, who)
    dims = []
    as_axis = set()
    for text in arguments.dims:
        dim, given, _ = text.partition("=")
        size = arguments.sizes.get(dim, "")
        if given and size:
            raise InputError(who, f"--dim {text} and --{dim} {size}", f"the values of {dim} once")
        as_axis.add(dim)
        dims.append(f"{dim}={size}" if size else text)
    values: dict[str, Any] = {
        dim.replace("-", "_"): _size(dim, text) for dim, text in arguments.sizes.items() if text and dim not in as_axis
    }
    _require_used(arguments, as_axis, who)
    ops = tuple(op.strip() for op in arguments.ops.split(",") if op.strip())
    if arguments.ops and not ops:
        raise InputError("--ops", repr(arguments.ops), "names of ops, comma separated: qkv,attention")
    held = Held(layout=arguments.layout, causal=arguments.causal, ops=ops, direction=arguments.direction)
    named = named_model(who, arguments)
    if named is not None:
        held = replace(held, **{name: getattr(named.shape, name) for name in _OF_A_MODEL})
        # Any other model runs attention as is usual on the device, which is filled in when it is known.
        values["attention"] = "unfused" if named.shape.attention == "unfused" else ""
    for name, choices in (("attention", ATTENTIONS), ("softmax", SOFTMAXES)):
        if getattr(arguments, name):
            values[name] = require_choice(who, f"--{name}", getattr(arguments, name), choices)
    if arguments.kv_heads:
        values["kv_heads"] = arguments.kv_heads
    held = _free_what_follows(held, as_axis | set(values))
    held = replace(held, **values, gated=held.gated or arguments.gated, dtype=arguments.dtype)
    return held, tuple(dims)


def assumed_words(
    arguments: GridOptions,
    held: Held,
    ops: Collection[str],
    spec: DeviceSpec,
    who: str = "sweep",
    *,
    listed: bool = False,
) -> tuple[str, ...]:
    """What moves the result and was not typed, in words. held: its defaults filled in. ops: names of
    those that run. listed: whether a file lists the shapes."""
    named = named_model(who, arguments)
    typed = {dim.replace("-", "_") for dim, size in arguments.sizes.items() if size}
    axes = {text.partition("=")[0].replace("-", "_") for text in arguments.dims}
    words: list[str] = []
    if "gemm" in ops:
        sizes = () if listed else ("m", "n", "k")
    else:
        sizes = ("hidden", "seq", "mbs", "tp", *(("vocab",) if "logits" in ops else ()))
        if {*UNFUSED_OPS, "attention"} & set(ops):
            how, of_attention = attention_of(who, arguments, named, spec)
            # Ops that are named run whatever is usual.
            words += [] if held.ops else [word for word in of_attention if "dropout" not in word]
            words += ["dropout is not timed"] if how["dropout"] else []
            if not held.heads and not {"heads", "head_dim"} & axes:
                words.append("heads of a width near 128")
            if named is not None and "seq" not in axes:
                words += window_ignored(named.shape.sliding_window, held.seq)
        if named is not None and not held.kv_heads and named.shape.kv_heads != named.shape.heads:
            words.append("kv_heads = heads")
    for name in (name for name in sizes if name not in typed | axes):
        if named is None or name in ("mbs", "tp"):
            words.append(f"{name} = {getattr(held, name)}")
        elif name in named.assumed:
            words.append(named.assumed[name])
    return (*words, *([] if arguments.dtype else [f"dtype = {held.dtype}"]))


def _no_dim(arguments: GridOptions, who: str) -> InputError:
    """What to say where sizes are all that was typed: the dimensions that go with them."""
    given = [dim for dim, size in arguments.sizes.items() if size]
    beside = " beside --" + ", --".join(given) if given else ""
    fitting = [dims for dims in (MODEL_DIMS, GEMM_DIMS) if set(given) <= set(dims)]
    choices = fitting[0] if len(fitting) == 1 else DIMS
    return InputError(who, f"no --dim{beside}", "at least one of --dim " + ", --dim ".join(choices))


def _require_used(arguments: GridOptions, as_axis: set[str], who: str) -> None:
    """Raise InputError for a size that plays no part: one of a model beside a plain product's axes, or the reverse."""
    if not as_axis:
        return
    plain = as_axis <= set(GEMM_DIMS)
    unused = MODEL_DIMS if plain else GEMM_DIMS
    found = [f"--{dim} {size}" for dim, size in arguments.sizes.items() if size and dim in unused]
    if plain:
        names = ("model", "config", "attention", "softmax")
        found += [f"--{name} {getattr(arguments, name)}" for name in names if getattr(arguments, name)]
    if found:
        what = f"sizes of a plain product: {', '.join(GEMM_DIMS)}" if plain else "sizes of a model"
        raise InputError(who, f"{found[0]} with --dim {sorted(as_axis)[0]}", what)


def sweep_words(arguments: GridOptions) -> str:
    """The words with which `quantbench sweep` measures what was predicted: what is varied, and what is held."""
    words = [f"--dim {dim}" for dim in arguments.dims]
    words += [f"--{dim} {size}" for dim, size in arguments.sizes.items() if size]
    usual = {field.name: field.default for field in fields(GridOptions)}
    for name in _SAID_AGAIN:
        value = getattr(arguments, name)
        if value != usual[name]:
            option = f"--{name.replace('_', '-')}"
            words.append(option if value is True else f"{option} {quote(str(value))}")
    if arguments.dropout is not None:
        words.append("--dropout" if arguments.dropout else "--no-dropout")
    return " ".join(words if arguments.causal else [*words, "--no-causal"])


def _size(dim: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) < 2**31):
        raise InputError(f"--{dim}", repr(text), f"an integer of at least 1, or a range together with --dim {dim}")
    return int(text)


def _free_what_follows(held: Held, given: set[str]) -> Held:
    """What follows from a size that was given must not stay at a preset's value, unless it was given as well: heads
    and head_dim when hidden is, head_dim when heads are, and ffn where the preset's is 4·hidden."""
    given = {name.replace("-", "_") for name in given}
    free = set()
    if "hidden" in given:
        free |= {"head_dim"} if "heads" in given else {"heads", "kv_heads", "head_dim"}
        free |= {"ffn"} if held.ffn == 4 * held.hidden else set()
    if "heads" in given:
        free |= {"head_dim", "kv_heads"}
    if "head_dim" in given and "heads" not in given:
        free |= {"heads", "kv_heads"}
    freed: dict[str, Any] = dict.fromkeys(free - given, 0)
    return replace(held, **freed)
