"""Command `pad`: says whether padding a product or a model's dimensions saves time, to what, and what it costs.

Entry points: `pad`, loaded by `app`; `broken_lines`, used by `advise`. `advice.pad` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.model_options import StepOptions, chosen_model
from quantbench.cli.options import command, gpu_option, integers, json_option, option, typed_words
from quantbench.cli.output import StyledLine, plain_table, print_result
from quantbench.device import default_dtype, lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.units import latency, signed_percent, size
from quantbench.workload import Gemm

if TYPE_CHECKING:
    from quantbench.advice.pad import Padding, PaddingVerdict, ShapePadding
    from quantbench.alignment_rules import Broken

_WHO = "pad"
_WORDS = {
    "must": ("must pad, it crashes", "bold red"), "sure": ("pad", "bold green"),
    "worth": ("pad, but measure first", "yellow"), "no": ("keep", ""),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PadOptions(StepOptions):
    """The options of `pad` as typed; "" and None stand for the default."""

    gpu: str = gpu_option("")
    gemm: str = option("", "A product m,n,k per GPU: tokens, outputs, inputs of a linear layer.")
    layout: str = option("nt", "Layout of the product: nt (weights stored n×k), nn or tn.")
    at_run_time: str = option("m", "Sides of the product that are padded in every call, comma separated: m, n, k.")
    library: str = option("", "Whose kernels run: torch, triton, vllm, sglang, trtllm or aiter (default: the GPU's).")
    forward_only: bool = option(False, "Price a forward pass instead of a training step.")


@command
def pad(arguments: PadOptions, as_json: bool = json_option()) -> None:
    """Say whether padding a product, or vocab, ffn, head_dim or tokens of a model, saves time, and what it costs."""
    if not arguments.gpu:
        raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them)")
    spec = lookup(arguments.gpu)
    if spec.kind == "cpu":
        raise InputError(_WHO, f"--gpu {arguments.gpu}", "a GPU: on processors waves are not modelled")
    if arguments.gemm:
        verdict, assumed = _of_gemm(arguments, spec)
        print_result(as_json, lambda: _gemm_to_json(verdict, assumed), _gemm_lines(verdict, assumed))
    else:
        padding, said = _of_model(arguments, spec)
        print_result(as_json, lambda: _shape_to_json(padding, said), _shape_lines(padding, said, arguments))


def _of_gemm(arguments: PadOptions, spec: DeviceSpec) -> tuple[PaddingVerdict, list[str]]:
    from quantbench.advice.pad import padding_verdict

    of_a_model = [one.name for one in fields(StepOptions) if one.name != "dtype"]
    typed = typed_words(arguments, [*of_a_model, "forward_only"])
    if typed:
        raise InputError(_WHO, f"--gemm {arguments.gemm} and {typed[0]}", "a product or a model")
    sizes = integers("--gemm", arguments.gemm)
    if len(sizes) != 3:
        raise InputError("--gemm", repr(arguments.gemm), "three integers m,n,k, comma separated: 4096,50257,1600")
    dtype = _dtype(arguments, spec)
    gemm = Gemm(*sizes, dtype=dtype, layout=arguments.layout)
    sides = [side.strip() for side in arguments.at_run_time.split(",") if side.strip()]
    assumed = [] if arguments.dtype else [f"dtype = {dtype}"]
    once = [side for side in ("m", "n", "k") if side not in sides]
    assumed.append(
        f"padded in every call: {', '.join(sides) or 'nothing'}; padded once: {', '.join(once) or 'nothing'}"
    )
    return padding_verdict(gemm, spec, library=arguments.library, at_run_time=sides), assumed


def _of_model(arguments: PadOptions, spec: DeviceSpec) -> tuple[ShapePadding, list[str]]:
    from quantbench.advice.pad import shape_padding
    from quantbench.latency.model_times import ModelTimes
    from quantbench.planner.calibration import shipped

    if not (arguments.model or arguments.config or arguments.hidden):
        raise InputError(_WHO, "no product and no model", "--gemm m,n,k, --model, --config, or --hidden and --heads")
    unused = typed_words(arguments, ("layout", "at_run_time"))
    if unused:
        raise InputError(_WHO, f"{unused[0]} without --gemm", "options of a model")
    _dtype(arguments, spec)
    shape, assumed = chosen_model(_WHO, arguments, spec)
    assumed = (*assumed, *(f"{name} = 1" for name in ("mbs", "tp") if not getattr(arguments, name)))
    assumed = (*assumed, "a forward pass" if arguments.forward_only else "a training step")
    found = shape_padding(
        shape, ModelTimes(spec, library=arguments.library), library=arguments.library,
        backward=not arguments.forward_only, unaligned_share=shipped().elsewhere.unaligned_share,
    )  # fmt: skip
    return found, list(assumed)


def _dtype(arguments: PadOptions, spec: DeviceSpec) -> str:
    """Returns the dtype. Raises InputError if it is unknown or the device has no peak for it."""
    dtype = arguments.dtype or default_dtype(spec)
    if spec.peak(dtype) is None:
        raise InputError(_WHO, f"--dtype {dtype} on {spec.name}", "one of " + ", ".join(sorted(spec.peak_tflops)))
    return dtype


# --- output ----------------------------------------------------------------------------------------------------------


def _header(
    spec: DeviceSpec, note: str, dtype: str, library: str, assumed: Sequence[str], unmeasured: str
) -> Iterator[StyledLine]:
    from quantbench.latency.libraries import default_library, why_default

    if unmeasured:
        yield f"not measured, only estimated: {unmeasured}"
    yield device_line(spec)
    yield f"times: {note}"
    why = f" ({why_default(spec.name, dtype)})" if library == default_library(spec.name, dtype) else ""
    yield f"kernels of {library}{why}; assumed: {', '.join(assumed)}"


def _gemm_lines(verdict: PaddingVerdict, assumed: Sequence[str]) -> Iterator[StyledLine | Table]:
    gemm = verdict.gemm
    now = verdict.now
    yield from _header(verdict.device, verdict.note, gemm.dtype, verdict.library, assumed, now.unmeasured)
    yield f"{gemm}: {latency(now.latency_us)} ({_interval(now.low_us, now.high_us)})"
    yield from broken_lines(verdict.broken)
    yield ""
    yield from _table(verdict.options, "product", "memory")
    best = verdict.best
    if best is None:
        yield _WORDS["no"], ": no padding is expected to save as much as measured times scatter (1 %)"
        if verdict.must:
            yield ("warning:", "yellow"), " the library crashes on it, and on every padded size that was tried"
    else:
        yield _verdict(best), f": {best.words}"
    yield f"Next, on such a card, measure it: quantbench sweep {_sweep_words(verdict)}"


def _shape_lines(found: ShapePadding, assumed: Sequence[str], arguments: PadOptions) -> Iterator[StyledLine | Table]:
    shape = found.shape
    yield from _header(found.device, found.note, shape.dtype, found.library, assumed, found.now.unmeasured)
    us = found.now
    yield f"micro-batch of {shape.mbs} × {shape.seq} tokens on tp = {shape.tp}: {latency(us.latency_us)} on each GPU"
    yield from broken_lines(found.broken)
    yield ""
    yield from _table(found.options, "whole step", "weights per GPU")
    worth = [one for one in found.options if one.worth or one.repairs]
    if not worth:
        yield _WORDS["no"], ": no padding is expected to save as much as measured times scatter (1 %)"
    for one in worth:
        change = one.changes[0]
        how = "in every step" if change.at_run_time else "once, in the model's configuration and weights"
        yield _verdict(one), f": {one.words}, {how}"
    model = f" --model {quote(arguments.model)}" if arguments.model else ""
    yield f"Next, better shapes: quantbench advise{model or ' …'} --gpu {found.device.name} --tp {shape.tp}"


def _verdict(one: Padding) -> tuple[str, str]:
    return _WORDS["must" if one.repairs else "sure" if one.sure else "worth" if one.worth else "no"]


def broken_lines(broken: Sequence[Broken]) -> Iterator[StyledLine]:
    """Yields a line for each broken rule, and their sources."""
    styles = {"crashes": "bold red", "falls back": "yellow", "wastes": ""}
    for one in broken:
        ops = f" [{', '.join(one.ops)}]" if one.ops else ""
        yield ("rule: ", styles[one.rule.effect]), one.words + ops
    sources = dict.fromkeys(source for one in broken for source in one.rule.sources)
    if sources:
        yield f"sources of the rules: {', '.join(sources)}"


def _table(options: Sequence[Padding], what: str, memory: str) -> Iterator[Table | str]:
    if not options:
        yield "every dimension is a multiple of 256: nothing to pad"
        return
    table = plain_table(
        ("pad", f">{what}", ">copies", ">saving", ">low to high", f">more {memory}", "when", "verdict"), fold=("pad",)
    )
    for one in options:
        verdict, style = _verdict(one)
        when = {change.at_run_time for change in one.changes}
        table.add_row(
            one.words, latency(one.then.latency_us), latency(one.copy_us) if one.copy_bytes else "none",
            f"{signed_percent(one.saving)} ({latency(abs(one.saving_us))})",
            f"{signed_percent(one.low)} to {signed_percent(one.high)}", size(one.more_bytes),
            "every call" if when == {True} else "once" if when == {False} else "both", Text(verdict, style=style),
        )  # fmt: skip
    yield table
    yield "saving: share of the time saved, copies included, with its 90 % interval; negative if padding costs time"


def _sweep_words(verdict: PaddingVerdict) -> str:
    """Formats the options with which `quantbench sweep` measures the product and the padded one."""
    gemm, best = verdict.gemm, verdict.best or next(iter(verdict.options), None)
    to = {} if best is None else {one.dimension: one.to for one in best.changes}
    axes = [f"--dim {side}={getattr(gemm, side)},{size}" for side, size in to.items()] or [f"--dim m={gemm.m}"]
    rest = [f"-{side} {getattr(gemm, side)}" for side in "mnk" if side not in (to or "m")]
    return " ".join([*axes, *rest, f"--layout {gemm.layout} --dtype {gemm.dtype}"])


def _interval(low_us: float, high_us: float) -> str:
    return f"{latency(low_us)} to {latency(high_us)}"


def _gemm_to_json(verdict: PaddingVerdict, assumed: Sequence[str]) -> dict[str, Any]:
    best = verdict.best
    return {
        "device": verdict.device.name, "library": verdict.library, "assumed": assumed, "note": verdict.note,
        "gemm": asdict(verdict.gemm), "now": asdict(verdict.now), "broken": [asdict(one) for one in verdict.broken],
        "must_pad": verdict.must, "pad": None if best is None else best.words, "sure": best is not None and best.sure,
        "options": [_option_to_json(one) for one in verdict.options],
    }  # fmt: skip


def _shape_to_json(found: ShapePadding, assumed: Sequence[str]) -> dict[str, Any]:
    return {
        "device": found.device.name, "library": found.library, "assumed": assumed, "note": found.note,
        "shape": asdict(found.shape), "now": asdict(found.now), "broken": [asdict(one) for one in found.broken],
        "options": [_option_to_json(one) for one in found.options],
    }  # fmt: skip


def _option_to_json(one: Padding) -> dict[str, Any]:
    return {**asdict(one), "saving_us": one.saving_us, "worth": one.worth, "sure": one.sure}
