"""From what was typed to SweepOptions: sizes that are axes, sizes that are held, durations, presets."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shlex import quote
from typing import Any

from quantbench.cli.model_options import ModelOptions, attention_of, named_model, window_ignored
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.sweep.axes import DIMS, GEMM_DIMS, MODEL_DIMS
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.shape_file import SUFFIX, NamedShape, read_shape_file
from quantbench.sweep.shape_list import read_shapes
from quantbench.sweep.shapes import UNFUSED_OPS, Held
from quantbench.timing.options import TimingOptions
from quantbench.units import parse_duration_s
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

# What a sweep takes of a model; its layers it does not: a point is one layer.
_OF_A_MODEL = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated", "gate_fused", "seq", "vocab", "softmax",
)  # fmt: skip
# With the installation before it, `make sweep` so stays under three minutes on two cores and under five on a GPU.
_BUDGET = {"cuda": "4m", "cpu": "75s"}
# One thread of a shared processor repeats within 1 to 2 %; asking more of it only takes time.
_HALF_WIDTH = {"cuda": 0.005, "cpu": 0.01}
_MAX_TIME = {"cuda": "2s", "cpu": "500ms"}
# Options that go with a file of transformer shapes: how to measure them, not what they are.
_BESIDE_MODELS = (
    "shapes", "provider", "cache", "mode", "half-width", "min-samples", "max-time", "distribution", "seed", "budget",
    "point-limit", "points", "shard",
)  # fmt: skip


@dataclass(frozen=True)
class SweepArguments:
    """The command line's words, not yet understood. sizes: by dimension as typed; a range where it is an axis.
    half_width None, max_time and budget "": the device's default."""

    dims: tuple[str, ...]
    sizes: dict[str, str]
    kv_heads: int = 0
    gated: bool = False
    layout: str = "nn"
    model: str = ""
    config: Path | None = None
    dtype: str = ""
    ops: str = ""
    direction: str = "forward"
    causal: bool = True
    attention: str = ""
    dropout: bool | None = None
    softmax: str = ""
    provider: str = "torch"
    cache: str = "cold"
    mode: str = "auto"
    half_width: float | None = None
    min_samples: int = 10
    max_time: str = ""
    distribution: str = "normal"
    seed: int = 0
    budget: str = ""
    point_limit: str = ""
    skip_impossible: bool = False
    shapes: Path | None = None
    points: int = 0
    adaptive: bool = False
    refine: bool = False
    shard: str = ""


def held_and_dims(arguments: SweepArguments, who: str = "sweep") -> tuple[Held, tuple[str, ...]]:
    """What is held, and the axes as texts. A size given for a dimension that `--dim` names alone is its range.

    Raises InputError, in the name of the command `who`, for a size that is no integer, for a size given twice, and for
    no `--dim` at all.
    """
    if not arguments.dims and arguments.shapes is None:
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
    named = named_model(who, _model_options(arguments))
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
    arguments: SweepArguments, held: Held, ops: Collection[str], spec: DeviceSpec, who: str = "sweep"
) -> tuple[str, ...]:
    """What moves the result and was not typed, in words. held: its defaults filled in; ops: names of those that run."""
    named = named_model(who, _model_options(arguments))
    typed = {dim.replace("-", "_") for dim, size in arguments.sizes.items() if size}
    axes = {text.partition("=")[0].replace("-", "_") for text in arguments.dims}
    words: list[str] = []
    if "gemm" in ops:
        sizes = () if arguments.shapes is not None else ("m", "n", "k")
    else:
        sizes = ("hidden", "seq", "mbs", "tp", *(("vocab",) if "logits" in ops else ()))
        if {*UNFUSED_OPS, "attention"} & set(ops):
            how, of_attention = attention_of(who, _model_options(arguments), named, spec)
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


def _model_options(arguments: SweepArguments) -> ModelOptions:
    """What was typed of the model; sizes are the sweep's own."""
    return ModelOptions(
        arguments.model, arguments.config, gated=arguments.gated, dtype=arguments.dtype,
        attention=arguments.attention, dropout=arguments.dropout, softmax=arguments.softmax,
    )  # fmt: skip


def _no_dim(arguments: SweepArguments, who: str) -> InputError:
    """What to say where sizes are all that was typed: the dimensions that go with them."""
    given = [dim for dim, size in arguments.sizes.items() if size]
    beside = " beside --" + ", --".join(given) if given else ""
    fitting = [dims for dims in (MODEL_DIMS, GEMM_DIMS) if set(given) <= set(dims)]
    choices = fitting[0] if len(fitting) == 1 else DIMS
    return InputError(who, f"no --dim{beside}", "at least one of --dim " + ", --dim ".join(choices))


def _require_used(arguments: SweepArguments, as_axis: set[str], who: str) -> None:
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


def given_words(arguments: SweepArguments) -> tuple[str, ...]:
    """The options that are not as they are without any words, such as `--budget`."""
    sizes = [name for name, size in arguments.sizes.items() if size]
    others = [
        field.name.replace("_", "-")
        for field in fields(SweepArguments)
        if field.name not in ("dims", "sizes") and getattr(arguments, field.name) != field.default
    ]
    return tuple(f"--{name}" for name in (*sizes, *others))


def sweep_words(arguments: SweepArguments) -> str:
    """The words with which `quantbench sweep` measures what was predicted: what is varied, and what is held."""
    words = [f"--dim {dim}" for dim in arguments.dims]
    words += [f"--{dim} {size}" for dim, size in arguments.sizes.items() if size]
    usual = {field.name: field.default for field in fields(SweepArguments)}
    for name in (
        "model",
        "config",
        "kv_heads",
        "gated",
        "layout",
        "dtype",
        "ops",
        "direction",
        "attention",
        "softmax",
        "skip_impossible",
    ):
        value = getattr(arguments, name)
        if value != usual[name]:
            option = f"--{name.replace('_', '-')}"
            words.append(option if value is True else f"{option} {quote(str(value))}")
    if arguments.dropout is not None:
        words.append("--dropout" if arguments.dropout else "--no-dropout")
    return " ".join(words if arguments.causal else [*words, "--no-causal"])


def sweep_options(arguments: SweepArguments, device_kind: str) -> SweepOptions:
    """Everything that was asked for, with the defaults of a kind of device."""
    held, dims = held_and_dims(arguments)
    models = _models(arguments)
    budget = arguments.budget or _BUDGET[device_kind]
    timing = TimingOptions(
        cache=arguments.cache,
        mode=arguments.mode,
        half_width=_HALF_WIDTH[device_kind] if arguments.half_width is None else arguments.half_width,
        min_samples=arguments.min_samples,
        max_samples=max(2000, arguments.min_samples),
        max_time_s=parse_duration_s("--max-time", arguments.max_time or _MAX_TIME[device_kind]),
        distribution=arguments.distribution,
        seed=arguments.seed,
    )
    return SweepOptions(
        dims=dims,
        held=held,
        providers=tuple(name.strip() for name in arguments.provider.split(",")),
        timing=timing,
        skip_impossible=arguments.skip_impossible,
        points=arguments.points,
        adaptive=arguments.adaptive,
        refine=arguments.refine,
        shard=_shard(arguments.shard),
        shapes=() if arguments.shapes is None or models else read_shapes(arguments.shapes),
        models=models,
        budget_s=None if budget == "none" else parse_duration_s("--budget", budget),
        limit_s=parse_duration_s("--point-limit", arguments.point_limit) if arguments.point_limit else None,
    )


def _models(arguments: SweepArguments) -> tuple[NamedShape, ...]:
    """The transformer shapes of a JSON file; () for a CSV file of products. A shape says all about itself, so that
    options about sizes, ops and number formats are refused."""
    if arguments.shapes is None or arguments.shapes.suffix != SUFFIX:
        return ()
    about = [word for word in given_words(arguments) if word.removeprefix("--") not in _BESIDE_MODELS]
    if about:
        raise InputError("sweep", f"--shapes {arguments.shapes} with {about[0]}", "shapes as the file describes them")
    return read_shape_file(arguments.shapes)


def _size(dim: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) < 2**31):
        raise InputError(f"--{dim}", repr(text), f"an integer of at least 1, or a range together with --dim {dim}")
    return int(text)


def _shard(text: str) -> tuple[int, ...]:
    """`2/8` as (2, 8); () where none was given."""
    if not text:
        return ()
    part, _, parts = text.partition("/")
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in (part, parts)) or not 1 <= int(part) <= int(parts):
        raise InputError("--shard", repr(text), "PART/PARTS from 1/PARTS to PARTS/PARTS, such as 2/8")
    return int(part), int(parts)


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
