"""Command `pad`: predicts whether padding a GEMM's sizes saves time, and at what cost.

`broken_lines` and `first_broken_lines` format broken alignment rules for other commands too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text

from quantbench.cli.devices import device_line
from quantbench.cli.options import command, option
from quantbench.cli.output import Lines, Result, encoded, plain_table
from quantbench.cli.times import TimesOptions
from quantbench.device import default_dtype
from quantbench.errors import InputError, require_choice
from quantbench.latency.libraries import LIBRARIES
from quantbench.units import counted, latency, signed_percent, size
from quantbench.workload import Gemm
from quantbench.workload.dtypes import GEMM_DTYPES

if TYPE_CHECKING:
    from quantbench.advice.pad import Padding, PaddingVerdict
    from quantbench.alignment_rules import Broken

_KEEP = ("keep", "")


@dataclass(frozen=True, kw_only=True)
class PadOptions(TimesOptions):
    """The options of `pad` as typed; "" means the default."""

    who: ClassVar[str] = "pad"

    m: int = option(..., "Rows: tokens.", "--m", "-m", min=1)
    n: int = option(..., "Columns: outputs of a linear layer, on one GPU.", "--n", "-n", min=1)
    k: int = option(
        ..., "Inner dimension: inputs of a linear layer, on one GPU.", "--k", "-k", min=1
    )
    dtype: str = option(
        "", f"Number format: {', '.join(GEMM_DTYPES)} (default: the device's usual one)."
    )
    layout: str = option("nt", "nt (weights stored n×k), nn or tn.")


@command
def pad(arguments: PadOptions) -> Result:
    """Say whether padding a product saves time, and what it costs. m is padded in every call, n and
    k once.
    """
    from quantbench.advice.pad import padding_verdict

    a = arguments
    times, _ = a.times()
    spec = times.device
    assumed = []
    dtype = a.dtype
    if not dtype:
        dtype = default_dtype(spec)
        assumed.append(f"dtype = {dtype}")
    if spec.peak(dtype) is None:
        raise InputError(a.who, f"--dtype {dtype} on {spec.name}", f"one of {spec.dtypes}")
    require_choice(a.who, "--library", a.library, ("", *LIBRARIES))
    gemm = Gemm(a.m, a.n, a.k, dtype=dtype, layout=a.layout)
    verdict = padding_verdict(gemm, spec, library=a.library, times=times)
    assumed.append("padded in every call: m; padded once: n, k")
    advised = [one.words for one in verdict.advised]
    answer = {**encoded(verdict), "device": spec.name, "assumed": assumed, "advised": advised}
    return Result(answer, _lines(verdict, assumed, a))


# --- output ---------------------------------------------------------------------------------------


def _lines(verdict: PaddingVerdict, assumed: Sequence[str], arguments: PadOptions) -> Lines:
    """Yields the lines and the table that the command prints."""
    spec = verdict.device
    gemm = verdict.gemm
    now = verdict.now
    if now.unmeasured:
        yield f"not measured, only estimated: {now.unmeasured}"
    yield device_line(spec)
    yield f"times: {verdict.note}"
    words = arguments.words(spec, gemm.dtype, experts=False)
    yield f"{words}; assumed: {', '.join(assumed)}"
    yield f"{gemm}: {latency(now.latency_us)} ({latency(now.low_us)} to {latency(now.high_us)})"
    yield from broken_lines(verdict.broken)
    yield ""
    yield from _table(verdict)
    best = verdict.best
    if best is not None:
        yield _verdict(best), f": {best.words}"
    elif verdict.options:
        few = ": no padding is expected to save as much as measured times scatter (2 %)"
        yield _KEEP, few
    sweep = f"quantbench sweep {_sweep_words(gemm, verdict.options)}"
    yield f"Next, on such a card, measure it: {sweep}"


def _verdict(one: Padding) -> tuple[str, str]:
    """Returns the verdict on one padding as (text, style)."""
    if one.repairs:
        return "must pad, it crashes", "bold red"
    if one.sure:
        return "pad", "bold green"
    if one.worth:
        return "pad, but measure first", "yellow"
    return _KEEP


def broken_lines(broken: Sequence[Broken]) -> Lines:
    """Yields a line for each broken alignment rule, and a line with the rules' sources."""
    styles = {"crashes": "bold red", "falls back": "yellow", "wastes": ""}
    for one in broken:
        words = one.words
        if one.ops:
            words += f" [{', '.join(one.ops)}]"
        yield ("rule: ", styles[one.rule.effect]), words
    sources = dict.fromkeys(source for one in broken for source in one.rule.sources)
    if sources:
        yield f"sources of the rules: {', '.join(sources)}"


def first_broken_lines(broken: Sequence[Broken]) -> Lines:
    """Yields a line with the first broken rule, and the number of the other sizes."""
    if not broken:
        return
    words = broken[0].words
    if len(broken) > 1:
        words += f"; {counted(len(broken) - 1, 'other size')} too: advise lists the rules"
    yield ("rule: ", "bold red"), words


def _table(verdict: PaddingVerdict) -> Iterator[Table | str]:
    """Yields a table of the possible paddings and its legend.

    If there are none, yields a line with the reason.
    """
    from quantbench.latency.gemm.inputs import LARGEST_SIDE

    if not verdict.options:
        past = any(getattr(verdict.gemm, side) % 256 for side in "mnk")
        limit = f" or have no larger one up to {LARGEST_SIDE}, the largest size" if past else ""
        yield f"m, n and k are multiples of 256{limit}: nothing to pad"
        return
    sizes = (">product", ">copies", ">saving", ">low to high", ">more memory")
    table = plain_table(("pad", *sizes, "when", "verdict"), fold=("pad",))
    for one in verdict.options:
        said, style = _verdict(one)
        table.add_row(
            one.words,
            latency(one.then.latency_us),
            latency(one.copy_us) if one.copy_bytes else "none",
            f"{signed_percent(one.saving)} ({latency(abs(one.saving_us))})",
            f"{signed_percent(one.low)} to {signed_percent(one.high)}",
            size(one.more_bytes),
            _when({change.at_run_time for change in one.changes}),
            Text(said, style=style),
        )
    yield table
    interval = "with its 90 % interval; negative if padding costs time"
    yield f"saving: share of the time saved, copies included, {interval}"


def _when(at_run_time: set[bool]) -> str:
    """Formats when sizes are padded: in every call, once, or both.

    at_run_time: for each padded size, whether it is padded in every call.
    """
    if len(at_run_time) > 1:
        return "both"
    return "every call" if True in at_run_time else "once"


def _sweep_words(gemm: Gemm, options: Sequence[Padding]) -> str:
    """Formats the options with which `quantbench sweep` measures the GEMM and its first padding."""
    to = {one.dimension: f",{one.to}" for one in options[0].changes} if options else {"m": ""}
    axes = [f"--dim {side}={getattr(gemm, side)}{padded}" for side, padded in to.items()]
    rest = [f"-{side} {getattr(gemm, side)}" for side in "mnk" if side not in to]
    return " ".join([*axes, *rest, f"--layout {gemm.layout} --dtype {gemm.dtype}"])
