"""Command `pad`: says whether padding a product or a model's dimensions saves time, to what, and what it costs.

Entry points: `pad`, loaded by `app`; `broken_lines`, used by `advise`. `advice.pad` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.model_options import StepOptions, chosen_model
from quantbench.cli.options import (
    command,
    gpu_option,
    integers,
    json_option,
    library_option,
    option,
    profile_option,
    typed_words,
)
from quantbench.cli.output import StyledLine, plain_table, print_result
from quantbench.device import default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.libraries import LIBRARIES
from quantbench.units import latency, percent, signed_percent, size
from quantbench.workload import Gemm, TransformerShape

if TYPE_CHECKING:
    from quantbench.advice.pad import Padding, PaddingVerdict
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
    library: str = library_option()
    profile: Path | None = profile_option()
    forward_only: bool = option(False, "Price a forward pass instead of a training step.")


@command
def pad(arguments: PadOptions, as_json: bool = json_option()) -> None:
    """Say whether padding a product, or vocab, ffn, head_dim or tokens of a model, saves time, and what it costs."""
    from quantbench.advice.pad import SIDES, padding_verdict
    from quantbench.cli.times import chosen_times

    times, _ = chosen_times(_WHO, arguments.gpu, arguments.library, arguments.profile)
    spec = times.device
    dtype = arguments.dtype or default_dtype(spec)
    if spec.peak(dtype) is None:
        raise InputError(_WHO, f"--dtype {dtype} on {spec.name}", f"one of {spec.dtypes}")
    sides = [side.strip() for side in arguments.at_run_time.split(",") if side.strip()]
    for side in sides:
        require_choice(_WHO, "--at-run-time", side, SIDES)
    require_choice(_WHO, "--library", arguments.library, ("", *LIBRARIES))
    subject, assumed = _gemm(arguments, dtype, sides) if arguments.gemm else _shape(arguments, spec)
    verdict = padding_verdict(
        subject, spec, library=arguments.library, at_run_time=sides, backward=not arguments.forward_only, times=times
    )
    print_result(as_json, lambda: _to_json(verdict, assumed), _lines(verdict, assumed, arguments))


def _gemm(arguments: PadOptions, dtype: str, sides: Sequence[str]) -> tuple[Gemm, list[str]]:
    """Returns the product and the assumptions about it as text."""
    of_a_model = [one.name for one in fields(StepOptions) if one.name not in ("dtype", "library")]
    typed = typed_words(arguments, [*of_a_model, "forward_only"])
    if typed:
        raise InputError(_WHO, f"--gemm {arguments.gemm} and {typed[0]}", "a product or a model")
    sizes = integers("--gemm", arguments.gemm)
    if len(sizes) != 3:
        raise InputError("--gemm", repr(arguments.gemm), "three integers m,n,k, comma separated: 4096,50257,1600")
    once = ", ".join(side for side in ("m", "n", "k") if side not in sides)
    how = f"padded in every call: {', '.join(sides) or 'nothing'}; padded once: {once or 'nothing'}"
    return Gemm(*sizes, dtype=dtype, layout=arguments.layout), [*([] if arguments.dtype else [f"dtype = {dtype}"]), how]


def _shape(arguments: PadOptions, spec: DeviceSpec) -> tuple[TransformerShape, list[str]]:
    """Returns the model and the assumptions about it as text."""
    if not (arguments.model or arguments.config or arguments.hidden):
        raise InputError(_WHO, "no product and no model", "--gemm m,n,k, --model, --config, or --hidden and --heads")
    unused = typed_words(arguments, ("layout", "at_run_time"))
    if unused:
        raise InputError(_WHO, f"{unused[0]} without --gemm", "options of a model")
    shape, assumed = chosen_model(_WHO, arguments, spec)
    of_one = (f"{name} = 1" for name in ("mbs", "tp") if not getattr(arguments, name))
    forward = arguments.forward_only or shape.experts
    return shape, [*assumed, *of_one, "a forward pass" if forward else "a training step"]


# --- output ----------------------------------------------------------------------------------------------------------


def _lines(verdict: PaddingVerdict, assumed: Sequence[str], asked: PadOptions) -> Iterator[StyledLine | Table]:
    from quantbench.latency.model_times import chosen_libraries

    spec, subject, now = verdict.device, verdict.subject, verdict.now
    if now.unmeasured:
        yield f"not measured, only estimated: {now.unmeasured}"
    yield device_line(spec)
    yield f"times: {verdict.note}"
    experts = isinstance(subject, TransformerShape) and bool(subject.experts)
    words = f"times of {asked.profile}"
    if asked.profile is None:
        words = chosen_libraries(spec, subject.dtype, asked.library, _WHO, experts=experts)
    yield f"{words}; assumed: {', '.join(assumed)}"
    interval = f"{latency(now.latency_us)} ({latency(now.low_us)} to {latency(now.high_us)})"
    if isinstance(subject, Gemm):
        yield f"{subject}: {interval}"
    else:
        tokens = f"{subject.mbs} × {subject.seq} tokens on tp = {subject.tp}"
        if subject.experts:
            from quantbench.advice.pad import capacity

            rows, beyond = capacity(subject)
            yield (
                f"capacity: {rows} rows per expert are whole blocks of 128; with {subject.experts_of(1).routing_words} "
                f"routing {percent(beyond)} of the rows are beyond it"
            )
        yield f"micro-batch of {tokens}, {subject.dtype}: {interval} on each GPU"
    yield from broken_lines(verdict.broken)
    yield ""
    yield from _table(verdict)
    if verdict.options and not verdict.advised:
        yield _WORDS["no"], ": no padding is expected to save as much as measured times scatter (2 %)"
    for one in verdict.advised[:1] if isinstance(subject, Gemm) else verdict.advised:
        yield _verdict(one), f": {one.words}"
    if isinstance(subject, Gemm):
        yield f"Next, on such a card, measure it: quantbench sweep {_sweep_words(subject, verdict.options)}"
    else:
        yield f"Next, better shapes: quantbench advise with the same model, --gpu {spec.name} --tp {subject.tp}"


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


def _table(verdict: PaddingVerdict) -> Iterator[Table | str]:
    if not verdict.options:
        yield _nothing_to_pad(verdict.subject)
        return
    of = ("product", "memory") if isinstance(verdict.subject, Gemm) else ("whole step", "weights per GPU")
    titles = ("pad", f">{of[0]}", ">copies", ">saving", ">low to high", f">more {of[1]}", "when", "verdict")
    table = plain_table(titles, fold=("pad",))
    for one in verdict.options:
        said, style = _verdict(one)
        when = {change.at_run_time for change in one.changes}
        table.add_row(
            one.words, latency(one.then.latency_us), latency(one.copy_us) if one.copy_bytes else "none",
            f"{signed_percent(one.saving)} ({latency(abs(one.saving_us))})",
            f"{signed_percent(one.low)} to {signed_percent(one.high)}", size(one.more_bytes),
            "every call" if when == {True} else "once" if when == {False} else "both", Text(said, style=style),
        )  # fmt: skip
    yield table
    yield "saving: share of the time saved, copies included, with its 90 % interval; negative if padding costs time"


def _nothing_to_pad(subject: Gemm | TransformerShape) -> str:
    """Names the dimensions that would be padded; those of a model are each GPU's part."""
    from quantbench.latency.gemm.inputs import LARGEST_SIDE

    parts, names = 1, ("m", "n", "k")
    if isinstance(subject, TransformerShape):
        parts, names = subject.tp, ("vocab", "moe_ffn" if subject.experts else "ffn", "tokens")
    past = any(getattr(subject, name) % (256 * parts) for name in names)
    sides = f"{', '.join(names[:-1])} and {names[-1]}{' of each GPU' if parts > 1 else ''}"
    limit = f" or have no larger one up to {LARGEST_SIDE}, the largest size" if past else ""
    return f"{sides} are multiples of 256{limit}: nothing to pad"


def _sweep_words(gemm: Gemm, options: Sequence[Padding]) -> str:
    """Formats the options with which `quantbench sweep` measures the product and the padded one."""
    to = {one.dimension: f",{one.to}" for one in options[0].changes} if options else {"m": ""}
    axes = [f"--dim {side}={getattr(gemm, side)}{padded}" for side, padded in to.items()]
    rest = [f"-{side} {getattr(gemm, side)}" for side in "mnk" if side not in to]
    return " ".join([*axes, *rest, f"--layout {gemm.layout} --dtype {gemm.dtype}"])


def _to_json(verdict: PaddingVerdict, assumed: Sequence[str]) -> dict[str, Any]:
    options = [
        {**asdict(one), "words": one.words, "saving_us": one.saving_us, "worth": one.worth, "sure": one.sure}
        for one in verdict.options
    ]
    broken = [{**asdict(one), "words": one.words} for one in verdict.broken]
    found = {"device": verdict.device.name, "library": verdict.library, "assumed": assumed, "note": verdict.note}
    subject = {"gemm" if isinstance(verdict.subject, Gemm) else "shape": asdict(verdict.subject)}
    pad = [one.words for one in verdict.advised]
    return {**found, **subject, "now": asdict(verdict.now), "broken_rules": broken, "options": options, "pad": pad}
