"""Declares options that describe a model or a grid of sizes, and converts them to shapes and axes.

`chosen_model` returns one transformer shape, and `held_and_dims` a grid. A typed value always
counts. A value that was not typed comes from the preset or configuration. Without a preset or
configuration, the device's usual value is used. The module also lists the values that were assumed.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from quantbench.units import dashed
from quantbench.workload import Gemm, GroupedGemm, TransformerShape
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.huggingface import Described, describe
from quantbench.workload.parameters import USUAL_ASPECT, padded_vocab
from quantbench.workload.presets import preset
from quantbench.workload.recipes import RECIPES
from quantbench.workload.transformer import ATTENTIONS

# Fields that a grid copies from the preset or configuration. The number of layers is not copied,
# because each grid point is one layer.
_MODEL_FIELDS = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "gated",
    "gate_fused",
    "seq",
    "vocab",
    "softmax",
    "experts",
    "top_k",
    "moe_ffn",
    "shared_ffn",
    "q_rank",
    "kv_rank",
    "rope_dim",
    "value_dim",
)
# Options that `sweep_words` repeats in addition to axes and sizes.
_REPEATED_OPTIONS = (
    "model",
    "config",
    "kv_heads",
    "gated",
    "routing",
    "layout",
    "dtype",
    "ops",
    "direction",
    "attention",
    "dropout",
    "causal",
)

_SOFTMAX_WORDS = {"megatron": "Megatron's fused softmax", "torch": "torch's separate softmax"}
# Largest file that --routing reads, in bytes.
_LARGEST_HISTOGRAM_BYTES = 2**20
_model = partial(option, panel="Model")
# Shape whose fields have the usual values. They are used if neither a model nor an option sets
# them.
_USUAL_MODEL = TransformerShape(hidden=1, heads=1)
_MOE_FIELDS = [name.replace("-", "_") for name in MOE_DIMS]
_EXPERTS_EXPECTED = "--experts, or a model with experts"
_RANGES = "Sizes: a number, or with --dim of the same name a range"
ROUTING = _model(
    "",
    "Tokens over experts: balanced (default), power_law_1.2, or a JSON file with a count for "
    "each expert.",
)
_Options = TypeVar("_Options", bound=type)


def with_sizes(*names: str) -> Callable[[_Options], _Options]:
    """Returns a class decorator that declares one option per size.

    The decorator must run before `dataclass`. An option takes an integer. In `GridOptions`, the
    option of a size that can be swept takes a text, because the text may be a range.

    names: keys of `sweep.sizes.SIZES`.
    """

    def add(options: _Options) -> _Options:
        for name in names:
            field = name.replace("-", "_")
            spelled = [f"--{name}", f"-{name}"][: 1 + (len(name) == 1)]
            size = SIZES[name]
            hint: Any = int | None
            declared = _model(None, size.words, *spelled, min=1, max=LARGEST)
            if options.__name__ == "GridOptions" and size.swept is not None:
                hint = str
                declared = option("", size.words, *spelled, panel=_RANGES, show_default=False)
            options.__annotations__[field] = hint
            setattr(options, field, declared)
        options.size_names = (*options.size_names, *names)  # type: ignore[attr-defined]
        return options

    return add


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every command that takes a model; "" and None mean the default.

    who: name of the command, for error messages.
    size_names: names of the sizes that the command takes.
    """

    who: ClassVar[str]
    size_names: ClassVar[tuple[str, ...]] = ()

    model: str = _model("", "Preset, such as llama-3-8b (list: quantbench models).")
    config: Path | None = _model(None, "A Hugging Face config.json.")
    gated: bool = _model(False, "Gated MLP: a gate projection beside the up projection.")
    dtype: str = _model(
        "", f"Number format: {', '.join(GEMM_DTYPES)} (default: the device's usual one)."
    )
    attention: str = _model(
        "",
        "flash (one kernel) or unfused (scores, softmax, context); default: the model's, else "
        "flash.",
    )
    dropout: bool | None = _model(
        None,
        "Dropout of hidden states and attention (default: the model's, else none).",
        "--dropout/--no-dropout",
    )

    @property
    def sizes(self) -> dict[str, Any]:
        """Values of the typed sizes, by field name."""
        found = {}
        for name in self.size_names:
            field = name.replace("-", "_")
            if getattr(self, field):
                found[field] = getattr(self, field)
        return found

    @cached_property
    def named(self) -> Described:
        """Model of --model or --config; usual values without a name if neither was typed."""
        return named_model(self.who, self.model, self.config)


@dataclass(frozen=True, kw_only=True)
@with_sizes("hidden", "heads", "kv-heads", "head-dim", "ffn", "layers", "seq", "vocab")
class ShapeOptions(ModelOptions):
    """Options for a model with one value per size.

    needed: sizes that must be typed if no model is named. Layers and vocab get usual values if they
        are neither needed nor typed.
    """

    who: ClassVar[str] = "advise"
    needed: ClassVar[tuple[str, ...]] = ("hidden", "heads")

    untied: bool = _model(False, "Separate matrices for embedding and logits.")
    fp8_recipe: str = _model(
        "", f"Recipe of an 8- or 4-bit step: {', '.join(RECIPES)} (default: none, no casts)."
    )


@dataclass(frozen=True, kw_only=True)
@with_sizes("kv-heads", *DIMS)
class GridOptions(ModelOptions):
    """Options for a grid of sizes, as typed. A size that varies is a range or a list as text."""

    who: ClassVar[str] = "sweep"

    dim: list[str] | None = option(
        None,
        f"Dimension to vary: {', '.join(DIMS)}; with values: hidden=1024:4096:64, tp=1,2,4, "
        f"n=3072:8192@edges. "
        "Several make a grid.",
    )
    routing: str = ROUTING
    layout: str = _model("nn", "Layout of plain products: nn, nt or tn.")
    ops: str = _model("", "Ops of a layer, comma separated: qkv,attention (default: all).")
    direction: str = _model("forward", "forward, backward or both.")
    causal: bool = _model(True, "Causal attention.")

    @property
    def listed(self) -> bool:
        """Whether a file lists the shapes, so that no axis is needed."""
        return False

    @property
    def dims(self) -> tuple[str, ...]:
        """Axes as the user typed them after --dim, with or without values."""
        return tuple(self.dim or ())

    @property
    def axes(self) -> set[str]:
        """Field names of the sizes that vary."""
        return {text.partition("=")[0].replace("-", "_") for text in self.dims}


def named_model(who: str, model: str, config: Path | None) -> Described:
    """Returns the model of --model or --config; usual values without a name if both are empty.

    who: name of the command, for error messages.
    Raises InputError if both options are typed, or if a GEMM of the configuration is too large to
    predict.
    """
    if model and config is not None:
        raise InputError(who, f"--model {model} and --config {config}", "one of them")
    if model:
        shape = preset(model)
        return Described(shape, {"seq": f"seq = {shape.seq} (as {model} was pre-trained)"}, model)
    if config is None:
        return Described(_USUAL_MODEL, {"seq": f"seq = {_USUAL_MODEL.seq}"}, "")
    found = describe(config)
    _require_reach(config, found.shape)
    return found


def _require_reach(config: Path, shape: TransformerShape) -> None:
    """Raises InputError if a GEMM of the configuration's shape is too large to predict.

    The logits GEMM is not checked.
    """
    from quantbench.latency.model_times import require_reach

    try:
        for op in shape.ops(backward=False):
            work = op.workload
            if isinstance(work, Gemm | GroupedGemm) and op.name != "logits":
                require_reach(shape.tokens, work.n, work.k)
    except InputError as error:
        sizes = f"hidden = {shape.hidden}, heads = {shape.heads}, head_dim = {shape.head_dim}"
        what = f"{sizes}, ffn = {shape.ffn}: {error.value}"
        raise InputError(f"config {config}", what, error.expected) from None


def attention_of(options: ModelOptions, device: DeviceSpec) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields `attention` and `dropout` of a shape, and the assumptions as text.

    Raises InputError for an unknown attention kind.
    """
    named = options.named
    usual = default_attention(device)
    of_model = ""
    if named.shape.attention == "unfused":
        usual = "unfused"
        of_model = f" (of {named.name})"
    attention = require_choice(options.who, "--attention", options.attention or usual, ATTENTIONS)
    assumed = []
    if not options.attention:
        assumed.append(f"{attention} attention{of_model}")
    if attention == "unfused":
        assumed.append(_SOFTMAX_WORDS[named.shape.softmax])
    dropout = options.dropout
    if dropout is None:
        dropout = named.shape.dropout
        words = f"dropout (of {named.name})" if dropout else "no dropout"
        assumed.append(named.assumed.get("dropout", words))
    return {"attention": attention, "dropout": dropout}, assumed


def latent_words(kv_rank: int, core_dim: int) -> list[str]:
    """Returns a note on how latent attention is predicted; [] for other attention.

    kv_rank: rank of the latent keys and values; 0 without latent attention.
    core_dim: head_dim of the ordinary attention whose time is used instead. Both kinds of attention
        have the same number of FLOPs.
    """
    if not kv_rank:
        return []
    return [f"latent attention not measured: priced as heads of {core_dim}, with as many FLOPs"]


def window_ignored(window: int, seq: int) -> list[str]:
    """Returns a note that a sliding window is ignored; [] if the window would have no effect.

    Predictions and measurements compute attention over the whole sequence.

    window: size of the sliding window, in tokens; 0 for none.
    seq: sequence length, in tokens.
    """
    if not 0 < window < seq:
        return []
    return [f"sliding window of {window} ignored: attention over all {seq} tokens"]


def chosen_model(
    options: ShapeOptions, device: DeviceSpec
) -> tuple[TransformerShape, tuple[str, ...]]:
    """Returns the shape that the options describe on a device, and the assumptions as text.

    Raises InputError for a missing or impossible size, and for a dtype that the device does not
    support.
    """
    named = options.named
    base = named.shape
    typed = options.sizes
    missing = [f"--{name}" for name in options.needed if name not in typed]
    if missing and not named.name:
        sizes = ", ".join(f"--{name}" for name in options.needed)
        expected = f"--model, --config, or all of {sizes}"
        raise InputError(options.who, f"no {' and no '.join(missing)}", expected)
    tp = typed.get("tp", 1)
    changes = {**_dependent_sizes(base, typed, tp), **typed}
    how, assumed = attention_of(options, device)
    if named.name:
        for name in ("heads", "kv_heads", "head_dim", "ffn"):
            if name in changes and name not in typed and (changes[name] or name != "head_dim"):
                assumed.append(f"{name} = {changes[name] or 'heads'}")
        hidden = typed.get("hidden", base.hidden)
        if hidden != base.hidden and "heads" not in changes and not changes["head_dim"]:
            why = f"no whole heads and kv_heads of {base.head_dim} at tp = {tp}"
            assumed.append(f"head_dim = {hidden // base.heads} ({why})")
    elif not options.untied:
        assumed.append("one matrix for embedding and logits")
    if not named.name and "layers" not in typed:
        changes["layers"] = max(1, round(typed["hidden"] / USUAL_ASPECT))
        assumed.append(f"layers = {changes['layers']} (hidden / {USUAL_ASPECT})")
    vocab = typed.get("vocab", base.vocab)
    padded = padded_vocab(vocab, tp)
    if not named.name and "vocab" not in typed:
        changes["vocab"] = padded
        assumed.append(f"vocab = {padded}")
    elif vocab % tp:
        changes["vocab"] = padded
        assumed.append(f"vocab padded from {vocab} to {padded}, as tp = {tp} must divide it")
    if "seq" not in typed and "seq" in named.assumed:
        assumed.append(named.assumed["seq"])
    if options.untied:
        changes["tied"] = False
    if options.gated or "experts" in typed:
        changes["gated"] = True
    routing = getattr(options, "routing", "")
    if "experts" in options.size_names and (base.experts or "experts" in typed):
        changes["routing"] = _routing(routing or "balanced")
        if not routing:
            assumed.append("balanced routing")
        if "ep" not in typed:
            assumed.append("ep = 1")
    elif "experts" in options.size_names:
        for word in typed_words(options, ("top_k", "moe_ffn", "ep", "routing")):
            if word != "--ep 1":
                raise InputError(options.who, f"{word} without experts", _EXPERTS_EXPECTED)
    fp8_recipe = require_choice(options.who, "--fp8-recipe", options.fp8_recipe, ("", *RECIPES))
    usual = default_dtype(device)
    asked = f"--dtype {options.dtype}"
    casts = []
    if fp8_recipe:
        fused = "casts fused with norms and activations, weights cast once per step"
        casts = [fused, f"logits in {usual}"]
        usual = RECIPES[fp8_recipe].forward
    if not options.dtype:
        asked = f"--fp8-recipe {fp8_recipe} ({usual})"
        assumed.append(f"dtype = {usual}")
    dtype = options.dtype or usual
    if device.peak(dtype) is None:
        expected = f"one of {device.dtypes}"
        if fp8_recipe and not options.dtype:
            expected = recipes_of(device)
        raise InputError(options.who, f"{asked} on {device.name}", expected)
    changes |= {"dtype": dtype, "fp8_recipe": fp8_recipe}
    try:
        shape = replace(base, **changes, **how)
    except InputError as error:
        raise InputError(options.who, error.value, error.expected) from None
    assumed += [*casts, *latent_words(shape.kv_rank, shape.core_dim)]
    return shape, (*assumed, *window_ignored(shape.sliding_window, shape.seq))


def recipes_of(device: DeviceSpec) -> str:
    """Lists the recipes that a device can run, as text for error messages."""
    runs = [name for name, recipe in RECIPES.items() if device.peak(recipe.forward) is not None]
    return f"one of {', '.join(runs)}" if runs else "a GPU with 8-bit floating-point products"


def _dependent_sizes(base: TransformerShape, typed: dict[str, Any], tp: int) -> dict[str, Any]:
    """Returns new values for sizes of `base` that depend on a typed hidden or a typed heads.

    A value of 0 means that the size is derived again from hidden and heads.

    ffn: scales with a typed hidden.
    kv_heads: kept if heads does not change and the model has fewer kv_heads than heads; else 0.
    head_dim: kept if heads does not change and the model's head_dim is not hidden / heads; else 0.

    If the model's head_dim is hidden / heads and neither heads nor head_dim is typed, another
    hidden changes heads and kv_heads at the same head_dim, if possible (see `_heads_at`).

    base: shape of the preset or configuration.
    typed: typed sizes, by field name.
    tp: tensor-parallel degree.
    """
    if not {"hidden", "heads"} & typed.keys():
        return {}
    found = {"kv_heads": 0, "head_dim": 0}
    wide = base.heads * base.head_dim != base.hidden
    if typed.get("heads", base.heads) == base.heads:
        if base.kv_heads != base.heads:
            found["kv_heads"] = base.kv_heads
        if wide:
            found["head_dim"] = base.head_dim
    if "hidden" in typed:
        found["ffn"] = round(base.ffn / base.hidden * typed["hidden"])
        if not wide and not {"heads", "head_dim"} & typed.keys():
            found |= _heads_at(base, typed["hidden"], tp)
    return found


def _heads_at(base: TransformerShape, hidden: int, tp: int) -> dict[str, int]:
    """Returns heads and kv_heads for another hidden size, at the same head_dim.

    The ratio heads / kv_heads also stays the same. Returns {} if heads or kv_heads would not be an
    integer, if heads and kv_heads cannot be divided over `tp` GPUs, or if heads would not change.
    """
    heads = hidden // base.head_dim
    kv_heads = heads * base.kv_heads // base.heads
    whole = heads * base.head_dim == hidden and kv_heads * base.heads == heads * base.kv_heads
    split = kv_heads and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    if whole and split and heads != base.heads:
        return {"heads": heads, "kv_heads": kv_heads}
    return {}


def held_and_dims(arguments: GridOptions) -> tuple[Held, tuple[str, ...]]:
    """Returns the fixed sizes, and the axes as texts such as `hidden=1024:4096:64`.

    If `--dim` names a size without values, the values come from the option of that size
    (`--dim hidden --hidden 1024:4096`).

    Raises InputError for a fixed size that is not an integer, for a size typed twice, for an option
    without effect, and for a missing `--dim`.
    """
    who = arguments.who
    if not arguments.dims and not arguments.listed:
        raise _no_dim(arguments)
    sizes = arguments.sizes
    given = arguments.axes | sizes.keys()
    dims = []
    for text in arguments.dims:
        dim, has_values, _ = text.partition("=")
        size = sizes.pop(dim.replace("-", "_"), "")
        if has_values and size:
            raise InputError(who, f"--dim {text} and --{dim} {size}", f"the values of {dim} once")
        dims.append(f"{dim}={size}" if size else text)
    values: dict[str, Any] = {}
    for name, size in sizes.items():
        text = str(size)
        if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= LARGEST:
            dim = dashed(name)
            expected = f"an integer from 1 to {LARGEST:,}, or a range together with --dim {dim}"
            raise InputError(f"--{dim}", repr(text), expected)
        values[name] = int(text)
    _require_used(arguments)
    for name in ("seq", "mbs"):
        if "tokens" in given and name in sizes:
            expected = "tokens, or seq and mbs, whose product they are"
            raise InputError(who, f"--{name} {sizes[name]} with tokens", expected)
    ops = tuple(filter(None, map(str.strip, arguments.ops.split(","))))
    if arguments.ops and not ops:
        expected = "names of ops, comma separated: qkv,attention"
        raise InputError("--ops", repr(arguments.ops), expected)
    held = Held(
        layout=arguments.layout, causal=arguments.causal, ops=ops, direction=arguments.direction
    )
    named = arguments.named
    if named.name:
        held = replace(held, **{name: getattr(named.shape, name) for name in _MODEL_FIELDS})
        # Attention "" means the device's usual attention, which is filled in when the device is
        # known.
        if named.shape.attention == "unfused":
            values["attention"] = "unfused"
    if arguments.attention:
        values["attention"] = require_choice(who, "--attention", arguments.attention, ATTENTIONS)
    if arguments.routing:
        values["routing"] = _routing(arguments.routing)
    held = _reset_dependent_sizes(held, given)
    held = replace(held, **values, gated=held.gated or arguments.gated, dtype=arguments.dtype)
    if arguments.routing and not held.experts and given.isdisjoint(_MOE_FIELDS):
        typed_routing = f"--routing {arguments.routing} without experts"
        raise InputError(who, typed_routing, _EXPERTS_EXPECTED)
    return held, tuple(dims)


def _routing(text: str) -> str | tuple[int, ...]:
    """Returns the value of --routing: a distribution's name, or the token counts from a JSON file.

    Raises InputError if the file cannot be read or does not contain a list of integers.
    """
    if not text.endswith(".json"):
        return text
    try:
        counts = read_json(Path(text), most_bytes=_LARGEST_HISTOGRAM_BYTES)
    except (OSError, ValueError) as error:
        what = f"{text} ({reason(error)})"[:200]
        raise InputError("--routing", what, "a JSON file with a list of counts") from None
    if not isinstance(counts, list) or {*map(type, counts)} - {int}:
        what = f"{text}: {counts!r}"[:120]
        raise InputError("--routing", what, "a list of counts, one for each expert")
    return tuple(counts)


def assumed_words(
    arguments: GridOptions, held: Held, ops: Collection[str], spec: DeviceSpec
) -> tuple[str, ...]:
    """Returns the assumptions that change the result, one text each.

    held: fixed sizes, with the defaults filled in.
    ops: names of the ops that run.
    spec: device that the sweep is for.
    """
    named = arguments.named
    axes = arguments.axes
    given = axes | arguments.sizes.keys()
    words: list[str] = []
    sizes = ["m", "n", "k"]
    if "gemm" not in ops:
        words = _layer_words(arguments, held, ops, spec)
        sizes = ["hidden", "seq", "mbs", "tp", "vocab"]
        if "tokens" in given:
            sizes = ["hidden", "tp", "vocab"]
        if "logits" not in ops:
            sizes.remove("vocab")
    elif arguments.listed:
        sizes = []
    for name in sizes:
        if name in given:
            continue
        if not named.name or name in ("mbs", "tp"):
            words.append(f"{name} = {getattr(held, name)}")
        elif name in named.assumed:
            words.append(named.assumed[name])
    if not arguments.dtype:
        words.append(f"dtype = {held.dtype}")
    return tuple(words)


def _layer_words(
    arguments: GridOptions, held: Held, ops: Collection[str], spec: DeviceSpec
) -> list[str]:
    """Returns the assumptions about a layer's experts, attention and widths.

    The arguments are those of `assumed_words`.
    """
    named = arguments.named
    shape = named.shape
    axes = arguments.axes
    given = axes | arguments.sizes.keys()
    words = []
    experts = not set(EXPERT_OPS).isdisjoint(ops)
    if experts:
        sizes = ["ep"] if shape.experts else ["experts", "top_k", "moe_ffn", "ep"]
        words = [f"{name} = {getattr(held, name)}" for name in sizes if name not in given]
        if not arguments.routing:
            words.append("balanced routing")
        words += ["gated experts", "products of the busiest GPU"]
    if {*UNFUSED_OPS, "attention"} & set(ops):
        how, of_attention = attention_of(arguments, spec)
        if not held.ops:  # ops named by --ops run whatever the usual attention is
            words += [word for word in of_attention if "dropout" not in word]
        if how["dropout"]:
            words.append("dropout is not timed")
        if not held.heads and not {"heads", "head_dim"} & given:
            # Along a hidden axis, head_dim is 128. Otherwise the number of heads is chosen so that
            # head_dim is near 128.
            fixed = held.head_dim or 128 * ("hidden" in axes)
            words.append(f"head_dim = {fixed}" if fixed else "heads of a width near 128")
        if "seq" not in axes:
            words += window_ignored(shape.sliding_window, held.seq)
    if not held.kv_heads and shape.kv_heads != shape.heads:
        ratio = held.heads_per_kv_head
        words.append("kv_heads = heads" if ratio == 1 else f"kv_heads = heads / {ratio}")
    # If hidden is given, the model's other widths stay. Only an ffn of 4 · hidden changes.
    if named.name and "hidden" in given:
        if held.ffn and {"mlp_up", "mlp_up_gate"} & set(ops) and "ffn" not in given:
            words.append(f"ffn = {held.ffn}")
        if experts and "moe_ffn" not in given:
            words.append(f"moe_ffn = {held.moe_ffn}")
    return words


def _no_dim(arguments: GridOptions) -> InputError:
    """Returns the error for a missing --dim. It lists the dimensions that fit the typed sizes."""
    given = [dim for dim in map(dashed, arguments.sizes) if dim in DIMS]
    beside = " beside --" + ", --".join(given) if given else ""
    fitting = [dims for dims in (MODEL_DIMS, GEMM_DIMS) if set(given) <= set(dims)]
    choices = fitting[0] if len(fitting) == 1 else DIMS
    known = ", --dim ".join(choices)
    expected = f"at least one of --dim {known}; one value will do"
    return InputError(arguments.who, f"no --dim{beside}", expected)


def _require_used(arguments: GridOptions) -> None:
    """Raises InputError for an option without effect.

    Model options have no effect on plain GEMMs, and plain-GEMM options have no effect on models. If
    a file lists the shapes, sizes and most other model options have no effect.
    """
    unused = GEMM_DIMS
    others: Collection[str] = ("layout",)
    expected = "sizes of a model"
    if arguments.listed or arguments.axes <= set(GEMM_DIMS):
        unused = DIMS if arguments.listed else MODEL_DIMS
        others = [name for name in _REPEATED_OPTIONS if name not in ("layout", "dtype")]
        expected = f"sizes of a plain product: {', '.join(GEMM_DIMS)}"
    sizes = [name.replace("-", "_") for name in unused]
    found = typed_words(arguments, (*sizes, *others))
    if not found:
        return
    beside = "--shapes"
    if arguments.listed:
        expected = "shapes as the file describes them"
    else:
        beside = f"--dim {dashed(min(arguments.axes))}"
    raise InputError(arguments.who, f"{found[0]} with {beside}", expected)


def sweep_words(arguments: GridOptions) -> str:
    """Formats the options with which `quantbench sweep` measures the predicted points."""
    sizes = (dim.replace("-", "_") for dim in DIMS)
    return " ".join(typed_words(arguments, ("dim", *sizes, *_REPEATED_OPTIONS)))


def _reset_dependent_sizes(held: Held, given: set[str]) -> Held:
    """Resets the preset's sizes that depend on given sizes to 0, so that they are derived again.

    A given hidden resets heads and kv_heads if heads × head_dim is the preset's hidden. It also
    resets ffn if the preset's ffn is 4 · hidden. A given heads resets head_dim and kv_heads. A
    given head_dim without a given heads resets heads and kv_heads. Given sizes are never reset.

    A reset kv_heads becomes equal to a given heads. Without a given heads, kv_heads is derived with
    the preset's ratio heads / kv_heads.

    given: field names of the sizes that were typed or that vary.
    """
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
