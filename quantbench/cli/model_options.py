"""The options that describe a model, the transformer shape they give, and what was assumed for it.

`advise`, `plan`, `predict` and `sweep` share these options and their defaults: the option's value, else the preset's or
configuration's, else what is usual on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from quantbench.device import default_attention, default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.planner.layout import padded_vocab
from quantbench.planner.search import ShapeSpace
from quantbench.workload import TransformerShape
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

# hidden / layers of a usual model: the middle of what the planner's search allows.
_USUAL_ASPECT = round(sqrt(ShapeSpace.aspect[0] * ShapeSpace.aspect[1]))


_PANEL = "Model"
_LARGEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that every command about a model has; "", 0 and None leave a thing open."""

    model: Annotated[
        str, typer.Option(help="Preset, such as llama-3-8b (list: quantbench models).", rich_help_panel=_PANEL)
    ] = ""
    config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json.", rich_help_panel=_PANEL)] = None
    kv_heads: Annotated[
        int,
        typer.Option(min=0, help="Key/value heads (0: the model's, else as many as heads).", rich_help_panel=_PANEL),
    ] = 0
    gated: Annotated[
        bool,
        typer.Option("--gated", help="Gated MLP: a gate projection beside the up projection.", rich_help_panel=_PANEL),
    ] = False
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format: fp16, bf16, fp32, tf32, fp8 or int8 (default: the device's usual one).",
            rich_help_panel=_PANEL,
        ),
    ] = ""
    attention: Annotated[
        str,
        typer.Option(
            help="flash (one kernel) or unfused (scores, softmax, context); default: the model's, else flash.",
            rich_help_panel=_PANEL,
        ),
    ] = ""
    dropout: Annotated[
        bool | None,
        typer.Option(
            "--dropout/--no-dropout",
            help="Dropout of hidden states and attention (default: the model's, else none).",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None
    softmax: Annotated[
        str,
        typer.Option(
            help="Softmax of unfused attention: megatron (fused kernel where it runs) or torch (separate kernels).",
            rich_help_panel=_PANEL,
        ),
    ] = ""


def size_option(help_text: str) -> Any:
    """The option of one size of a model."""
    return typer.Option(min=1, max=_LARGEST, help=help_text, rich_help_panel=_PANEL, show_default=False)


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(ModelOptions):
    """A model and one size of each kind. `size_names` lists the fields that are sizes of a transformer."""

    size_names: ClassVar[tuple[str, ...]] = ("hidden", "heads", "kv_heads", "ffn", "layers", "seq", "vocab")

    hidden: Annotated[int | None, size_option("Hidden size.")] = None
    heads: Annotated[int | None, size_option("Attention heads.")] = None
    ffn: Annotated[int | None, size_option("Width of the MLP (default: 4 × hidden).")] = None
    layers: Annotated[int | None, size_option("Layers (default: a usual depth for the hidden size).")] = None
    seq: Annotated[int | None, size_option("Sequence length, tokens.")] = None
    vocab: Annotated[int | None, size_option("Vocabulary size.")] = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were given, by field."""
        return {name: getattr(self, name) for name in self.size_names if getattr(self, name)}


@dataclass(frozen=True)
class NamedModel:
    """The model that --model or --config names. name: what to call it. assumed: by field, in words."""

    name: str
    shape: TransformerShape
    assumed: Mapping[str, str]


def named_model(who: str, options: ModelOptions) -> NamedModel | None:
    """The preset or the configuration that was typed; None for neither. Raises InputError for both."""
    if options.model and options.config is not None:
        raise InputError(who, f"--model {options.model} and --config {options.config}", "one of them")
    if options.model:
        from quantbench.workload.presets import preset

        shape = preset(options.model)
        return NamedModel(options.model, shape, {"seq": f"seq = {shape.seq} (as {options.model} was pre-trained)"})
    if options.config is not None:
        from quantbench.workload.huggingface import describe

        found = describe(options.config)
        return NamedModel("the config", found.shape, found.assumed)
    return None


def attention_of(
    who: str, options: ModelOptions, named: NamedModel | None, device: DeviceSpec
) -> tuple[dict[str, Any], list[str]]:
    """The fields attention, softmax and dropout of a shape, and in words what of them was not typed."""
    base = None if named is None else named.shape
    as_named = "" if named is None else f" (of {named.name})"
    attention, softmax, dropout = options.attention, options.softmax, options.dropout
    assumed = []
    if attention:
        require_choice(who, "--attention", attention, ATTENTIONS)
    else:
        attention = default_attention(device)
        if base is not None and base.attention == "unfused":
            attention = "unfused"
            assumed.append(f"unfused attention{as_named}")
        else:
            assumed.append(f"{attention} attention")
    if softmax:
        require_choice(who, "--softmax", softmax, SOFTMAXES)
    else:
        softmax = TransformerShape.softmax if base is None else base.softmax
        if attention == "unfused":
            assumed.append({"megatron": "Megatron's fused softmax", "torch": "torch's separate softmax"}[softmax])
    if dropout is None:
        dropout = base is not None and base.dropout
        if named is not None and "dropout" in named.assumed:
            assumed.append(named.assumed["dropout"])
        else:
            assumed.append(f"dropout{as_named}" if dropout else "no dropout")
    return {"attention": attention, "softmax": softmax, "dropout": dropout}, assumed


def window_ignored(window: int, seq: int) -> tuple[str, ...]:
    """What is to be said of a sliding window, which no predicted or measured attention has."""
    return (f"sliding window of {window} ignored: attention over all {seq} tokens",) if 0 < window < seq else ()


def number_format(who: str, typed: str, device: DeviceSpec) -> tuple[str, tuple[str, ...]]:
    """The dtype that was typed, or the device's usual one, and in words what of it was assumed."""
    if typed and device.peak(typed) is None:
        raise InputError(who, f"--dtype {typed} on {device.name}", "one of " + ", ".join(sorted(device.peak_tflops)))
    return (typed, ()) if typed else (default_dtype(device), (f"dtype = {default_dtype(device)}",))


def chosen_model(
    who: str, options: ShapeOptions, device: DeviceSpec, *, needed: tuple[str, ...] = ("hidden", "heads")
) -> tuple[TransformerShape, tuple[str, ...]]:
    """The shape that the options describe on `device`, and everything that was assumed of it, in words.

    needed: the sizes that must be typed where no model is named; layers and vocab among the others are guessed. Raises
    InputError, in the name of the command `who`, for what is missing or cannot be.
    """
    named, typed = named_model(who, options), options.sizes
    missing = [f"--{name}" for name in needed if named is None and name not in typed]
    if missing:
        sizes = ", ".join(f"--{name}" for name in needed)
        raise InputError(who, f"no {' and no '.join(missing)}", f"--model, --config, or all of {sizes}")
    # One head always divides; the typed heads come with everything else.
    base = TransformerShape(hidden=typed["hidden"], heads=1) if named is None else named.shape
    changes = with_what_follows(base, typed)
    how, assumed = attention_of(who, options, named, device)
    if named is not None:
        follows = (name for name in ("kv_heads", "ffn") if name in changes and name not in typed)
        assumed += [f"{name} = {changes[name] or 'heads'}" for name in follows]
    elif "layers" not in typed:
        changes["layers"] = max(1, round(typed["hidden"] / _USUAL_ASPECT))
        assumed.append(f"layers = {changes['layers']} (hidden / {_USUAL_ASPECT})")
    tp, vocab = typed.get("tp", 1), typed.get("vocab", base.vocab)
    if named is None and "vocab" not in typed:
        changes["vocab"] = padded_vocab(vocab, tp)
        assumed.append(f"vocab = {changes['vocab']}")
    elif vocab % tp:
        changes["vocab"] = padded_vocab(vocab, tp)
        assumed.append(f"vocab padded from {vocab} to {changes['vocab']}, as tp = {tp} must divide it")
    if "seq" not in typed:
        said = f"seq = {base.seq}" if named is None else named.assumed.get("seq")
        assumed += [] if said is None else [said]
    if options.gated:
        changes["gated"] = True
    changes["dtype"], of_dtype = number_format(who, options.dtype, device)
    try:
        shape = replace(base, **changes, **how)
    except InputError as error:
        raise InputError(who, error.value, error.expected) from None
    return shape, (*assumed, *of_dtype, *window_ignored(shape.sliding_window, shape.seq))


def with_what_follows(base: TransformerShape, typed: Mapping[str, int]) -> dict[str, Any]:
    """Sizes that were typed over those of `base`, and what must not stay at the base's value then: key/value heads and
    head_dim when hidden or heads were, and the MLP's width, which follows hidden."""
    changes: dict[str, Any] = dict(typed)
    if {"hidden", "heads"} & typed.keys():
        changes.setdefault("kv_heads", 0)
        changes.setdefault("head_dim", 0)
        if "hidden" in typed:
            changes.setdefault("ffn", round(base.ffn / base.hidden * typed["hidden"]))
    return changes
