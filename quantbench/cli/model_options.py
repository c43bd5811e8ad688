"""Declares options that describe a model or a grid of sizes, and converts them to shapes and axes.

The options of sizes come from `sweep.sizes`. `chosen_model` returns one model, `held_and_dims` a
grid. A value is the typed one, else that of the preset or configuration, else what is usual on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from quantbench.cli.options import option, typed_words
from quantbench.device import default_attention, default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.files import read_json, reason
from quantbench.sweep.axes import Held
from quantbench.sweep.sizes import (
    DIMS,
    EXPERT_OPS,
    GEMM_DIMS,
    LARGEST,
    MODEL_DIMS,
    MOE_DIMS,
    SIZES,
    UNFUSED_OPS,
)
from quantbench.workload import Gemm, GroupedGemm, TransformerShape
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.huggingface import Described, describe
from quantbench.workload.parameters import USUAL_ASPECT, padded_vocab
from quantbench.workload.presets import preset
from quantbench.workload.recipes import RECIPES
from quantbench.workload.transformer import ATTENTIONS

# Fields of a model that a grid takes over; not layers, because a point is one layer.
_OF_A_MODEL = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "gate_fused", "seq", "vocab", "softmax",
    "experts", "top_k", "moe_ffn", "shared_ffn", "q_rank", "kv_rank", "rope_dim", "value_dim",
)  # fmt: skip
# Options that `sweep_words` repeats after the axes and the sizes.
_SAID_AGAIN = (
    "model", "config", "kv_heads", "gated", "routing", "layout", "dtype", "ops", "direction", "attention", "dropout",
    "causal",
)  # fmt: skip

_LARGEST_HISTOGRAM_BYTES = 2**20
_model = partial(option, panel="Model")
_RANGES = "Sizes: a number, or with --dim of the same name a range"
ROUTING = _model(
    "",
    "Tokens over experts: balanced (default), power_law_1.2, or a JSON file with a count for each expert.",
)
_Options = TypeVar("_Options", bound=type)


def with_sizes(*names: str) -> Callable[[_Options], _Options]:
    """Adds an option for each of these sizes (`sweep.sizes.SIZES`) to a class of options, before it
    is a dataclass.

    A size is an integer; in `GridOptions` a text, which may be a range, if it may be swept.
    """

    def add(options: _Options) -> _Options:
        for name in names:
            field = name.replace("-", "_")
            spelled = (f"--{name}", *((f"-{name}",) if len(name) == 1 else ()))
            size = SIZES[name]
            if options.__name__ == "GridOptions" and size.swept is not None:
                options.__annotations__[field] = str
                setattr(
                    options,
                    field,
                    option("", size.words, *spelled, panel=_RANGES, show_default=False),
                )
            else:
                options.__annotations__[field] = int | None
                setattr(options, field, _model(None, size.words, *spelled, min=1, max=LARGEST))
        options.size_names = (*options.size_names, *names)  # type: ignore[attr-defined]
        return options

    return add


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options shared by all commands about a model; "" and None stand for the default.

    size_names: sizes that the command takes.
    """

    size_names: ClassVar[tuple[str, ...]] = ()

    model: str = _model("", "Preset, such as llama-3-8b (list: quantbench models).")
    config: Path | None = _model(None, "A Hugging Face config.json.")
    gated: bool = _model(False, "Gated MLP: a gate projection beside the up projection.")
    dtype: str = _model(
        "", f"Number format: {', '.join(GEMM_DTYPES)} (default: the device's usual one)."
    )
    attention: str = _model(
        "",
        "flash (one kernel) or unfused (scores, softmax, context); default: the model's, else flash.",
    )
    dropout: bool | None = _model(
        None,
        "Dropout of hidden states and attention (default: the model's, else none).",
        "--dropout/--no-dropout",
    )

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes as typed, by name; None or "" if not typed."""
        return {name: getattr(self, name.replace("-", "_")) for name in self.size_names}


@dataclass(frozen=True, kw_only=True)
@with_sizes("hidden", "heads", "kv-heads", "head-dim", "ffn", "layers", "seq", "vocab")
class ShapeOptions(ModelOptions):
    """Options for a model with one value per size. plans: whether the command plans training."""

    plans: ClassVar[bool] = False

    untied: bool = _model(False, "Separate matrices for embedding and logits.")
    fp8_recipe: str = _model(
        "", f"Recipe of an 8- or 4-bit step: {', '.join(RECIPES)} (default: none, no casts)."
    )


@dataclass(frozen=True, kw_only=True)
@with_sizes("kv-heads", *DIMS)
class GridOptions(ModelOptions):
    """Options for a grid of sizes, as typed. The text of a size that is an axis is a range."""

    dim: list[str] | None = option(
        None,
        f"Dimension to vary: {', '.join(DIMS)}; with values: hidden=1024:4096:64, tp=1,2,4, n=3072:8192@edges. "
        "Several make a grid.",
    )
    routing: str = ROUTING
    layout: str = _model("nn", "Layout of plain products: nn, nt or tn.")
    ops: str = _model("", "Ops of a layer, comma separated: qkv,attention (default: all).")
    direction: str = _model("forward", "forward, backward or both.")
    causal: bool = _model(True, "Causal attention.")

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self.dim or ())


def named_model(who: str, options: ModelOptions) -> Described | None:
    """Reads the preset or configuration; returns None if neither was typed. Raises InputError if
    both were.
    """
    if options.model and options.config is not None:
        raise InputError(
            who, f"--model {options.model} and --config {options.config}", "one of them"
        )
    if options.model:
        shape = preset(options.model)
        return Described(
            shape, {"seq": f"seq = {shape.seq} (as {options.model} was pre-trained)"}, options.model
        )
    if options.config is not None:
        found = describe(options.config)
        _require_reach(options.config, found.shape)
        return found
    return None


def _require_reach(config: Path, shape: TransformerShape) -> None:
    """Raises InputError for a config with products too large to predict. (Logits may be.)"""
    from quantbench.latency.model_times import require_reach

    try:
        for op in shape.ops(backward=False):
            work = op.workload
            if isinstance(work, Gemm | GroupedGemm) and op.name != "logits":
                require_reach(shape.tokens, work.n, work.k)
    except InputError as error:
        sizes = ", ".join(
            f"{name} = {getattr(shape, name)}" for name in ("hidden", "heads", "head_dim", "ffn")
        )
        raise InputError(f"config {config}", f"{sizes}: {error.value}", error.expected) from None


def attention_of(
    who: str, options: ModelOptions, named: Described | None, device: DeviceSpec
) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields attention and dropout of a shape, and the assumptions about them as
    text.
    """
    base = TransformerShape if named is None else named.shape
    as_named = "" if named is None else f" (of {named.name})"
    of_model = named is not None and named.shape.attention == "unfused"
    usual = "unfused" if of_model else default_attention(device)
    attention = require_choice(who, "--attention", options.attention or usual, ATTENTIONS)
    dropout = base.dropout if options.dropout is None else options.dropout
    assumed = []
    if not options.attention:
        assumed.append(f"{attention} attention{as_named if of_model else ''}")
    if attention == "unfused":
        assumed.append(
            {"megatron": "Megatron's fused softmax", "torch": "torch's separate softmax"}[
                base.softmax
            ]
        )
    if options.dropout is None:
        said = None if named is None else named.assumed.get("dropout")
        assumed.append(said or (f"dropout{as_named}" if dropout else "no dropout"))
    return {"attention": attention, "dropout": dropout}, assumed


def latent_words(kv_rank: int, core_dim: int) -> list[str]:
    """Returns a note on how latent attention is priced; [] for usual attention."""
    return (
        [f"latent attention not measured: priced as heads of {core_dim}, with as many FLOPs"]
        if kv_rank
        else []
    )


def window_ignored(window: int, seq: int) -> list[str]:
    """Returns a note on a sliding window, which predictions and measurements ignore; [] if it has
    no effect.
    """
    return (
        [f"sliding window of {window} ignored: attention over all {seq} tokens"]
        if 0 < window < seq
        else []
    )


def chosen_model(
    who: str,
    options: ShapeOptions,
    device: DeviceSpec,
    *,
    needed: tuple[str, ...] = ("hidden", "heads"),
) -> tuple[TransformerShape, tuple[str, ...]]:
    """Returns the shape that the options describe on `device`, and all assumptions about it as
    text.

    who: the command, named in errors.
    needed: sizes that must be typed if no model is named; if layers or vocab are not among them,
        they are guessed.

    Raises InputError for a missing or impossible size.
    """
    named = named_model(who, options)
    typed = {name.replace("-", "_"): value for name, value in options.sizes.items() if value}
    missing = [f"--{name}" for name in needed if named is None and name not in typed]
    if missing:
        sizes = ", ".join(f"--{name}" for name in needed)
        raise InputError(
            who, f"no {' and no '.join(missing)}", f"--model, --config, or all of {sizes}"
        )
    # A valid shape to start from, as one head always divides hidden; `changes` has the typed heads.
    base = TransformerShape(hidden=typed["hidden"], heads=1) if named is None else named.shape
    changes: dict[str, Any] = dict(typed)
    if {
        "hidden",
        "heads",
    } & typed.keys():  # derived sizes must not keep the base's values, unless the heads do
        same = named is not None and typed.get("heads", base.heads) == base.heads
        grouped, wide = base.kv_heads != base.heads, base.heads * base.head_dim != base.hidden
        kept = {
            "kv_heads": base.kv_heads * (same and grouped),
            "head_dim": base.head_dim * (same and wide),
        }
        if named is not None and not wide and not {"heads", "head_dim"} & typed.keys():
            kept |= _heads_at(base, typed["hidden"], typed.get("tp", 1))
        changes = {**kept, **changes}
        if "hidden" in typed:
            changes.setdefault("ffn", round(base.ffn / base.hidden * typed["hidden"]))
    how, assumed = attention_of(who, options, named, device)
    if named is not None:
        follows = (
            name
            for name in ("heads", "kv_heads", "head_dim", "ffn")
            if name in changes and name not in typed
        )
        assumed += [
            f"{name} = {changes[name] or 'heads'}"
            for name in follows
            if changes[name] or name != "head_dim"
        ]
    elif not options.untied:
        assumed.append("one matrix for embedding and logits")
    if named is None and "layers" not in typed:
        changes["layers"] = max(1, round(typed["hidden"] / USUAL_ASPECT))
        assumed.append(f"layers = {changes['layers']} (hidden / {USUAL_ASPECT})")
    tp, vocab = typed.get("tp", 1), typed.get("vocab", base.vocab)
    if named is None and "vocab" not in typed:
        changes["vocab"] = padded_vocab(vocab, tp)
        assumed.append(f"vocab = {changes['vocab']}")
    elif vocab % tp:
        changes["vocab"] = padded_vocab(vocab, tp)
        assumed.append(
            f"vocab padded from {vocab} to {changes['vocab']}, as tp = {tp} must divide it"
        )
    if "seq" not in typed:
        said = f"seq = {base.seq}" if named is None else named.assumed.get("seq")
        assumed += [] if said is None else [said]
    if options.untied:
        changes["tied"] = False
    if options.gated or "experts" in typed:
        changes["gated"] = True
    routing = getattr(options, "routing", "")
    if "experts" in options.size_names and (base.experts or "experts" in typed):
        changes["routing"] = _routing(routing or "balanced")
        assumed += [] if routing else ["balanced routing"]
        assumed += [] if "ep" in typed else ["ep = 1"]
    elif "experts" in options.size_names:
        of_experts = [
            word
            for word in typed_words(options, ("top_k", "moe_ffn", "ep", "routing"))
            if word != "--ep 1"
        ]
        if of_experts:
            raise InputError(
                who, f"{of_experts[0]} without experts", "--experts, or a model with experts"
            )
    fp8_recipe = require_choice(who, "--fp8-recipe", options.fp8_recipe, ("", *RECIPES))
    recipe = RECIPES.get(fp8_recipe)
    usual = default_dtype(device) if recipe is None else recipe.forward
    if device.peak(options.dtype or usual) is None:
        asked = (
            f"--dtype {options.dtype}" if options.dtype else f"--fp8-recipe {fp8_recipe} ({usual})"
        )
        raise InputError(who, f"{asked} on {device.name}", f"one of {device.dtypes}")
    changes |= {"dtype": options.dtype or usual, "fp8_recipe": fp8_recipe}
    assumed += [] if options.dtype else [f"dtype = {changes['dtype']}"]
    if recipe is not None:
        fused = "casts fused with norms and activations, weights cast once per step"
        assumed += [fused if options.plans else "casts are kernels of their own"]
        assumed += [f"logits in {default_dtype(device)}"]
    try:
        shape = replace(base, **changes, **how)
    except InputError as error:
        raise InputError(who, error.value, error.expected) from None
    assumed += latent_words(shape.kv_rank, shape.core_dim)
    return shape, (*assumed, *window_ignored(shape.sliding_window, shape.seq))


def _heads_at(base: TransformerShape, hidden: int, tp: int) -> dict[str, int]:
    """Returns heads and kv_heads at another hidden size, of the same head_dim and in the same
    ratio; {} if there are none that tp divides, so that the number of heads stays."""
    heads = hidden // base.head_dim
    kv_heads = heads * base.kv_heads // base.heads
    whole = heads * base.head_dim == hidden and kv_heads * base.heads == heads * base.kv_heads
    split = kv_heads and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    return {"heads": heads, "kv_heads": kv_heads} if whole and split and heads != base.heads else {}


def held_and_dims(
    arguments: GridOptions, who: str = "sweep", *, listed: bool = False
) -> tuple[Held, tuple[str, ...]]:
    """Returns the fixed sizes, and the axes as text. If `--dim` has no values, those of its size
    option are used.

    who: the command, named in errors.
    listed: whether a file lists the shapes, so that no axis is needed.

    Raises InputError for a size that is no integer, for a size typed twice, and for a missing
    `--dim`.
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
    values: dict[str, Any] = {}
    for dim, text in arguments.sizes.items():
        if text and dim not in as_axis:
            text = str(text)
            if not (
                text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= LARGEST
            ):
                expected = f"an integer from 1 to {LARGEST:,}, or a range together with --dim {dim}"
                raise InputError(f"--{dim}", repr(text), expected)
            values[dim.replace("-", "_")] = int(text)
    _require_used(arguments, as_axis, who, listed=listed)
    typed = {*as_axis, *(dim for dim, text in arguments.sizes.items() if text)}
    for dim in ("seq", "mbs"):
        if "tokens" in typed and dim in typed - as_axis:
            raise InputError(
                who,
                f"--{dim} {arguments.sizes[dim]} with tokens",
                "tokens, or seq and mbs, whose product they are",
            )
    ops = tuple(op.strip() for op in arguments.ops.split(",") if op.strip())
    if arguments.ops and not ops:
        raise InputError(
            "--ops", repr(arguments.ops), "names of ops, comma separated: qkv,attention"
        )
    held = Held(
        layout=arguments.layout, causal=arguments.causal, ops=ops, direction=arguments.direction
    )
    named = named_model(who, arguments)
    if named is not None:
        held = replace(held, **{name: getattr(named.shape, name) for name in _OF_A_MODEL})
        # "" stands for the device's usual attention, which is filled in when the device is known.
        values["attention"] = "unfused" if named.shape.attention == "unfused" else ""
    if arguments.attention:
        values["attention"] = require_choice(who, "--attention", arguments.attention, ATTENTIONS)
    if arguments.routing:
        values["routing"] = _routing(arguments.routing)
    held = _free_what_follows(held, as_axis | set(values))
    held = replace(held, **values, gated=held.gated or arguments.gated, dtype=arguments.dtype)
    if arguments.routing and not (held.experts or typed & set(MOE_DIMS)):
        raise InputError(
            who,
            f"--routing {arguments.routing} without experts",
            "--experts, or a model with experts",
        )
    return held, tuple(dims)


def _routing(text: str) -> str | tuple[int, ...]:
    """Returns a distribution by name, or the counts in a JSON file."""
    if not text.endswith(".json"):
        return text
    try:
        counts = read_json(Path(text), most_bytes=_LARGEST_HISTOGRAM_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(
            "--routing", f"{text} ({reason(error)})"[:200], "a JSON file with a list of counts"
        ) from None
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise InputError(
            "--routing", f"{text}: {counts!r}"[:120], "a list of counts, one for each expert"
        )
    return tuple(counts)


def assumed_words(
    arguments: GridOptions,
    held: Held,
    ops: Collection[str],
    spec: DeviceSpec,
    who: str = "sweep",
    *,
    listed: bool = False,
) -> tuple[str, ...]:
    """Lists the assumptions that change the result, as text.

    held: fixed sizes with the defaults filled in.
    ops: names of the ops that run.
    listed: whether a file lists the shapes.
    """
    named = named_model(who, arguments)
    typed = {dim.replace("-", "_") for dim, size in arguments.sizes.items() if size}
    axes = {text.partition("=")[0].replace("-", "_") for text in arguments.dims}
    words: list[str] = []
    sizes: tuple[str, ...]
    if "gemm" in ops:
        sizes = () if listed else ("m", "n", "k")
    else:
        if set(EXPERT_OPS) & set(ops):
            words += _expert_words(arguments, held, typed | axes, named)
        tokens = () if "tokens" in typed | axes else ("seq", "mbs")
        sizes = ("hidden", *tokens, "tp", *(("vocab",) if "logits" in ops else ()))
        if {*UNFUSED_OPS, "attention"} & set(ops):
            how, of_attention = attention_of(who, arguments, named, spec)
            # Named ops run whatever the usual attention is.
            words += [] if held.ops else [word for word in of_attention if "dropout" not in word]
            words += ["dropout is not timed"] if how["dropout"] else []
            if not held.heads and not {"heads", "head_dim"} & (typed | axes):
                fixed = held.head_dim or 128 * ("hidden" in axes)
                words.append(f"head_dim = {fixed}" if fixed else "heads of a width near 128")
            if named is not None and "seq" not in axes:
                words += window_ignored(named.shape.sliding_window, held.seq)
        if named is not None and not held.kv_heads and named.shape.kv_heads != named.shape.heads:
            ratio = held.heads_per_kv_head
            words.append("kv_heads = heads" if ratio == 1 else f"kv_heads = heads / {ratio}")
        if (
            named is not None and "hidden" in typed | axes
        ):  # the model's widths stay, unless ffn is 4 · hidden
            widths = {
                "ffn": held.ffn and {"mlp_up", "mlp_up_gate"} & set(ops),
                "moe_ffn": set(EXPERT_OPS) & set(ops),
            }
            words += [
                f"{name} = {getattr(held, name)}"
                for name in widths
                if widths[name] and name not in typed | axes
            ]
    for name in (name for name in sizes if name not in typed | axes):
        if named is None or name in ("mbs", "tp"):
            words.append(f"{name} = {getattr(held, name)}")
        elif name in named.assumed:
            words.append(named.assumed[name])
    return (*words, *([] if arguments.dtype else [f"dtype = {held.dtype}"]))


def _expert_words(
    arguments: GridOptions, held: Held, given: Collection[str], named: Described | None
) -> list[str]:
    """Lists the assumptions about experts."""
    of_model = () if named is None or not named.shape.experts else ("experts", "top_k", "moe_ffn")
    sizes = [
        name for name in ("experts", "top_k", "moe_ffn", "ep") if name not in {*given, *of_model}
    ]
    words = [f"{name} = {getattr(held, name)}" for name in sizes]
    words += [] if arguments.routing else ["balanced routing"]
    return [*words, "gated experts", "products of the busiest GPU"]


def _no_dim(arguments: GridOptions, who: str) -> InputError:
    """Returns the error for a missing --dim, which lists the dimensions that fit the typed
    sizes.
    """
    given = [dim for dim, size in arguments.sizes.items() if size and dim in DIMS]
    beside = " beside --" + ", --".join(given) if given else ""
    fitting = [dims for dims in (MODEL_DIMS, GEMM_DIMS) if set(given) <= set(dims)]
    choices = fitting[0] if len(fitting) == 1 else DIMS
    known = ", --dim ".join(choices)
    return InputError(who, f"no --dim{beside}", f"at least one of --dim {known}; one value will do")


def _require_used(arguments: GridOptions, as_axis: set[str], who: str, *, listed: bool) -> None:
    """Raises InputError for an option without effect: one of a model with plain GEMMs, or the
    reverse.
    """
    plain = listed or as_axis <= set(GEMM_DIMS)
    unused = DIMS if listed else MODEL_DIMS if plain else GEMM_DIMS
    found = [f"--{dim} {size}" for dim, size in arguments.sizes.items() if size and dim in unused]
    only_model = (
        "model",
        "config",
        "kv_heads",
        "gated",
        "routing",
        "attention",
        "dropout",
        "causal",
        "ops",
        "direction",
    )
    found += typed_words(arguments, only_model if plain else ("layout",))
    if found:
        if listed:
            raise InputError(who, f"{found[0]} with --shapes", "shapes as the file describes them")
        what = f"sizes of a plain product: {', '.join(GEMM_DIMS)}" if plain else "sizes of a model"
        raise InputError(who, f"{found[0]} with --dim {sorted(as_axis)[0]}", what)


def sweep_words(arguments: GridOptions) -> str:
    """Formats the options with which `quantbench sweep` measures what was predicted."""
    sizes = (dim.replace("-", "_") for dim in DIMS)
    return " ".join(typed_words(arguments, ("dim", *sizes, *_SAID_AGAIN)))


def _free_what_follows(held: Held, given: set[str]) -> Held:
    """Sets to 0 the preset's sizes that follow from given ones: heads and kv_heads from hidden at
    the same head_dim (if heads × head_dim is hidden), kv_heads and head_dim from heads, heads and
    kv_heads from head_dim, and ffn from hidden if it is 4 · hidden. Given sizes stay.
    """
    given = {name.replace("-", "_") for name in given}
    free: set[str] = set()
    if "hidden" in given:
        if held.heads * held.head_dim == held.hidden:
            free |= {"heads", "kv_heads"}
        if held.ffn == 4 * held.hidden:
            free.add("ffn")
    if "heads" in given:
        free |= {"head_dim", "kv_heads"}
    if "head_dim" in given and "heads" not in given:
        free |= {"heads", "kv_heads"}
    freed: dict[str, Any] = dict.fromkeys(free - given, 0)
    ratio = held.heads // held.kv_heads if held.kv_heads and "heads" not in given else 1
    return replace(held, **freed, heads_per_kv_head=ratio)
